"""Words of the inspector that flow over lines: whole groups, joints between them only, and an end that says so."""

from __future__ import annotations

import pytest

from kvtui.widgets.spans import LABEL, MOST_LINES, flowing

JOINT = (" · ", "muted")


def texts(rows) -> list[str]:
    return ["".join(text for text, _ in row) for row in rows]


def groups(*words: str):
    return [((word, "text"),) for word in words]


@pytest.mark.parametrize(("width", "lines"), [(9, ["abc · def", " " * LABEL + "ghi"]), (8, ["abc"])])
def test_a_joint_needs_room_as_well(width, lines) -> None:
    assert texts(flowing(groups("abc", "def", "ghi"), JOINT, width))[: len(lines)] == lines


def test_a_label_stands_in_front_of_the_first_line_and_the_others_begin_below_its_text() -> None:
    assert texts(flowing(groups("abcdef", "ghijkl"), JOINT, LABEL + 8, "took")) == ["took    abcdef", "        ghijkl"]
    assert flowing([], JOINT, 20, "took") == []


def test_what_does_not_fit_into_the_most_lines_makes_the_last_one_too_long_for_the_panel() -> None:
    width = LABEL + 6
    words = ["abcdef"] * MOST_LINES
    assert all(len(line) <= width for line in texts(flowing(groups(*words), JOINT, width, "took")))
    rows = texts(flowing(groups(*words, "more"), JOINT, width, "took"))
    assert len(rows) == MOST_LINES
    assert [len(line) > width for line in rows] == [False] * (MOST_LINES - 1) + [True]
