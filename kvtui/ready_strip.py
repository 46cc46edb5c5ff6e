"""Runs of codes on their way to the terminal, as ANSI text put together from pieces that are kept.

Rendering each segment's style anew is most of what a frame of the grid would cost. Here a run of one code becomes text
once, by the way that Textual itself would have taken, and whole stretches are joined from those pieces.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from textual.strip import Strip

from kvtui.block_codes import BLANK

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray
    from rich.console import Console
    from rich.segment import Segment
    from textual.color import Color
    from textual.filter import LineFilter

_RUN_BITS = 16
_MOST_PIECES = 60_000
_LONGEST_JUMP = 6
"""Unchanged characters that are written again rather than jumped over: most go on in the style before."""
_ELSEWHERE = 1 << 40
_COLUMN_BITS = 20


class Ink(dict[int, str]):
    """ANSI text by its key: a run's is `code << 16 | length`; negative ones move the cursor.

    -n goes n columns on; `-(_ELSEWHERE + (line << 20) + column)`, both counted from 1, goes to a place.

    Args:
        segment: Makes the segment of a code and a length.
        filters: Applied to it.
        background: Behind it, for the filters.
        console: Says which colours the terminal has.
    """

    def __init__(
        self,
        segment: Callable[[int, int], Segment],
        filters: Sequence[LineFilter],
        background: Color,
        console: Console,
    ) -> None:
        super().__init__()
        self._segment, self._filters, self._background, self._console = segment, filters, background, console

    def __missing__(self, key: int) -> str:
        if len(self) > _MOST_PIECES:
            self.clear()
        if key >= 0:
            text = self.ansi(self._segment(key >> _RUN_BITS, key & ((1 << _RUN_BITS) - 1)))
        elif key > -_ELSEWHERE:
            text = f"\x1b[{-key}C"
        else:
            line, column = divmod(-key - _ELSEWHERE, 1 << _COLUMN_BITS)
            text = f"\x1b[{line};{column}H"
        self[key] = text
        return text

    def ansi(self, *segments: Segment) -> str:
        """Segments as the terminal gets them."""
        strip = Strip(segments)
        for line_filter in self._filters:
            strip = strip.apply_filter(line_filter, self._background)
        return strip.render(self._console)

    def row(self, codes: NDArray[np.uint32]) -> str:
        """One row of codes."""
        starts = _run_starts(codes)
        return "".join(map(self.__getitem__, _keys(codes, starts).tolist()))

    def changes(
        self, old: NDArray[np.uint32], new: NDArray[np.uint32], place: tuple[int, int], lines: NDArray[np.int64]
    ) -> str:
        """What makes a terminal that shows the old codes show the new ones.

        Args:
            old: [rows, columns].
            new: The same shape.
            place: Column and line of the first character on the terminal, counted from 0.
            lines: For each row, how many lines below the first it is.
        """
        columns = new.shape[1]
        flat = new.reshape(-1)
        changed = np.flatnonzero(old.reshape(-1) != flat)
        if not len(changed):
            return ""
        row = changed // columns
        step = changed[1:] - changed[:-1]
        # A gap between groups of cells would be a piece of its own.
        gap = (step > 1) & (flat[changed[:-1] + 1] == BLANK)
        far = np.flatnonzero((step > _LONGEST_JUMP) | gap | (row[1:] != row[:-1])) + 1
        begins = np.concatenate(([0], far))
        first = changed[begins]
        length = changed[np.concatenate((far, [len(changed)])) - 1] + 1 - first
        # Positions of all stretches, one after the other.
        offset = np.cumsum(length) - length
        position = np.arange(int(length.sum())) + np.repeat(first - offset, length)
        codes = flat[position]
        breaks = codes[1:] != codes[:-1]
        breaks[offset[1:] - 1] = True
        starts = np.concatenate(([0], np.flatnonzero(breaks) + 1))
        # Within a row one goes on from the end of the stretch before; a new row needs its place.
        row, (x, y) = row[begins], place
        moves = -(_ELSEWHERE + ((lines[row] + (y + 1)) << _COLUMN_BITS) + first % columns + (x + 1))
        again = np.flatnonzero(row[1:] == row[:-1]) + 1
        moves[again] = first[again - 1] + length[again - 1] - first[again]
        at = np.searchsorted(starts, offset) + np.arange(len(offset))
        keys = np.empty(len(starts) + len(moves), dtype=np.int64)
        is_run = np.ones(len(keys), dtype=np.bool_)
        is_run[at] = False
        keys[at] = moves
        keys[is_run] = _keys(codes, starts)
        return "".join(map(self.__getitem__, keys.tolist()))


def _run_starts(codes: NDArray[np.uint32]) -> NDArray[np.int64]:
    return np.concatenate(([0], np.flatnonzero(codes[1:] != codes[:-1]) + 1))


def _keys(codes: NDArray[np.uint32], starts: NDArray[np.int64]) -> NDArray[np.int64]:
    keys = codes[starts].astype(np.int64) << _RUN_BITS
    keys[:-1] |= starts[1:] - starts[:-1]
    keys[-1] |= len(codes) - starts[-1]
    return keys


def segments_of(codes: NDArray[np.uint32], segment: Callable[[int, int], Segment]) -> Iterable[Segment]:
    """A row of codes as segments, one for each run."""
    starts = _run_starts(codes)
    runs = np.diff(starts, append=len(codes))
    return map(segment, codes[starts].tolist(), runs.tolist())


class ReadyStrip(Strip):
    """A strip whose segments and whose text for the terminal are each made only when they are asked for.

    The compositor cuts and joins segments; a line that is drawn as it is needs its text alone.

    Args:
        segments: Makes the segments.
        ansi: Makes the text, equal to rendering the segments.
        cell_length: Cells; every character is one wide.
    """

    __slots__ = ("_ansi", "_made", "_make")

    def __init__(self, segments: Callable[[], list[Segment]], ansi: Callable[[], str], cell_length: int) -> None:
        self._make, self._ansi = segments, ansi
        self._made: list[Segment] | None = None
        super().__init__((), cell_length)
        self._cell_count = cell_length

    @property
    def _segments(self) -> list[Segment]:
        if self._made is None:
            self._made = self._make()
        return self._made

    @_segments.setter
    def _segments(self, _segments: list[Segment]) -> None:
        """The base sets them to none."""

    def __bool__(self) -> bool:
        return bool(self._cell_count)

    def render(self, console: Console) -> str:
        """The line as the terminal gets it."""
        if self._render_cache is None:
            self._render_cache = self._ansi()
        return self._render_cache
