"""What drawing costs: `python -m kvtui.bench.screen`.

Frames of the block grid at 300 by 80 cells, from the state to the bytes for the terminal; a step that changes a
thousand blocks of a million; a key in a list of 500 requests; and whether a session's last frames cost more than its
first. All in CPU time of one thread, medians.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import time
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from rich.console import Console
from textual.app import App

from engine.bench.report import Figure, show
from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.request import SamplingParams
from engine.simulated import simulated_engine
from engine.trace.events import BlockOp, Op, RequestArrived, StepTrace
from engine.trace.marks import Marks
from engine.trace.state import PoolState
from engine.trace.step_columns import StepColumns
from kvtui.app import KvtuiApp
from kvtui.glyphs import choose_glyphs
from kvtui.history import History
from kvtui.pace import BEST_SECONDS
from kvtui.paint import Painter
from kvtui.palette import load_palettes
from kvtui.sources.moved import MovedSource
from kvtui.view import Panel, View
from kvtui.widgets.block_moves import MovableGrid
from kvtui.widgets.request_table import RequestTable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from textual.app import ComposeResult

    from engine.trace.events import TraceMessage

SIZE = (300, 80)
_MILLION = 1_000_000
_CHANGED = 1_000


class Still(MovedSource):
    """A `Source` around an engine without a model, which steps only when asked to."""

    live = True
    paused = False

    def __init__(self, num_blocks: int, max_num_seqs: int = 16) -> None:
        limits = SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=2048)
        self.engine = simulated_engine(EngineConfig(cache=CacheConfig(num_blocks=64), scheduler=limits))
        self.header = msgspec.structs.replace(self.engine.header, num_blocks=num_blocks)
        self.state = PoolState(self.header)
        self.history = History()
        self._messages: list[TraceMessage] = []
        self.marks = Marks()
        self._palette = next(iter(load_palettes().values()))
        self._glyphs = choose_glyphs(False)

    def follow_engine(self) -> None:
        """Let the engine's own steps be what is drawn."""
        self.header = self.engine.header
        self.state = PoolState(self.header)
        self.engine.add_sink(self._messages.append)

    @property
    def position(self) -> int:
        """Index of the step shown."""
        return self.state.step

    @property
    def length(self) -> int:
        """Steps known."""
        return self.state.step + 1

    def advance(self) -> list[StepTrace]:
        """Make one step of the engine and take it in."""
        self.engine.step()
        messages, self._messages[:] = self._messages[1:] if self.position < 0 else list(self._messages), []
        return self.take(messages)

    def take(self, messages: Sequence[Any]) -> list[StepTrace]:
        """Apply messages; the steps among them."""
        steps = []
        for message in messages:
            self.state.apply(message)
            if isinstance(message, StepTrace):
                self.history.append(message, self.state)
                steps.append(message)
        return steps

    def view(self) -> View:
        """The present moment."""
        return View(self, self.state, self.history, self._palette, self._glyphs)

    def context(self, most: int) -> StepColumns:
        """It never jumps."""
        return StepColumns.of(self.state.step + 1, ())


class _Host(App[None]):
    """One panel that fills the screen."""

    ENABLE_COMMAND_PALETTE = False

    def __init__(self, panel: Panel) -> None:
        super().__init__()
        self._panel = panel
        self.console = Console(force_terminal=True, color_system="truecolor", width=SIZE[0])
        self.painter = Painter(self)

    def compose(self) -> ComposeResult:
        self._panel.styles.width = "100%"
        self._panel.styles.height = "100%"
        yield self._panel


class _Terminal:
    """Takes what a panel's frames write by the short way, and counts it."""

    def __init__(self, host: _Host) -> None:
        self.painter = host.painter
        self._text = ""
        driver = host._driver
        assert driver is not None
        driver.write = self._take  # type: ignore[method-assign]

    def _take(self, data: str) -> None:
        self._text = data

    @property
    def bytes_drawn(self) -> int:
        """Of the last frame."""
        return len(self._text.encode())

    def frame(self, panel: Panel, view: View, steps: Sequence[StepTrace] = ()) -> int:
        """Draw one frame of a panel; nanoseconds of this thread."""
        began = time.thread_time_ns()
        self.painter.begin(True)
        panel.update_view(view, steps, False)
        self.painter.flush()
        return time.thread_time_ns() - began


