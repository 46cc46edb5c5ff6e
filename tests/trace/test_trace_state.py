"""The fold: what each message does to the state, and that nothing in a trace can break it."""

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trace_builder import (
    MODEL,
    TraceBuilder,
    admitted,
    allocate,
    arrived,
    evict,
    fill,
    hashed,
    make_header,
    release,
    share,
    simulated_trace,
)

from engine.request import RequestStatus
from engine.trace import state as state_module
from engine.trace.block_fold import MAX_VIOLATIONS
from engine.trace.events import (
    NO_BLOCK,
    BatchMember,
    BlockOp,
    Counters,
    Decision,
    DecisionKind,
    Finish,
    NewToken,
    Op,
    Phase,
    Reason,
    StepTrace,
)
from engine.trace.invariants import check, quick_check
from engine.trace.state import PoolState


def clean(state):
    return check(state) == [] and state.violations == [] and quick_check(state) == []


def test_a_new_state_is_an_empty_pool_before_its_first_step():
    state = PoolState(make_header())
    assert (state.used, state.cached, state.free, state.step) == (0, 0, 8, -1)
    assert state.owner.tolist() == [-1] * 8
    assert state.free_order.tolist() == list(range(8))
    assert state.last_step is None
    assert clean(state)


def test_prefill_gives_blocks_to_their_owner_and_fills_them():
    build = TraceBuilder()
    build.arrive(0, num_tokens=6)
    build.prefill(0, [0, 1], 6)
    state = build.state
    request = state.requests[0]
    assert state.table(0) == request.table == [0, 1]
    assert state.owner[:3].tolist() == [0, 0, -1]
    assert state.logical[:3].tolist() == [0, 1, -1]
    assert state.filled[:3].tolist() == [4, 2, 0]
    assert (state.used, state.free) == (2, 6)
    assert request.status is RequestStatus.RUNNING
    assert (request.num_computed, request.num_prompt_tokens, request.num_output_tokens) == (6, 6, 1)
    assert (request.last_phase, request.last_scheduled, request.last_batch) == (Phase.PREFILL, 6, 0)
    assert (request.arrival_ns, request.admitted_ns, request.first_token_ns) == (1000, 0, 86)
    assert clean(state)


def test_the_text_of_a_block_is_that_of_its_slots():
    build = TraceBuilder()
    build.arrive(0, num_tokens=6)
    build.prefill(0, [3, 5], 6, text=" new")
    assert build.state.block_text(3) == [" w0", " w1", " w2", " w3"]
    assert build.state.block_text(5) == [" w4", " w5"]
    build.step(fill(5, 0, 3), batch=[(0, Phase.DECODE, 6, 1)], tokens=[(0, 8, "er")])
    assert build.state.block_text(5) == [" w4", " w5", " new"]
    assert build.state.block_text(0) == build.state.block_text(-1) == build.state.block_text(99) == []


def test_a_hashed_block_is_cached_after_its_release_and_keeps_its_text_until_it_is_evicted():
    build = TraceBuilder()
    build.arrive(0)
    build.prefill(0, [2], 4)
    build.step(hashed(2, -77), release(2, 0), finished=[(0, "stop", "")])
    state = build.state
    assert (state.used, state.cached, state.free) == (0, 1, 7)
    assert (state.key[2], state.filled[2], state.last_owner[2], state.owner[2]) == (-77, 4, 0, -1)
    assert state.block_text(2) == [" w0", " w1", " w2", " w3"]
    assert clean(state)
    build.arrive(1)
    build.step(evict(2, -77), allocate(2, 1, 0), decisions=[admitted(1)])
    assert (state.used, state.cached, state.free) == (1, 0, 7)
    assert (state.key[2], state.filled[2], state.owner[2], state.last_op[2]) == (0, 0, 1, Op.ALLOCATE)
    assert state.block_text(2) == []
    assert clean(state)


def test_a_block_released_without_a_key_is_free_and_empty():
    build = TraceBuilder()
    build.arrive(0)
    build.prefill(0, [2], 3)
    build.step(release(2, 0), finished=[(0, "abort", "")])
    state = build.state
    assert (state.used, state.cached, state.free, state.filled[2]) == (0, 0, 8, 0)
    assert clean(state)


