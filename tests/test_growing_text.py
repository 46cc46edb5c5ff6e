"""Text that grows is wrapped as if it had been there at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import example, given
from hypothesis import strategies as st

from kvtui import growing_text
from kvtui.growing_text import GrowingText
from kvtui.safe_text import wrap

if TYPE_CHECKING:
    import pytest

PIECE = st.one_of(
    st.text(st.sampled_from("ab \n\r\t字é👩‍"), max_size=6),
    st.text(st.sampled_from("abcdef  "), max_size=12),
    st.text(max_size=4),
    st.sampled_from(["\r\n", "\u0301", "e", " ", "\n\n", "👩‍👩‍👧", "가", "\u1161", "\u1100"]),
)


@example(["a b\r", "\nc"], 4, False)
@example(["a", "\r ", "b"], 2, False)
@example(["aa \u200d"], 2, False)
@example(["e", "\u0301 x"], 2, False)
@example(["\u1100", "\u1161\u1161"], 2, False)
@given(st.lists(PIECE, max_size=30), st.integers(2, 12), st.booleans())
def test_lines_equal_those_of_the_whole_text_at_every_step(pieces: list[str], cells: int, ascii_only: bool) -> None:
    growing = GrowingText(cells, 10_000, ascii_only=ascii_only)
    for count in range(len(pieces) + 1):
        text = "".join(pieces[:count]).strip()
        expected = wrap(text, cells, 10_000, ascii_only=ascii_only) if text else []
        while expected and expected[-1].isspace():
            expected.pop()
        assert growing.follow(["before", *pieces[:count]], 1) == expected


def test_of_a_long_text_the_end_is_kept() -> None:
    growing = GrowingText(10, 100, ascii_only=False)
    pieces: list[str] = []
    for number in range(200):
        pieces.append(f"word{number} ")
        lines = growing.follow(pieces)
        assert f"word{number}" in lines[-1]
        assert min(100, sum(map(len, pieces))) - 30 <= sum(map(len, lines)) <= 400
    assert "word0" not in "".join(lines)


def test_another_text_is_not_mixed_with_the_one_before() -> None:
    growing = GrowingText(10, 100, ascii_only=False)
    growing.follow(["one ", "two ", "three"])
    assert growing.follow(["four"]) == ["four      "]


def test_a_word_more_wraps_no_more_than_the_last_line(monkeypatch: pytest.MonkeyPatch) -> None:
    growing = GrowingText(20, 10_000, ascii_only=False)
    pieces = ["many words that fill lines "] * 100
    growing.follow(pieces)
    wrapped: list[int] = []
    whole = growing_text.wrap_from

    def counted(paragraph: str, cells: int, *, ascii_only: bool) -> tuple[list[str], str]:
        wrapped.append(len(paragraph))
        return whole(paragraph, cells, ascii_only=ascii_only)

    monkeypatch.setattr(growing_text, "wrap_from", counted)
    growing.follow([*pieces, "word "])
    assert sum(wrapped) < 100
