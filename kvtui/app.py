"""The dashboard: pulls a source at its own frame rate and hands the panels what to draw.

Overlays are imported when they are opened: the first picture does not wait for them.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import time
from typing import TYPE_CHECKING, Any

from engine.trace.invariants import quick_check
from engine.trace.marks import ALL_KINDS
from kvtui.actions import Actions
from kvtui.history import History
from kvtui.names import Names
from kvtui.on_terminal import run_on_terminal
from kvtui.pace import BEST_SECONDS, MOST_BESIDE_A_MODEL, MOST_OF_A_CORE, Pace
from kvtui.paint import Painter
from kvtui.palette import ThemeError
from kvtui.queue_head import QueueHead
from kvtui.screens.main import MainScreen
from kvtui.screens.turns import BAR_SECONDS
from kvtui.terminal import pending_writes, terminal_problem
from kvtui.view import BlockSelected, Prefix, PrefixSelected, RequestSelected, View

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from textual.driver import Driver
    from textual.screen import Screen

    from kvtui.capture_output import OutputCapture
    from kvtui.feed import Feed
    from kvtui.settings import Settings
    from kvtui.sources.source import Source
    from kvtui.widgets.transport import MarkKindPicked, SeekRequested


_SETTLED_SECONDS = 1.5
"""After the start: the first picture must not wait for it."""

_WELCOME_SECONDS = 8
"""Long enough to be read once the eye has found it."""

_REST_AFTER_SECONDS = 1.0
_SELDOM_SECONDS = 0.2
"""How often one looks whether something happens after nothing did for a second: waking up is all that idling costs."""

_COLLECT_AFTER = 20_000
"""Objects after which garbage is looked for: a frame that draws everything makes more than the 700 of Python's own."""

_MARKS_SECONDS = 0.02
"""How long a tick looks for the marks of a recording that did not bring them along."""

NEXT_BLOCKS = 8
"""Blocks at the head of the free queue that are marked."""

STUCK_SECONDS = 0.8
"""How long a quit waits for the engine to come out of a step."""