def test_released_blocks_queue_behind_all_that_were_free_in_the_order_of_their_release():
    build = TraceBuilder()
    build.arrive(0, num_tokens=12)
    build.prefill(0, [0, 1, 2], 12)
    build.step(release(2, 0), release(1, 0), release(0, 0), finished=[(0, "stop", "")])
    assert np.argsort(build.state.free_order).tolist() == [3, 4, 5, 6, 7, 2, 1, 0]


def test_a_shared_block_goes_to_its_longest_holder_when_its_owner_lets_go():
    build = TraceBuilder()
    build.arrive(0, 1, 2)
    build.prefill(0, [0], 4)
    build.step(hashed(0, 5))
    for request in (1, 2):
        build.step(share(0, request, 0), decisions=[admitted(request, cached=4)])
    state = build.state
    assert (state.refs[0], state.owner[0], state.used) == (3, 0, 1)
    assert clean(state)
    build.step(release(0, 0), finished=[(0, "stop", "")])
    assert (state.refs[0], state.owner[0]) == (2, 1)
    build.step(release(0, 1), finished=[(1, "stop", "")])
    assert (state.refs[0], state.owner[0]) == (1, 2)
    build.step(release(0, 2), finished=[(2, "stop", "")])
    assert (state.refs[0], state.owner[0], state.last_owner[0], state.cached) == (0, -1, 2, 1)
    assert clean(state)


def test_a_holder_between_others_can_let_go_first():
    build = TraceBuilder()
    build.arrive(0, 1, 2)
    build.prefill(0, [0], 4)
    for request in (1, 2):
        build.step(share(0, request, 0), decisions=[admitted(request, cached=4)])
    build.step(release(0, 1), finished=[(1, "abort", "")])
    assert build.state.owner[0] == 0
    build.step(release(0, 0), finished=[(0, "abort", "")])
    assert build.state.owner[0] == 2
    assert clean(build.state)


def test_a_prefix_hit_on_a_cached_block_makes_its_taker_the_owner():
    build = TraceBuilder()
    build.arrive(0, 1)
    build.prefill(0, [0], 4)
    build.step(hashed(0, 9), release(0, 0), finished=[(0, "stop", "")])
    build.step(share(0, 1, 0), allocate(1, 1, 1), decisions=[admitted(1, cached=4)])
    state = build.state
    assert (state.owner[0], state.refs[0], state.cached, state.used) == (1, 1, 0, 2)
    assert state.requests[1].num_cached == state.requests[1].num_computed == 4
    assert clean(state)


def test_copy_on_write_puts_another_block_in_the_same_place():
    build = TraceBuilder()
    build.arrive(0, 1)
    build.prefill(0, [0], 3)
    build.step(share(0, 1, 0), decisions=[admitted(1, cached=3)])
    build.step(
        allocate(1, 1, 0),
        BlockOp(Op.COPY, 0, 1, 3),
        release(0, 1),
        fill(1, 1, 4),
        batch=[(1, Phase.DECODE, 3, 1)],
    )
    state = build.state
    assert state.table(1) == [1]
    assert (state.refs[0], state.refs[1], state.filled[1], state.last_op[1]) == (1, 1, 4, Op.FILL)
    assert clean(state)


def test_a_place_taken_over_without_release_is_named():
    build = TraceBuilder()
    build.arrive(0)
    build.prefill(0, [0], 4)
    build.step(allocate(1, 0, 0), fill(1, 0, 4))
    assert [(v.name, v.block, v.step) for v in build.state.violations] == [("tables", 0, 1)]


def test_a_release_from_the_middle_leaves_a_hole_and_from_the_tail_none():
    build = TraceBuilder(make_header(model=msgspec.structs.replace(MODEL, sliding_window=5)))
    build.arrive(0, num_tokens=12)
    build.prefill(0, [0, 1, 2], 12)
    build.step(release(0, 0))
    assert build.state.table(0) == [NO_BLOCK, 1, 2]
    assert clean(build.state)
    build.step(release(1, 0))
    build.step(release(2, 0))
    assert build.state.table(0) == []


def test_a_table_may_begin_behind_its_window_and_be_filled_in_afterwards():
    build = TraceBuilder(make_header(model=msgspec.structs.replace(MODEL, sliding_window=5)))
    build.arrive(0, 1, num_tokens=20)
    build.prefill(0, [0, 1, 2, 3, 4], 20)
    build.step(release(0, 0), release(1, 0), release(2, 0))
    # The hit at place 4 leaves the free queue before place 3 takes a block from it.
    build.step(share(4, 1, 4), allocate(5, 1, 3), fill(5, 1, 4), decisions=[admitted(1, cached=20)])
    assert build.state.table(1) == [NO_BLOCK, NO_BLOCK, NO_BLOCK, 5, 4]
    assert build.state.requests[1].num_held(4) == 8
    assert clean(build.state)
    assert PoolState.from_keyframe(build.header, build.state.to_keyframe()).table(1) == build.state.table(1)


