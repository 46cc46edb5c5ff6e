"""What cells that stand for many blocks are made of: how many are free, cached, and in use by which hue.

Counts are made once for a stretch of the grid and then kept up by the blocks that changed, whatever the pool's size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from engine.trace.state import PoolState
    from kvtui.block_order import OrderKeeper

FREE, CACHED, HUES = 0, 1, 2
"""Columns of the counts: free, cached, and one for each hue of the cycle from there on."""

_ONE = np.int32(1)
"""Of the counts' own type: with another one, `ufunc.at` takes ten times as long."""


def kinds_of(state: PoolState, which: slice | NDArray[np.int64], num_hues: int) -> NDArray[np.uint8]:
    """The column that each block counts in."""
    held = state.owner[which] % num_hues + HUES
    idle = state.key[which] != 0
    kinds: NDArray[np.uint8] = np.where(state.refs[which] > 0, held, idle).astype(np.uint8)
    return kinds


class BlockMix:
    """Counts of consecutive cells, each of the same number of blocks.

    Args:
        state: What is counted.
        order: The order that the cells follow.
        num_hues: Length of the palette's cycle.
        blocks: Blocks of a cell, a power of two.
        first: The first cell counted.
        num_cells: Cells counted from there on; the pool may end within the last.

    Attributes:
        counts: int32[num_cells, 2 + num_hues]: free, cached, and in use by hue.
        sizes: int32[num_cells]: blocks that the cell really has.
    """

    def __init__(
        self, state: PoolState, order: OrderKeeper, num_hues: int, blocks: int, first: int, num_cells: int
    ) -> None:
        self.blocks, self.first, self.num_cells = blocks, first, num_cells
        self._order, self._num_hues = order, num_hues
        self._shift = blocks.bit_length() - 1
        self._start = first * blocks
        stop = min(state.header.num_blocks, self._start + num_cells * blocks)
        self._kinds = kinds_of(state, order.between(self._start, stop), num_hues)
        columns = num_hues + HUES
        cells = np.arange(len(self._kinds)) >> self._shift
        flat = np.bincount(cells * columns + self._kinds, minlength=num_cells * columns)
        self.counts: NDArray[np.int32] = flat.astype(np.int32).reshape(num_cells, columns)
        self.sizes: NDArray[np.int32] = self.counts.sum(axis=1, dtype=np.int32)

    def covers(self, first: int, stop: int) -> bool:
        """Whether these cells are counted."""
        return self.first <= first and stop <= self.first + self.num_cells

    def update(self, state: PoolState, blocks: NDArray[np.int64]) -> None:
        """Take in blocks that may have changed, each named once."""
        at = self._order.places_of(blocks) - self._start
        inside = (at >= 0) & (at < len(self._kinds))
        if not inside.all():
            at, blocks = at[inside], blocks[inside]
        before, now = self._kinds[at], kinds_of(state, blocks, self._num_hues)
        changed = np.flatnonzero(before != now)
        if not len(changed):
            return
        at, before, now = at[changed], before[changed], now[changed]
        self._kinds[at] = now
        rows = (at >> self._shift) * self.counts.shape[1]
        flat = self.counts.reshape(-1)
        np.subtract.at(flat, rows + before, _ONE)
        np.add.at(flat, rows + now, _ONE)
