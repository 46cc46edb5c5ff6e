"""Runs of codes on their way to the terminal, as ANSI text put together from pieces that are kept.

Rendering each segment's style anew is most of what a frame of the grid would cost. Here a run of one code becomes text
once, by the way that Textual itself would have taken, and whole stretches are joined from those pieces.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from textual.strip import Strip

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray
    from rich.console import Console
    from rich.segment import Segment
    from textual.color import Color
    from textual.filter import LineFilter

_RUN_BITS = 16
_MOST_PIECES = 60_000
_JUMP_SHIFT = 48
_RUN_MASK = (1 << _JUMP_SHIFT) - 1
_COLUMN_BITS = 20


class Ink(dict[int, str]):
    """ANSI text by its key.

    A run's is `jump << 48 | code << 16 | length`: so many columns on, a run of one code; `-((line << 20) + column)`,
    both counted from 1, moves the cursor there.

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
        if key < 0:
            line, column = divmod(-key, 1 << _COLUMN_BITS)
            text = f"\x1b[{line};{column}H"
        elif key >> _JUMP_SHIFT:
            text = f"\x1b[{key >> _JUMP_SHIFT}C{self[key & _RUN_MASK]}"
        else:
            text = self.ansi(self._segment(key >> _RUN_BITS, key & ((1 << _RUN_BITS) - 1)))
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
        self, new: NDArray[np.uint32], changed: NDArray[np.int64], place: tuple[int, int], lines: NDArray[np.int64]
    ) -> str:
        """What makes a terminal show new codes where they are not those that it shows.

        Args:
            new: [rows, columns].
            changed: Where they are not, in order, counted row by row.
            place: Column and line of the first character on the terminal, counted from 0.
            lines: For each row, how many lines below the first it is.
        """
        if not len(changed):
            return ""
        columns = new.shape[1]
        codes, row = new.reshape(-1).take(changed), changed // columns
        # A run goes on where the next character follows it in its row and looks the same.
        at = changed + row
        starts = np.concatenate(([0], ((at[1:] - at[:-1] != 1) | (codes[1:] != codes[:-1])).nonzero()[0] + 1))
        keys = _keys(codes, starts)
        first, row = changed.take(starts), row.take(starts)
        # Within a row the cursor goes on from the end of the run before, and may have to jump.
        jumps = first[1:] - changed.take(starts[1:] - 1) - 1
        turns = (row[1:] != row[:-1]).nonzero()[0]
        jumps[turns] = 0
        keys[1:] |= jumps << _JUMP_SHIFT
        texts = list(map(self.__getitem__, keys.tolist()))
        turns = np.concatenate(([0], turns + 1))
        x, y = place
        column, line = first.take(turns) % columns + (x + 1), lines.take(row.take(turns)) + (y + 1)
        for turn, move in zip(turns.tolist(), (-(line << _COLUMN_BITS) - column).tolist(), strict=True):
            texts[turn] = self[move] + texts[turn]
        return "".join(texts)


def _run_starts(codes: NDArray[np.uint32]) -> NDArray[np.int64]:
    return np.concatenate(([0], (codes[1:] != codes[:-1]).nonzero()[0] + 1))


def _keys(codes: NDArray[np.uint32], starts: NDArray[np.int64]) -> NDArray[np.int64]:
    keys = codes.take(starts).astype(np.int64) << _RUN_BITS
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
