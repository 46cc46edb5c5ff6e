"""What cells that stand for many blocks are made of: how many are free, cached, and in use by which hue; how many lit.

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

_WEIGHT = np.array([0, 1, 1 << 21, 1 << 42], dtype=np.int64)
"""By kind of flash: two million blocks of one kind weigh less than one of the next."""

_ONE = np.int32(1)
"""Of the counts' own type: with another one, `ufunc.at` takes ten times as long."""


def kinds_of(state: PoolState, which: slice | NDArray[np.int64], num_hues: int) -> NDArray[np.uint8]:
    """The column that each block counts in."""
    held = state.owner[which] % num_hues + HUES
    idle = state.key[which] != 0
    kinds: NDArray[np.uint8] = np.where(state.refs[which] > 0, held, idle).astype(np.uint8)
    return kinds


class CellLights:
    """What cells of many blocks are lit up with: the kind of flash that matters most in them.

    Args:
        kinds: Of the blocks, cell by cell; kept.
        blocks: Blocks of a cell; the last may have fewer.
    """

    def __init__(self, kinds: NDArray[np.uint8], blocks: int) -> None:
        self._kinds, self._blocks = kinds, blocks
        lit = np.flatnonzero(kinds)
        self._sums: NDArray[np.int64] = np.zeros(-(-len(kinds) // blocks), dtype=np.int64)
        np.add.at(self._sums, lit // blocks, _WEIGHT[kinds[lit]])

    def update(self, at: NDArray[np.int64], now: NDArray[np.uint8]) -> None:
        """Take in the kinds that blocks have now, each named once, by their places."""
        before = self._kinds[at]
        changed = (before != now).nonzero()[0]
        if len(changed):
            at, before, now = at[changed], before[changed], now[changed]
            self._kinds[at] = now
            np.add.at(self._sums, at // self._blocks, _WEIGHT[now] - _WEIGHT[before])

    def of(self, cells: slice | NDArray[np.int64]) -> NDArray[np.uint8]:
        """The kind of each of some cells; 0 where nothing is lit."""
        sums = self._sums[cells]
        kinds: NDArray[np.uint8] = (sums >= _WEIGHT[1]).view(np.uint8)
        for weight in _WEIGHT[2:]:
            kinds = kinds + (sums >= weight)
        return kinds


class BlockMix:
    """Counts of consecutive cells, each of the same number of blocks.

    Args:
        state: What is counted.
        order: The order that the cells follow.
        num_hues: Length of the palette's cycle.
        blocks: Blocks of a cell.
        first: The first cell counted.
        num_cells: Cells counted from there on; the pool may end within the last.
        lit: By block, the kind of flash that it is lit up with; None where nobody asks.

    Attributes:
        counts: int32[num_cells, 2 + num_hues]: free, cached, and in use by hue.
        sizes: int32[num_cells]: blocks that the cell really has.
    """

    def __init__(
        self,
        state: PoolState,
        order: OrderKeeper,
        num_hues: int,
        blocks: int,
        first: int,
        num_cells: int,
        lit: NDArray[np.uint8] | None = None,
    ) -> None:
        self.blocks, self.first, self.num_cells = blocks, first, num_cells
        self._order, self._num_hues = order, num_hues
        self._start = first * blocks
        self._stop = min(state.header.num_blocks, self._start + num_cells * blocks)
        which = order.at(slice(self._start, self._stop))
        self._kinds = kinds_of(state, which, num_hues)
        columns = num_hues + HUES
        cells = np.arange(len(self._kinds)) // blocks
        flat = np.bincount(cells * columns + self._kinds, minlength=num_cells * columns)
        self.counts: NDArray[np.int32] = flat.astype(np.int32).reshape(num_cells, columns)
        self.sizes: NDArray[np.int32] = self.counts.sum(axis=1, dtype=np.int32)
        self._lights = None if lit is None else CellLights(lit[which].copy(), blocks)

    def covers(self, first: int, stop: int) -> bool:
        """Whether these cells are counted."""
        return self.first <= first and stop <= self.first + self.num_cells

    def update(self, state: PoolState, blocks: NDArray[np.int64]) -> None:
        """Take in blocks that may have changed, each named once."""
        at, blocks = self._inside(blocks)
        before, now = self._kinds[at], kinds_of(state, blocks, self._num_hues)
        changed = (before != now).nonzero()[0]
        if not len(changed):
            return
        if len(changed) < len(at):
            at, before, now = at[changed], before[changed], now[changed]
        self._kinds[at] = now
        rows = at // self.blocks * self.counts.shape[1]
        flat = self.counts.reshape(-1)
        np.subtract.at(flat, rows + before, _ONE)
        np.add.at(flat, rows + now, _ONE)

    def update_lights(self, lit: NDArray[np.uint8], blocks: NDArray[np.int64]) -> None:
        """Take in blocks that may be lit up otherwise, each named once."""
        if self._lights is not None and len(blocks):
            at, blocks = self._inside(blocks)
            self._lights.update(at, lit[blocks])

    def lights_of(self, cells: slice | NDArray[np.int64]) -> NDArray[np.uint8]:
        """What some cells are lit up with, counted from the first."""
        assert self._lights is not None
        return self._lights.of(cells)

    def _inside(self, blocks: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Those of some blocks that are counted: where, and which."""
        at = self._order.places_of(blocks) - self._start
        if not len(at) or (at.min() >= 0 and at.max() < len(self._kinds)):
            return at, blocks
        inside = (at >= 0) & (at < len(self._kinds))
        return at[inside], blocks[inside]
