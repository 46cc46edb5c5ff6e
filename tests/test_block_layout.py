"""Where blocks are drawn: all of them, at any size, and back from a place to its block."""

from __future__ import annotations

import numpy as np
import pytest

from kvtui.block_layout import fitting_level, lay_out, levels_for

SIZES = [(1, 1), (20, 4), (52, 9), (76, 12), (104, 22), (190, 60)]
POOLS = [1, 7, 64, 512, 5000, 100_000, 1_000_000]


@pytest.mark.parametrize(("width", "height"), SIZES)
@pytest.mark.parametrize("num_blocks", POOLS)
def test_the_whole_pool_is_visible_at_the_level_that_is_chosen(num_blocks, width, height) -> None:
    levels, fitting = levels_for(num_blocks, width, height), fitting_level(num_blocks, width, height)
    layout = lay_out(num_blocks, levels[fitting], width, height)
    assert layout.num_lines <= height
    assert layout.gutter + len(layout.cell_of_char) <= width
    assert layout.columns * layout.num_rows * layout.level.blocks >= num_blocks


@pytest.mark.parametrize(("width", "height"), SIZES[1:])
@pytest.mark.parametrize("num_blocks", POOLS[:5])
@pytest.mark.parametrize("zoom", range(5))
def test_every_cell_is_found_where_it_is_drawn_and_nothing_between_them(num_blocks, width, height, zoom) -> None:
    levels = levels_for(num_blocks, width, height)
    layout = lay_out(num_blocks, levels[min(zoom, len(levels) - 1)], width, height)
    found = set()
    for line in range(layout.num_lines):
        for x in range(width):
            block = layout.block_at(x, line)
            if block is not None:
                found.add(block)
                assert layout.line_of_block(block) == line
                assert layout.cell_of_char[x - layout.gutter] >= 0
    assert found == set(range(0, num_blocks, layout.level.blocks))
    assert layout.block_at(-1, 0) is None
    assert layout.block_at(width + 5, 0) is None
    assert layout.block_at(layout.gutter, layout.num_lines + 3) is None


def test_cells_stand_in_groups_of_eight_with_round_addresses() -> None:
    layout = lay_out(512, levels_for(512, 76, 12)[3], 76, 12)
    assert layout.columns == 64
    gaps = np.flatnonzero(layout.cell_of_char < 0).tolist()
    assert gaps == [8 + 9 * i for i in range(7)]


@pytest.mark.parametrize(("height", "columns"), [(13, 64), (12, 64), (11, 72)])
def test_addresses_are_round_where_the_pool_fits_as_well_to_the_last_line(height, columns) -> None:
    one_cell_a_block = levels_for(768, 90, height)[3]
    layout = lay_out(768, one_cell_a_block, 90, height)
    assert layout.columns == columns
    assert layout.num_lines == 768 // columns + (768 % columns > 0) <= height


@pytest.mark.parametrize("pixels", [False, True])
def test_zooming_out_ends_with_one_cell_for_the_whole_pool(pixels) -> None:
    for num_blocks in POOLS:
        for width, height in SIZES:
            levels = levels_for(num_blocks, width, height, pixels)
            assert levels[-1].blocks_per_cell >= num_blocks
            assert [level.blocks_per_cell for level in levels] == sorted(level.blocks_per_cell for level in levels)


@pytest.mark.parametrize("pixels", [False, True])
@pytest.mark.parametrize(("width", "height"), [(104, 40), (160, 57), (60, 14)])
@pytest.mark.parametrize("num_blocks", [100_000, 777_777, 1_000_000, 4_000_000])
def test_a_large_pool_fills_the_place_to_its_edges(num_blocks, width, height, pixels) -> None:
    levels = levels_for(num_blocks, width, height, pixels)
    layout = lay_out(num_blocks, levels[fitting_level(num_blocks, width, height, pixels)], width, height)
    assert layout.gutter + len(layout.cell_of_char) == width
    assert 0.85 * height <= layout.num_lines <= height


def test_a_pool_that_cannot_be_seen_whole_leaves_no_columns_empty() -> None:
    layout = lay_out(1_000_000, levels_for(1_000_000, 108, 40)[3], 108, 40)
    assert layout.columns == 88, "as many whole groups as fit"
