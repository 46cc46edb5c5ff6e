"""Where each block of the pool is drawn: cells, groups, rows and their addresses.

A level says how wide a cell is, how far rows are apart, and how many blocks a cell (or one of two pixels stacked in it)
stands for. The roomiest level at which the whole pool is visible is the one to start from; zooming moves along the
levels. Where cells stand for many blocks, that level's scale lets the pool fill the place; the scales around it are
powers of two. Blocks are counted here by their place in the grid's order, which is the address unless another was
chosen.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

GROUP = 8
"""Cells between two gaps, so that the eye can count."""

_MIN_WIDTH_FOR_ADDRESSES = 28

_LEAST_ZOOM = 1.5
"""Between the scale that fills the place and the next one."""


class Scale(NamedTuple):
    """What a cell of the grid is.

    Attributes:
        blocks: Blocks that it stands for.
        pixels: Pixels stacked in it.
        roomy: Whether cells stand apart.
    """

    blocks: int = 1
    pixels: int = 1
    roomy: bool = False


@dataclass(frozen=True, slots=True)
class Level:
    """One zoom level.

    Attributes:
        cell: Characters a cell takes; the last one stays blank where there are more than one.
        pitch: Lines from one row to the next.
        blocks: Blocks that a unit stands for: a cell, or a pixel where pixels are stacked.
        stacked: Units above each other in one cell: 1, or 2 where half blocks are drawn as pixels.
    """

    cell: int
    pitch: int
    blocks: int
    stacked: int = 1

    @property
    def blocks_per_cell(self) -> int:
        """Blocks that a cell stands for, all its pixels together."""
        return self.blocks * self.stacked

    @property
    def grouped(self) -> bool:
        """Whether gaps help to count: only where one cell is one block."""
        return self.blocks_per_cell == 1


def levels_for(num_blocks: int, width: int, height: int, pixels: bool = False) -> list[Level]:
    """All levels that make sense for a pool in a place of some size, from the roomiest to one cell for the whole pool.

    Args:
        num_blocks: Of the pool.
        width: Of the place, in characters.
        height: Likewise.
        pixels: Draw those at which a cell stands for several blocks as pixels, two in a cell, each for half of them.
    """
    stacked = 2 if pixels else 1
    filling = _filling_scale(num_blocks, width, height, stacked)
    scales = []
    blocks = 1 if pixels else 2
    while blocks * stacked < num_blocks * 2:
        if not blocks / _LEAST_ZOOM < filling < blocks * _LEAST_ZOOM:
            scales.append(blocks)
        blocks *= 2
    if num_blocks > 1 and filling * stacked > 1:
        scales = sorted([*scales, filling])
    roomy = [Level(3, 2, 1), Level(3, 1, 1), Level(2, 1, 1), Level(1, 1, 1)]
    return roomy + [Level(1, 1, blocks, stacked) for blocks in scales]


def _filling_scale(num_blocks: int, width: int, height: int, stacked: int) -> int:
    """The fewest blocks of a unit with which the whole pool is visible, in two digits: rounded up, so that it is."""
    cells = (width - _gutter(num_blocks, width)) * height
    blocks = -(-num_blocks // max(1, cells * stacked))
    unit: int = 10 ** max(0, len(str(blocks)) - 2)
    return -(-blocks // unit) * unit


@dataclass(frozen=True)
class BlockLayout:
    """The grid at one level and one width.

    Attributes:
        columns: Cells in a row, as many as fit. Where a cell is one block they stand in whole groups, and where the
            pool fits as well, their number is a power of two, so that addresses are round.
        gutter: Characters for the address in front of a row; 0 where there is no room for it.
    """

    num_blocks: int
    level: Level
    width: int
    columns: int
    gutter: int

    @property
    def num_units(self) -> int:
        """Cells, or pixels, that stand for at least one block."""
        return -(-self.num_blocks // self.level.blocks)

    @property
    def units_per_row(self) -> int:
        """Cells, or pixels, of one line."""
        return self.columns * self.level.stacked

    @property
    def num_rows(self) -> int:
        """Rows of cells."""
        return -(-self.num_units // self.units_per_row)

    @property
    def num_lines(self) -> int:
        """Lines of text, blank ones between rows included."""
        return (self.num_rows - 1) * self.level.pitch + 1

    def rows_between(self, first_line: int, num_lines: int) -> tuple[int, int]:
        """The rows drawn on some lines: the first one, and the one after the last."""
        pitch = self.level.pitch
        start = min(max(0, -(-first_line // pitch)), self.num_rows)
        stop = min(max(0, -(-(first_line + num_lines) // pitch)), self.num_rows)
        return start, max(start, stop)

    def row_of_line(self, line: int) -> int | None:
        """The row drawn on a line, if any."""
        row, offset = divmod(line, self.level.pitch)
        return row if offset == 0 and 0 <= row < self.num_rows else None

    def line_of_block(self, block: int) -> int:
        """The line that a block is drawn on."""
        return block // (self.units_per_row * self.level.blocks) * self.level.pitch

    def block_at(self, x: int, line: int) -> int | None:
        """The first block of the cell at a place, if there is one."""
        row = self.row_of_line(line)
        x -= self.gutter
        if row is None or not 0 <= x < len(self.cell_of_char):
            return None
        column = int(self.cell_of_char[x])
        if column < 0:
            return None
        unit = row * self.units_per_row + column
        return unit * self.level.blocks if unit < self.num_units else None

    @cached_property
    def cell_of_char(self) -> NDArray[np.int32]:
        """For each character of a row after the gutter, the column of its cell, or -1 in a gap."""
        chars: list[int] = []
        for column in range(self.columns):
            if column and column % GROUP == 0 and self.level.grouped:
                chars.append(-1)
            chars.extend([column] * max(1, self.level.cell - 1))
            if self.level.cell > 1:
                chars.append(-1)
        while chars[-1] < 0:
            chars.pop()
        return np.array(chars, dtype=np.int32)

    @cached_property
    def is_second_char(self) -> NDArray[np.bool_]:
        """For each character of a row after the gutter, whether it repeats the cell to its left."""
        cells = self.cell_of_char
        second = np.zeros(len(cells), dtype=np.bool_)
        second[1:] = (cells[1:] == cells[:-1]) & (cells[1:] >= 0)
        return second


def _columns_at(level: Level, room: int) -> int:
    """Cells that fit beside each other: whole groups where one fits."""
    if not level.grouped:
        return max(1, room)
    group = GROUP * level.cell + 1
    groups = (room + (2 if level.cell > 1 else 1)) // group
    return groups * GROUP if groups else max(1, (room + (level.cell > 1)) // level.cell)


def _gutter(num_blocks: int, width: int) -> int:
    """Characters for addresses."""
    return len(str(max(0, num_blocks - 1))) + 1 if width >= _MIN_WIDTH_FOR_ADDRESSES else 0


def lay_out(num_blocks: int, level: Level, width: int, height: int) -> BlockLayout:
    """The grid of a level in a place of some size; it may be taller than the place."""
    gutter = _gutter(num_blocks, width)
    most = _columns_at(level, max(1, width - gutter))
    full = BlockLayout(num_blocks, level, width, most, gutter)
    if not level.grouped:
        return full
    round_columns = 1 << (most.bit_length() - 1)
    round_layout = BlockLayout(num_blocks, level, width, round_columns, gutter)
    return round_layout if round_layout.num_lines <= height else full


def fitting_level(num_blocks: int, width: int, height: int, pixels: bool = False) -> int:
    """Index (in `levels_for`) of the roomiest level at which the whole pool is visible."""
    levels = levels_for(num_blocks, width, height, pixels)
    for index, level in enumerate(levels):
        layout = lay_out(num_blocks, level, width, height)
        if layout.num_lines <= height and layout.gutter + len(layout.cell_of_char) <= width:
            return index
    return len(levels) - 1
