"""One line of a panel, put together from pieces and exactly as wide as the panel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.cells import set_cell_size
from rich.segment import Segment
from textual.strip import Strip

from kvtui.safe_text import width

if TYPE_CHECKING:
    from rich.style import Style


class Line:
    """Pieces of a line from left to right; what does not fit is cut, what is missing is filled.

    Text given to it must be safe already: glyphs, numbers, words of our own, or what `kvtui.safe_text` returned.
    """

    __slots__ = ("_blank", "_segments", "_used", "cells")

    def __init__(self, cells: int, blank: Style) -> None:
        self.cells = cells
        self._blank = blank
        self._segments: list[Segment] = []
        self._used = 0

    @property
    def room(self) -> int:
        """Cells that are left."""
        return self.cells - self._used

    def add(self, text: str, style: Style) -> Line:
        """Append a piece, cut at the right edge."""
        size = width(text)
        room = self.cells - self._used
        if size > room:
            text = text[: max(0, room)] if text.isascii() else set_cell_size(text, max(0, room))
            size = width(text)
        if size > 0:
            self._segments.append(Segment(text, style))
            self._used += size
        return self

    def gap(self, cells: int = 1) -> Line:
        """Leave cells empty."""
        return self.add(" " * cells, self._blank) if cells > 0 else self

    def to(self, column: int) -> Line:
        """Leave everything up to a column empty."""
        return self.gap(column - self._used)

    def right(self, pieces: list[tuple[str, Style]]) -> Line:
        """Append pieces at the right edge, where they fit with a space before them."""
        size = sum(width(text) for text, _ in pieces)
        if size < self.room:
            self.gap(self.room - size)
            for text, style in pieces:
                self.add(text, style)
        return self

    def strip(self, base: Style | None = None) -> Strip:
        """The finished line.

        Args:
            base: Added to the style of every piece, for a line that is selected.
        """
        room = self.cells - self._used
        segments = [*self._segments, Segment(" " * room, self._blank)] if room > 0 else self._segments
        if base is not None:
            segments = [Segment(text, style + base if style is not None else base) for text, style, _ in segments]
        return Strip(segments, max(0, self.cells))