def test_a_place_behind_all_that_the_request_has_tokens_for_takes_no_memory():
    build = TraceBuilder()
    build.arrive(0, num_tokens=9)
    build.step(allocate(0, 0, 2**31 - 1), allocate(1, 0, 3), allocate(2, 0, 2))
    assert [(v.name, v.block) for v in build.state.violations] == [("tables", 0), ("tables", 1)]
    assert build.state.table(0) == [NO_BLOCK, NO_BLOCK, 2]


def test_preemption_keeps_tokens_and_forgets_what_was_computed():
    build = TraceBuilder()
    build.arrive(0, num_tokens=6)
    build.prefill(0, [0, 1], 6)
    preempted = Decision(DecisionKind.PREEMPTED, 0, Reason.GAVE_WAY, {"needs": 1, "free": 0, "to": 3, "released": 2})
    build.step(release(1, 0), release(0, 0), decisions=[preempted])
    request = build.state.requests[0]
    assert request.status is RequestStatus.PREEMPTED
    assert (request.num_computed, request.preemptions, request.num_tokens) == (0, 1, 7)
    assert request.waiting_for == preempted
    assert clean(build.state)
    waits = Decision(DecisionKind.WAITS, 0, Reason.NO_BLOCKS, {"needs": 2, "free": 1})
    build.step(decisions=[waits])
    assert request.waiting_for == waits
    build.step(
        *(allocate(0, 0, 0), allocate(1, 0, 1), fill(0, 0, 4), fill(1, 0, 3)),
        decisions=[admitted(0, kind=DecisionKind.RESUMED)],
        batch=[(0, Phase.RECOMPUTE, 0, 7)],
        tokens=[(0, 8, " on")],
    )
    assert request.status is RequestStatus.RUNNING
    assert request.waiting_for is None
    assert request.admitted_ns == 0
    assert clean(build.state)


def test_a_refusal_ends_a_request_with_its_message():
    build = TraceBuilder()
    build.arrive(0)
    refused = Decision(DecisionKind.REFUSED, 0, Reason.NEVER_FITS, {"needs": 9, "pool": 8})
    build.step(decisions=[refused], finished=[(0, "refused", "needs 9 blocks, the pool has 8")])
    request = build.state.requests[0]
    assert request.status is RequestStatus.FINISHED_REFUSED
    assert (request.finish_reason, request.message) == ("refused", "needs 9 blocks, the pool has 8")
    assert request.finished_ns == 86
    assert clean(build.state)


def test_swapped_content_comes_back_with_its_fill():
    build = TraceBuilder()
    build.arrive(0)
    build.prefill(0, [3], 3)
    build.step(BlockOp(Op.SWAP_OUT, 3, 1, 0), release(3, 0))
    state = build.state
    assert (state.cpu_owner[1], state.cpu_filled[1], state.cpu_logical[1]) == (0, 3, 0)
    build.step(allocate(5, 0, 0), BlockOp(Op.SWAP_IN, 1, 5, 0))
    assert (state.cpu_owner[1], state.cpu_filled[1]) == (-1, 0)
    assert (state.filled[5], state.last_op[5], state.table(0)) == (3, Op.SWAP_IN, [5])
    assert state.violations == []


def test_a_whole_schedule_under_pressure_folds_without_a_violation():
    header, messages = simulated_trace(seed=3)
    state = PoolState(header)
    kinds = set()
    for message in messages:
        state.apply(message)
        if isinstance(message, StepTrace):
            assert check(state) == [], message.index
            kinds |= {op.op for op in message.ops}
    assert state.violations == []
    assert kinds >= {Op.ALLOCATE, Op.SHARE, Op.FILL, Op.HASH, Op.RELEASE, Op.EVICT}
    assert state.counters.preemptions > 0


def test_the_last_finished_requests_are_kept_and_the_others_forgotten(monkeypatch):
    monkeypatch.setattr(state_module, "MAX_FINISHED", 3)
    build = TraceBuilder()
    for request in range(5):
        build.arrive(request)
        build.step(finished=[(request, "abort", "")])
    assert list(build.state.requests) == [2, 3, 4]


