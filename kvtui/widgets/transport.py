"""The position in time: a bar to see it and to move it, in a recording and in the past of a live session alike."""

from __future__ import annotations

from typing import TYPE_CHECKING

from textual.message import Message

from engine.trace.marks import MarkKind
from kvtui.safe_text import width as cells_of
from kvtui.widgets.line import Line
from kvtui.widgets.line_panel import LinePanel
from kvtui.widgets.position_bar import PositionBar, rarest

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from textual import events
    from textual.strip import Strip

    from kvtui.view import View

_SHORTEST_BAR = 8
_ROOM_FOR_COUNTS = 118
"""Cells from which on the numbers of marks are written beside the bar."""
_COUNTED = "steps"
"""What those numbers count: a step with three preemptions in it has one mark."""


class SeekRequested(Message):
    """The user pointed at a step."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.step = step


class MarkKindPicked(Message):
    """The user pointed at a kind of mark: that it be shown alone, or with all others again."""

    def __init__(self, kind: int) -> None:
        super().__init__()
        self.kind = kind


class Transport(LinePanel, can_focus=False):
    """What moves and how fast, the position bar, step and time. A press or a drag on the bar posts `SeekRequested`.

    With the class `-roomy` the marks have a row of their own above the bar; else they lie on it, and what has been
    played has a ground of its own.
    """

    DEFAULT_CSS = """
    Transport { height: 1; }
    Transport.-roomy { height: 2; }
    """

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:  # noqa: A002
        super().__init__(id=id, classes=classes)
        self._bar = PositionBar(0, 0, 0, 0)
        self._bar_start = self._counts_start = 0
        self._marks_for: tuple[int, ...] = ()
        self._marks_drawn: list[int] = []
        self._dragging = False
        self._asked = -1

    def rows(self, view: View, width: int, height: int) -> Sequence[Hashable]:
        """The pieces of each line, with the role that each is drawn in; the bar is on the last one."""
        source = view.source
        sign, role = sign_of(view)
        places = places_of(view)
        counts = counts_of(view, width)
        start = cells_of(sign) + 3
        taken = start + sum(cells_of(text) + 1 for _, text, _ in counts) + (len(_COUNTED) + 2 if counts else 0)
        for text in places:
            cells = width - taken - cells_of(text) - 3
            if cells >= max(_SHORTEST_BAR, width // 3):
                break
        # The present is at the right end, also where the engine is some steps ahead of what has been folded.
        following = source.live and not source.looking_back
        last = source.position if following else source.length - 1
        bar = PositionBar(max(0, cells), source.first, max(source.first, last), source.position)
        self._bar, self._bar_start = bar, start
        self._counts_start = start + bar.cells + 2
        marks = self._marks(view, bar)
        if height < 2:
            return [(sign, role, tuple(bar.runs(view.glyphs, marks, source.window)), counts, text, True)]
        line = (sign, role, tuple(bar.runs(view.glyphs, (), source.window)), counts, text, False)
        return [(start, *bar.marks_alone(view.glyphs, marks)), line]

    def _marks(self, view: View, bar: PositionBar) -> list[int]:
        """The kind of mark in each cell of the bar; the same as long as nothing becomes known and nothing moves."""
        marks, kinds = view.source.marks, view.mark_kinds
        key = (marks.version, bar.first, bar.last, bar.cells, kinds)
        if key != self._marks_for:
            self._marks_for = key
            self._marks_drawn = rarest(marks.cells(bar.first, bar.last, bar.cells), kinds, marks.counts)
        return self._marks_drawn

    def draw(self, view: View, key: Hashable, width: int) -> Strip:
        """A line."""
        assert isinstance(key, tuple)
        palette = view.palette
        styles = {"done": palette.accent, "head": palette.strong, "ahead": palette.faint, "window": palette.strong}
        styles |= {f"mark{kind}": palette.mark(kind) for kind in MarkKind} | {"none": palette.blank}
        if isinstance(key[0], int):
            line = Line(width, palette.blank).gap(key[0])
            for piece, kind in key[1:]:
                line.add(piece, styles[kind])
            return line.strip()
        sign, role, bar, counts, text, with_marks = key
        if with_marks:
            styles["done"] += palette.selection
            styles |= {f"past{kind}": palette.mark(kind) + palette.selection for kind in MarkKind}
        line = Line(width, palette.blank).gap().add(sign, palette.role(role)).gap(2)
        for piece, kind in bar:
            line.add(piece, styles[kind])
        line.gap(2)
        for kind, piece, shown in counts:
            line.add(piece, palette.mark(kind) if shown else palette.faint).gap()
        if counts:
            line.add(_COUNTED, palette.faint).gap(2)
        return line.add(text, palette.text).strip()

    # -- acting --------------------------------------------------------------------------------------------------

    def on_mouse_down(self, event: events.MouseDown) -> None:
        """Seek, and go on until the mouse is let go; a press on the number of a kind of mark shows that kind."""
        kind = self._kind_at(event.x - self.gutter.left)
        if kind is not None:
            self.post_message(MarkKindPicked(kind))
        elif self._seek(event):
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

    def _kind_at(self, x: int) -> int | None:
        """The kind of mark whose number lies there."""
        start = self._counts_start
        for kind, text, _ in counts_of(self.view, self.size.width) if self.view is not None else ():
            if start <= x < start + cells_of(text):
                return kind
            start += cells_of(text) + 1
        return None

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
    loop = " loop" if source.window is not None and not source.paused else ""
    speed = f"{source.speed:g}{glyphs.times}{loop}"
    if source.damage is not None:
        beyond = source.damage.beyond
        return f"! {glyphs.arrow_right} goes on at {beyond:,}" if beyond >= 0 else "! cannot go on", "error"
    if source.cut_off and source.paused and source.position >= source.length - 1:
        return "! cut off here", "error"
    if source.looking_back:
        if source.paused:
            return f"{glyphs.arrow_left} PAST", "warning"
        return f"{glyphs.playing} PAST {speed}", "warning"
    if source.live:
        slowed = "" if source.speed == 1 else f" {source.speed:g}{glyphs.times}"
        if source.engine_paused:
            return f"{glyphs.paused} ENGINE PAUSED{slowed}", "warning"
        return f"{glyphs.live} LIVE{slowed}", "good"
    if source.paused:
        return f"{glyphs.paused} paused {speed}", "warning"
    return f"{glyphs.playing} {speed}", "accent"


def counts_of(view: View, width: int) -> tuple[tuple[int, str, bool], ...]:
    """Each kind of mark, its glyph and in how many steps it is, and whether it is shown.

    Where there is little room, only a kind that is shown alone.
    """
    counts, glyphs, shown = view.source.marks.counts, view.glyphs, view.mark_kinds
    if width < _ROOM_FOR_COUNTS and shown.bit_count() != 1:
        return ()
    return tuple(
        (int(kind), f"{glyphs.step_marks[kind]} {counts[kind]:,}", bool(shown >> kind & 1))
        for kind in MarkKind
        if width >= _ROOM_FOR_COUNTS or shown >> kind & 1
    )


def places_of(view: View) -> list[str]:
    """Where one is, in words, the longest first: the first that leaves a third of the line to the bar is drawn."""
    source = view.source
    position, last = source.position, max(0, source.length - 1)
    seconds = max(0, view.state.time_ns) // 1_000_000_000
    clock = f"{seconds // 60}:{seconds % 60:02}"
    shown = (
        f"{position:,}" if position >= source.first else "start" if source.first == 0 else f"before {source.first:,}"
    )
    behind = f"LIVE +{last - position:,} steps behind" if source.looking_back else ""
    begins = f"history begins at {source.first:,}" if source.first else ""
    if source.live and not source.looking_back:
        # The present stands in the header; said here again, where lines are drawn less often, it would contradict it.
        return ["  ".join(part for part in (begins, clock) if part), clock]
    step = f"{shown} / {last:,}{' cut off' if source.cut_off else ''}"
    known = source.marks.known
    looking = f"marks {known:.0%}" if known < 1 else ""
    full = [part for part in (looking, begins, step, behind, clock) if part]
    short = [part for part in (step, behind.removesuffix(" steps behind")) if part]
    return ["  ".join(full), "  ".join([step, behind, clock] if behind else [step, clock]), "  ".join(short), shown]
