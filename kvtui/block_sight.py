"""What of the pool is in sight, as numbers: codes of the cells, and what stands before the rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvtui import block_codes as bc
from kvtui.block_mix import BlockMix
from kvtui.block_order import ADDRESS, OWNER

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from engine.trace.state import PoolState
    from kvtui.block_flash import Flash
    from kvtui.block_layout import BlockLayout
    from kvtui.block_order import OrderKeeper
    from kvtui.view import View

_MOST_CELLS_COUNTED = 1 << 16
"""Up to so many cells are counted all; of more, those in sight."""


class Window(NamedTuple):
    """The part of the grid in sight: its layout, the line at the top, the first row, and the one after the last."""

    layout: BlockLayout
    top: int
    first: int
    stop: int

    @property
    def units(self) -> tuple[int, int]:
        """The cells (or pixels) in sight."""
        per_row = self.layout.units_per_row
        return self.first * per_row, min(self.stop * per_row, self.layout.num_units)

    @property
    def lines(self) -> NDArray[np.int64]:
        """By row in sight, its line counted from the top."""
        return np.arange(self.first, self.stop) * self.layout.level.pitch - self.top


class Sight:
    """Works out the numbers of a window, and keeps what the next ones can be worked out from.

    Args:
        order: That of the blocks.
    """

    def __init__(self, order: OrderKeeper) -> None:
        self.order = order
        self._mix: BlockMix | None = None
        self._units: NDArray[np.uint16] = np.zeros(0, dtype=np.uint16)

    def forget(self) -> None:
        """Count anew: the state jumped, or the cells stand for other blocks."""
        self._mix = None

    def take(self, state: PoolState, changed: NDArray[np.int64]) -> None:
        """Take in blocks that changed, each named once."""
        if self._mix is not None:
            self._mix.update(state, changed)

    def chars(self, view: View, window: Window, flash: Flash, dirty: NDArray[np.int64] | None) -> NDArray[np.uint32]:
        """One code for each character of the rows in sight, after the addresses.

        Args:
            view: What is shown.
            window: The part of it.
            flash: What is lit up.
            dirty: Blocks that may look different from the last time, where nothing else does; None: anything may.
        """
        layout, (start, stop) = window.layout, window.units
        if layout.level.blocks == 1:
            which = self.order.between(start, stop)
            emphasis = self._emphasis(view, window, flash, which)
            self._units = bc.block_codes(view.state, which, len(view.palette.hues), emphasis)
        else:
            mix = self._counted(view, window)
            emphasis = self._emphasis(view, window, flash, None)
            if dirty is not None and emphasis.selected is None:
                self._recode_cells(mix, dirty, start, emphasis)
            else:
                self._units = bc.mix_codes(mix, slice(start - mix.first, stop - mix.first), emphasis)
        return bc.char_codes(self._units, window.stop - window.first, layout)

    def _recode_cells(self, mix: BlockMix, dirty: NDArray[np.int64], start: int, emphasis: bc.Emphasis) -> None:
        """Work out those cells in sight that some blocks lie in."""
        sought = np.zeros(len(self._units), dtype=np.bool_)
        cells = self.order.places_of(dirty) // mix.blocks - start
        sought[cells[(cells >= 0) & (cells < len(sought))]] = True
        cells = np.flatnonzero(sought)
        at = np.flatnonzero(cells == emphasis.cursor)
        part = bc.Emphasis(
            flash=None if emphasis.flash is None else emphasis.flash[cells],
            cursor=int(at[0]) if emphasis.cursor >= 0 and len(at) else -1,
        )
        self._units[cells] = bc.mix_codes(mix, cells + (start - mix.first), part)

    def _counted(self, view: View, window: Window) -> BlockMix:
        """Counts of the cells in sight, made where they are missing."""
        mix, (start, stop) = self._mix, window.units
        if mix is None or not mix.covers(start, stop):
            num_units, blocks = window.layout.num_units, window.layout.level.blocks
            first, num_cells = (0, num_units) if num_units <= _MOST_CELLS_COUNTED else (start, stop - start)
            mix = BlockMix(view.state, self.order, len(view.palette.hues), blocks, first, num_cells)
            self._mix = mix
        return mix

    def _emphasis(
        self, view: View, window: Window, flashes: Flash, which: slice | NDArray[np.int64] | None
    ) -> bc.Emphasis:
        """What stands out among the cells in sight; `which` are their blocks, where each is one block."""
        order, blocks, (start, stop) = self.order, window.layout.level.blocks, window.units
        flash: NDArray[np.uint8] | None = None
        if flashes and which is not None:
            flash = flashes.kinds[which]
        elif flashes:
            lit = flashes.lit
            cells = order.places_of(lit) // blocks - start
            inside = (cells >= 0) & (cells < stop - start)
            flash = np.zeros(stop - start, dtype=np.uint8)
            np.maximum.at(flash, cells[inside], flashes.kinds[lit[inside]])
        selected: NDArray[np.int64] | None = None
        if view.selected_request is not None:
            table = np.array(view.state.table(view.selected_request), dtype=np.int64)
            cells = order.places_of(table[table >= 0]) // blocks - start
            selected = cells[(cells >= 0) & (cells < stop - start)]
        elif view.selected_prefix is not None:
            cells = order.places_of(np.array(view.selected_blocks, dtype=np.int64)) // blocks - start
            selected = cells[(cells >= 0) & (cells < stop - start)]
        cursor = -1
        if view.selected_block is not None and view.selected_block < view.state.header.num_blocks:
            cell = order.place(view.selected_block) // blocks
            cursor = cell - start if start <= cell < stop else -1
        hue = bc.OWN_HUES if view.selected_request is None else view.selected_request % len(view.palette.hues)
        return bc.Emphasis(flash, selected, hue, cursor)

    def addresses(self, view: View, window: Window) -> list[tuple[str, bool]]:
        """What stands before each row in sight, and whether the cursor is in the row."""
        layout = window.layout
        if not layout.gutter:
            return []
        per_row = layout.units_per_row * layout.level.blocks
        cursor = view.selected_block
        at = -1 if cursor is None else self.order.place(cursor) // per_row
        rows = range(window.first, window.stop)
        texts = (self._address(view.state, row * per_row) for row in rows)
        return [
            (f"{text if len(text) < layout.gutter else '':>{layout.gutter - 1}} ", row == at)
            for row, text in zip(rows, texts, strict=True)
        ]

    def _address(self, state: PoolState, place: int) -> str:
        """What stands before the row that begins at a place of the order."""
        if self.order.order == ADDRESS:
            return str(place)
        block = self.order.block(place)
        if self.order.order == OWNER:
            owner = int(state.owner[block])
            return f"#{owner}" if owner >= 0 else "cached" if state.key[block] else "free"
        touched = int(state.touched[block])
        return f"@{touched}" if touched >= 0 else ""
