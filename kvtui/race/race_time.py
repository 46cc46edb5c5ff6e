"""The one axis of time that all lanes share: the same column is the same moment in every lane."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

_PRESENT_AT = 0.75
"""Where the present stands, as a share of the width, while the axis shows a part of the race and follows it."""
_NICE = (1, 2, 5)


@dataclass(slots=True)
class RaceTime:
    """Where the race is and which part of it is in sight.

    Attributes:
        total: Seconds until the last lane is done.
        shortest: Seconds of the shortest step worth seeing: no column is made to stand for less.
        label: Cells in front of the columns.
        now: Seconds since the start that have passed.
        zoom: The whole race is 2 to the power of this times as wide as what is in sight; 0 shows all of it.
    """

    total: float
    shortest: float
    label: int = 0
    now: float = 0.0
    zoom: int = 0

    def axis(self, width: int) -> TimeAxis:
        """The columns of a line of so many cells, the label in front of them."""
        columns = max(0, width - self.label - 1)
        whole = max(self.total, 1e-9) / max(1, columns)
        column = whole / 2**self.zoom
        # In whole columns, so that what has been drawn moves as it is, and is not cut anew with every frame.
        first = round(min(max(0.0, self.now / column - _PRESENT_AT * columns), columns * (2**self.zoom - 1)))
        return TimeAxis(first * column, column, columns)

    def zoom_by(self, by: int, width: int) -> None:
        """See half as much, or twice as much; not more than all, nor columns that are shorter than steps."""
        zoom = max(0, self.zoom + by)
        columns = max(1, width - self.label - 1)
        if by < 0 or self.total / columns / 2**zoom >= self.shortest / 2:
            self.zoom = zoom


@dataclass(frozen=True, slots=True)
class TimeAxis:
    """Columns that are the same moments in every lane.

    Attributes:
        start: Seconds of the race at the left edge of the first one.
        column: Seconds that each stands for.
        columns: How many there are.
    """

    start: float
    column: float
    columns: int

    @property
    def stop(self) -> float:
        """Seconds at the right edge of the last column."""
        return self.start + self.column * self.columns

    @property
    def edges(self) -> npt.NDArray[np.float64]:
        """Of all columns, in seconds; one more than there are columns."""
        return self.start + self.column * np.arange(self.columns + 1, dtype=np.float64)

    def column_of(self, seconds: float) -> int:
        """The column that a moment lies in, the nearest one where it is out of sight."""
        return min(max(0, int((seconds - self.start) / self.column)), max(0, self.columns - 1))

    def ticks(self, apart: int) -> list[tuple[int, str]]:
        """Round moments at least so many cells apart: the column of each, and it in words."""
        least = max(self.column * apart, 1e-6)
        scale = 10.0 ** np.floor(np.log10(least))
        step = float(next(nice * scale for nice in (*_NICE, 10) if nice * scale >= least * 0.999))
        digits = max(0, -int(np.floor(np.log10(step) + 1e-9)))
        ticks = []
        at = int(np.ceil(self.start / step - 1e-9))
        while self.columns and at * step < self.stop - self.column / 2:
            ticks.append((round((at * step - self.start) / self.column), f"{at * step:,.{digits}f} s"))
            at += 1
        return ticks
