"""Text put together from kept pieces shows what the segments show, and only what changed is written."""

from __future__ import annotations

import re

import numpy as np
import pytest
from rich.console import Console
from rich.segment import Segment
from rich.style import Style
from textual.color import Color
from textual.strip import Strip

from kvtui.ready_strip import Ink, ReadyStrip, segments_of

CONSOLE = Console(force_terminal=True, color_system="truecolor", width=400)
_SEQUENCE = re.compile(r"\x1b\[(\d+);(\d+)H|\x1b\[(\d+)C|\x1b\[([\d;]*)m|(.)", re.DOTALL)


def segment(code: int, run: int) -> Segment:
    return Segment(chr(65 + code) * run, Style(color=f"#{code:02x}8040", bold=code % 2 == 0))


def ink() -> Ink:
    return Ink(segment, (), Color.parse("#000000"), CONSOLE)


def changes(pieces: Ink, old, new, place, lines) -> str:
    return pieces.changes(new, np.flatnonzero(old != new), place, lines)


def put(screen: list[list[tuple[str, str]]], output: str) -> int:
    """What a terminal makes of output; how many characters it put."""
    x = y = count = 0
    style = ""
    for match in _SEQUENCE.finditer(output):
        line, column, forward, sgr, char = match.groups()
        if line is not None:
            y, x = int(line) - 1, int(column) - 1
        elif forward is not None:
            x += int(forward)
        elif sgr is not None:
            style = "" if sgr in ("", "0") else sgr
        else:
            screen[y][x] = (char, style)
            x += 1
            count += 1
    return count


@pytest.mark.parametrize("seed", range(12))
def test_changes_turn_what_was_shown_into_what_is(seed) -> None:
    rng = np.random.default_rng(seed)
    rows, columns = int(rng.integers(1, 9)), int(rng.integers(1, 70))
    shape, (x, y), lines = (rows, columns), (3, 2), np.arange(rows) * 2
    old = rng.integers(0, 3, shape).astype(np.uint32)
    new = np.where(rng.random(shape) < rng.choice([0.02, 0.3, 1.0]), rng.integers(0, 5, shape), old).astype(np.uint32)
    pieces = ink()
    screen, expected = ([[(" ", "")] * 100 for _ in range(30)] for _ in range(2))
    everything = np.full(shape, 99, dtype=np.uint32)
    put(screen, changes(pieces, everything, old, (x, y), lines))
    put(expected, changes(pieces, everything, new, (x, y), lines))
    put(screen, changes(pieces, old, new, (x, y), lines))
    assert screen == expected
    for row in range(rows):
        drawn = [chr(65 + code) for code in new[row].tolist()]
        assert [char for char, _ in screen[y + 2 * row][x : x + columns]] == drawn


def test_nothing_is_written_where_nothing_changed_and_one_character_where_one_did() -> None:
    old = np.zeros((5, 50), dtype=np.uint32)
    new = old.copy()
    assert changes(ink(), old, new, (0, 0), np.arange(5)) == ""
    new[3, 20] = 4
    output = changes(ink(), old, new, (0, 0), np.arange(5))
    assert output.startswith("\x1b[4;21H")
    assert put([[(" ", "")] * 60 for _ in range(9)], output) == 1


@pytest.mark.parametrize("system", ["truecolor", "256", "standard", None])
def test_the_text_of_a_row_is_what_rendering_its_segments_gives(system) -> None:
    console = Console(force_terminal=True, color_system=system)

    def fresh(code: int, run: int) -> Segment:
        # Textual keeps a style's escape sequence with the style.
        return Segment("x" * run, Style(color=f"#{code:02x}8040"))

    codes = np.random.default_rng(1).integers(0, 4, 80).astype(np.uint32)
    row = Ink(fresh, (), Color.parse("#000000"), console).row(codes)
    assert row == Strip(segments_of(codes, fresh)).render(console)


def test_a_ready_strip_can_be_cut_joined_and_read_like_any_other() -> None:
    codes = np.random.default_rng(2).integers(0, 4, 80).astype(np.uint32)
    plain = Strip(segments_of(codes, segment), 80)
    asked: list[str] = []

    def make() -> list[Segment]:
        asked.append("segments")
        return list(segments_of(codes, segment))

    ready = ReadyStrip(make, lambda: ink().row(codes), 80)
    assert ready.cell_length == 80
    assert ready
    assert ready.render(CONSOLE) == plain.render(CONSOLE)
    assert asked == [], "a whole line needs no segments"
    assert ready.text == plain.text
    assert ready.crop(10, 30) == plain.crop(10, 30)
    assert ready.divide([7, 40, 80]) == plain.divide([7, 40, 80])
    assert Strip.join([Strip.blank(3), ready, Strip.blank(2)]) == Strip.join([Strip.blank(3), plain, Strip.blank(2)])
    assert Strip.join([ready, Strip.blank(2)]).render(CONSOLE) == Strip.join([plain, Strip.blank(2)]).render(CONSOLE)
    assert ready.apply_style(Style(underline=True)) == plain.apply_style(Style(underline=True))
    assert ready.adjust_cell_length(90) == plain.adjust_cell_length(90)
    assert asked == ["segments"]
