"""The map under the grid: the part in sight stands in brackets, and every column leads to the blocks that it shows."""

from __future__ import annotations

import msgspec
import pytest
from panel_session import PALETTE

from engine.simulated import simulated_engine
from engine.trace.state import PoolState
from kvtui.block_order import OrderKeeper
from kvtui.glyphs import UNICODE
from kvtui.widgets.minimap import Minimap


def map_of(num_blocks: int, width: int, view: tuple[int, int], words: str = "") -> tuple[Minimap, str]:
    state = PoolState(msgspec.structs.replace(simulated_engine().header, num_blocks=num_blocks))
    shown = Minimap()
    assert shown.look_at(state, OrderKeeper(), 7, width, view, words)
    strip = shown.strip(PALETTE, UNICODE)
    assert strip is not None
    return shown, strip.text


@pytest.mark.parametrize(
    ("view", "line"),
    [
        ((0, 100), "[··········]··········"),
        ((0, 101), "[···········]·········"),
        ((95, 105), "·········[··]·········"),
        ((30, 31), "···[·]················"),
        ((190, 200), "···················[·]"),
    ],
)
def test_the_cells_of_all_blocks_in_sight_stand_in_brackets(view, line) -> None:
    assert map_of(200, 22, view)[1] == line


@pytest.mark.parametrize("view", [(0, 50), (60, 90), (150, 200)])
def test_a_column_stands_for_the_blocks_of_its_cell(view) -> None:
    shown, line = map_of(200, 22, view)
    cells = [x for x, char in enumerate(line) if char not in "[]"]
    assert [shown.place_at(x) for x in cells] == list(range(0, 200, 10))
    assert [shown.place_at(line.index(bracket)) in range(view[0], view[1]) for bracket in "[]"] == [True, True]
    assert shown.place_at(22) is None


def test_the_words_are_left_out_where_hardly_any_cell_would_be_left() -> None:
    assert map_of(200, 50, (0, 20), "1 to 20 of 200")[1].endswith("1 to 20 of 200")
    assert "of" not in map_of(200, 30, (0, 20), "1 to 20 of 200")[1]
