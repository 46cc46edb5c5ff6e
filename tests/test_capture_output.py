"""What a process prints, as lines."""

from __future__ import annotations

import pytest

from kvtui.capture_output import MAX_LINE_CHARACTERS, MAX_LINES, LineAssembler, OutputCapture


@pytest.mark.parametrize(
    ("pieces", "lines", "rest"),
    [
        (["one\ntwo\n"], ["one", "two"], ""),
        (["o", "ne\nt", "wo"], ["one"], "two"),
        (["a\r\nb\r\n"], ["a", "b"], ""),
        (["a\r", "\nb\n"], ["a", "b"], ""),
        (["10%\r20%\r", "30%\r"], [], "30%"),
        (["10%\r20%\rdone\n"], ["done"], ""),
        (["\n\n"], ["", ""], ""),
        ([""], [], ""),
    ],
)
def test_text_becomes_lines_and_of_a_bar_only_the_last_state_stays(pieces, lines, rest) -> None:
    assembler = LineAssembler()
    got = [line for piece in pieces for line in assembler.feed(piece)]
    assert got == lines
    assert assembler.flush() == rest
    assert assembler.flush() == ""


def test_a_bar_that_never_ends_its_line_takes_no_memory() -> None:
    assembler = LineAssembler()
    for i in range(10_000):
        assert list(assembler.feed(f"{i}%\r")) == []
    assert assembler.flush() == "9999%"


def test_a_line_without_an_end_is_cut() -> None:
    assembler = LineAssembler()
    got = list(assembler.feed("x" * (MAX_LINE_CHARACTERS * 2 + 5)))
    assert [len(line) for line in got] == [MAX_LINE_CHARACTERS] * 2
    assert assembler.flush() == "x" * 5
    assert max(map(len, assembler.feed("y" * 20_000 + "\n"))) == MAX_LINE_CHARACTERS


def test_only_the_newest_lines_are_kept_and_all_are_counted() -> None:
    capture = OutputCapture()
    for i in range(MAX_LINES + 10):
        capture.add(str(i))
    assert capture.num_lines == MAX_LINES + 10
    assert capture.tail(2) == [str(MAX_LINES + 8), str(MAX_LINES + 9)]
    assert capture.tail(0) == []
    assert len(capture.tail(10**6)) == MAX_LINES


def test_lines_after_the_mark_are_told_from_those_before() -> None:
    capture = OutputCapture()
    capture.add("on screen")
    assert capture.since_mark() == []
    capture.mark()
    capture.add("afterwards")
    assert capture.since_mark() == ["afterwards"]
