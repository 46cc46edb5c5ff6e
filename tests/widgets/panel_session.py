"""A simulated session and a bare app, for looking at one panel line by line."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from rich.cells import cell_len
from textual.app import App

from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.request import SamplingParams
from engine.simulated import simulated_engine
from engine.trace.events import StepTrace
from engine.trace.marks import Marks, marks_of
from engine.trace.state import PoolState
from kvtui.glyphs import UNICODE
from kvtui.history import History
from kvtui.names import Names
from kvtui.palette import load_palettes
from kvtui.view import BlockSelected, RequestSelected, View

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from textual.message import Message
    from textual.pilot import Pilot

    from engine.config import KVDType
    from engine.trace.damage import Damage
    from kvtui.view import Panel
    from kvtui.widgets.transport import SeekRequested

PALETTE = next(iter(load_palettes().values()))


class Session:
    """An engine without a model that is its own `Source`."""

    live = True
    paused = False
    looking_back = False
    first = 0
    speed = 1.0
    generation = 0
    error: str | None = None
    damage: Damage | None = None
    cut_off = False

    def __init__(
        self,
        *,
        num_blocks: int = 40,
        block_size: int = 4,
        max_num_seqs: int = 8,
        chunk: int = 16,
        history: int = 1024,
        kv_dtype: KVDType = "auto",
        sliding_window: int = 0,
    ) -> None:
        config = EngineConfig(
            cache=CacheConfig(num_blocks=num_blocks, block_size=block_size, kv_dtype=kv_dtype),
            scheduler=SchedulerConfig(
                max_num_seqs=max_num_seqs, max_num_batched_tokens=64, max_prefill_chunk=chunk, max_model_len=256
            ),
        )
        self.engine = simulated_engine(config, sliding_window=sliding_window)
        self.header = self.engine.header
        self.state = PoolState(self.header)
        self.history = History(history)
        self.names = Names()
        self.steps: list[StepTrace] = []
        self.marks = Marks()
        self.window: tuple[int, int] | None = None
        self._messages: list[object] = []
        self.engine.add_sink(self._messages.append)

    @property
    def position(self) -> int:
        return self.state.step

    @property
    def num_arrived(self) -> int:
        return self.engine.num_arrived

    @property
    def engine_paused(self) -> bool:
        return self.paused

    @property
    def length(self) -> int:
        return len(self.steps)

    def ask(self, prompt: str | list[int] = "the block of the page", max_tokens: int = 12, name: str = "") -> int:
        return self.engine.add_request(prompt, SamplingParams(max_tokens=max_tokens), name)

    def run(self, steps: int = 1) -> list[StepTrace]:
        """Step the engine; the steps applied."""
        applied: list[StepTrace] = []
        for _ in range(steps):
            self.engine.step()
            messages, self._messages[:] = list(self._messages), []
            for message in messages:
                self.state.apply(message)
                if isinstance(message, StepTrace):
                    self.history.append(message, self.state)
                    self.marks.append(marks_of(message))
                    applied.append(message)
        self.steps += applied
        return applied

    def view(self, *, selected: int | None = None, glyphs=UNICODE, palette=PALETTE) -> View:
        self.names.follow(self.state.requests)
        batch = self.state.last_step.batch if self.state.last_step else []
        return View(
            source=self,
            state=self.state,
            history=self.history,
            palette=palette,
            glyphs=glyphs,
            selected_request=selected,
            running=frozenset(member.request for member in batch),
            names=self.names,
        )


def busy_session(steps: int = 30) -> Session:
    """More requests than fit: some run, some wait, some were preempted, some have ended."""
    session = Session()
    for i in range(12):
        session.ask("the block of the cache page " * (1 + i % 3) + f"{i}", max_tokens=8 + 9 * (i % 5), name=f"rag-{i}")
    session.run(steps)
    return session


class PanelApp(App[None]):
    """One panel that fills the screen; keeps what it posted."""

    ENABLE_COMMAND_PALETTE = False

    def __init__(self, panel: Panel) -> None:
        super().__init__()
        self.panel = panel
        self.posted: list[Message] = []

    def compose(self):
        self.panel.styles.width = "100%"
        self.panel.styles.height = "100%"
        yield self.panel

    def on_request_selected(self, message: RequestSelected) -> None:
        self.posted.append(message)

    def on_block_selected(self, message: BlockSelected) -> None:
        self.posted.append(message)

    def on_seek_requested(self, message: SeekRequested) -> None:
        self.posted.append(message)


@asynccontextmanager
async def shown(panel: Panel, view: View, width: int, height: int) -> AsyncIterator[Pilot[None]]:
    """The panel with a view on a screen of some size."""
    app = PanelApp(panel)
    async with app.run_test(size=(width, height)) as pilot:
        panel.update_view(view, view.source.steps, True)
        await pilot.pause()
        yield pilot


def lines(panel: Panel) -> list[str]:
    """The panel's lines as text, each checked to be as wide as the panel."""
    width, height = panel.size
    drawn = []
    for y in range(height):
        strip = panel.render_line(y)
        assert strip.cell_length == width
        text = "".join(segment.text for segment in strip)
        assert cell_len(text) == width, f"line {y} is {cell_len(text)} cells wide, not {width}: {text!r}"
        assert not any(ord(c) < 32 or 127 <= ord(c) < 160 for c in text)
        drawn.append(text)
    return drawn