def test_text_beyond_the_limit_goes_the_oldest_finished_first(monkeypatch):
    monkeypatch.setattr(state_module, "MAX_TOKENS", 20)
    build = TraceBuilder()
    build.arrive(0, 1, num_tokens=8)
    build.step(finished=[(0, "abort", "")])
    build.arrive(2, num_tokens=8)
    assert list(build.state.requests) == [1, 2]
    assert build.state.violations == []
    build.arrive(3, num_tokens=8)
    assert build.state.requests[3].token_ids == []
    assert [v.name for v in build.state.violations] == ["size"]


def test_a_copy_shares_nothing_with_its_original():
    build = TraceBuilder()
    build.arrive(0, 1)
    build.prefill(0, [0, 1], 6)
    copy = build.state.copy()
    assert copy.same_as(build.state) == []
    build.step(share(0, 1, 0), release(1, 0), decisions=[admitted(1, cached=4)])
    changed = copy.same_as(build.state)
    assert any("step" in line for line in changed)
    assert copy.table(0) == [0, 1]
    assert (copy.refs[0], copy.used) == (1, 2)


@pytest.mark.parametrize(
    ("ops", "name", "block"),
    [
        ([allocate(99, 0, 0)], "operation", -1),
        ([allocate(-1, 0, 0)], "operation", -1),
        ([BlockOp(77, 1, 0, 0)], "operation", 1),
        ([allocate(0, 0, 0), allocate(0, 1, 0)], "operation", 0),
        ([release(0, 0)], "free_queue", 0),
        ([allocate(0, 0, 0), release(0, 0), release(0, 0)], "free_queue", 0),
        ([allocate(0, 0, 0), release(0, 1)], "references", 0),
        ([allocate(0, 9, 0)], "request", 0),
        ([allocate(0, 0, 5)], "tables", 0),
        ([share(0, 0, 0)], "operation", 0),
        ([fill(0, 0, 2)], "operation", 0),
        ([allocate(0, 0, 0), fill(0, 0, 5)], "operation", 0),
        ([allocate(0, 0, 0), fill(0, 0, 2), hashed(0, 5)], "hashed_full", 0),
        ([allocate(0, 0, 0), fill(0, 0, 4), hashed(0, 0)], "operation", 0),
        ([allocate(0, 0, 0), fill(0, 0, 4), hashed(0, 2**80)], "operation", 0),
        ([evict(0, 5)], "operation", 0),
        ([allocate(0, 0, 0), fill(0, 0, 4), hashed(0, 5), evict(0, 6)], "operation", 0),
        ([allocate(0, 0, 0), fill(0, 0, 4), hashed(0, 5), release(0, 0), allocate(0, 0, 0)], "operation", 0),
        ([BlockOp(Op.COPY, 0, 1, 2)], "operation", 1),
        ([BlockOp(Op.SWAP_OUT, 0, 7, 0)], "operation", 0),
        ([BlockOp(Op.SWAP_IN, 7, 0, 0)], "operation", 0),
    ],
)
def test_an_operation_that_contradicts_the_state_is_named_with_block_and_step(ops, name, block):
    build = TraceBuilder()
    build.arrive(0, 1)
    build.step()
    build.step(*ops)
    violation = build.state.violations[0]
    assert (violation.name, violation.block, violation.step) == (name, block, 1)
    assert build.state.used + build.state.cached + build.state.free == 8


@pytest.mark.parametrize(
    "step",
    [
        {"finished": [(0, "stop", ""), (0, "stop", "")]},
        {"finished": [(5, "stop", "")]},
        {"finished": [(0, "boredom", "")]},
        {"batch": [(5, 1, 0, 1)]},
        {"batch": [(0, 1, 2**40, 1)]},
        {"tokens": [(5, 1, "x")]},
        {"decisions": [admitted(5)]},
    ],
)
def test_what_is_said_about_requests_that_cannot_be_is_named(step):
    build = TraceBuilder()
    build.arrive(0)
    build.step(**step)
    assert [v.name for v in build.state.violations] == ["request"]


def test_a_step_out_of_sequence_is_named():
    state = PoolState(make_header())
    build = TraceBuilder()
    steps = [build.step() for _ in range(3)]
    for step in (steps[0], steps[2]):
        state.apply(step)
    assert [(v.name, v.step) for v in state.violations] == [("sequence", 0)]
    assert state.step == 2


