"""What each cell of the block grid looks like, as one number: a glyph, a hue and a few flags.

Numbers are compared and run-length encoded by numpy; nothing here takes Python time in proportion to the pool, and only
blocks in sight are looked at. Where two pixels are stacked in a cell, its number is the upper one's, and 16 bits up the
lower one's.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvtui import block_mix as mix_columns

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from engine.trace.state import PoolState
    from kvtui.block_layout import BlockLayout
    from kvtui.block_mix import BlockMix

BLANK, FREE, CACHED = 0, 1, 2
LEVEL = 3
"""3 to 10: in use, by eighths of its slots; of a cell for many blocks, by how many of them (`level_of_mix`)."""
NUM_LEVELS = 8
SHARED = 11
"""11 to 18: two to nine references."""
MANY = 19
"""More than nine."""
EVICTED, SWAPPED = 20, 21
NEXT_FREE, NEXT_CACHED = 22, 23
"""Among those that are taken next: free, and cached, so that its content is evicted then."""
GLYPH_MASK = 31

HUE_SHIFT = 5
HUE_MASK = 63
"""0: the glyph's own colour; else 1 + the place in the palette's cycle."""

DIMMED = 1 << 11
FLASH = 1 << 12
CURSOR = 1 << 13
SECOND = 1 << 14
"""The second character of a wide cell."""
MOSTLY_CACHED = 1 << 15
"""Of a cell for many blocks: at least half of those not in use are cached."""

UNIT_BITS = 16
UNIT_MASK = (1 << UNIT_BITS) - 1

OWN_HUES = -1
"""Of what is selected: no hue for all of it."""

FLASH_CHANGED, FLASH_EVICTED, FLASH_SWAPPED = 1, 2, 3


class Emphasis(NamedTuple):
    """What stands out in one frame; cells are counted from the first one in sight.

    Attributes:
        flash: By cell, 0 or the FLASH_ kind that it is lit up with; None where nothing is.
        selected: Cells with blocks of the selected request or prefix, or None where none is selected.
        selected_hue: The request's place in the cycle; OWN_HUES lights the cells in the hues that they have.
        cursor: The cell of the selected block, or -1 where it is out of sight.
        next_free: Cells with free blocks that are taken next; None where these are not marked.
        next_cached: Cells with cached blocks that are taken next.
    """

    flash: NDArray[np.uint8] | None = None
    selected: NDArray[np.int64] | None = None
    selected_hue: int = 0
    cursor: int = -1
    next_free: NDArray[np.int64] | None = None
    next_cached: NDArray[np.int64] | None = None


@lru_cache(maxsize=8)
def _level_glyphs(block_size: int) -> NDArray[np.uint16]:
    """By the number of filled slots, the glyph of a block in use."""
    levels = np.maximum(-(-np.arange(block_size + 1) * NUM_LEVELS // block_size) - 1, 0)
    return (LEVEL + levels).astype(np.uint16)


def block_codes(
    state: PoolState, which: slice | NDArray[np.int64], num_hues: int, emphasis: Emphasis
) -> NDArray[np.uint16]:
    """One code for each of some blocks."""
    block_size = state.header.block_size
    refs = state.refs[which]
    used = refs > 0
    held = _level_glyphs(block_size).take(state.filled[which], mode="clip")
    if (refs > 1).any():
        held = np.where(refs > 1, np.minimum(SHARED - 2 + refs, MANY), held).astype(np.uint16)
    hue = ((state.owner[which] % num_hues + 1) << HUE_SHIFT).astype(np.uint16)
    codes = np.where(used, held | hue, np.where(state.key[which] != 0, np.uint16(CACHED), np.uint16(FREE)))
    return _emphasised(codes, used, emphasis)


def level_of_mix(used: NDArray[np.int32], sizes: NDArray[np.int32]) -> NDArray[np.int32]:
    """0 to 7 for cells with blocks in use: 7 where all of them are, else by sevenths, so that full means full."""
    level: NDArray[np.int32] = used * np.int32(NUM_LEVELS - 1) // sizes
    return level


def mix_codes(mix: BlockMix, cells: slice | NDArray[np.int64], emphasis: Emphasis) -> NDArray[np.uint16]:
    """One code for each of some cells that stand for many blocks.

    The level is the part of the cell's blocks in use, the hue that of most of those. A cell without one in use is
    cached if any of its blocks is. Selection, change and eviction show if any block of the cell has them.
    """
    if isinstance(cells, slice):
        counts, sizes = mix.counts[cells], mix.sizes[cells]
    else:
        counts, sizes = mix.counts.take(cells, axis=0), mix.sizes.take(cells)
    free, cached = counts[:, mix_columns.FREE], counts[:, mix_columns.CACHED]
    used = sizes - free - cached
    any_used, any_cached = used > 0, cached > 0
    codes = LEVEL + level_of_mix(used, sizes) + ((counts[:, mix_columns.HUES :].argmax(axis=1) + 1) << HUE_SHIFT)
    codes = np.where(any_used, codes, FREE + any_cached)
    codes |= (any_cached & (cached >= free)) * np.int32(MOSTLY_CACHED)
    return _emphasised(codes.astype(np.uint16), any_used, emphasis)


def _emphasised(codes: NDArray[np.uint16], used: NDArray[np.bool_], emphasis: Emphasis) -> NDArray[np.uint16]:
    if emphasis.selected is not None:
        codes[used] |= DIMMED
        chosen = emphasis.selected
        if emphasis.selected_hue == OWN_HUES:
            codes[chosen] = (codes[chosen] & np.uint16(UNIT_MASK & ~DIMMED)) | np.uint16(FLASH)
        else:
            codes[chosen] &= np.uint16(UNIT_MASK & ~DIMMED & ~(HUE_MASK << HUE_SHIFT))
            codes[chosen] |= np.uint16((emphasis.selected_hue + 1) << HUE_SHIFT)
    for cells, glyph in ((emphasis.next_free, NEXT_FREE), (emphasis.next_cached, NEXT_CACHED)):
        if cells is not None:
            codes[cells] = (codes[cells] & np.uint16(UNIT_MASK & ~GLYPH_MASK)) | np.uint16(glyph)
    if emphasis.flash is not None:
        lit = np.flatnonzero(emphasis.flash)
        kinds = emphasis.flash[lit]
        codes[lit] |= FLASH
        for kind, glyph in ((FLASH_EVICTED, EVICTED), (FLASH_SWAPPED, SWAPPED)):
            which = lit[kinds == kind]
            codes[which] = (codes[which] & np.uint16(UNIT_MASK & ~GLYPH_MASK)) | np.uint16(glyph)
    if emphasis.cursor >= 0:
        codes[emphasis.cursor] |= CURSOR
    return codes


def char_codes(units: NDArray[np.uint16], num_rows: int, layout: BlockLayout) -> NDArray[np.uint32]:
    """One code for each character of some rows, from one for each cell or pixel.

    Returns:
        uint32[num_rows, characters of a row after the gutter].
    """
    stacked, columns = layout.level.stacked, layout.columns
    padded = np.zeros(num_rows * layout.units_per_row, dtype=np.uint32)
    padded[: len(units)] = units
    rows = padded.reshape(num_rows, stacked, columns)
    cells = rows[:, 0] if stacked == 1 else rows[:, 0] | (rows[:, 1] << np.uint32(UNIT_BITS))
    of_char = layout.cell_of_char
    if len(of_char) == columns:
        return cells
    chars = cells[:, of_char]
    chars[:, of_char < 0] = BLANK
    if layout.level.cell > 2:
        chars[:, layout.is_second_char] |= np.uint32(SECOND)
    return chars