class _Bench:
    """A panel on a screen of some size, and the bytes of its lines."""

    def __init__(self, panel: Panel) -> None:
        self.panel = panel
        self._console = Console(force_terminal=True, color_system="truecolor", width=SIZE[0])
        self._dirty: set[int] = set()
        self.bytes_drawn = 0
        panel.refresh_rows = self._note  # type: ignore[method-assign]

    def _note(self, rows: Sequence[int]) -> None:
        self._dirty.update(rows)

    def draw(self, lines: Iterator[int] | range | None = None) -> None:
        """Make the bytes of the lines that changed, or of those named."""
        out = [
            self.panel.render_line(y).render(self._console) for y in (sorted(self._dirty) if lines is None else lines)
        ]
        self.bytes_drawn = len("".join(out).encode())
        self._dirty.clear()


def _median_ms(function: Callable[[], object], rounds: int) -> float:
    taken = []
    for number in range(rounds + 1):
        began = time.thread_time_ns()
        function()
        if number:
            taken.append(time.thread_time_ns() - began)
    return statistics.median(taken) / 1e6


def _fill(state: PoolState, owners: np.ndarray[Any, Any], seed: int) -> None:
    """Make blocks look as if requests held them, filled to some degree."""
    rng = np.random.default_rng(seed)
    n, size = len(owners), state.header.block_size
    state.owner[:] = owners
    state.refs[:] = owners >= 0
    state.filled[:] = np.where(owners >= 0, np.where(rng.random(n) < 0.1, rng.integers(1, size, n), size), 0)


