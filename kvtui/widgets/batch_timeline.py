"""Who was in the batch at each iteration: a row for each request, a column for each step, the newest at the right."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvtui.history import Mark
from kvtui.view import RequestSelected
from kvtui.widgets.line import Line
from kvtui.widgets.line_panel import LinePanel
from kvtui.widgets.marks import mark_row
from kvtui.widgets.wheel import WheelScrolled

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from rich.style import Style
    from textual import events
    from textual.strip import Strip

    from kvtui.view import View

_LABEL = 5
_LONGEST_LABEL = 18
_LABEL_FRACTION = 6
"""At most one cell in so many is spent on what a request is called."""
_LEGEND_FROM_HEIGHT = 6
LEGEND = (
    (Mark.PREFILL, "prefill"),
    (Mark.DECODE, "decode"),
    (Mark.RECOMPUTE, "recompute"),
    (Mark.WAITING, "waits"),
    (Mark.PREEMPTED, "preempted"),
    (Mark.ENDED, "end"),
    (Mark.ENDED_BADLY, "failed"),
    (Mark.ABORTED, "aborted"),
    (Mark.REDONE, "lost, redone"),
)
"""What the marks of the rows mean, in words."""


class BatchTimeline(WheelScrolled, LinePanel):
    """The batch over time.

    Where there are more requests than rows, the ones in the batch come first, then waiting ones, then those that ended
    last; moving up or down instead walks through all of them, and moving down past the end goes back.
    """

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:  # noqa: A002
        super().__init__(id=id, classes=classes)
        self._shown: list[tuple[int, bool]] = []
        self._offset: int | None = None
        self._count = 0
        self._above = 0
        """Lines in front of the requests."""

    def rows(self, view: View, width: int, height: int) -> Sequence[Hashable]:
        """A heading, the requests, and a legend where there is room for one."""
        history = view.history
        label = label_cells(view.names.longest, width)
        columns = width - label - 1
        if not len(history):
            self.set_title("Batch per iteration")
            return ["", "No iteration yet: nothing was scheduled." if height > 2 else "No iteration yet."]
        if columns < 1:
            return []
        stop = history.last_index + 1
        first = stop - min(columns, len(history))
        heading = height >= 3
        self._above = int(heading)
        legend = height >= _LEGEND_FROM_HEIGHT
        room = height - heading - legend
        there = history.requests(first)
        self._choose(view, there, room)
        parts = [f"average {history.rates().average_batch:.1f} requests a step"]
        hidden = len(there) - len(self._shown)
        if hidden > 0:
            parts.append(f"{hidden} more")
        glyphs = view.glyphs
        self.set_title("Batch per iteration", f"{glyphs.horizontal} {f' {glyphs.dot} '.join(parts)}")
        keys: list[Hashable] = [("heading", first, stop, label)] if heading else []
        for request, live in self._shown:
            marks = history.marks(request, first, stop)
            keys.append((request, live, view.selected_request, marks.tobytes(), view.names.of(request), label))
        keys += [""] * (room - len(self._shown))
        if legend:
            keys.append(("legend", label))
        return keys

    def _choose(self, view: View, there: list[tuple[int, bool]], room: int) -> None:
        """Pick the requests that get a row, in order of arrival."""
        self._count = len(there)
        if len(there) <= room:
            self._offset = None
            self._shown = there
        elif self._offset is not None:
            self._offset = max(0, min(self._offset, len(there) - room))
            self._shown = there[self._offset : self._offset + room]
        else:
            running, selected = view.running, view.selected_request

            def rank(item: tuple[int, bool]) -> tuple[int, int]:
                request, live = item
                group = 0 if request == selected else 1 if request in running else 2 if live else 3
                return group, request if live else -request

            self._shown = sorted(sorted(there, key=rank)[:room])

    # -- drawing -------------------------------------------------------------------------------------------------

    def draw(self, view: View, key: Hashable, width: int) -> Strip:
        """The heading, the legend or one request."""
        assert isinstance(key, tuple)
        if key[0] == "heading":
            return _draw_heading(view, key[1], key[2], key[3], width)
        if key[0] == "legend":
            return draw_legend(view, key[1], width)
        return draw_request(view, key[0], key[1], key[3], key[5], width)

    # -- acting --------------------------------------------------------------------------------------------------

    @property
    def window_rows(self) -> int:
        """Requests that have a row."""
        return len(self._shown)

    def scroll_rows(self, rows: int) -> None:
        """Move the window towards newer rows, older ones where negative."""
        newest = self._count - len(self._shown)
        if newest <= 0:
            return
        at = newest if self._offset is None else self._offset
        moved = at + rows
        self._offset = None if moved > newest else max(0, moved)
        self.redraw()

    def on_click(self, event: events.Click) -> None:
        """Select the request that was clicked."""
        offset = event.get_content_offset(self)
        if offset is None or self.view is None:
            return
        place = offset.y - self._above
        if 0 <= place < len(self._shown):
            request = self._shown[place][0]
            self.post_message(RequestSelected(None if request == self.view.selected_request else request))


def label_cells(longest: int, width: int) -> int:
    """Cells for what requests are called, of a line of so many."""
    return max(_LABEL, min(longest, width // _LABEL_FRACTION, _LONGEST_LABEL))


def _draw_heading(view: View, first: int, stop: int, label: int, width: int) -> Strip:
    palette = view.palette
    line = Line(width, palette.blank).add("step".rjust(label), palette.faint)
    left, right = f"{first:,}", f"{stop - 1:,}"
    start = width - (stop - first)
    if start + len(left) + len(right) + 3 <= width:
        line.to(start).add(left, palette.muted)
        line.to((start + len(left) + width - len(right)) // 2).add(view.glyphs.ellipsis, palette.faint)
    return line.to(width - len(right)).add(right, palette.muted).strip()


def draw_legend(view: View, label: int, width: int) -> Strip:
    """What the marks mean, in words: as many as fit, behind so many cells."""
    palette, glyphs = view.palette, mark_row(view.glyphs)
    legend = (*LEGEND, (Mark.OVERRUN, "overrun")) if view.state.header.async_scheduling else LEGEND
    roomy = sum(len(word) + 4 for _, word in legend) < width
    joint = " " if roomy else "=" if view.glyphs.ascii else ""
    line = Line(width, palette.blank).gap(label + 1 if width > 80 + label else 1)
    for mark, word in legend:
        if line.room < len(word) + 3:
            break
        line.add(glyphs[mark], palette.text).add(joint, palette.muted).add(word, palette.muted).gap(1 + roomy)
    return line.strip()


def draw_request(view: View, request: int, live: bool, marks: bytes, cells: int, width: int) -> Strip:
    """A request's label in so many cells, and its marks at the right edge."""
    palette = view.palette
    selected = view.selected_request
    hue = palette.hue(request, selected)
    dimmed = selected is not None and selected != request
    label = hue if live else palette.faint if dimmed else palette.muted
    line = Line(width, palette.blank)
    line.add(view.names.fitted(request, cells, ascii_only=view.glyphs.ascii), label).gap()
    line.to(width - len(marks))
    glyphs = mark_row(view.glyphs)
    styles: dict[int, Style] = {
        Mark.ABSENT: palette.blank,
        Mark.WAITING: palette.faint,
        Mark.PREEMPTED: hue if dimmed else palette.warning,
        Mark.REDONE: hue if dimmed else palette.warning,
        Mark.ENDED_BADLY: hue if dimmed else palette.error,
    }
    codes = np.frombuffer(marks, np.uint8)
    starts = np.flatnonzero(np.diff(codes, prepend=np.uint8(255)))
    stops = np.append(starts[1:], len(codes))
    for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
        code = marks[start]
        line.add(glyphs[code] * (stop - start), styles.get(code, hue))
    return line.strip(palette.selection if request == selected else None)
