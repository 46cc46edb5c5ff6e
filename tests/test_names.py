"""What a request is called."""

from __future__ import annotations

from small_trace import HEADER

from engine.trace.events import RequestArrived
from engine.trace.state import PoolState
from kvtui.names import Names


def arrivals(*names: str) -> PoolState:
    state = PoolState(HEADER)
    for number, name in enumerate(names):
        state.apply(
            RequestArrived(
                request=number,
                name=name,
                time_ns=0,
                prompt_token_ids=[1],
                prompt_pieces=["a"],
                max_tokens=4,
                temperature=0,
            )
        )
    return state


def test_a_request_is_called_by_its_name_and_by_its_number_only_where_the_name_was_taken_or_missing() -> None:
    names = Names()
    names.follow(arrivals("burst-01", "burst-02", "", "burst-01", "#0", "  ").requests)
    assert [names.of(i) for i in range(6)] == ["burst-01", "burst-02", "#2", "burst-01 #3", "#0 #4", "#5"]
    assert names.full(1) == "burst-02 #1"
    assert names.of(77) == "#77"
    assert names.longest == len("burst-01 #3")


def test_a_label_stays_as_it_was_when_another_request_of_the_name_arrives() -> None:
    names = Names()
    state = arrivals("one")
    names.follow(state.requests)
    assert names.of(0) == "one"
    names.follow(arrivals("one", "one").requests)
    assert (names.of(0), names.of(1)) == ("one", "one #1")


def test_names_of_one_kind_stay_apart_where_there_is_little_room() -> None:
    names = Names()
    names.follow(arrivals("a-question-about-it-01", "a-question-about-it-02", "x\x1b[2J").requests)
    assert names.fitted(0, 8, ascii_only=False) == "…t-it-01"[:8]
    assert names.fitted(1, 8, ascii_only=True) == "~t-it-02"[:8]
    assert "\x1b" not in names.of(2)
