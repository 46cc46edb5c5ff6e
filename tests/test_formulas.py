"""Formulas: hand-made states whose numbers are known, and what is said where there are none yet."""

from __future__ import annotations

import pytest
from small_trace import HEADER, Trace, arrived, step

from engine.trace.events import Op, Phase
from kvtui.formulas import formulas_of
from kvtui.history import History
from kvtui.waste import waste_of


def told(trace):
    return {f.name: f for f in formulas_of(trace.state, trace.history, waste_of(trace.state))}


@pytest.fixture
def two_requests():
    """Six and ten tokens in blocks of four; the first block is shared."""
    trace = Trace().take(arrived(0, 6, 10), arrived(1, 10, 60))
    return trace.take(
        step(
            0,
            [(0, Phase.PREFILL, 0, 6), (1, Phase.PREFILL, 0, 10)],
            ops=[
                (Op.ALLOCATE, 0, 0, 0),
                (Op.ALLOCATE, 1, 0, 1),
                (Op.FILL, 0, 0, 4),
                (Op.FILL, 1, 0, 2),
                (Op.HASH, 0, 77, 0),
                (Op.SHARE, 0, 1, 0),
                (Op.ALLOCATE, 2, 1, 1),
                (Op.ALLOCATE, 3, 1, 2),
                (Op.FILL, 2, 1, 4),
                (Op.FILL, 3, 1, 2),
            ],
            tokens=[(0, 1, "a"), (1, 1, "b")],
        ),
        step(1, [(0, Phase.DECODE, 5, 1), (1, Phase.DECODE, 9, 1)], tokens=[(0, 1, "a"), (1, 1, "b")]),
    )


def test_every_formula_comes_out_as_the_numbers_in_it(two_requests):
    found = told(two_requests)
    assert (found["KV cache"].numbers, found["KV cache"].value) == ("2·2·3·8·8·2·2 B", "3.0 KiB")
    assert (found["pool in use"].numbers, found["pool in use"].value) == ("4·2·2·3·8·4·2 B", "3.0 KiB")
    assert (found["blocks"].numbers, found["blocks"].value) == ("⌈6/4⌉ + ⌈10/4⌉", "5")
    assert "4 blocks are in use: 1 fewer, since blocks are shared" in found["blocks"].note
    assert (found["utilisation"].numbers, found["utilisation"].value) == ("12/(4·4)", "75.0%")
    assert (found["fragmentation"].numbers, found["fragmentation"].value) == ("1 − 12/66", "81.8%")
    assert (found["average batch"].numbers, found["average batch"].value) == ("4/2", "2.00 requests")
    assert (found["throughput"].numbers, found["throughput"].value) == ("4/0.020 s", "200.0 tokens/s")


def test_the_speed_up_is_measured_against_a_request_that_decoded_alone_and_bounded_where_none_did(two_requests):
    bound = told(two_requests)["speed-up"]
    assert (bound.numbers, bound.value) == ("0.0100 s·4/0.020 s", "≤ 2.00×")
    two_requests.take(step(2, [(0, Phase.DECODE, 6, 1)], tokens=[(0, 1, "a")]))
    measured = told(two_requests)["speed-up"]
    assert measured.value == "1.67×"
    assert "one request decoded alone" in measured.note


def test_nothing_yet_is_said_without_a_division_by_nothing():
    found = formulas_of(Trace().state, History(), waste_of(Trace().state))
    assert all(formula.value for formula in found)
    assert {f.name: f.value for f in found}["speed-up"] == "unknown"


def test_the_ascii_form_says_the_same(two_requests):
    for formula in formulas_of(two_requests.state, two_requests.history, waste_of(two_requests.state)):
        assert all(text.isascii() for text in formula.in_ascii())
    assert told(two_requests)["blocks"].in_ascii().numbers == "ceil(6/4) + ceil(10/4)"
    assert HEADER.block_size == 4
