"""When a frame is drawn, and what an engine that fails, contradicts itself or prints leaves on the screen."""

from __future__ import annotations

import asyncio

from live_dashboard import Live
from screen_text import frame, text_of

from kvtui.capture_output import OutputCapture
from kvtui.view import Panel


async def test_nothing_is_drawn_while_nothing_happens(monkeypatch) -> None:
    live = Live()
    live.ask(2)
    async with live.app.run_test(size=(120, 34)) as pilot:
        live.run(5)
        await pilot.press("space")
        await frame(pilot)
        await asyncio.sleep(1.0)
        drawn = []
        monkeypatch.setattr(live.app, "draw", lambda *_: drawn.append("frame"))
        displayed = []
        monkeypatch.setattr(live.app, "_display", lambda *_: displayed.append("display"))
        await asyncio.sleep(0.6)
        assert drawn == []
        assert displayed == []


async def test_holding_a_key_with_many_requests_costs_no_more_than_the_screen(monkeypatch) -> None:
    live = Live(num_blocks=4000)
    live.ask(500, max_tokens=20)
    async with live.app.run_test(size=(120, 34)) as pilot:
        live.run(3)
        await frame(pilot)
        await pilot.press("2")
        await frame(pilot)
        table = live.app.main.query_one("#requests", Panel)
        asked = []
        draw = table.draw
        monkeypatch.setattr(table, "draw", lambda *args: asked.append(1) or draw(*args))
        await pilot.press(*["down"] * 20)
        assert len(asked) < 20 * 34


async def test_an_engine_that_dies_ends_the_app_with_its_reason() -> None:
    live = Live()

    def burn() -> None:
        raise RuntimeError("the cache caught fire")

    live.engine.step = burn
    async with live.app.run_test(size=(80, 24)) as pilot:
        live.loop.start()
        live.ask()
        for _ in range(200):
            await asyncio.sleep(0.02)
            if live.app.return_code is not None:
                break
        await pilot.pause()
    assert live.app.return_code == 1
    assert live.app.exit_reason == "the engine ended: RuntimeError: the cache caught fire"


async def test_a_contradiction_in_a_recording_is_named_and_the_playing_goes_on() -> None:
    live = Live()
    live.ask(1)
    async with live.app.run_test(size=(100, 24)) as pilot:
        live.run(2)
        await frame(pilot)
        live.source.state._violate("references", 7, "it is released, but nobody holds it")
        live.run(1)
        await frame(pilot)
        await pilot.press("6")
        await frame(pilot)
        picture = text_of(live.app)
        assert "block 7" in picture
        assert "nobody holds it" in picture
        live.run(2)
        await frame(pilot)
        assert live.source.position == 4


async def test_what_the_process_prints_is_in_the_log_panel() -> None:
    capture = OutputCapture()
    live = Live(capture=capture)
    async with live.app.run_test(size=(80, 24)) as pilot:
        capture.add("UserWarning: \x1b[31mred\x1b[0m")
        await pilot.press("6")
        await frame(pilot)
        picture = text_of(live.app)
        assert "UserWarning" in picture
        assert "\x1b" not in picture
