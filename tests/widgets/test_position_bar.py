from __future__ import annotations

import numpy as np
import pytest

from kvtui.glyphs import ASCII, UNICODE
from kvtui.widgets.position_bar import PositionBar, rarest


def text(bar: PositionBar, *args, glyphs=UNICODE) -> str:
    return "".join(piece for piece, _ in bar.runs(glyphs, *args))


@pytest.mark.parametrize("cells", [2, 8, 61])
def test_the_ends_of_the_bar_are_the_ends_of_the_trace(cells):
    bar = PositionBar(cells, 40, 900, 40)
    assert (bar.step_of(0), bar.step_of(cells - 1), bar.step_of(-5), bar.step_of(999)) == (40, 900, 40, 900)
    assert (bar.cell_of(40), bar.cell_of(39), bar.cell_of(900), bar.cell_of(2000)) == (0, 0, cells - 1, cells - 1)
    for cell in range(cells):
        assert bar.cell_of(bar.step_of(cell)) == cell


def test_the_head_is_drawn_over_marks_and_marks_over_the_bar():
    bar = PositionBar(10, 0, 9, 4)
    marks = [-1, 0, -1, 1, 2, -1, 3, -1, -1, 4]
    assert text(bar, marks) == "━▼━×●─⇄──▌"
    assert text(bar, marks, glyphs=ASCII) == "=v=xO-%--|"
    assert ("▼", "past0") in bar.runs(UNICODE, marks), "how far it is shows among marks as well"
    assert ("▌", "mark4") in bar.runs(UNICODE, marks)
    assert "".join(piece for piece, _ in bar.marks_alone(UNICODE, marks)) == " ▼ ×! ⇄  ▌"


def test_a_window_has_its_ends_on_the_bar_also_where_it_reaches_beyond():
    bar = PositionBar(10, 10, 19, 15)
    assert text(bar, (), (12, 17)) == "━━[━━●─]──"
    assert text(bar, (), (0, 99)) == "[━━━━●───]"


@pytest.mark.parametrize("cells", [0, 1, 2])
def test_hardly_any_room_is_no_error(cells):
    for bar in (PositionBar(cells, 0, 0, -1), PositionBar(cells, 0, 5, 3), PositionBar(cells, 5, 5, 5)):
        assert len(text(bar, [0] * cells, (0, 3))) == cells


def test_of_several_kinds_in_a_cell_the_rarest_is_drawn():
    flags = np.array([0b11111, 0b00011, 0b10000, 0, 0b00110], np.uint8)
    counts = [5, 900, 1, 4, 30]
    assert rarest(flags, 0b11111, counts) == [2, 0, 4, -1, 2]
    assert rarest(flags, 0b00010, counts) == [1, 1, -1, -1, 1]
    assert rarest(flags, 0, counts) == [-1] * 5
