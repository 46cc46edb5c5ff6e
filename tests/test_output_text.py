from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.output_text import OutputText


class Letters:
    """A stream whose tokens are given as their text."""

    def __init__(self, pieces: list[str], rest: str = "") -> None:
        self.pieces = pieces
        self.rest = rest

    def push(self, token_id: int) -> str:
        return self.pieces[token_id]

    def flush(self) -> str:
        rest, self.rest = self.rest, ""
        return rest


def play(pieces: list[str], stop: tuple[str, ...], rest: str = "") -> tuple[list[str], bool]:
    """What is shown after each token and at the end, and whether a stop string came."""
    text = OutputText(Letters(pieces, rest), stop)
    shown = []
    for token_id in range(len(pieces)):
        shown.append(text.push(token_id)[1])
        if text.stopped:
            return shown, True
    shown.append(text.finish()[1])
    return shown, text.stopped


def test_without_stop_strings_text_is_shown_as_it_comes():
    assert play(["a", "", "bc"], ()) == (["a", "", "bc", ""], False)


def test_what_may_become_a_stop_string_is_held_back():
    assert play(["one E", "N", "D two"], ("END",)) == (["one ", "", ""], True)
    assert play(["one E", "N", "C", "E"], ("END",)) == (["one ", "", "ENC", "", "E"], False)


def test_a_stop_string_in_the_middle_of_a_token_ends_the_text_before_it():
    assert play(["abc. def"], (". ",)) == (["abc"], True)


@pytest.mark.parametrize("stop", [("later", "b"), ("b", "later")])
def test_the_first_stop_string_in_the_text_counts(stop: tuple[str, ...]):
    assert play(["abc later"], stop) == (["a"], True)


def test_overlapping_beginnings_are_held_as_far_as_needed():
    assert play(["aab", "aac"], ("aabaab", "aac")) == (["", "aab"], True)
    assert play(["aaa", "ab"], ("aab",)) == (["a", "a"], True)


def test_held_text_is_shown_at_the_end_once():
    text = OutputText(Letters(["wait ST"]), ("STOP",))
    assert text.push(0) == ("wait ST", "wait ")
    assert text.finish() == ("", "ST")
    assert text.finish() == ("", "")


def test_the_last_half_of_a_character_may_complete_a_stop_string():
    assert play(["a\n"], ("\n�",), rest="�") == (["a", ""], True)


def test_the_trace_gets_all_text_and_the_caller_none_of_the_stop_string():
    text = OutputText(Letters(["a<", "/s>b"]), ("</s>",))
    assert text.push(0) == ("a<", "a")
    assert text.push(1) == ("/s>b", "")
    assert text.stopped
    assert text.push(0) == ("a<", "")


@given(
    st.lists(st.text("ab.", max_size=4), max_size=8),
    st.lists(st.text("ab.", min_size=1, max_size=4), max_size=3).map(tuple),
)
def test_shown_text_is_the_text_before_the_first_stop_string(pieces: list[str], stop: tuple[str, ...]):
    shown, stopped = play(pieces, stop)
    fed = "".join(pieces[: len(shown)])
    # Text ends with the token in which a stop string is first complete, at the one that begins first then.
    before = "".join(pieces[: len(shown) - 1])
    starts = [at for s in stop if (at := fed.find(s)) >= 0]
    assert stopped == bool(starts)
    assert "".join(shown) == (fed[: min(starts)] if starts else fed)
    if stopped:
        assert not any(s in before for s in stop)


@given(st.text("ab", min_size=1, max_size=12), st.text("ab", min_size=1, max_size=5), st.data())
def test_how_text_is_cut_into_tokens_does_not_matter_without_a_stop(whole: str, stop: str, data: st.DataObject):
    while stop in whole:
        whole = whole.replace(stop, "")
    cuts = sorted({0, len(whole), *data.draw(st.lists(st.integers(0, len(whole)), max_size=4))})
    pieces = [whole[a:b] for a, b in pairwise(cuts)]
    shown, stopped = play(pieces, (stop,))
    assert (stopped, "".join(shown)) == (False, whole)
