"""Time: pausing, playing, and the past of a recording and of a live session."""

from __future__ import annotations

import asyncio

import pytest
from live_dashboard import Live
from screen_text import frame, screen_lines, text_of

from engine.trace.reader import Recording
from engine.trace.recording import RecordingWriter
from kvtui.app import KvtuiApp
from kvtui.sources.recorded import RecordingSource


async def test_while_paused_a_badge_says_so_and_on_resuming_the_picture_catches_up_by_itself() -> None:
    live = Live(num_blocks=200)
    live.ask(2, max_tokens=100)
    async with live.app.run_test(size=(120, 34)) as pilot:
        await pilot.press("space")
        await frame(pilot)
        assert "PAUSED" in text_of(live.app)
        live.run(90)
        await pilot.press("space")
        for _ in range(100):
            await asyncio.sleep(0.02)
            if live.source.position == 89:
                break
        await asyncio.sleep(0.7)
        picture = text_of(live.app)
        assert "PAUSED" not in picture
        assert "step 89" in picture


async def test_a_recording_is_played_stepped_and_jumped_in(tmp_path) -> None:
    live = Live()
    path = tmp_path / "r.mcap"
    writer = RecordingWriter(path, live.engine.header)
    live.engine.add_sink(writer)
    live.ask(4)
    live.run(30)
    writer.close()
    with Recording.open(path) as recording:
        source = RecordingSource(recording)
        source.pause()
        app = KvtuiApp(source, theme="dark")
        async with app.run_test(size=(120, 34)) as pilot:
            await frame(pilot)
            await pilot.press("right", "right", "right")
            await frame(pilot)
            assert source.position == 2
            await pilot.press("left")
            assert source.position == 1
            await pilot.press("shift+right")
            assert source.position == 11
            await pilot.press("end")
            assert source.position == 29
            await frame(pilot)
            assert "29 / 29" in text_of(app)
            await pilot.press("home")
            assert source.position == -1
            await frame(pilot)
            bar = screen_lines(app)[-2]
            await pilot.click("#transport", offset=(bar.rindex("─") - 1, 0))
            await frame(pilot)
            assert source.position > 20


async def test_a_recording_that_is_opened_in_the_middle_shows_the_steps_before(tmp_path) -> None:
    live = Live()
    writer = RecordingWriter(tmp_path / "middle.mcap", live.engine.header)
    live.engine.add_sink(writer)
    live.ask(3)
    live.run(20)
    writer.close()
    with Recording.open(tmp_path / "middle.mcap") as recording:
        source = RecordingSource(recording, 12)
        source.pause()
        app = KvtuiApp(source, theme="dark")
        async with app.run_test(size=(160, 45)) as pilot:
            await frame(pilot)
            assert len(app.history) == 13


@pytest.mark.parametrize("size", [(120, 34), (80, 24)])
async def test_the_past_of_a_live_session_is_scrubbed_while_the_engine_goes_on(size) -> None:
    live = Live()
    live.ask(6)
    async with live.app.run_test(size=size) as pilot:
        live.run(30)
        await frame(pilot)
        source = live.source
        assert "look back" in text_of(live.app)
        await pilot.press("left", "left")
        await frame(pilot)
        assert source.position == 27
        picture = text_of(live.app)
        assert "LOOKING BACK" in picture
        assert "the engine goes on" in picture
        assert "LIVE +2" in picture
        assert "27 / 29" in picture
        blocks = screen_lines(live.app)[2:8]
        live.run(10)
        await frame(pilot)
        picture = text_of(live.app)
        assert source.position == 27
        assert "LIVE +12" in picture, "how far the engine is keeps being told"
        assert screen_lines(live.app)[2:8] == blocks, "what is looked at stays"
        await pilot.press("shift+left", "right", "right")
        assert source.position == 19
        await pilot.press("home")
        assert source.position == -1
        await pilot.press("L")
        await frame(pilot)
        assert (source.position, source.looking_back) == (39, False)
        assert "LOOKING BACK" not in text_of(live.app)
        assert not live.loop.paused
        await pilot.press("left")
        await pilot.press("end")
        assert not source.looking_back


async def test_the_bar_of_a_live_session_is_pressed_and_dragged() -> None:
    live = Live()
    live.ask(6)
    async with live.app.run_test(size=(120, 34)) as pilot:
        live.run(40)
        await frame(pilot)
        bar = screen_lines(live.app)[-2]
        start, stop = bar.index("━"), bar.index("●", bar.index("━"))
        await pilot.mouse_down("#transport", offset=((start + stop) // 2, 0))
        await frame(pilot)
        assert 15 < live.source.position < 25
        await pilot.hover("#transport", offset=(start, 0))
        await frame(pilot)
        assert live.source.position == 0
        await pilot.hover("#transport", offset=(119, 0))
        await pilot.mouse_up("#transport", offset=(119, 0))
        await frame(pilot)
        assert not live.source.looking_back, "the right end of the bar is the present"


async def test_pausing_the_engine_and_looking_back_are_told_apart_in_words() -> None:
    live = Live()
    live.ask(6)
    async with live.app.run_test(size=(120, 34)) as pilot:
        live.run(20)
        await frame(pilot)
        await pilot.press("space")
        await frame(pilot)
        picture = text_of(live.app)
        assert "ENGINE PAUSED" in picture
        assert "run engine" in picture
        assert live.loop.paused
        await pilot.press("left")
        await frame(pilot)
        picture = text_of(live.app)
        assert "LOOKING BACK  the engine is paused" in picture
        assert "step the past" in picture
        await pilot.press("space")
        await frame(pilot)
        assert "the engine goes on" in text_of(live.app)
        assert live.source.position == 18
        await pilot.press("home")
        live.source._past._clock = lambda: 0
        await pilot.press("r")
        assert not live.source.paused
        await frame(pilot)
        assert "▶ PAST" in text_of(live.app)
        await pilot.press("r")
        assert live.source.paused


async def test_playing_needs_a_past() -> None:
    live = Live()
    live.ask(2)
    async with live.app.run_test(size=(120, 34)) as pilot:
        live.run(10)
        await frame(pilot)
        await pilot.press("r")
        await frame(pilot)
        assert any("look back first" in notice.message for notice in live.app._notifications)
        assert not live.loop.paused
