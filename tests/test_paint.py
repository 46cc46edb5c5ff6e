"""The short way to the terminal shows what the compositor would have shown."""

from __future__ import annotations

import re

import pytest
from rich.cells import cell_len

from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.loop import EngineLoop
from engine.request import SamplingParams
from engine.simulated import simulated_engine
from kvtui.app import KvtuiApp
from kvtui.sources.live import LiveSource

_SEQUENCE = re.compile(r"\x1b\[(\d+);(\d+)H|\x1b\[(\d+)C|\x1b\[([\d;]*)m|\x1b\[\?2026[hl]|(.)", re.DOTALL)

Cell = tuple[str, str]


def cells_of(strips, console) -> list[list[Cell]]:
    """A screen of strips as (character, how it is drawn)."""
    screen = [[(" ", "")] * 400 for _ in strips]
    for y, strip in enumerate(strips):
        write(screen, f"\x1b[{y + 1};1H" + strip.render(console))
    return screen


def write(screen: list[list[Cell]], output: str) -> None:
    """What a terminal does with output: go somewhere, set a style, put characters."""
    x = y = 0
    style = ""
    for match in _SEQUENCE.finditer(output):
        row, column, forward, sgr, char = match.groups()
        if row is not None:
            y, x = int(row) - 1, int(column) - 1
        elif forward is not None:
            x += int(forward)
        elif sgr is not None:
            style = "" if sgr in ("", "0") else sgr
        elif char is not None:
            assert char.isprintable(), repr(char)
            screen[y][x] = (char, style)
            for extra in range(1, cell_len(char)):
                screen[y][x + extra] = ("", style)
            x += cell_len(char)


@pytest.mark.parametrize("theme", ["dark", "ansi"])
@pytest.mark.parametrize("size", [(200, 50), (80, 24)])
async def test_frames_written_the_short_way_equal_the_compositors(size, theme, monkeypatch) -> None:
    engine = simulated_engine(
        EngineConfig(
            cache=CacheConfig(num_blocks=60, block_size=4),
            scheduler=SchedulerConfig(max_num_seqs=5, max_num_batched_tokens=48, max_model_len=120),
        )
    )
    app = KvtuiApp(LiveSource(engine, EngineLoop(engine)), theme=theme)
    async with app.run_test(size=size) as pilot:
        for i in range(9):
            engine.add_request("字 shared words to begin with " + "and more " * i, SamplingParams(max_tokens=30))
        engine.step()
        # Paused, so that what a step lights up does not go out between the two pictures.
        app.source.pause()
        await pilot.pause()
        app.hurry()
        await pilot.pause(0.5)
        screen = cells_of(app.screen._compositor.render_strips(), app.console)
        written: list[str] = []
        monkeypatch.setattr(app._driver, "write", written.append)
        begin = app.painter.begin
        monkeypatch.setattr(app.painter, "begin", lambda _allowed: begin(True))
        for _ in range(25):
            engine.step()
            steps = app.source.poll()
            app._take_in(steps)
            app.main.hurry()
            app.draw(steps)
        app.select_block(3)
        assert sum(map(len, written)) > 2000, "the short way was not taken"
        write(screen, "".join(written))
        monkeypatch.undo()
        app.screen.refresh()
        await pilot.pause()
        expected = cells_of(app.screen._compositor.render_strips(), app.console)
        for y, (short, long) in enumerate(zip(screen, expected, strict=True)):
            assert "".join(c for c, _ in short) == "".join(c for c, _ in long), f"line {y}"
            assert [s for c, s in short if c.strip()] == [s for c, s in long if c.strip()], f"line {y}"


async def test_while_something_lies_over_the_dashboard_the_long_way_is_taken(monkeypatch) -> None:
    engine = simulated_engine(EngineConfig(cache=CacheConfig(num_blocks=60, block_size=4)))
    app = KvtuiApp(LiveSource(engine, EngineLoop(engine)), theme="dark")
    async with app.run_test(size=(120, 34)) as pilot:
        await pilot.pause()
        allowed: list[bool] = []
        begin = app.painter.begin
        monkeypatch.setattr(app.painter, "begin", lambda yes: (allowed.append(yes), begin(False)))
        monkeypatch.setattr(type(app), "is_headless", False)
        monkeypatch.setattr(app._driver, "write", lambda _text: None)
        app.draw()
        await pilot.press("question_mark")
        await pilot.pause()
        app.draw()
        await pilot.press("escape")
        await pilot.pause(0.3)
        app.draw()
        app.notify("over it")
        await pilot.pause()
        app.draw()
        assert allowed[0] is True
        assert False in allowed[1:-2]
        assert allowed[-1] is False