class KvtuiApp(Actions):
    """The dashboard over one source.

    Args:
        source: Live or recorded.
        feed: What brings requests by itself; None where nothing does.
        listen_url: Where requests can be sent to, shown while there are none.
        theme: Name of a packaged theme.
        ascii_only: Draw with ASCII alone; chosen by itself where the locale knows no Unicode.
        capture: Lines that the process prints, for the log panel.
        settings: The user's own; what is given beside them goes before them.
        driver_class: For tests and `run_on_terminal`.

    Raises:
        ThemeError: If there is no such theme.
    """

    TITLE = "kvtui"
    ENABLE_COMMAND_PALETTE = True
    ESCAPE_TO_MINIMIZE = False

    def __init__(
        self,
        source: Source,
        *,
        feed: Feed | None = None,
        listen_url: str | None = None,
        theme: str | None = None,
        ascii_only: bool = False,
        capture: OutputCapture | None = None,
        settings: Settings | None = None,
        driver_class: type[Driver] | None = None,
    ) -> None:
        super().__init__(
            theme=theme, ascii_only=ascii_only, settings=settings, capture=capture, driver_class=driver_class
        )
        self.source = source
        self.feed = feed
        self.listen_url = listen_url
        self.hidden = settings.hide if settings is not None else frozenset[str]()
        self.history = History()
        self.names = Names()
        self.mark_kinds = ALL_KINDS
        self._selected_request: int | None = None
        self._selected_block: int | None = None
        self._selected_prefix: Prefix | None = None
        self.marks_next = False
        self._queue = QueueHead()
        self._generation = source.generation if source.position < 0 else -1
        """Of the last picture; one that begins in the middle of a trace has the steps before it to read."""
        rate = settings.frame_rate if settings is not None else None
        beside_a_model = source.live and source.header.model.device == "cpu"
        self._pace = Pace(
            frame_rate=rate or 1 / BEST_SECONDS,
            most_of_a_core=MOST_BESIDE_A_MODEL if beside_a_model else MOST_OF_A_CORE,
        )
        self.painter = Painter(self)
        self._reset = True
        self._changed = True
        self._log_lines = 0
        self._shown_status: tuple[object, ...] = ()
        self._shown_length = -1
        self._drew_bars_at = self._active_at = float("-inf")
        self._next_turn: asyncio.TimerHandle | None = None
        self._resting = False
        self._reported: set[str] = set()

    # -- what Textual asks for --------------------------------------------------------------------------------------

    def get_default_screen(self) -> Screen[Any]:
        """The dashboard itself."""
        return MainScreen(self.hidden, self.source.header.num_cpu_blocks)

    def on_mount(self) -> None:
        """Start pulling."""
        self.screen.set_class(self.glyphs.ascii, "-ascii")
        self.end_with_terminal()
        self._turn_later(self._pace.interval / 4)
        self.call_after_refresh(self._take_turn)  # The first picture need not wait for the timer.
        self.set_timer(_SETTLED_SECONDS, _freeze_garbage)
        welcome = self.feed.welcome(self._hold_key) if self.feed is not None else ""
        if welcome:
            self.notify(welcome, timeout=_WELCOME_SECONDS, markup=False)

    # -- frames -----------------------------------------------------------------------------------------------------

    def _turn_later(self, seconds: float) -> None:
        """Have `tick` called once, as the event loop does it itself: Textual's timers cost several times as much."""
        if self._next_turn is not None:
            self._next_turn.cancel()
        self._next_turn = asyncio.get_running_loop().call_later(seconds, self._take_turn)

    def _take_turn(self) -> None:
        """One turn of the timer, and the next one when a frame is due."""
        if self._exit:
            return
        try:
            self.tick()
        except Exception as error:
            self._handle_exception(error)
        else:
            self._turn_later(_SELDOM_SECONDS if self._resting else self._pace.wait())

    @property
    def main(self) -> MainScreen:
        """The dashboard's screen, whatever lies over it."""
        screen = self.screen_stack[0]
        assert isinstance(screen, MainScreen)
        return screen

    def tick(self) -> None:
        """One turn of the timer: take in what is due, and draw where something changed and the time has come."""
        if not self.screen_stack or not self.main.is_mounted or not self._pace.due() or pending_writes(self._driver):
            return
        source = self.source
        with self._pace.following():
            steps = source.poll()
            self._take_in(steps)
        self._take_log()
        if source.error is not None:
            if source.live:
                self.leave(1, f"the engine ended: {source.error}")
                return
            self._report(source.error)
        status = (
            source.paused,
            source.engine_paused,
            source.looking_back,
            source.speed,
            source.position,
            source.window,
            source.num_arrived if source.engine_paused else 0,
            self._fed(),
        )
        if status != self._shown_status:
            self._shown_status = status
            self._changed = True
        if source.marks.known < 1 and source.marks.look(_MARKS_SECONDS):
            self._changed = True
        if steps or self._changed or self._reset:
            self._pace.drew()
            self.draw(steps)
        # What a change lit up has to be put out again, also when nothing else happens.
        elif self.main.behind or (self.main.flashing and not source.paused):
            self._pace.drew()
            self._hand_out(self.main.update_unfinished)
        elif source.length != self._shown_length:
            if time.monotonic() - self._drew_bars_at >= BAR_SECONDS:
                self._pace.drew()
                self._draw_bars()
        else:
            self._rest()
            return
        self._wake()

    def _rest(self) -> None:
        """Nothing happens: after a while, look less often whether something does."""
        self._resting = time.monotonic() - self._active_at > _REST_AFTER_SECONDS

    def _wake(self) -> None:
        """Something happens: look often again."""
        self._active_at = time.monotonic()
        if self._resting:
            self._resting = False
            self._turn_later(self._pace.interval)

    def _draw_bars(self) -> None:
        """Draw how far the engine has come while the rest stands still."""
        self._shown_length = self.source.length
        self._drew_bars_at = time.monotonic()
        self._hand_out(self.main.update_bars)

    def _hand_out(self, hand_over: Callable[[View], None]) -> None:
        """Hand the present view over, and write what the panels make of it."""
        self.main.turns.slowness = self._pace.slowness
        uncovered = self.screen is self.main and not self._notifications and not self.is_headless
        self.painter.begin(uncovered and not self.main.settling)
        hand_over(self.view())
        self.painter.flush()

    def _take_in(self, steps: Sequence[Any]) -> None:
        source = self.source
        if source.generation != self._generation:
            self._generation = source.generation
            self._reset = True
            self.names.clear()
            self.history.rebuild(source.context(self.history.capacity), source.state)
            if self._selected_request not in source.state.requests:
                self._selected_request = None
        else:
            for step in steps:
                self.history.append(step, source.state)
        self.names.follow(source.state.requests)
        for violation in (*source.state.violations[:1], *(quick_check(source.state)[:1] if steps else ())):
            self._report(f"broken invariant: {violation}")

    def _take_log(self) -> None:
        if self.capture is not None and self.capture.num_lines != self._log_lines:
            new = self.capture.num_lines - self._log_lines
            self._log_lines += new
            for line in self.capture.tail(new):
                self.main.log_panel.write(line)
        if self.main.log_panel.drain():
            self._changed = True

    def _report(self, message: str) -> None:
        """Say something once: a notice, and a line in the log."""
        if message not in self._reported:
            self._reported.add(message)
            self.main.log_panel.write(message)
            self.notify(message, severity="error", timeout=10, markup=False)
            self._changed = True

    def draw(self, steps: Sequence[Any] = ()) -> None:
        """Hand the present view to the panels."""
        reset, self._reset, self._changed = self._reset, False, False
        self._shown_length = self.source.length
        self._hand_out(lambda view: self.main.update(view, steps, reset))

    def view(self) -> View:
        """The present moment, as the panels see it."""
        state = self.source.state
        last = state.last_step
        return View(
            source=self.source,
            state=state,
            history=self.history,
            palette=self.palette,
            glyphs=self.glyphs,
            selected_request=self._selected_request,
            selected_block=self._selected_block,
            selected_prefix=self._selected_prefix.key if self._selected_prefix is not None else None,
            selected_blocks=self._selected_prefix.blocks_in(state) if self._selected_prefix is not None else (),
            next_blocks=tuple(self._queue.first(state, NEXT_BLOCKS)) if self.marks_next else (),
            running=frozenset(member[0] for member in last.batch) if last is not None else frozenset(),
            listen_url=self.listen_url,
            fed=self._fed(),
            names=self.names,
            mark_kinds=self.mark_kinds,
        )

    def _fed(self) -> str:
        """What the feed does and which key changes that; empty where nothing comes by itself."""
        feed = self.feed
        if feed is None or feed.done:
            return ""
        return f"{feed.state} {self.glyphs.dot} {self._hold_key} {'lets it go on' if feed.held else 'holds it'}"

    @property
    def _hold_key(self) -> str:
        return self.own_keys.get("hold_feed", "w")

    # -- selection --------------------------------------------------------------------------------------------------

    def on_request_selected(self, message: RequestSelected) -> None:
        """A panel picked a request."""
        self.select(message.request, None)
        if message.jump:
            self.main.open_panel("requests")
        if message.inspect:
            self.action_inspect()

    def on_prefix_selected(self, message: PrefixSelected) -> None:
        """A panel picked a prefix: its blocks are lit."""
        self._selected_request = self._selected_block = None
        self._selected_prefix = message.prefix
        self.draw()

    def on_block_selected(self, message: BlockSelected) -> None:
        """A panel picked a block: whoever owns it is selected with it."""
        self.select_block(message.block)

    def on_seek_requested(self, message: SeekRequested) -> None:
        """The position bar was pressed, or a panel names the step to look at."""
        self.go_to(message.step)

    def on_mark_kind_picked(self, message: MarkKindPicked) -> None:
        """A kind of mark was pressed beside the bar."""
        kinds = 1 << message.kind
        self.show_marks(ALL_KINDS if self.mark_kinds == kinds else kinds)

    @property
    def selected_request(self) -> int | None:
        """The request that is selected."""
        return self._selected_request

    @property
    def selected_block(self) -> int | None:
        """The block that is selected."""
        return self._selected_block

    def select(self, request: int | None, block: int | None) -> None:
        """Select a request, a block, both, or nothing; all panels show it at once."""
        self._selected_request, self._selected_block = request, block
        self._selected_prefix = None
        self.draw()

    def select_block(self, block: int | None) -> None:
        """Select a block and its owner."""
        owner = int(self.source.state.owner[block]) if block is not None else -1
        self.select(owner if owner in self.source.state.requests else None, block)

    def hurry(self) -> None:
        """Show the answer to a key without waiting for the next frame."""
        self._pace.hurry()
        self.main.hurry()
        self._changed = True
        self.tick()

    def redraw(self) -> None:
        """Draw everything anew: the theme is another one."""
        self._reset = True
        self.draw()