async def frames(rounds: int) -> list[Figure]:
    """A whole frame of the grid in which every block changes: runs of one owner, and every block another."""
    figures = []
    num_blocks = SIZE[1] * 256
    rng = np.random.default_rng(0)
    for name, run in (("runs", 20), ("noise", 1)):
        source, grid = Still(num_blocks), MovableGrid()
        host = _Host(grid)
        async with host.run_test(size=SIZE) as pilot:
            grid.update_view(source.view(), (), True)
            await pilot.pause()
            terminal, view = _Terminal(host), source.view()
            taken: list[int] = []
            for number in range(rounds + 3):
                _fill(source.state, np.repeat(rng.integers(-1, 60, num_blocks // run), run), number)
                # No step tells what changed; with another palette, all of it is looked at.
                taken.append(terminal.frame(grid, replace(view, palette=copy(view.palette))))
        figures.append(
            Figure(f"grid frame, {name}", statistics.median(taken[3:]) / 1e6, "ms", f"{num_blocks:,} blocks")
        )
        figures.append(Figure(f"bytes of it, {name}", terminal.bytes_drawn, "bytes"))
    return figures


async def large_pool(rounds: int) -> list[Figure]:
    """A step that changes a thousand blocks of a million: the fold, and the grid to its bytes."""
    now = itertools.count()
    source, grid = Still(_MILLION), MovableGrid(clock=lambda: next(now) * BEST_SECONDS)
    host = _Host(grid)
    _arrive(source, 1)
    chosen = np.random.default_rng(2).choice(_MILLION, _CHANGED, replace=False).tolist()
    # A request lets its last block go first, as the engine does.
    ops = [
        [BlockOp(Op.ALLOCATE, b, 0, i) for i, b in enumerate(chosen)],
        [BlockOp(Op.RELEASE, b, 0, 0) for b in reversed(chosen)],
    ]
    counters = _one_step(source).counters
    folded: list[int] = []
    drawn: list[int] = []
    async with host.run_test(size=SIZE) as pilot:
        grid.update_view(source.view(), (), True)
        await pilot.pause()
        terminal = _Terminal(host)
        for number in range(rounds + 4):
            step = StepTrace(number, number, 0, 0, 0, 0, [], ops[number % 2], [], [], [], counters)
            began = time.thread_time_ns()
            source.state.apply(step)
            folded.append(time.thread_time_ns() - began)
            drawn.append(terminal.frame(grid, source.view(), [step]))
    what = f"{_CHANGED:,} changed blocks of {_MILLION:,}"
    return [
        Figure(f"fold a step, {what}", statistics.median(folded[4:]) / 1e6, "ms"),
        Figure(f"draw it, {what}", statistics.median(drawn[4:]) / 1e6, "ms", f"{grid.blocks_per_cell} blocks a cell"),
        Figure(f"bytes of it, {what}", terminal.bytes_drawn, "bytes"),
    ]


async def long_list(rounds: int) -> list[Figure]:
    """Moving the cursor in a list of 500 requests, to the bytes."""
    source, table = Still(64), RequestTable()
    bench = _Bench(table)
    _arrive(source, 500)
    async with _Host(table).run_test(size=SIZE):
        table.update_view(source.view(), (), True)
        bench.draw(range(table.size.height))

        def key() -> None:
            table.action_scroll_down()
            bench.draw()

        return [Figure("key in a list of 500 requests", _median_ms(key, rounds), "ms")]


def _arrive(source: Still, num: int) -> None:
    source.take(
        [
            RequestArrived(
                request=n,
                name=f"request {n}",
                time_ns=n,
                prompt_token_ids=[97] * 20,
                prompt_pieces=["a"] * 20,
                max_tokens=100,
                temperature=0.0,
            )
            for n in range(num)
        ]
    )


def _one_step(source: Still) -> StepTrace:
    """Some step of the source's engine, for its counters."""
    steps: list[StepTrace] = []
    source.engine.add_sink(lambda message: steps.append(message) if isinstance(message, StepTrace) else None)
    source.engine.add_request([97], SamplingParams(max_tokens=1))
    source.engine.step()
    return steps[0]


class _Unhurried(KvtuiApp):
    """The dashboard without its timer: frames are drawn when asked for."""

    def tick(self) -> None:
        """Nothing happens by itself."""


async def long_session(num_frames: int) -> list[Figure]:
    """All panels through a session with a frame at every step: the last tenth of the frames over the first."""
    source = Still(64)
    source.follow_engine()
    app = _Unhurried(source)
    tenth = max(1, num_frames // 10)
    taken: list[int] = []
    async with app.run_test(size=(200, 50)) as pilot:
        await pilot.pause()
        app.draw()
        for number in range(num_frames + tenth):
            if len(source.engine.scheduler.waiting) < 4:
                prompt = [97 + (number + i) % 26 for i in range(20 + number % 60)]
                source.engine.add_request(prompt, SamplingParams(max_tokens=20 + number % 90), name=f"chat-{number}")
            steps = source.advance()
            began = time.thread_time_ns()
            app._take_in(steps)
            app.painter.begin(True)
            app.main.update(app.view(), steps, False)
            app.painter.flush()
            taken.append(time.thread_time_ns() - began)
            if number % 20 == 0:
                await asyncio.sleep(0)
    # The first tenth fills the rings and the caches.
    first, last = (statistics.median(part) for part in (taken[tenth : 2 * tenth], taken[-tenth:]))
    return [
        Figure(f"last {tenth:,} of {num_frames:,} frames over the first", last / first, "x"),
        Figure("frame of all panels at 200x50", statistics.median(taken) / 1e6, "ms"),
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m kvtui.bench.screen", description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--frames", type=int, default=10_000, help="of the long session")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(argv)

    async def measure() -> list[Figure]:
        return [
            *await frames(options.rounds),
            *await large_pool(options.rounds),
            *await long_list(options.rounds),
            *await long_session(options.frames),
        ]

    show("screen", asyncio.run(measure()), as_json=options.json, about=f"grid at {SIZE[0]}x{SIZE[1]}, CPU time")


if __name__ == "__main__":
    main()
