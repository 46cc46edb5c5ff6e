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


def _among(emphasis: bc.Emphasis, cells: NDArray[np.int64]) -> bc.Emphasis:
    """What stands out among some of the cells in sight, counted along these."""

    def along(marked: NDArray[np.int64] | None) -> NDArray[np.int64] | None:
        return None if marked is None else np.flatnonzero(np.isin(cells, marked))

    at = np.flatnonzero(cells == emphasis.cursor)
    return emphasis._replace(
        cursor=int(at[0]) if emphasis.cursor >= 0 and len(at) else -1,
        next_free=along(emphasis.next_free),
        next_cached=along(emphasis.next_cached),
    )


def _moved(cells: slice | NDArray[np.int64], by: int) -> slice | NDArray[np.int64]:
    """Cells counted from another one."""
    return slice(cells.start + by, cells.stop + by) if isinstance(cells, slice) else cells + by


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

    def take_lights(self, flash: Flash, *changed: NDArray[np.int64]) -> None:
        """Take in blocks that were lit up or put out, each named once in a group."""
        if self._mix is not None:
            for blocks in changed:
                self._mix.update_lights(flash.kinds, blocks)

    def chars(self, view: View, window: Window, flash: Flash, dirty: NDArray[np.int64] | None) -> NDArray[np.uint32]:
        """One code for each character of the rows in sight, after the addresses.

        Args:
            view: What is shown.
            window: The part of it.
            flash: What is lit up.
            dirty: Blocks that may look different from the last time, where nothing else does; None: anything may.
        """
        start, stop = window.units
        emphasis = self._emphasis(view, window)
        cells: slice | NDArray[np.int64] = slice(0, stop - start)
        if dirty is not None and emphasis.selected is None:
            cells = self._cells_in_sight(dirty, window)
            emphasis = _among(emphasis, cells)
        else:
            self._units = np.zeros(stop - start, dtype=np.uint16)
        self._units[cells] = self._codes(view, window, flash, cells, emphasis)
        return bc.char_codes(self._units, window.stop - window.first, window.layout)

    def _codes(
        self, view: View, window: Window, flash: Flash, cells: slice | NDArray[np.int64], emphasis: bc.Emphasis
    ) -> NDArray[np.uint16]:
        """Codes of cells in sight, counted from the first one there; `emphasis` but for the flash."""
        if window.layout.level.blocks == 1:
            blocks = self.order.at(_moved(cells, window.units[0]))
            emphasis = emphasis._replace(flash=flash.kinds[blocks] if flash else None)
            return bc.block_codes(view.state, blocks, len(view.palette.hues), emphasis)
        mix = self._counted(view, window, flash)
        cells = _moved(cells, window.units[0] - mix.first)
        return bc.mix_codes(mix, cells, emphasis._replace(flash=mix.lights_of(cells) if flash else None))

    def _cells_in_sight(self, blocks: NDArray[np.int64], window: Window) -> NDArray[np.int64]:
        """The cells in sight that blocks lie in, in order, each once; counted from the first one in sight."""
        start, stop = window.units
        cells = self.order.places_of(blocks) // window.layout.level.blocks - start
        if len(cells) and (cells.min() < 0 or cells.max() >= stop - start):
            cells = cells[(cells >= 0) & (cells < stop - start)]
        sought = np.zeros(stop - start, dtype=np.bool_)
        sought[cells] = True
        return sought.nonzero()[0]

    def _counted(self, view: View, window: Window, flash: Flash) -> BlockMix:
        """Counts of the cells in sight, made where they are missing."""
        mix, (start, stop) = self._mix, window.units
        if mix is None or not mix.covers(start, stop):
            num_units, blocks = window.layout.num_units, window.layout.level.blocks
            first, num_cells = (0, num_units) if num_units <= _MOST_CELLS_COUNTED else (start, stop - start)
            mix = BlockMix(view.state, self.order, len(view.palette.hues), blocks, first, num_cells, flash.kinds)
            self._mix = mix
        return mix

    def _emphasis(self, view: View, window: Window) -> bc.Emphasis:
        """What is selected among the cells in sight."""
        order, blocks, (start, stop) = self.order, window.layout.level.blocks, window.units
        selected: NDArray[np.int64] | None = None
        if view.selected_request is not None:
            table = np.array(view.state.table(view.selected_request), dtype=np.int64)
            cells = order.places_of(table[table >= 0]) // blocks - start
            selected = cells[(cells >= 0) & (cells < stop - start)]
        elif view.selected_prefix is not None:
            cells = order.places_of(np.array(view.selected_blocks, dtype=np.int64)) // blocks - start
            selected = cells[(cells >= 0) & (cells < stop - start)]
        free = cached = None
        if view.next_blocks:
            taken_next = np.array(view.next_blocks, dtype=np.int64)
            keyed = view.state.key[taken_next] != 0
            free = self._cells_in_sight(taken_next[~keyed], window)
            cached = self._cells_in_sight(taken_next[keyed], window)
        cursor = -1
        if view.selected_block is not None and view.selected_block < view.state.header.num_blocks:
            cell = order.place(view.selected_block) // blocks
            cursor = cell - start if start <= cell < stop else -1
        hue = bc.OWN_HUES if view.selected_request is None else view.selected_request % len(view.palette.hues)
        return bc.Emphasis(None, selected, hue, cursor, free, cached)

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