def _freeze_garbage() -> None:
    """Take what exists by now out of the collector's sight: a full collection in the middle of a frame can be seen."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_COLLECT_AFTER)


def run_app(
    source: Source,
    *,
    feed: Feed | None = None,
    listen_url: str | None = None,
    theme: str | None = None,
    ascii: bool = False,  # noqa: A002
    settings: Settings | None = None,
    before_exit: Callable[[], None] | None = None,
) -> int:
    """Draw a source until the user quits, and give the terminal back whatever happens.

    Args:
        source: Live or recorded; closed at the end.
        feed: What brings requests by itself; None where nothing does.
        listen_url: Where requests can be sent to, shown while there are none.
        theme: Name of a packaged theme.
        ascii: Draw with ASCII alone.
        settings: The user's own.
        before_exit: Called when the screen is gone: the place to close recordings. The process may end right after
            it, where the engine is stuck in a step.

    Returns:
        The exit code: 0, 1 where something went wrong (printed on standard error), 2 where the terminal or the theme
        will not do, 128 + n after signal n.
    """

    def dashboard(capture: OutputCapture | None, driver_class: type[Driver] | None) -> KvtuiApp:
        return KvtuiApp(
            source,
            feed=feed,
            listen_url=listen_url,
            theme=theme,
            ascii_only=ascii,
            capture=capture,
            settings=settings,
            driver_class=driver_class,
        )

    problem = terminal_problem()
    if problem is not None:
        print(f"kvtui: {problem}", file=sys.stderr)
        return 2
    try:
        code = run_on_terminal(dashboard)
    except ThemeError as error:
        print(f"kvtui: {error}", file=sys.stderr)
        return 2
    _close(source, code, before_exit)
    return code


def _close(source: Source, code: int, before_exit: Callable[[], None] | None) -> None:
    """Let go of the source; where its engine hangs in a step, end the process without it."""
    started = time.monotonic()
    closed = source.close(STUCK_SECONDS)
    if before_exit is not None:
        before_exit()
    if not closed and not source.close(max(0.0, STUCK_SECONDS - (time.monotonic() - started))):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
