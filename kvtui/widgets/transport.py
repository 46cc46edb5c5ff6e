"""The position in time: a bar to see it and to move it in a recording, the lag behind the engine when live."""

from __future__ import annotations

from typing import TYPE_CHECKING

from textual.message import Message

from kvtui.widgets.line import Line
from kvtui.widgets.line_panel import LinePanel

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
    """Playing or paused, speed, position bar, step and time. A press or a drag on the bar posts `SeekRequested`."""

    DEFAULT_CSS = """
    Transport { height: 1; }
    """

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:  # noqa: A002
        super().__init__(id=id, classes=classes)
        self._bar = (0, 0)
        self._dragging = False
        self._asked = -1

    def rows(self, view: View, width: int, height: int) -> Sequence[Hashable]:
        """What the line says; the bar as a number of filled cells."""
        source, glyphs = view.source, view.glyphs
        last = max(0, source.length - 1)
        position = min(max(0, source.position), last)
        sign = f"{glyphs.paused} paused" if source.paused else f"{glyphs.live} live" if source.live else glyphs.playing
        seconds = max(0, view.state.time_ns) // 1_000_000_000
        clock = f"{seconds // 60}:{seconds % 60:02}"
        if source.live:
            behind = last - position
            note = f"{behind:,} steps behind the engine" if behind > 0 else "following the engine"
            self._bar = (0, 0)
            return [("live", sign, note, f"step {position:,}", clock)]
        sign = f"{sign} {source.speed:g}{glyphs.times}"
        step = f"{position:,} / {last:,}" if source.position >= 0 else f"start / {last:,}"
        start = len(sign) + 3
        cells = width - start - len(step) - len(clock) - 5
        if cells < _SHORTEST_BAR:
            clock, cells = "", width - start - len(step) - 3
        if cells < _SHORTEST_BAR:
            step, cells = str(position), width - start - len(str(position)) - 3
        cells = max(0, cells)
        self._bar = (start, cells)
        filled = round(position / last * (cells - 1)) if last else 0
        return [("played", sign, filled, cells, step, clock)]

    def draw(self, view: View, key: Hashable, width: int) -> Strip:
        """The line."""
        assert isinstance(key, tuple)
        palette, glyphs = view.palette, view.glyphs
        state = palette.warning if view.source.paused else palette.good if view.source.live else palette.accent
        kind, sign, *rest = key
        line = Line(width, palette.blank).gap().add(sign, state).gap(2)
        if kind == "live":
            note, step, clock = rest
            return line.add(note, palette.muted).right([(step, palette.text), (f"  {clock} ", palette.muted)]).strip()
        filled, cells, step, clock = rest
        if cells > 0:
            head = "O" if glyphs.ascii else glyphs.live
            line.add(glyphs.bar * filled, palette.accent).add(head, palette.strong)
            line.add(glyphs.bar_empty * (cells - filled - 1), palette.faint).gap(2)
        line.add(step, palette.text)
        return line.right([(f"{clock} ", palette.muted)]).strip()

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
        start, cells = self._bar
        if cells < 2 or self.view is None or self.view.source.length < 1:
            return False
        at = event.x - self.gutter.left - start
        if not self._dragging and not 0 <= at < cells:
            return False
        at = max(0, min(cells - 1, at))
        step = round(at / (cells - 1) * (self.view.source.length - 1))
        if not self._dragging or step != self._asked:
            self._asked = step
            self.post_message(SeekRequested(step))
        return True
