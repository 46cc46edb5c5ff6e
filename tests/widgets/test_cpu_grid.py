"""The second grid shows the CPU pool block by block, and what was just moved."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from pressed_engine import pressed_engine, run

from engine.loop import EngineLoop
from engine.trace.events import NO_REQUEST, StepTrace, TraceMessage
from engine.trace.state import PoolState
from kvtui.app import KvtuiApp
from kvtui.block_flash import FLASH_SECONDS
from kvtui.sources.live import LiveSource
from kvtui.widgets.cpu_grid import CpuGrid, lines_for


def live(num_cpu_blocks: int, **options: object) -> tuple[KvtuiApp, object]:
    engine = pressed_engine(num_cpu_blocks)
    return KvtuiApp(LiveSource(engine, EngineLoop(engine)), theme="dark", **options), engine  # type: ignore[arg-type]


def cells_of(app: KvtuiApp) -> str:
    grid = app.main.query_one(CpuGrid)
    lines = [grid.render_line(y).text for y in range(grid.size.height)]
    return "".join(line[len("CPU 12 ") :].rstrip() for line in lines)


async def test_every_cell_says_what_its_block_holds() -> None:
    app, engine = live(12)
    seen: set[str] = set()
    async with app.run_test(size=(200, 50)) as pilot:
        for start in range(0, 240, 8):
            run(engine, 8, start)  # type: ignore[arg-type]
            app.hurry()
            await pilot.pause(0.05)
            if start % 80 == 72:  # Let what was lit up by a move go out, however slow the machine is.
                await pilot.pause(FLASH_SECONDS + 0.1)
                app.hurry()
                await pilot.pause(0.05)
            state = app.source.state
            cells = cells_of(app)
            assert len(cells) == 12
            for cell, filled, owner in zip(cells, state.cpu_filled, state.cpu_owner, strict=True):
                if cell == "⇄":
                    seen.add("moved")
                elif filled == 0:
                    assert cell == "·"
                elif owner == NO_REQUEST:
                    assert cell == "░"
                    seen.add("kept")
                else:
                    assert cell in "▁▂▃▄▅▆▇█"
                    seen.add("swapped")
    assert {"moved", "kept"} <= seen


async def test_what_was_moved_fades_while_nothing_happens() -> None:
    app, engine = live(12)
    async with app.run_test(size=(200, 50)) as pilot:
        grid = app.main.query_one(CpuGrid)
        now = [0.0]
        grid._clock = lambda: now[0]
        for start in range(0, 240, 2):
            run(engine, 2, start)  # type: ignore[arg-type]
            app.hurry()
            if "⇄" in cells_of(app):
                break
        assert grid.flashing
        now[0] = FLASH_SECONDS + 0.1
        app.tick()
        app.hurry()
        await pilot.pause()
        assert "⇄" not in cells_of(app)
        assert not grid.flashing


async def test_without_a_cpu_pool_there_is_no_second_grid() -> None:
    engine = pressed_engine(0, "recompute")
    app = KvtuiApp(LiveSource(engine, EngineLoop(engine)), theme="dark")
    async with app.run_test(size=(200, 50)):
        assert not app.main.query(CpuGrid)


@pytest.mark.parametrize("size", [(200, 50), (80, 24)])
async def test_a_large_pool_is_drawn_in_few_lines(size: tuple[int, int]) -> None:
    app, _ = live(5000, ascii_only=True)
    async with app.run_test(size=size) as pilot:
        await pilot.pause(0.1)
        grid = app.main.query_one(CpuGrid)
        assert grid.size.height == lines_for(5000) == 3
        state = app.source.state
        state.cpu_filled[:] = state.header.block_size
        state.cpu_owner[:] = np.arange(5000) % 3
        grid.redraw(everything=True)
        text = "".join(grid.render_line(y).text for y in range(3))
        assert text.isascii()
        assert text.count("#") * -(-5000 // text.count("#")) >= 5000


def test_cells_of_many_blocks_follow_step_by_step_what_a_look_at_all_of_them_gives() -> None:
    engine = pressed_engine(30)
    state = PoolState(engine.header)
    steps: list[StepTrace] = []

    def follow(message: TraceMessage) -> None:
        state.apply(message)
        if isinstance(message, StepTrace):
            steps.append(message)

    engine.add_sink(follow)
    grid, view, seen = CpuGrid(30), SimpleNamespace(state=state, source=SimpleNamespace(paused=False)), set()
    for start in range(0, 200, 4):
        steps.clear()
        run(engine, 4, start)
        grid.follow(view, steps, False)  # type: ignore[arg-type]
        fresh = CpuGrid(30)
        fresh.follow(view, (), True)  # type: ignore[arg-type]
        followed, looked_at = (each.rows(view, 12, 2) for each in (grid, fresh))  # type: ignore[arg-type]
        assert [(first, per_cell) for first, per_cell, _ in followed] == [(0, 3), (15, 3)]
        for (_, _, mine), (_, _, theirs) in zip(followed, looked_at, strict=True):
            assert [cell[:2] for cell in mine] == [cell[:2] for cell in theirs]
            seen.update(cell[:2] for cell in theirs)
    assert len(seen) > 3
