from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_trace import HEADER, LEVELS, Trace, arrived, step

from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.request import SamplingParams
from engine.simulated import simulated_engine
from engine.trace.events import (
    Counters,
    Decision,
    DecisionKind,
    Op,
    Phase,
    Reason,
    StepTrace,
)
from engine.trace.state import PoolState
from engine.trace.step_columns import StepColumns
from kvtui.history import History, Mark


def preempted(request):
    return Decision(DecisionKind.PREEMPTED, request, Reason.GAVE_WAY, {"needs": 1, "free": 0, "to": 0, "released": 2})


def test_marks_tell_what_a_request_did_in_each_step():
    trace = Trace().take(
        arrived(0),
        step(0, [(0, Phase.PREFILL, 0, 6)]),
        step(1, [(0, Phase.DECODE, 6, 1)]),
        arrived(1),
        step(2, [(0, Phase.DECODE, 7, 1)]),
        step(3, decisions=[preempted(0)]),
        step(4),
        step(5, [(0, Phase.RECOMPUTE, 0, 8), (1, Phase.PREFILL, 0, 6)]),
        step(6, [(0, Phase.DECODE, 8, 1)], finished=[(0, "length", ""), (1, "abort", "")]),
        step(7),
    )
    assert trace.history.marks(0, 0, 8).tolist() == [
        Mark.PREFILL,
        Mark.DECODE,
        Mark.DECODE,
        Mark.PREEMPTED,
        Mark.WAITING,
        Mark.RECOMPUTE,
        Mark.ENDED,
        Mark.ABSENT,
    ]
    assert trace.history.marks(1, 0, 8).tolist() == [
        Mark.ABSENT,
        Mark.ABSENT,
        Mark.WAITING,
        Mark.WAITING,
        Mark.WAITING,
        Mark.PREFILL,
        Mark.ABORTED,
        Mark.ABSENT,
    ]
    assert trace.history.marks(99, 0, 8).tolist() == [Mark.ABSENT] * 8


def test_an_overrun_shows_behind_the_end_and_does_not_bring_the_request_back():
    messages = [
        arrived(0),
        step(0, [(0, Phase.PREFILL, 0, 6)]),
        step(1, [(0, Phase.DECODE, 6, 1)], finished=[(0, "stop", "")]),
        step(2, [(0, Phase.OVERRUN, 7, 1)]),
        step(3),
    ]
    trace = Trace().take(*messages)
    marks = [Mark.PREFILL, Mark.ENDED, Mark.OVERRUN, Mark.ABSENT]
    assert trace.history.marks(0, 0, 4).tolist() == marks
    assert trace.history.series("decode_tokens", 0, 4).tolist() == [0, 1, 1, 0]
    assert trace.state.violations == []
    assert trace.state.requests[0].num_computed == 7
    for first in (0, 2):
        rebuilt = History()
        steps = [m for m in messages if isinstance(m, StepTrace)]
        rebuilt.rebuild(StepColumns.of(first, steps[first:]), trace.state)
        assert rebuilt.series("decode_tokens", first, 4).tolist() == [0, 1, 1, 0][first:]
        assert [number for number, live in rebuilt.requests(first) if live] == []
        if first == 0:
            assert rebuilt.marks(0, 0, 4).tolist() == marks


def test_who_is_preempted_and_admitted_again_in_one_step_shows_both():
    messages = [
        arrived(0),
        step(0, [(0, Phase.PREFILL, 0, 6)]),
        step(1, [(0, Phase.RECOMPUTE, 0, 6)], decisions=[preempted(0)]),
        step(2, [(0, Phase.DECODE, 6, 1)]),
    ]
    trace = Trace().take(*messages)
    marks = [Mark.PREFILL, Mark.REDONE, Mark.DECODE]
    assert trace.history.marks(0, 0, 3).tolist() == marks
    rebuilt = History()
    rebuilt.rebuild(StepColumns.of(0, [m for m in messages if isinstance(m, StepTrace)]), trace.state)
    assert rebuilt.marks(0, 0, 3).tolist() == marks


def test_a_state_that_is_ahead_gives_the_same_marks():
    messages = [
        arrived(0),
        step(0, [(0, Phase.PREFILL, 0, 6)]),
        arrived(1),
        step(1),
        step(2, finished=[(0, "stop", "")]),
    ]
    stepwise = Trace().take(*messages)
    ahead = PoolState(HEADER)
    for message in messages:
        ahead.apply(message)
    rebuilt = History()
    rebuilt.rebuild(StepColumns.of(0, [m for m in messages if isinstance(m, StepTrace)]), ahead)
    for request in (0, 1):
        assert rebuilt.marks(request, 0, 3).tolist() == stepwise.history.marks(request, 0, 3).tolist()
    assert rebuilt.requests(0) == stepwise.history.requests(0) == [(0, False), (1, True)]


