"""The parts of the race's screen: a timeline for each lane, the time, and the keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

from textual.message import Message

from kvtui.widgets.batch_timeline import BatchTimeline
from kvtui.widgets.footer_bar import FooterBar, Hint
from kvtui.widgets.line import Line
from kvtui.widgets.line_panel import LinePanel

if TYPE_CHECKING:
    from textual import events
    from textual.strip import Strip

    from kvtui.race.playing import LanePlayer
    from kvtui.view import View


class LaneTimeline(BatchTimeline):
    """One lane's batches; its title says how far it is."""

    DEFAULT_CSS = """
    LaneTimeline { height: 1fr; border: round $kv-border; border-title-color: $foreground;
        border-title-background: $background; }
    LaneTimeline:focus { border: round $kv-focus; }
    LaneTimeline.-ascii { border: ascii $kv-border; }
    LaneTimeline.-ascii:focus { border: ascii $kv-focus; }
    """

    def __init__(self, player: LanePlayer) -> None:
        super().__init__(id=f"lane-{player.lane.policy}")
        self.player = player

    def set_title(self, *parts: str, separator: str = " ") -> None:
        """Say how far the lane is; what the timeline would say about itself has no place here."""
        if self.view is None:
            return
        moment, glyphs, result = self.player.moment, self.view.glyphs, self.player.result
        words = [
            f"{self.player.lane.policy} {glyphs.horizontal} average batch {moment.average_batch:.2f}",
            f"{moment.tokens_per_s:,.1f} tokens/s",
            f"{moment.steps:,} steps",
        ]
        if self.player.done:
            words.insert(2, f"done after {result.seconds:,.1f} s")
        super().set_title(*words, separator=f" {glyphs.dot} ")


class RaceTimePicked(Message):
    """The user pointed at a time of the race.

    Attributes:
        seconds: Since its start.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds


class RaceBar(LinePanel, can_focus=False):
    """The time of the race; once all are done, who made how much of it. A press or a drag posts `RaceTimePicked`."""

    DEFAULT_CSS = """
    RaceBar { height: 1; }
    """

    def __init__(self) -> None:
        super().__init__(id="race-bar")
        self.facts: tuple[float, float, float, bool, str] = (0.0, 0.0, 1.0, True, "")
        self._bar = (0, 0)
        """Where the bar begins, and its cells."""
        self._dragging = False

    def rows(self, view: View, width: int, height: int) -> list[tuple[float, float, float, bool, str]]:
        """The one line there is."""
        return [self.facts]

    def draw(self, view: View, key: tuple[float, float, float, bool, str], width: int) -> Strip:  # type: ignore[override]
        """The time, a bar and, at the end, the verdict."""
        seconds, total, speed, paused, verdict = key
        palette, glyphs = view.palette, view.glyphs
        line = Line(width, palette.blank).gap()
        line.add(glyphs.paused if paused else glyphs.playing, palette.accent).gap()
        line.add(f"{seconds:,.1f} / {total:,.1f} s", palette.strong).gap()
        line.add(f"{speed:g}{glyphs.times}", palette.muted).gap(2)
        room = line.room - (len(verdict) + 3 if verdict else 1)
        self._bar = (width - line.room, room if room >= 10 else 0)
        if room >= 10:
            done = round(room * seconds / total) if total > 0 else 0
            line.add(glyphs.bar * done, palette.accent).add(glyphs.bar_empty * (room - done), palette.faint)
        if verdict:
            line.gap(2).add(verdict, palette.strong)
        return line.strip()

    def on_mouse_down(self, event: events.MouseDown) -> None:
        """Go to the time under the pointer, and go on until the mouse is let go."""
        start, cells = self._bar
        if 0 <= event.x - self.gutter.left - start < cells:
            self._dragging = True
            self.capture_mouse()
            self._pick(event.x)

    def on_mouse_move(self, event: events.MouseMove) -> None:
        """Follow a drag."""
        if self._dragging:
            self._pick(event.x)

    def on_mouse_up(self) -> None:
        """Let go."""
        if self._dragging:
            self._dragging = False
            self.release_mouse()

    def _pick(self, x: int) -> None:
        start, cells = self._bar
        share = (x - self.gutter.left - start) / max(1, cells - 1)
        self.post_message(RaceTimePicked(min(max(0.0, share), 1.0) * self.facts[1]))


class RaceFooter(FooterBar):
    """The keys of the race.

    Attributes:
        paused: Whether the clock stands still.
    """

    paused = False

    def hints(self, view: View) -> list[Hint]:
        """What can be done, the most useful first."""
        glyphs = view.glyphs
        return [
            Hint("q", "quit", "quit"),
            Hint("?", "help", "help"),
            Hint("space", "resume" if self.paused else "pause", "toggle_pause"),
            Hint(f"{glyphs.arrow_left} {glyphs.arrow_right}", "step", "step(1)"),
            Hint("home", "start", "go_to(0)"),
            Hint("end", "finish", "go_to(1)"),
            Hint("[ ]", "speed", "faster(1)"),
            Hint("tab", "lanes", "app.focus_next"),
            Hint("ctrl+p", "commands", "command_palette"),
            Hint("t", "theme", "next_theme"),
        ]
