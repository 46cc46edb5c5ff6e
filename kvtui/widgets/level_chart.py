"""The levels of the pool over time as numbers ready to draw: steps gathered into columns, columns cut into cells."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from kvtui.history import History

EIGHTHS = 8
"""Heights that a cell can show."""
CACHED = EIGHTHS + 1
"""Code of a cell in the cached area; 0 is the free area and 1 to 8 are eighths of the used area."""
TRACE = CACHED + 1
"""Code of a cell in which something is cached that rounds to no cell."""


SCALES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256, 512, 1024)
"""Steps a column that the chart chooses from: few, so that it seldom changes its scale while it fills."""


class Gathered(NamedTuple):
    """Some steps a column, oldest first.

    Attributes:
        first: The first step of the first column.
        stop: One past the last step.
        steps_per_column: How many steps a column stands for.
        used: Mean blocks in use, float64.
        held: Mean blocks in use or cached, float64.
        preemptions: How many there were, int64.
        evictions: How many there were, int64.
    """

    first: int
    stop: int
    steps_per_column: int
    used: npt.NDArray[np.float64]
    held: npt.NDArray[np.float64]
    preemptions: npt.NDArray[np.int64]
    evictions: npt.NDArray[np.int64]


def gather(history: History, columns: int, steps_per_column: int = 0) -> Gathered | None:
    """The newest steps in at most so many columns; None where there is no step or no column.

    Columns begin at multiples of their width, so that a column keeps its value while it moves to the left.

    Args:
        history: Where the steps are.
        columns: Most columns.
        steps_per_column: How many steps a column stands for; 0 takes the fewest that show all that is remembered.
    """
    stop = history.last_index + 1
    remembered = len(history)
    if columns < 1 or not remembered:
        return None
    k = steps_per_column or next(k for k in SCALES if columns * k >= remembered or k == SCALES[-1])
    oldest = stop - remembered
    first = max(0, (stop - 1) // k - columns + 1) * k
    if first < oldest:  # a column that lost some of its steps would change while one looks at it
        first = min(-(-oldest // k), (stop - 1) // k) * k
    first_step = max(first, oldest)
    starts = np.arange(first, stop, k) - first_step
    starts[0] = 0
    counts = np.diff(np.append(starts, stop - first_step))

    def total(name: str) -> npt.NDArray[np.int64]:
        values: npt.NDArray[np.int64] = np.add.reduceat(history.series(name, first_step, stop), starts)
        return values

    used = total("used") / counts
    return Gathered(
        first=first_step,
        stop=stop,
        steps_per_column=k,
        used=used,
        held=used + total("cached") / counts,
        preemptions=total("preemptions"),
        evictions=total("evictions"),
    )


def cells(gathered: Gathered, num_blocks: int, rows: int) -> npt.NDArray[np.uint8]:
    """Codes of the chart, uint8 `[rows, columns]`, the top row first.

    Used blocks are drawn to an eighth of a cell; the cached area on top of them in whole cells. Whatever is not none is
    seen: an eighth, or a trace.
    """
    scale = rows / max(1, num_blocks)
    eighths = np.clip(np.rint(gathered.used * scale * EIGHTHS), gathered.used > 0, rows * EIGHTHS).astype(np.int64)
    used_cells = -(-eighths // EIGHTHS)
    cached = gathered.held > gathered.used
    top = np.minimum(np.rint(gathered.held * scale).astype(np.int64), rows)
    row = np.arange(rows - 1, -1, -1)[:, None]
    level = np.clip(eighths - row * EIGHTHS, 0, EIGHTHS)
    trace = cached & (top <= used_cells) & (row == used_cells)
    return np.where(level > 0, level, np.where(row < top, CACHED, np.where(trace, TRACE, 0))).astype(np.uint8)
