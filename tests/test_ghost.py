"""The old way beside the new one: hand-made arrivals, and the baseline's own allocation on the same ones."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_trace import HEADER, arrived, step

from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.request import SamplingParams
from engine.simulated import simulated_engine
from engine.trace.events import Op, Phase, StepTrace
from engine.trace.state import PoolState
from kvtui.ghost import Ghost, Piece


class Told:
    """A state and a ghost that are told the same."""

    def __init__(self, header=HEADER):
        self.state = PoolState(header)
        self.ghost = Ghost(header)

    def take(self, *messages):
        for message in messages:
            self.state.apply(message)
            if isinstance(message, StepTrace):
                self.ghost.follow(self.state, [message])
        return self


def test_each_reserves_its_maximum_in_one_piece_and_who_finds_no_hole_waits_with_all_behind_it():
    told = Told().take(arrived(0, 6, 10), arrived(1, 4, 10), arrived(2, 8, 8), arrived(3, 1, 3), step(0))
    assert told.ghost.pieces == {0: Piece(0, 4), 1: Piece(4, 4)}
    assert told.ghost.waiting == {2: 4, 3: 1}, "the pool has ten blocks of four; 3 would fit, but stands behind 2"
    assert told.ghost.head == 2


def test_nobody_reserves_more_than_a_request_may_come_to():
    told = Told().take(arrived(0, 6, 1000), step(0))
    assert told.ghost.refused == {0: -(-HEADER.max_model_len // HEADER.block_size)}
    header = msgspec.structs.replace(HEADER, num_blocks=20)
    assert Told(header).take(arrived(0, 6, 1000), step(0)).ghost.pieces == {0: Piece(0, 13)}


def test_a_piece_is_free_for_the_step_after_the_one_in_which_its_request_ended():
    told = Told().take(arrived(0, 6, 10), arrived(1, 4, 10), arrived(2, 8, 8), step(0))
    told.take(step(1, [(0, Phase.DECODE, 6, 1)], finished=[(0, "length", "")]))
    assert told.ghost.pieces == {1: Piece(4, 4)}
    told.take(step(2))
    assert told.ghost.pieces == {1: Piece(4, 4), 2: Piece(0, 4)}


def test_what_the_blocks_share_lies_in_the_pieces_as_copies():
    told = Told().take(arrived(0, 6, 10), arrived(1, 6, 10))
    ops = [(Op.ALLOCATE, 0, 0, 0), (Op.FILL, 0, 0, 4), (Op.ALLOCATE, 1, 0, 1), (Op.FILL, 1, 0, 2)]
    told.take(step(0, [(0, Phase.PREFILL, 0, 6)], ops=ops))
    assert told.ghost.copies(told.state) == 0
    ops = [(Op.SHARE, 0, 1, 0), (Op.ALLOCATE, 2, 1, 1), (Op.FILL, 2, 1, 2)]
    told.take(step(1, [(1, Phase.PREFILL, 4, 2)], ops=ops))
    assert told.ghost.pieces.keys() == {0, 1}
    assert told.ghost.copies(told.state) == 4


def test_what_is_lost_inside_pieces_and_between_them_is_counted():
    told = Told().take(arrived(0, 6, 10), arrived(1, 4, 4), arrived(2, 4, 12), arrived(3, 9, 9))
    told.take(step(0, [(0, Phase.PREFILL, 0, 6), (1, Phase.PREFILL, 0, 4), (2, Phase.PREFILL, 0, 3)]))
    assert told.ghost.pieces == {0: Piece(0, 4), 1: Piece(4, 2), 2: Piece(6, 4)}
    lost = told.ghost.fragmentation(told.state)
    assert (lost.reserved_slots, lost.filled_slots, lost.free) == (40, 13, 0)
    told.take(step(1, [(1, Phase.DECODE, 4, 1)], finished=[(1, "stop", "")]), step(2))
    lost = told.ghost.fragmentation(told.state)
    assert (lost.free, lost.largest_hole) == (2, 2)
    assert told.ghost.head == 3
    assert list(told.ghost.holes) == [(4, 2)]


def test_a_request_that_can_never_fit_does_not_hold_up_the_others_and_an_abort_frees_at_once():
    told = Told().take(arrived(0, 6, 44), arrived(1, 30, 5), arrived(2, 4, 12), step(0))
    assert told.ghost.refused == {0: 13}
    assert told.ghost.pieces == {1: Piece(0, 9)}
    told.take(step(1, finished=[(1, "abort", ""), (0, "abort", "")]))
    assert told.ghost.pieces == {2: Piece(0, 4)}
    assert told.ghost.refused == {}


def engine_trace(policy, seed, requests, *, num_blocks=24, max_num_seqs=4):
    """Messages of a real schedule, `requests` as (prompt words, max_tokens, steps until the next, abort)."""
    config = EngineConfig(
        cache=CacheConfig(block_size=4, num_blocks=num_blocks),
        scheduler=SchedulerConfig(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=4096, max_model_len=80, policy=policy
        ),
        seed=seed,
    )
    engine = simulated_engine(config, eos_rate=0.05)
    messages: list[object] = []
    engine.add_sink(messages.append)
    chance = random.Random(seed)
    for words, max_tokens, wait, abort in requests:
        number = engine.add_request(" ".join(["page"] * words), SamplingParams(max_tokens=max_tokens))
        for _ in range(wait):
            engine.step()
        if abort:
            engine.abort(chance.randint(0, number))
    while engine.has_work:
        engine.step()
    return messages[0], messages[1:]


REQUESTS = st.lists(
    st.tuples(st.integers(1, 40), st.integers(1, 40), st.integers(0, 6), st.booleans()), min_size=1, max_size=25
)


def check_whole(ghost):
    """Pieces and holes are the pool, each block once."""
    spans = sorted([(p.start, p.num) for p in ghost.pieces.values()] + list(ghost.holes))
    at = 0
    for start, num in spans:
        assert start == at
        assert num > 0
        at += num
    assert at == ghost.header.num_blocks


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 99), REQUESTS, st.sampled_from([2, 4, 16]))
def test_first_fit_is_the_baselines_own_allocation_on_the_same_arrivals(seed, requests, max_num_seqs):
    header, messages = engine_trace("contiguous", seed, requests, max_num_seqs=max_num_seqs)
    told = Told(header)
    for message in messages:
        told.take(message)
        if isinstance(message, StepTrace):
            tables = {number: request.table for number, request in told.state.requests.items() if request.table}
            assert {n: list(range(p.start, p.start + p.num)) for n, p in told.ghost.pieces.items()} == tables
            assert set(told.ghost.waiting) == {
                n for n, r in told.state.requests.items() if not r.status.is_finished and not r.table
            }


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 99), REQUESTS, st.integers(1, 7))
def test_pieces_never_overlap_and_a_jump_comes_to_the_same_as_following(seed, requests, at_once):
    header, messages = engine_trace("paged", seed, requests)
    state, ghost, jumped = PoolState(header), Ghost(header), Ghost(header)
    steps = []
    for message in messages:
        state.apply(message)
        if not isinstance(message, StepTrace):
            continue
        steps.append(message)
        if len(steps) == at_once:
            ghost.follow(state, steps)
            steps = []
            check_whole(ghost)
            live = {n for n, r in state.requests.items() if not r.status.is_finished}
            assert ghost.pieces.keys() | ghost.waiting.keys() | ghost.refused.keys() == live
            jumped.rebuild(state)
            assert (jumped.pieces, jumped.waiting, jumped.refused) == (ghost.pieces, ghost.waiting, ghost.refused)


@pytest.mark.parametrize("max_tokens", [2**40, -5])
def test_impossible_lengths_in_a_made_up_trace_are_bounded(max_tokens):
    told = Told().take(arrived(0, 3, max_tokens), step(0))
    assert told.ghost.pieces.keys() | told.ghost.refused.keys() == {0}
    check_whole(told.ghost)
