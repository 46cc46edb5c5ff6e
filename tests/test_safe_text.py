from __future__ import annotations

import time
import unicodedata

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.cells import cell_len

from kvtui.safe_text import clean, fit, width, wrap

FAMILY = "👨\u200d👩\u200d👧"
ANY_TEXT = st.text(st.characters(exclude_categories=[]), max_size=60)
NASTY_PIECES = "a| |字|❤\ufe0f|🇩🇪|👍🏽|e\u0301|\x1b[31m|\n|\t|\x9b|\u202e|ᄒ|\u1161|क्षि|" + FAMILY
NASTY = st.lists(st.sampled_from(NASTY_PIECES.split("|")), max_size=20).map("".join)


def is_harmless(safe: str) -> bool:
    return all(unicodedata.category(c) not in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp") for c in safe)


@given(st.one_of(ANY_TEXT, NASTY), st.integers(-1, 40), st.sampled_from(["head", "tail"]), st.booleans())
@example(FAMILY * 5, 3, "head", False)
@example("字字字", 4, "tail", False)
def test_fitted_text_is_exactly_as_wide_as_asked_and_harmless(text, cells, keep, ascii_only):
    safe = fit(text, cells, keep=keep, ascii_only=ascii_only)

    assert cell_len(safe) == max(cells, 0)
    assert sum(max(cell_len(c), 0) for c in safe) == max(cells, 0), "no cluster may count as less than its characters"
    assert is_harmless(safe)
    if ascii_only:
        assert safe.isascii()


@example(" ⺀⺀", 3, 2, False)
@given(st.one_of(ANY_TEXT, NASTY), st.integers(1, 20), st.integers(1, 5), st.booleans())
def test_wrapped_lines_are_exactly_as_wide_as_asked_and_no_more_than_asked(text, cells, max_lines, ascii_only):
    lines = wrap(text, cells, max_lines, ascii_only=ascii_only)

    assert 1 <= len(lines) <= max_lines
    assert {cell_len(line) for line in lines} == {cells}
    assert all(is_harmless(line) for line in lines)
    if ascii_only:
        assert all(line.isascii() for line in lines)


@given(st.one_of(ANY_TEXT, NASTY))
def test_cleaning_clean_text_changes_nothing(text):
    once = clean(text)

    assert is_harmless(once)
    assert clean(once) == once
    assert width(once) == cell_len(once)


def test_control_characters_are_seen_and_never_passed_on():
    assert clean("a\x1b[31mred\x1b]0;title\x07\r\n\tb\x00\x7f") == "a␛[31mred␛]0;title␇␍⏎⇥b␀␡"
    assert clean("\x9b31m") == "\ufffd31m"


def test_ascii_text_names_control_characters_in_caret_notation_and_folds_accents():
    assert clean("a\x1b[31m\n\té “q” 字 🇩🇪 x²", ascii_only=True) == 'a^[[31m\\n\\te "q" ? ?? x2'


def test_overrides_of_the_reading_order_are_seen_and_do_nothing():
    assert clean("pay \u202eevil\u202c now") == "pay \ufffdevil\ufffd now"


def test_markup_is_text_like_any_other():
    assert clean("[red]x[/red] [@click=app.quit]y") == "[red]x[/red] [@click=app.quit]y"


def test_emoji_sequences_are_taken_apart_so_that_every_terminal_counts_the_same():
    assert clean(FAMILY) == "👨👩👧"
    assert clean("❤\ufe0f👍🏽🇩🇪") == "❤👍DE"


def test_accents_are_kept_on_letters_bounded_in_number_and_never_land_on_a_border():
    assert clean("e\u0301") == "é"
    assert clean("\u0301abc") == "abc"
    assert len(clean("q" + "\u0301" * 500)) == 3


def test_the_end_that_matters_is_kept():
    assert fit("abcdefgh", 5) == "abcd…"
    assert fit("abcdefgh", 5, keep="tail") == "…efgh"
    assert fit("abcdefgh", 5, ascii_only=True) == "abcd~"
    assert fit("ab", 5) == "ab   "
    assert fit("ab", 5, align="right") == "   ab"
    assert fit("字字字", 4) == "字… "
    assert fit("字字字", 4, keep="tail") == " …字"
    assert fit("字", 1) == "…"
    assert fit("abc", 3) == "abc"


def test_lines_break_between_words_and_at_line_breaks():
    assert wrap("the quick brown fox", 9, 5) == ["the quick", "brown fox"]
    assert wrap("one\ntwo three", 9, 5) == ["one      ", "two three"]
    assert wrap("a-very-long-word here", 6, 9) == ["a-very", "-long-", "word  ", "here  "]
    assert wrap("the quick brown fox jumps", 9, 2) == ["the quick", "brown fo…"]
    assert wrap("", 4, 2) == ["    "]
    assert wrap("abc", 0, 3) == []


@pytest.mark.parametrize("text", ["x" * 5_000_000, "\u200d" * 5_000_000], ids=["letters", "joiners"])
def test_huge_text_costs_no_more_than_what_is_shown(text):
    def cost(t: str) -> float:
        start = time.perf_counter()
        for _ in range(20):
            fit(t, 80)
            fit(t, 80, keep="tail")
            wrap(t, 80, 4)
            clean(t)
        return time.perf_counter() - start

    small = text[:8000]
    cost(small)
    assert min(cost(text) for _ in range(3)) < 20 * min(cost(small) for _ in range(3))
