"""What each cell of the block grid looks like, as one number: a glyph, a hue and a few flags.

Numbers are compared and run-length encoded by numpy; nothing here takes Python time in proportion to the pool.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from engine.trace.state import PoolState

BLANK, FREE, CACHED = 0, 1, 2
LEVEL = 3
"""3 to 10: in use, by eighths of its slots."""
NUM_LEVELS = 8
SHARED = 11
"""11 to 18: two to nine references."""
MANY = 19
"""More than nine."""
EVICTED, SWAPPED = 20, 21
GLYPH_MASK = 31

HUE_SHIFT = 5
HUE_MASK = 63
"""0: the glyph's own colour; else 1 + the place in the palette's cycle."""

DIMMED = 1 << 11
FLASH = 1 << 12
CURSOR = 1 << 13
SECOND = 1 << 14
"""The second character of a wide cell."""

FLASH_CHANGED, FLASH_EVICTED, FLASH_SWAPPED = 1, 2, 3


@dataclass(frozen=True, slots=True)
class Emphasis:
    """What stands out in one frame.

    Attributes:
        flash: By block, 0 or the FLASH_ kind that it is lit up with.
        selected_table: Blocks of the selected request, or None where none is selected.
        selected_hue: Its place in the cycle.
        cursor: The selected block, or -1.
    """

    flash: NDArray[np.uint8]
    selected_table: NDArray[np.int32] | None = None
    selected_hue: int = 0
    cursor: int = -1


def block_codes(state: PoolState, num_hues: int, emphasis: Emphasis) -> NDArray[np.uint16]:
    """One code for each block of the pool."""
    block_size = state.header.block_size
    refs = np.asarray(state.refs)
    used = refs > 0
    level = np.clip((np.asarray(state.filled) * NUM_LEVELS + block_size - 1) // block_size - 1, 0, NUM_LEVELS - 1)
    glyph = np.where(used, LEVEL + level, np.where(np.asarray(state.key) != 0, CACHED, FREE))
    shared = refs > 1
    if shared.any():
        glyph = np.where(shared, np.minimum(SHARED + refs - 2, MANY), glyph)
    hue = np.where(used, np.asarray(state.owner) % num_hues + 1, 0)
    return _emphasised(glyph, hue, used, emphasis)


def _emphasised(
    glyph: NDArray[np.integer], hue: NDArray[np.integer], used: NDArray[np.bool_], emphasis: Emphasis
) -> NDArray[np.uint16]:
    flags = np.zeros(len(glyph), dtype=np.uint16)
    if emphasis.selected_table is not None:
        table = emphasis.selected_table
        flags[used] = DIMMED
        flags[table] = 0
        hue[table] = emphasis.selected_hue + 1
    lit = np.flatnonzero(emphasis.flash)
    if len(lit):
        kinds = emphasis.flash[lit]
        flags[lit] |= FLASH
        glyph[lit[kinds == FLASH_EVICTED]] = EVICTED
        glyph[lit[kinds == FLASH_SWAPPED]] = SWAPPED
    if emphasis.cursor >= 0:
        flags[emphasis.cursor] |= CURSOR
    codes: NDArray[np.uint16] = (glyph.astype(np.uint16) | (hue.astype(np.uint16) << HUE_SHIFT) | flags).astype(
        np.uint16
    )
    return codes


def cell_codes(state: PoolState, blocks: int, num_hues: int, emphasis: Emphasis) -> NDArray[np.uint16]:
    """One code for each cell that stands for so many blocks.

    The level is the part of the cell's blocks in use; its hue that of the first one in use. A cell without one is
    cached if any of its blocks is. Selection, change and eviction show if any block of the cell has them.
    """
    if blocks == 1:
        return block_codes(state, num_hues, emphasis)
    num_blocks = len(state.refs)
    used = _padded(np.asarray(state.refs) > 0, blocks)
    num_used = used.sum(axis=1)
    num_real = np.full(len(used), blocks)
    num_real[-1] = num_blocks - blocks * (len(used) - 1)
    any_cached = _padded(np.asarray(state.key) != 0, blocks).any(axis=1)
    level = np.clip((num_used * NUM_LEVELS + num_real - 1) // num_real - 1, 0, NUM_LEVELS - 1)
    glyph = np.where(num_used > 0, LEVEL + level, np.where(any_cached, CACHED, FREE))
    first_used = np.minimum(np.arange(len(used)) * blocks + used.argmax(axis=1), num_blocks - 1)
    hue = np.where(num_used > 0, np.asarray(state.owner)[first_used] % num_hues + 1, 0)
    flash = np.zeros(len(used), dtype=np.uint8)
    np.maximum.at(flash, np.flatnonzero(emphasis.flash) // blocks, emphasis.flash[np.flatnonzero(emphasis.flash)])
    table = emphasis.selected_table
    return _emphasised(
        glyph,
        hue,
        num_used > 0,
        Emphasis(
            flash=flash,
            selected_table=None if table is None else table // blocks,
            selected_hue=emphasis.selected_hue,
            cursor=emphasis.cursor // blocks if emphasis.cursor >= 0 else -1,
        ),
    )


def _padded(flags: NDArray[np.bool_], blocks: int) -> NDArray[np.bool_]:
    """Flags by block as rows of so many; the last row is filled up with False."""
    missing = -len(flags) % blocks
    if missing:
        flags = np.concatenate([flags, np.zeros(missing, dtype=np.bool_)])
    return flags.reshape(-1, blocks)
