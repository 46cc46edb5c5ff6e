"""The race on screen: a batch timeline for each lane, one under another, on one axis of time."""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING, Any, ClassVar

from textual.app import SystemCommand
from textual.binding import Binding
from textual.widgets import Static

from kvtui.key_names import shown_keys
from kvtui.race.lane_timeline import LaneTimeline
from kvtui.race.panels import RaceAxis, RaceBar, RaceFooter, RaceLegend, RaceTimePicked, RaceTitle
from kvtui.race.race_time import RaceTime
from kvtui.race.report import speed_up
from kvtui.terminal import MIN_HEIGHT, MIN_WIDTH, pending_writes
from kvtui.themed_app import ThemedApp
from kvtui.view import RequestSelected, View
from kvtui.widgets.batch_timeline import label_cells

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from textual.app import ComposeResult
    from textual.binding import BindingType
    from textual.driver import Driver
    from textual.screen import Screen

    from kvtui.capture_output import OutputCapture
    from kvtui.race.playing import LanePlayer
    from kvtui.settings import Settings

FRAMES_PER_SECOND = 12
SPEEDS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
_NEARLY = 1e-9
_LEGEND_FROM_HEIGHT = 28


class RaceApp(ThemedApp):
    """Plays lanes side by side. What is done here and in the dashboard has the same id, so one key of the user's own.

    Args:
        players: One for each lane, in the order in which they are shown.
        name: What is raced, safe to draw.
        theme: Name of a packaged theme.
        ascii_only: Draw with ASCII alone.
        settings: The user's own: themes, glyphs, keys.
        capture: As `run_on_terminal` hands it.
        driver_class: As `run_on_terminal` hands it.
        clock: Seconds that only grow; tests bring their own.

    Raises:
        ThemeError: If there is no such theme.
    """

    TITLE = "kvtui race"
    ENABLE_COMMAND_PALETTE = True
    SCOPED_CSS = False
    CSS = """
    Screen { layout: vertical; background: $background; overflow: hidden hidden; }
    #too-small { display: none; width: 100%; height: 100%; content-align: center middle; text-align: center; }
    Screen.-tiny LaneTimeline, Screen.-tiny LinePanel { display: none; }
    Screen.-low RaceLegend { display: none; }
    Screen.-tiny #too-small { display: block; }
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Quit", id="app.quit"),
        Binding("ctrl+q", "quit", "Quit", show=False, priority=True, id="app.quit-now"),
        Binding("ctrl+c", "quit", "Quit", show=False, priority=True, id="app.interrupt"),
        Binding("space", "toggle_pause", "Pause or resume", id="app.pause"),
        Binding("right", "step(1)", "One step forward", id="app.step"),
        Binding("left", "step(-1)", "One step back", id="app.back"),
        Binding("shift+right", "step(10)", "Ten steps forward", id="app.step-ten"),
        Binding("shift+left", "step(-10)", "Ten steps back", id="app.back-ten"),
        Binding("home", "go_to(0)", "To the start", id="app.start"),
        Binding("end", "go_to(1)", "To the finish", id="app.end"),
        Binding("right_square_bracket", "faster(1)", "Faster", id="app.faster"),
        Binding("left_square_bracket", "faster(-1)", "Slower", id="app.slower"),
        Binding("plus,equals_sign", "zoom(1)", "Time: zoom in", id="app.zoom-in"),
        Binding("minus", "zoom(-1)", "Time: zoom out", id="app.zoom-out"),
        Binding("0", "whole", "Time: the whole race", id="app.whole-pool"),
        Binding("t", "next_theme", "Next theme", id="app.theme"),
        Binding("escape", "deselect", "Select nothing", id="app.deselect"),
        Binding("question_mark,f1", "help", "Help", id="app.help"),
    ]

    def __init__(
        self,
        players: Sequence[LanePlayer],
        name: str,
        *,
        theme: str | None = None,
        ascii_only: bool = False,
        settings: Settings | None = None,
        capture: OutputCapture | None = None,
        driver_class: type[Driver] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(
            theme=theme, ascii_only=ascii_only, settings=settings, capture=capture, driver_class=driver_class
        )
        self.players = list(players)
        self.seconds = 0.0
        self.total = max((player.ends[-1] for player in self.players if player.ends), default=0.0)
        self.speed = 1.0
        self.paused = False
        self._clock = clock
        self._last = clock()
        self._ends = sorted({end for player in self.players for end in player.ends})
        self._selected: int | None = None
        most = max((player.batch.most for player in self.players), default=0)
        steps = max((player.length for player in self.players), default=0)
        self._time = RaceTime(self.total, self.total / max(1, steps))
        self._title = RaceTitle(name, self._time)
        self._axis = RaceAxis(self._time)
        self._lanes = [LaneTimeline(player, self._time, most) for player in self.players]
        self._legend = RaceLegend(most)
        self._bar = RaceBar()
        self._footer = RaceFooter()

    # -- what Textual asks for -----------------------------------------------------------------------------------

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        """Every action by name, for the command palette."""
        for binding in self.BINDINGS:
            assert isinstance(binding, Binding)
            if binding.show:
                keys = self.remapped.get(binding.id or "", binding.key)
                yield SystemCommand(binding.description, f"key {shown_keys(keys)}", self.runner(binding.action))

    def compose(self) -> ComposeResult:
        """The lanes between a line that says what is raced and the time."""
        yield self._title
        yield self._axis
        yield from self._lanes
        yield self._legend
        yield self._bar
        yield self._footer
        yield Static("", id="too-small", markup=False)

    def on_mount(self) -> None:
        """Start the clock."""
        for lane in self._lanes:
            lane.set_class(self.glyphs.ascii, "-ascii")
        self.end_with_terminal()
        self._lanes[0].focus()
        self._last = self._clock()
        self.set_interval(1 / FRAMES_PER_SECOND, self.tick)
        self._fit()
        self.call_after_refresh(self.redraw)

    def on_resize(self) -> None:
        """Say so where there is too little room; the new size is known after the next layout."""
        self.call_after_refresh(self._fit)
        self.call_after_refresh(self.redraw)

    def _fit(self) -> None:
        width, height = self.size
        tiny = width < MIN_WIDTH or height < MIN_HEIGHT
        self.screen.set_class(tiny, "-tiny")
        self.screen.set_class(height < _LEGEND_FROM_HEIGHT, "-low")
        if tiny:
            words = f"kvtui needs {MIN_WIDTH} x {MIN_HEIGHT}; this is {width} x {height}. q quits."
            self.query_one("#too-small", Static).update(words)

    # -- time ----------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Let as much of the race pass as the clock says; none while the terminal has not taken what was drawn."""
        if pending_writes(self._driver):
            return
        now = self._clock()
        elapsed, self._last = now - self._last, now
        if not self.paused:
            self._go(self.seconds + elapsed * self.speed)

    def _go(self, seconds: float) -> None:
        self.seconds = min(max(0.0, seconds), self.total)
        if self.seconds >= self.total:
            self.paused = True
        for player in self.players:
            player.show(self.seconds + _NEARLY)
        self._draw(everything=False)

    def _draw(self, everything: bool) -> None:
        """Draw the lanes and what lies around them, at the present moment."""
        time, view = self._time, self._view(self.players[0])
        time.now = self.seconds
        time.label = label_cells(max(player.names.longest for player in self.players), self.size.width)
        for panel in (self._title, self._axis, self._legend, self._footer):
            panel.update_view(view, (), everything)
        slowest = min(self.players, key=lambda player: player.moment.tokens_per_s)
        least = slowest.moment.tokens_per_s
        for lane in self._lanes:
            times = lane.player.moment.tokens_per_s / least if least > 0 else 0.0
            lane.against = (slowest.lane.policy, times) if times and len(self.players) > 1 else None
            lane.update_view(self._view(lane.player), (), everything)
        self._draw_bar()

    def _draw_bar(self) -> None:
        verdict = ""
        if self.seconds >= self.total and len(self.players) > 1:
            results = [player.result for player in self.players]
            last = results[-1]
            against = ", ".join(f"{speed_up(last, r):.2f}{self.glyphs.times} {r.policy}" for r in results[:-1])
            verdict = f"{last.policy}: {against}"
        self._bar.facts = (round(self.seconds, 1), round(self.total, 1), self.speed, self.paused, verdict)
        view = self._view(self.players[0])
        self._bar.update_view(view, (), False)
        self._footer.paused = self.paused
        self._footer.update_view(view, (), False)

    def redraw(self) -> None:
        """Draw everything anew."""
        self._draw(everything=True)
        self._bar.update_view(self._view(self.players[0]), (), True)

    def _view(self, player: LanePlayer) -> View:
        last = player.state.last_step
        return View(
            source=player,
            state=player.state,
            history=player.history,
            palette=self.palette,
            glyphs=self.glyphs,
            selected_request=self._selected,
            running=frozenset(member[0] for member in last.batch) if last is not None else frozenset(),
            names=player.names,
        )

    # -- acting --------------------------------------------------------------------------------------------------

    def on_request_selected(self, message: RequestSelected) -> None:
        """A request was clicked: it has the same number in every lane."""
        self._selected = message.request
        self.redraw()

    def on_race_time_picked(self, message: RaceTimePicked) -> None:
        """The bar was pressed."""
        self.paused = True
        self._go(message.seconds)

    def action_deselect(self) -> None:
        """Select nothing."""
        self._selected = None
        self.redraw()

    def action_help(self) -> None:
        """Explain the screen, the lane that has the focus first."""
        from kvtui.race.help import KEYS, race_text
        from kvtui.screens.help import HelpScreen, help_keys

        lane = next((lane for lane in self._lanes if lane.has_focus), self._lanes[0])
        text = race_text(self.palette, self.glyphs, lane.player.lane.policy)
        self.push_screen(
            HelpScreen(text, help_keys(self.palette, self.glyphs, self.own_bindings, KEYS), self.palette, self.glyphs)
        )

    def action_toggle_pause(self) -> None:
        """Pause or resume; from the start where the end is shown."""
        if self.paused and self.seconds >= self.total:
            self._go(0.0)
        self.paused = not self.paused
        self._last = self._clock()
        self._draw_bar()

    def action_step(self, n: int) -> None:
        """Pause, and go to where the next step of any lane ends, or the one before."""
        self.paused = True
        at = bisect_right(self._ends, self.seconds + _NEARLY) if n > 0 else bisect_left(self._ends, self.seconds)
        at = at + n - 1 if n > 0 else at + n
        if not self._ends:
            return
        self._go(0.0 if at < 0 else self._ends[min(at, len(self._ends) - 1)])

    def action_go_to(self, end: int) -> None:
        """To the start or the finish."""
        self.paused = True
        self._go(self.total * end)

    def action_faster(self, by: int) -> None:
        """One notch faster or slower."""
        at = min(range(len(SPEEDS)), key=lambda i: abs(SPEEDS[i] - self.speed)) + by
        self.speed = SPEEDS[max(0, min(len(SPEEDS) - 1, at))]
        self._draw_bar()

    def action_zoom(self, by: int) -> None:
        """See half as much of the race, twice as wide; or twice as much."""
        self._time.zoom_by(by, self._axis.size.width)
        self.redraw()

    def action_whole(self) -> None:
        """See the whole race."""
        self._time.zoom = 0
        self.redraw()