def test_series_hold_the_levels_and_what_was_computed():
    trace = Trace().take(
        arrived(0),
        arrived(1),
        step(0, [(0, Phase.PREFILL, 0, 6), (1, Phase.RECOMPUTE, 0, 5)], tokens=[(0, 7, "a")]),
        step(
            1,
            [(0, Phase.DECODE, 6, 1)],
            ops=[(Op.EVICT, 3, 77, 0), (Op.ALLOCATE, 3, 0, 0)],
            decisions=[preempted(1)],
            counters=Counters(1, 2, 1, 4, 1, 5, 0, 0, 0, 0),
        ),
    )
    expected = {
        "used": [3, 4],
        "cached": [2, 1],
        "free": [5, 5],
        "running": [1, 1],
        "waiting": [0, 2],
        "preempted": [0, 1],
        "batch": [2, 1],
        "prefill_tokens": [6, 0],
        "recompute_tokens": [5, 0],
        "decode_tokens": [0, 1],
        "generated": [1, 0],
        "preemptions": [0, 1],
        "evictions": [0, 1],
        "execute_ns": [6_000_000, 6_000_000],
    }
    assert {name: trace.history.series(name, 0, 2).tolist() for name in expected} == expected


def test_only_the_last_steps_are_remembered_and_memory_stays_flat():
    trace = Trace(capacity=16, max_requests=4)
    sizes = set()
    for i in range(100):
        trace.take(arrived(i), step(i, [(i, Phase.PREFILL, 0, 6)], finished=[(i, "stop", "")]))
        sizes.add(trace.history.codes.nbytes)
    assert sizes == {16 * 4}
    assert len(trace.history) == 16
    assert trace.history.series("index", 84, 100).tolist() == list(range(84, 100))
    assert trace.history.marks(99, 98, 100).tolist() == [Mark.ABSENT, Mark.ENDED]
    with pytest.raises(IndexError):
        trace.history.series("index", 83, 100)


def test_a_column_is_taken_over_from_who_ended_first_and_carries_nothing_over():
    trace = Trace(capacity=8, max_requests=2).take(
        arrived(0),
        arrived(1),
        step(0, [(0, Phase.PREFILL, 0, 6), (1, Phase.PREFILL, 0, 6)], finished=[(0, "stop", "")]),
        arrived(2),
        step(1, [(1, Phase.DECODE, 6, 1)]),
    )
    assert [request for request, _ in trace.history.requests(0)] == [1, 2]
    assert trace.history.marks(2, 0, 2).tolist() == [Mark.ABSENT, Mark.WAITING]


def test_a_step_that_does_not_follow_starts_anew():
    trace = Trace().take(arrived(0), step(0, [(0, Phase.PREFILL, 0, 6)]), step(1), step(7))
    assert len(trace.history) == 1
    assert trace.history.last_index == 7


def test_rates_are_counted_over_the_last_seconds_so_that_a_pause_is_forgotten():
    quick = [step(i, [(0, Phase.DECODE, 6 + i, 1)], tokens=[(0, 1, "a"), (0, 2, "b")]) for i in range(20)]
    trace = Trace().take(arrived(0), *quick)
    rates = trace.history.rates()
    assert rates.steps_per_s == pytest.approx(100)
    assert rates.tokens_per_s == pytest.approx(200)
    assert rates.average_batch == 1

    trace.take(step(20, start_ns=60_000_000_000), step(21, start_ns=60_010_000_000, tokens=[(0, 3, "c")]))
    assert trace.history.rates().steps_per_s == pytest.approx(100)
    assert trace.history.rates().tokens_per_s == pytest.approx(50)
    assert History().rates() == (0, 0, 0)


def test_the_prefix_hit_rate_is_hits_over_looked_up_tokens():
    trace = Trace()
    assert trace.history.prefix_hit_rate is None
    trace.take(step(0, counters=LEVELS._replace(prefix_queried_tokens=40, prefix_hit_tokens=10)))
    assert trace.history.prefix_hit_rate == 0.25


