"""The parts of the race's screen around the lanes: what is raced, the axis of time, the time itself, and the keys."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from textual.message import Message
from textual.strip import Strip

from kvtui.safe_text import fit
from kvtui.safe_text import width as cells_of
from kvtui.widgets.batch_timeline import draw_legend
from kvtui.widgets.footer_bar import FooterBar, Hint
from kvtui.widgets.line import Line
from kvtui.widgets.line_panel import LinePanel

if TYPE_CHECKING:
    from collections.abc import Hashable

    from textual import events

    from kvtui.race.race_time import RaceTime, TimeAxis
    from kvtui.view import View


_TICKS_APART = 12
"""Cells between two moments on the axis, at least."""
_LANE_BORDER = 2
"""Cells that a lane's border takes of its width."""


class RaceTimePicked(Message):
    """The user pointed at a time of the race.

    Attributes:
        seconds: Since its start.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds


class TimeLine(LinePanel, can_focus=False):
    """A line on which the race's time lies. A press on it, or a drag along it, posts `RaceTimePicked`."""

    DEFAULT_CSS = """
    TimeLine { height: 1; }
    """

    def __init__(self, *, id: str) -> None:  # noqa: A002
        super().__init__(id=id)
        self._dragging = False

    @abstractmethod
    def time_at(self, cell: int, beyond: bool) -> float | None:
        """Seconds that a cell stands for; None where it stands for none. `beyond` the ends, they count as the ends."""

    def on_mouse_down(self, event: events.MouseDown) -> None:
        """Go to the time under the pointer, and go on until the mouse is let go."""
        if self._pick(event):
            self._dragging = True
            self.capture_mouse()

    def on_mouse_move(self, event: events.MouseMove) -> None:
        """Follow a drag."""
        if self._dragging:
            self._pick(event)

    def on_mouse_up(self) -> None:
        """Let go."""
        if self._dragging:
            self._dragging = False
            self.release_mouse()

    def _pick(self, event: events.MouseEvent) -> bool:
        seconds = self.time_at(event.x - self.gutter.left, self._dragging)
        if seconds is not None:
            self.post_message(RaceTimePicked(seconds))
        return seconds is not None


class RaceBar(TimeLine):
    """The time of the race; once all are done, who made how much of it.

    Attributes:
        facts: Seconds passed and in all, the speed, whether time stands still, and the verdict.
    """

    def __init__(self) -> None:
        super().__init__(id="race-bar")
        self.facts: tuple[float, float, float, bool, str] = (0.0, 0.0, 1.0, True, "")
        self._bar = (0, 0)
        """Where the bar begins, and its cells."""

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

    def time_at(self, cell: int, beyond: bool) -> float | None:
        """The share of the bar up to a cell, of the whole race."""
        start, cells = self._bar
        if not cells or not (beyond or 0 <= cell - start < cells):
            return None
        return min(max(0.0, (cell - start) / max(1, cells - 1)), 1.0) * self.facts[1]


class RaceAxis(TimeLine):
    """The moments that the columns of all lanes stand for; the present is marked. It is as wide as a lane's content."""

    DEFAULT_CSS = """
    RaceAxis { padding: 0 1; }
    """

    def __init__(self, time: RaceTime) -> None:
        super().__init__(id="race-axis")
        self._time = time

    def rows(self, view: View, width: int, height: int) -> list[Hashable]:
        """The one line there is."""
        axis = self._time.axis(width)
        return [(axis, axis.column_of(self._time.now), self._time.label)] if axis.columns else []

    def draw(self, view: View, key: tuple[TimeAxis, int, int], width: int) -> Strip:  # type: ignore[override]
        """Round moments, each written to the right of its place."""
        axis, present, label = key
        palette, glyphs = view.palette, view.glyphs
        cells = [" "] * axis.columns
        for column, words in axis.ticks(_TICKS_APART):
            if column + len(words) < axis.columns:
                cells[column : column + len(words) + 1] = glyphs.vertical + words
        line = Line(width, palette.blank).add("time".rjust(label), palette.muted).gap()
        line.add("".join(cells[:present]), palette.text)
        line.add("O" if glyphs.ascii else glyphs.live, palette.strong)
        return line.add("".join(cells[present + 1 :]), palette.faint).strip()

    def time_at(self, cell: int, beyond: bool) -> float | None:
        """The end of the column that a cell lies in."""
        axis = self._time.axis(self.size.width)
        column = cell - self._time.label - 1
        if not axis.columns or not (beyond or 0 <= column < axis.columns):
            return None
        return axis.start + axis.column * (min(max(0, column), axis.columns - 1) + 1)


class RaceTitle(LinePanel, can_focus=False):
    """What is raced, and the scale of the lanes."""

    DEFAULT_CSS = """
    RaceTitle { height: 1; }
    """

    def __init__(self, name: str, time: RaceTime) -> None:
        super().__init__(id="race-title")
        self._raced = name
        self._time = time

    def rows(self, view: View, width: int, height: int) -> list[Hashable]:
        """The one line there is."""
        axis = self._time.axis(width - _LANE_BORDER)
        if not axis.columns:
            return []
        part = f"{axis.start:,.1f} to {axis.stop:,.1f} s" if self._time.zoom else "the whole race"
        return [(f"1 column = {_short_time(axis.column)}", part)]

    def draw(self, view: View, key: tuple[str, str], width: int) -> Strip:  # type: ignore[override]
        """The name, cut where there is no room, and the scale at the right edge."""
        palette, dot = view.palette, view.glyphs.dot
        scale = f"{key[0]} {dot} {key[1]} "
        line = Line(width, palette.blank).gap().add("race", palette.accent).add(f" {dot} ", palette.muted)
        room = line.room - cells_of(scale) - 2
        name = fit(self._raced, room, ascii_only=view.glyphs.ascii) if cells_of(self._raced) > room > 0 else self._raced
        return line.add(name, palette.text).to(width - cells_of(scale)).add(scale, palette.muted).strip()


class RaceLegend(LinePanel, can_focus=False):
    """What the marks of the lanes mean, once for all of them.

    Args:
        most: Requests in a batch that the curves of the lanes reach up to.
    """

    DEFAULT_CSS = """
    RaceLegend { height: 1; }
    """

    def __init__(self, most: int) -> None:
        super().__init__(id="race-legend")
        self._most = most

    def rows(self, view: View, width: int, height: int) -> list[Hashable]:
        """The one line there is."""
        return [("legend",)]

    def draw(self, view: View, key: Hashable, width: int) -> Strip:
        """The curve, and the marks."""
        palette, curve = view.palette, view.glyphs.history
        words = f" requests in the batch, {curve[-1]} = {self._most:,}"
        line = Line(width, palette.blank).gap().add(curve[1:], palette.accent).add(words, palette.muted).gap(2)
        return Strip.join([line.strip().crop(0, width - line.room), draw_legend(view, 0, line.room)])


def _short_time(seconds: float) -> str:
    """Such as `0.93 s` or `12 ms`."""
    if seconds < 0.1:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:,.0f} s"


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
            Hint("+ -", "scale", "zoom(1)"),
            Hint("tab", "lanes", "app.focus_next"),
            Hint("ctrl+p", "commands", "command_palette"),
            Hint("t", "theme", "next_theme"),
        ]