def test_violations_are_counted_but_only_the_first_are_kept():
    build = TraceBuilder()
    for _ in range(100):
        build.step(release(0, 0), release(1, 0))
    assert build.state.num_violations == 200
    assert len(build.state.violations) == MAX_VIOLATIONS
    assert build.state.violations[0].step == 0


NUMBER = st.one_of(st.integers(-3, 12), st.sampled_from([2**31 - 1, 2**31, -(2**31) - 1, 2**63, -(2**63), 2**70]))
SMALL = st.integers(-1, 9)
OPS = st.tuples(st.integers(-1, 10), st.one_of(SMALL, NUMBER), st.one_of(SMALL, NUMBER), st.one_of(SMALL, NUMBER))
STEPS = st.builds(
    StepTrace,
    index=st.one_of(st.integers(0, 9), NUMBER),
    start_ns=NUMBER,
    schedule_ns=NUMBER,
    execute_ns=NUMBER,
    sample_ns=NUMBER,
    update_ns=NUMBER,
    batch=st.lists(st.builds(BatchMember, NUMBER, NUMBER, NUMBER, NUMBER), max_size=4),
    ops=st.lists(OPS.map(lambda row: BlockOp(*row)), max_size=30),
    tokens=st.lists(st.builds(NewToken, NUMBER, NUMBER, st.text(max_size=3)), max_size=3),
    finished=st.lists(st.builds(Finish, NUMBER, st.sampled_from(["stop", "abort", "?"]), st.text(max_size=3))),
    decisions=st.lists(
        st.builds(
            Decision,
            st.integers(-1, 7),
            NUMBER,
            st.sampled_from(["fits", "no_blocks", "?"]),
            st.dictionaries(st.sampled_from(["needs", "cached_tokens"]), NUMBER, max_size=2),
        ),
        max_size=3,
    ),
    counters=st.just(Counters(0, 0, 0, 0, 0, 8, 0, 0, 0, 0)),
)
ARRIVALS = st.builds(lambda request, n: arrived(request, n), NUMBER, st.integers(0, 9))


@given(st.lists(st.one_of(STEPS, ARRIVALS), max_size=12))
@settings(max_examples=60, deadline=None)
def test_no_trace_whatever_breaks_the_fold(messages):
    state = PoolState(make_header())
    for message in messages:
        state.apply(message)
        held = state.refs > 0
        assert (state.refs >= 0).all()
        assert state.used == held.sum()
        assert state.cached == (~held & (state.key != 0)).sum()
        assert state.used + state.cached + state.free == 8
        assert ((state.filled >= 0) & (state.filled <= 4)).all()
        assert len(state.violations) <= MAX_VIOLATIONS
        assert sum(len(request.table) for request in state.requests.values()) <= 12 * 30
        check(state)
        for block in range(-1, 9):
            state.block_text(block)


def test_a_hashed_block_knows_the_key_in_front_of_it_and_how_often_it_was_shared_since():
    build = TraceBuilder()
    build.arrive(0, 1, num_tokens=8)
    build.prefill(0, [3, 5], 8)
    build.step(hashed(3, 33), hashed(5, 55))
    assert (build.state.parent[3], build.state.parent[5]) == (0, 33)
    build.step(release(5, 0), release(3, 0))
    build.step(share(3, 1, 0), share(5, 1, 1))
    assert build.state.parent[5] == 33
    assert build.state.hits[[3, 5]].tolist() == [1, 1]
    build.step(release(5, 1), release(3, 1))
    build.step(evict(3, 33))
    assert (build.state.parent[3], build.state.hits[3]) == (0, 0)
    assert (build.state.parent[5], build.state.hits[5]) == (33, 1)


def test_parents_can_be_found_again_from_those_who_have_or_had_the_blocks():
    header, messages = simulated_trace(seed=5)
    state = PoolState(header)
    known = right = 0
    for message in messages:
        state.apply(message)
        for request in state.requests.values():
            pairs = zip(request.table, request.table[1:], strict=False)
            assert all(state.parent[block] == state.key[before] for before, block in pairs if state.key[block])
        told = state.parent.copy()
        state.parent[:] = 0
        state.derive_parents()
        found = state.parent != 0
        assert (state.parent[found] == told[found]).all()
        known, right = known + np.count_nonzero(told), right + np.count_nonzero(found)
        state.parent[:] = told
    assert right > 0.8 * known > 100
