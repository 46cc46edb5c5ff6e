"""Where a request's time went, in known traces and over random schedules."""

import random

import msgspec
import pytest
from trace_builder import TraceBuilder, admitted, allocate, arrived, fill, release, simulated_trace

from engine.trace.events import Decision, DecisionKind, Phase, Reason, StepTrace
from engine.trace.keyframe import from_keyframe
from engine.trace.latency import PARTS, end_of, latency_of
from engine.trace.state import PoolState

STEP = 11 + 50 + 12 + 13
"""How long a step of the builder lasts; each begins 100 ns after the one before."""


def split(build, request=0):
    latency = latency_of(build.state.requests[request], end_of(build.state))
    return dict(zip(PARTS, latency.parts, strict=True))


def decision(kind, request=0, **numbers):
    return Decision(kind, request, Reason.GAVE_WAY, numbers)


def preempted(build, request=0):
    blocks = build.state.table(request)
    build.step(*(release(b, request) for b in reversed(blocks)), decisions=[decision(DecisionKind.PREEMPTED, request)])


def arrive(build, time_ns, num_tokens=4):
    build._take(msgspec.structs.replace(arrived(0, num_tokens), time_ns=time_ns))


def test_a_request_without_trouble_is_queued_then_in_prefill_then_decodes():
    build = TraceBuilder()
    arrive(build, 30)
    build.step()
    assert split(build) == {"queued": 56, "prefill": 0, "decode": 0, "preempted": 0, "recompute": 0}
    ops = [allocate(0, 0, 0), fill(0, 0, 4)]
    build.step(*ops, batch=[(0, Phase.PREFILL, 0, 4)], decisions=[admitted(0)])
    assert split(build) == {"queued": 70, "prefill": STEP, "decode": 0, "preempted": 0, "recompute": 0}
    build.step(batch=[(0, Phase.DECODE, 4, 1)], tokens=[(0, 5, "a")])
    build.step(batch=[(0, Phase.DECODE, 5, 1)], tokens=[(0, 5, "b")])
    build.step(batch=[(0, Phase.DECODE, 6, 1)], tokens=[(0, 5, "c")], finished=[(0, "length", "")])
    build.step()
    latency = latency_of(build.state.requests[0], end_of(build.state))
    assert dict(zip(PARTS, latency.parts, strict=True)) == {
        "queued": 70,
        "prefill": 100 + STEP,
        "decode": 200,
        "preempted": 0,
        "recompute": 0,
    }
    assert latency.total_ns == 400 + STEP - 30
    assert latency.first_token_ns == 200 + STEP - 30
    assert latency.per_token_ns == 100
    assert latency.exact
    assert latency.share(2) == pytest.approx(200 / 456)


def test_what_a_preemption_costs_is_told_apart_waiting_and_computing_again():
    build = TraceBuilder()
    arrive(build, 0)
    build.prefill(0, [0, 1], 6)
    preempted(build)
    build.step()
    assert split(build)["preempted"] == 100 + STEP
    again = admitted(0, kind=DecisionKind.RESUMED)
    build.step(allocate(2, 0, 0), batch=[(0, Phase.RECOMPUTE, 0, 4)], decisions=[again])
    assert split(build)["recompute"] == STEP
    build.step(batch=[(0, Phase.RECOMPUTE, 4, 3)], tokens=[(0, 5, "b")])
    build.step(batch=[(0, Phase.DECODE, 7, 1)], tokens=[(0, 5, "c")])
    assert split(build) == {
        "queued": 0,
        "prefill": STEP,
        "preempted": 200,
        "recompute": 100 + STEP,
        "decode": (100 - STEP) + 100,
    }


def test_a_preemption_before_the_first_token_does_not_count_as_prefill():
    build = TraceBuilder()
    arrive(build, 0, num_tokens=8)
    build.step(allocate(0, 0, 0), batch=[(0, Phase.PREFILL, 0, 4)], decisions=[admitted(0)])
    preempted(build)
    again = admitted(0, kind=DecisionKind.RESUMED)
    build.step(allocate(2, 0, 0), batch=[(0, Phase.RECOMPUTE, 0, 4)], decisions=[again])
    build.step(allocate(3, 0, 1), batch=[(0, Phase.PREFILL, 4, 4)], tokens=[(0, 5, "b")])
    assert split(build) == {"queued": 0, "prefill": 100 + STEP, "preempted": 100, "recompute": 100, "decode": 0}