@given(
    st.lists(st.tuples(st.integers(0, 2**63 - 1), st.integers(-5, 300)), max_size=6), st.integers(-(2**63), 2**63 - 1)
)
def test_a_made_up_trace_is_taken_in_without_an_error(members, number):
    odd = step(0, [(request, phase, number, number) for request, phase in members], start_ns=number)
    odd = msgspec.structs.replace(odd, index=number, counters=Counters(*[number] * 10))
    history = History(capacity=4, max_requests=8)
    history.append(odd, PoolState(HEADER))
    last = history.last_index
    assert last >= 0
    assert history.series("running", last, last + 1)[0] == min(max(number, 0), 2**52)
    assert all(rate >= 0 for rate in history.rates())


@pytest.mark.parametrize("capacity", [64, 1024])
@pytest.mark.parametrize("at", [0, 7, 150, 299])
def test_a_history_made_of_columns_is_the_one_that_grew_step_by_step(capacity, at):
    engine = simulated_engine(
        EngineConfig(
            cache=CacheConfig(num_blocks=40, block_size=4),
            scheduler=SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=32, max_model_len=120),
        )
    )
    state, grown, steps = PoolState(engine.header), History(capacity), []

    def take(message):
        state.apply(message)
        if isinstance(message, StepTrace):
            steps.append(message)
            grown.append(message, state)

    engine.add_sink(take)
    rebuilt = None
    for i in range(340):
        if i % 4 == 0:
            number = engine.add_request(f"prompt {i}" + "x" * (i % 23), SamplingParams(max_tokens=10 + i % 40))
            if i % 12 == 0:
                engine.abort(number)
        engine.step()
        if len(steps) == at + 1 and rebuilt is None:
            rebuilt = History(capacity)
            rebuilt.rebuild(StepColumns.of(0, steps), state)
        elif rebuilt is not None:
            rebuilt.append(steps[-1], state)
        if rebuilt is None or (i > at + 3 and i != 339):
            continue
        first, stop = grown.last_index + 1 - len(grown), grown.last_index + 1
        assert (len(rebuilt), rebuilt.last_index) == (len(grown), grown.last_index)
        assert rebuilt.requests(first) == grown.requests(first)
        for request, _ in grown.requests(first):
            assert rebuilt.marks(request, first, stop).tolist() == grown.marks(request, first, stop).tolist()
        for name in (
            "used",
            "waiting",
            "batch",
            "prefill_tokens",
            "decode_tokens",
            "generated",
            "evictions",
            "start_ns",
        ):
            assert rebuilt.series(name, first, stop).tolist() == grown.series(name, first, stop).tolist()
        assert rebuilt.series("preemptions", first, stop).tolist() == grown.series("preemptions", first, stop).tolist()
        assert rebuilt.rates() == grown.rates()
        assert rebuilt.prefix_hit_rate == grown.prefix_hit_rate
    assert any(decision.kind == DecisionKind.PREEMPTED for step in steps for decision in step.decisions)
    assert rebuilt is not None


def test_more_requests_than_fit_into_a_rebuilt_history_leave_those_that_are_still_there():
    steps = [
        step(0, [(i, Phase.PREFILL, 0, 6) for i in range(6)], finished=[(i, "stop", "") for i in range(4)]),
        step(1, [(4, Phase.DECODE, 6, 1), (5, Phase.DECODE, 6, 1)]),
    ]
    history = History(max_requests=3)
    history.rebuild(StepColumns.of(0, steps), PoolState(HEADER))
    assert [request for request, live in history.requests(0) if live] == [4, 5]
    assert len(history.requests(0)) == 3


def test_who_is_still_there_is_kept_in_a_rebuilt_history_though_others_were_in_a_batch_later():
    others = [1, 2, 3, 4]
    steps = [
        step(0, [(i, Phase.PREFILL, 0, 6) for i in range(5)]),
        step(1, [(i, Phase.DECODE, 6, 1) for i in others], finished=[(i, "stop", "") for i in others]),
    ]
    history = History(max_requests=3)
    history.rebuild(StepColumns.of(0, steps), PoolState(HEADER))
    assert history.requests(0) == [(0, True), (3, False), (4, False)]


@given(
    st.lists(st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(-5, 300)), max_size=6),
    st.integers(-(2**63), 2**63 - 1),
)
def test_a_made_up_trace_is_rebuilt_without_an_error(members, number):
    odd = step(0, [(request, phase, number, number) for request, phase in members], start_ns=number)
    odd = msgspec.structs.replace(odd, counters=Counters(*[number] * 10))
    history = History(capacity=4, max_requests=3)
    history.rebuild(StepColumns.of(0, [odd, msgspec.structs.replace(odd, index=1)]), PoolState(HEADER))
    assert history.series("running", 0, 2).tolist() == [min(max(number, 0), 2**52)] * 2
    assert all(rate >= 0 for rate in history.rates())
