"""Blocks that stand out: those of what is selected or found, and those that are taken next."""

from __future__ import annotations

import asyncio

import pytest
from live_dashboard import Live
from screen_text import frame, text_of

from engine.config import EngineConfig, SchedulerConfig
from engine.loop import EngineLoop
from engine.simulated import simulated_engine
from kvtui.app import KvtuiApp
from kvtui.block_flash import FLASH_SECONDS
from kvtui.sources.live import LiveSource


async def test_selecting_a_block_selects_its_owner_and_shows_its_text() -> None:
    live = Live()
    live.ask(2)
    async with live.app.run_test(size=(200, 50)) as pilot:
        live.run(6)
        await frame(pilot)
        state = live.source.state
        block = next(b for b in range(48) if state.owner[b] == 1 and state.filled[b] == 4)
        live.app.select_block(block)
        await frame(pilot)
        view = live.app.view()
        assert (view.selected_request, view.selected_block) == (1, block)
        picture = text_of(live.app)
        assert f"block {block} · owner ask-1" in picture
        shown = "".join(state.block_text(block)).replace(" ", "␣")
        assert shown in picture
        await pilot.press("escape")
        await frame(pilot)
        assert live.app.view().selected_block is None
        assert "following" in text_of(live.app)


@pytest.mark.parametrize(
    ("typed", "request_selected", "block_selected"),
    [
        ("b7", None, 7),
        ("#1", 1, None),
        ("1", 1, None),
        ("ask-0", 0, None),
        ("SHARED beginning", 1, None),
        ("zzz", None, None),
    ],
)
async def test_find_takes_numbers_names_text_and_blocks(typed, request_selected, block_selected) -> None:
    live = Live()
    live.ask(2)
    async with live.app.run_test(size=(120, 34)) as pilot:
        live.run(1)
        await frame(pilot)
        await pilot.press("slash", *("space" if c == " " else c for c in typed.replace("#", "r")), "enter")
        await frame(pilot)
        view = live.app.view()
        assert view.selected_block == block_selected
        if block_selected is None:
            assert view.selected_request == request_selected


async def test_a_selected_prefix_lights_no_block_that_holds_something_else_by_now() -> None:
    live = Live(num_blocks=24)
    live.ask(1, max_tokens=8)
    async with live.app.run_test(size=(80, 24)) as pilot:
        live.run(12)
        await frame(pilot)
        await pilot.press("7", "down", "1")
        await frame(pilot)
        before = live.app.view().selected_blocks
        assert before
        live.ask(3, text="something else that needs all of the blocks there are, ")
        live.run(20)
        await frame(pilot)
        view = live.app.view()
        assert set(view.selected_blocks) < set(before)
        assert all(view.state.touched[block] < 12 for block in view.selected_blocks)


@pytest.mark.parametrize(("ascii_only", "mark"), [(False, "▚"), (True, ";")])
async def test_a_key_marks_what_is_evicted_next_and_legend_and_help_say_so(ascii_only, mark, monkeypatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    live = Live(num_blocks=24, ascii_only=ascii_only)
    live.ask(4, max_tokens=40)
    async with live.app.run_test(size=(80, 24)) as pilot:
        live.run(250)
        await frame(pilot)
        state = live.source.state
        queue = state.free_queue(8).tolist()
        evicted = sum(1 for block in queue if state.key[block])
        assert evicted > 0
        await asyncio.sleep(FLASH_SECONDS + 0.1)  # What was just evicted says so first.
        await frame(pilot)
        assert mark not in text_of(live.app)
        await pilot.press("e")
        await frame(pilot)
        picture = text_of(live.app)
        assert f"{mark} evicted next {evicted} " in picture
        assert sum(line.count(mark * 2) for line in picture.splitlines()) == evicted
        await pilot.press("question_mark")
        await pilot.pause()
        assert "evicted" in "".join(str(widget.render()) for widget in live.app.screen.query("Static"))
        await pilot.press("escape", "e")
        await frame(pilot)
        assert mark not in text_of(live.app)


async def test_a_policy_without_a_queue_marks_nothing_next() -> None:
    engine = simulated_engine(EngineConfig(scheduler=SchedulerConfig(policy="contiguous")))
    app = KvtuiApp(LiveSource(engine, EngineLoop(engine)), theme="dark")
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("e")
        await frame(pilot)
        assert not app.marks_next