def test_a_request_that_was_swapped_in_computes_nothing_again():
    build = TraceBuilder()
    arrive(build, 0)
    build.prefill(0, [0], 4)
    preempted(build)
    again = admitted(0, cached=4, kind=DecisionKind.RESUMED)
    build.step(allocate(2, 0, 0), batch=[(0, Phase.DECODE, 4, 1)], decisions=[again])
    assert split(build)["recompute"] == 0
    assert split(build)["preempted"] == 100


def test_one_that_ends_while_it_is_preempted_or_was_never_admitted_adds_up():
    build = TraceBuilder()
    arrive(build, 0)
    build._take(msgspec.structs.replace(arrived(1), time_ns=50))
    build.prefill(0, [0], 4)
    preempted(build)
    build.step(finished=[(0, "abort", ""), (1, "abort", "")])
    build.step()
    assert split(build) == {
        "queued": 0,
        "prefill": STEP,
        "decode": 100 - STEP,
        "preempted": 100 + STEP,
        "recompute": 0,
    }
    assert split(build, 1) == {"queued": 150 + STEP, "prefill": 0, "decode": 0, "preempted": 0, "recompute": 0}


@pytest.mark.parametrize("seed", range(5))
def test_over_random_schedules_the_parts_of_every_request_add_up_to_its_latency_at_every_step(seed):
    header, messages = simulated_trace(seed=seed, num_requests=25, num_blocks=16)
    state = PoolState(header)
    rng = random.Random(seed)
    with_preemption = 0
    for message in messages:
        state.apply(message)
        if not isinstance(message, StepTrace):
            continue
        if rng.random() < 0.1:
            state = from_keyframe_of(state)
        for request in state.requests.values():
            latency = latency_of(request, end_of(state))
            assert latency.exact
            assert sum(latency.parts) == latency.total_ns
            assert min(latency.parts) >= 0
            assert (latency.parts[3] > 0) <= (request.preemptions > 0)
            assert (latency.first_token_ns >= 0) == (request.first_token_step >= 0)
            with_preemption += request.preemptions > 0
    assert with_preemption > 0


def from_keyframe_of(state):
    """A state that went through a recording."""
    again = from_keyframe(state.header, state.to_keyframe())
    for number, request in again.requests.items():
        known = state.requests[number]
        request.token_ids, request.pieces = known.token_ids, known.pieces
        request.arrival_ns, request.name, request.max_tokens = known.arrival_ns, known.name, known.max_tokens
        request.temperature, request.parent = known.temperature, known.parent
    again.last_step, again._num_tokens = state.last_step, state._num_tokens
    assert again.same_as(state) == []
    return again


def test_a_keyframe_of_the_first_kvtui_says_that_it_did_not_keep_what_preemptions_cost():
    build = TraceBuilder()
    arrive(build, 0)
    build.arrive(1)
    build.prefill(0, [0], 4)
    preempted(build)
    later = ("admitted_step", "preempted_ns", "recompute_ns", "early_stall_ns", "stalled_since_ns")
    later += ("recompute_since_ns", "regret_blocks", "regret_step")
    keyframe = build.state.to_keyframe()
    old = msgspec.structs.replace(
        keyframe,
        requests={name: data for name, data in keyframe.requests.items() if name not in later},
        evicted=[],
        num_evicted=-1,
        regret_blocks=0,
        regret_since=0,
    )
    state = from_keyframe(build.header, old)
    assert not latency_of(state.requests[0], end_of(build.state)).exact
    assert latency_of(state.requests[1], end_of(build.state)).exact
    assert state.regret_since == 2
    again = Decision(DecisionKind.RESUMED, 0, Reason.FITS, {})
    build.state = state
    build.step(allocate(2, 0, 0), batch=[(0, Phase.RECOMPUTE, 0, 4)], decisions=[again], tokens=[(0, 5, "b")])
    assert not latency_of(state.requests[0], end_of(build.state)).exact
