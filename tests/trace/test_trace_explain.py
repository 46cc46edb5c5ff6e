"""Sentences for decisions: the numbers are in them, and no decision is too strange for one."""

import pytest

from engine.trace.events import Decision, DecisionKind, Reason
from engine.trace.explain import long, short

CASES = [
    (
        Decision(DecisionKind.WAITS, 12, Reason.NO_BLOCKS, {"needs": 6, "free": 4}),
        "waits: needs 6 blocks, 4 free",
        "Request 12 waits: its tokens need 6 blocks, but only 4 can be taken.",
    ),
    (
        Decision(DecisionKind.ADMITTED, 3, Reason.FITS, {"needs": 1, "free": 9, "cached_tokens": 32}),
        "admitted: takes 1 block of 9 free",
        "Request 3 is admitted: it takes 1 new block of the 9 free ones; 32 tokens of it came from the prefix cache.",
    ),
    (
        Decision(DecisionKind.WAITS, 3, Reason.BEHIND, {"ahead": 2}),
        "waits: behind #2",
        "Request 3 waits: first come, first served, and request 2 is ahead of it.",
    ),
    (
        Decision(DecisionKind.REFUSED, 1, Reason.TOO_LONG, {"tokens": 3000, "limit": 2048}),
        "refused: 3,000 tokens, limit 2,048",
        "Request 1 is refused: its prompt has 3,000 tokens, and the longest request is 2,048 (max_model_len).",
    ),
    (
        Decision(DecisionKind.FAILED, 1, Reason.OUTGREW_POOL, {"needs": 5, "pool": 4}),
        "failed: needs 5 blocks, pool has 4",
        "Request 1 failed: alone in the pool it needs 5 blocks, and the whole pool has 4.",
    ),
    (
        Decision(DecisionKind.WAITS, 5, Reason.NO_HOLE, {"needs": 12, "largest_hole": 8, "free": 20}),
        "waits: needs 12 in a row, hole 8, 20 free",
        (
            "Request 5 waits: it reserves 12 blocks in a row for the longest it can come to, "
            "and the largest hole has 8 of the 20 free ones."
        ),
    ),
    (
        Decision(DecisionKind.WAITS, 5, Reason.BATCH_RUNNING, {"running": 1, "batch": 4}),
        "waits: 1 of the batch of 4 still run",
        "Request 5 waits: a static batch takes in nobody until all of it is done, and 1 of its 4 requests still run.",
    ),
]


@pytest.mark.parametrize(("decision", "in_a_cell", "alone"), CASES)
def test_a_decision_is_one_sentence_with_its_numbers(decision, in_a_cell, alone):
    assert short(decision) == in_a_cell
    assert long(decision) == alone


NUMBERS = {
    Reason.FITS: ("needs", "free"),
    Reason.SWAPPED_IN: ("swapped",),
    Reason.FORKED: ("parent", "shared"),
    Reason.SWAPPED_OUT: ("needs", "free", "to", "released", "swapped"),
    Reason.SWAPPED_OUT_ITSELF: ("needs", "free", "released", "swapped"),
    Reason.PARENT_ENDED: ("parent",),
    Reason.NO_BLOCKS: ("needs", "free"),
    Reason.NO_HOLE: ("needs", "largest_hole", "free"),
    Reason.BATCH_RUNNING: ("running", "batch"),
    Reason.RESERVATION_NEVER_FITS: ("needs", "pool"),
    Reason.SEQUENCE_CAP: ("running", "limit"),
    Reason.TOKEN_BUDGET: ("scheduled", "limit"),
    Reason.BEHIND: ("ahead",),
    Reason.GAVE_WAY: ("needs", "free", "to", "released"),
    Reason.GAVE_WAY_TO_ITSELF: ("needs", "free", "released"),
    Reason.NEVER_FITS: ("needs", "pool"),
    Reason.TOO_LONG: ("tokens", "limit"),
    Reason.EMPTY_PROMPT: (),
    Reason.OUTGREW_POOL: ("needs", "pool"),
    Reason.STEP_FAILED: (),
}


@pytest.mark.parametrize("reason", Reason)
def test_every_reason_tells_all_numbers_that_it_carries(reason):
    numbers = {name: 101 + at for at, name in enumerate(NUMBERS[reason])}
    sentence = long(Decision(DecisionKind.WAITS, 7, reason, numbers))
    assert all(str(number) in sentence for number in numbers.values()), sentence
    assert sentence.startswith("Request 7 waits: ")
    assert sentence.endswith(".")
    assert len(short(Decision(DecisionKind.WAITS, 7, reason, numbers))) <= 60


@pytest.mark.parametrize("kind", [*DecisionKind, -1, 99])
@pytest.mark.parametrize("reason", [*Reason, "", "\x1b[31m" * 1000, "{needs.__class__}"])
def test_decisions_without_numbers_or_of_unknown_kinds_have_a_bounded_sentence(kind, reason):
    decision = Decision(kind, 1, reason, {})
    assert 0 < len(short(decision)) < 400
    assert 0 < len(long(decision)) < 400


def test_requests_are_called_by_their_names_where_somebody_knows_them():
    names = {2: "ask-2", 3: "ask-3"}
    behind = Decision(DecisionKind.WAITS, 3, Reason.BEHIND, {"ahead": 2})
    assert short(behind, names.__getitem__) == "waits: behind ask-2"
    assert long(behind, names.__getitem__) == "ask-3 waits: first come, first served, and ask-2 is ahead of it."
