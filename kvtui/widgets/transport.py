"""The position in time: a bar to see it and to move it, in a recording and in the past of a live session alike."""

from __future__ import annotations

from typing import TYPE_CHECKING

from textual.message import Message

from kvtui.safe_text import width as cells_of
from kvtui.widgets.line import Line
from kvtui.widgets.line_panel import LinePanel
from kvtui.widgets.position_bar import PositionBar

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from textual import events
    from textual.strip import Strip

    from kvtui.view import View

_SHORTEST_BAR = 8


class SeekRequested(Message):
    """The user pointed at a step."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.step = step


class Transport(LinePanel, can_focus=False):
    """What moves and how fast, the position bar, step and time. A press or a drag on the bar posts `SeekRequested`."""

    DEFAULT_CSS = """
    Transport { height: 1; }
    """

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:  # noqa: A002
        super().__init__(id=id, classes=classes)
        self._bar = PositionBar(0, 0, 0, 0)
        self._bar_start = 0
        self._dragging = False
        self._asked = -1

    def rows(self, view: View, width: int, height: int) -> Sequence[Hashable]:
        """The pieces of the line, each with the role that it is drawn in."""
        source = view.source
        sign, role = sign_of(view)
        places = places_of(view)
        first, last = source.first, max(source.first, source.length - 1)
        start = cells_of(sign) + 3
        for text in places:
            cells = width - start - cells_of(text) - 3
            if cells >= _SHORTEST_BAR:
                break
        cells = max(0, cells)
        self._bar = PositionBar(cells, first, last, source.position)
        self._bar_start = start
        return [(sign, role, tuple(self._bar.runs(view.glyphs)), text)]

    def draw(self, view: View, key: Hashable, width: int) -> Strip:
        """The line."""
        assert isinstance(key, tuple)
        palette = view.palette
        styles = {"done": palette.accent, "head": palette.strong, "ahead": palette.faint}
        sign, role, bar, text = key
        line = Line(width, palette.blank).gap().add(sign, palette.role(role)).gap(2)
        for piece, kind in bar:
            line.add(piece, styles[kind])
        return line.gap(2).add(text, palette.text).strip()

    # -- acting --------------------------------------------------------------------------------------------------

    def on_mouse_down(self, event: events.MouseDown) -> None:
        """Seek, and go on with the mouse until it is let go."""
        if self._seek(event):
            self._dragging = True
            self.capture_mouse()

    def on_mouse_move(self, event: events.MouseMove) -> None:
        """Seek while dragging."""
        if self._dragging:
            self._seek(event)

    def on_mouse_up(self, event: events.MouseUp) -> None:
        """Let go."""
        if self._dragging:
            self._dragging = False
            self.release_mouse()

    def _seek(self, event: events.MouseEvent) -> bool:
        bar = self._bar
        if bar.cells < 2 or self.view is None or self.view.source.length < 1:
            return False
        at = event.x - self.gutter.left - self._bar_start
        if not self._dragging and not 0 <= at < bar.cells:
            return False
        step = bar.step_of(at)
        if not self._dragging or step != self._asked:
            self._asked = step
            self.post_message(SeekRequested(step))
        return True


def sign_of(view: View) -> tuple[str, str]:
    """What moves, in a word or two, and its role."""
    source, glyphs = view.source, view.glyphs
    speed = f"{source.speed:g}{glyphs.times}"
    if source.looking_back:
        if source.paused:
            return f"{glyphs.arrow_left} PAST", "warning"
        return f"{glyphs.playing} PAST {speed}", "warning"
    if source.live:
        slowed = "" if source.speed == 1 else f" {speed}"
        if source.engine_paused:
            return f"{glyphs.paused} ENGINE PAUSED{slowed}", "warning"
        return f"{glyphs.live} LIVE{slowed}", "good"
    if source.paused:
        return f"{glyphs.paused} paused {speed}", "warning"
    return f"{glyphs.playing} {speed}", "accent"


def places_of(view: View) -> list[str]:
    """Where one is, in words, the longest first: the first that leaves room for a bar is drawn."""
    source = view.source
    position, last = source.position, max(0, source.length - 1)
    seconds = max(0, view.state.time_ns) // 1_000_000_000
    clock = f"{seconds // 60}:{seconds % 60:02}"
    shown = (
        f"{position:,}" if position >= source.first else "start" if source.first == 0 else f"before {source.first:,}"
    )
    behind = f"LIVE +{last - position:,} steps behind" if source.looking_back else ""
    begins = f"history begins at {source.first:,}" if source.first else ""
    step = f"step {shown}" if source.live and not source.looking_back else f"{shown} / {last:,}"
    if source.live and not source.looking_back and last - position > 0:
        behind = f"{last - position:,} not drawn yet"
    full = [part for part in (begins, step, behind, clock) if part]
    short = [part for part in (step, behind.removesuffix(" steps behind")) if part]
    return ["  ".join(full), "  ".join([step, behind, clock] if behind else [step, clock]), "  ".join(short), shown]
