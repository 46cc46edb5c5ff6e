"""The advisor: which limit holds requests up, on what numbers, and the setting that moves it."""

import dataclasses

import msgspec
import numpy as np
import pytest
from small_trace import HEADER, Trace, arrived, step

from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.request import SamplingParams
from engine.simulated import simulated_engine
from engine.trace.bottleneck import Limit, limits_of
from engine.trace.events import Decision, DecisionKind, Reason, StepTrace
from engine.trace.state import PoolState
from kvtui.advisor import WINDOW, advice_brief, advice_json, advice_words, advise, advise_now
from kvtui.history import History

LEVELS = ("waiting", "running", "batch", "tokens", "preemptions")


def levels(*rows):
    """One row a step."""
    return dict(zip(LEVELS, np.array(rows, np.int64).reshape(-1, 5).T, strict=True))


@pytest.mark.parametrize(
    ("row", "limit"),
    [
        ((0, 3, 3, 3, 0), Limit.NOTHING),
        ((2, 3, 3, 3, 0), Limit.BLOCKS),
        ((0, 3, 3, 3, 1), Limit.BLOCKS),
        ((2, 8, 8, 8, 0), Limit.SEQUENCES),
        ((2, 7, 8, 8, 0), Limit.SEQUENCES),
        ((0, 8, 8, 8, 0), Limit.NOTHING),
        ((2, 3, 3, 64, 0), Limit.TOKENS),
        ((0, 3, 3, 64, 0), Limit.TOKENS),
        ((2, 8, 8, 64, 0), Limit.SEQUENCES),
        ((2, 8, 8, 64, 1), Limit.BLOCKS),
    ],
)
def test_each_step_is_held_up_by_what_its_levels_say(row, limit):
    assert limits_of(HEADER, **levels(row)).tolist() == [limit]


def test_a_static_batch_is_a_limit_of_its_own():
    header = msgspec.structs.replace(HEADER, policy="static")
    assert limits_of(header, **levels((2, 3, 3, 3, 0), (2, 8, 8, 8, 0))).tolist() == [Limit.BATCH, Limit.SEQUENCES]
    advice = advise(header, None, **levels((2, 3, 3, 3, 0)))
    assert "--policy paged" in advice_words(advice)[0]


def test_the_limit_that_was_met_most_often_is_named_with_its_setting_and_value():
    rows = [(2, 8, 8, 8, 0)] * 3 + [(1, 3, 3, 3, 2)] * 2 + [(0, 1, 1, 1, 0)] * 5
    advice = advise(HEADER, None, **levels(*rows))
    assert (advice.limit, advice.held, advice.steps, advice.preemptions) == (Limit.SEQUENCES, 3, 10, 4)
    assert advice_words(advice)[0] == (
        "places in 3 of the last 10 steps: 8 may run, 0 wait; raise --max-num-seqs (now 8)"
    )
    assert advice_json(advice) == {
        "limit": "sequences",
        "steps_held_up": 3,
        "steps": 10,
        "steps_by_limit": {"nothing": 5, "blocks": 2, "sequences": 3, "tokens": 0, "batch": 0},
        "setting": "--max-num-seqs",
        "value": 8,
        "never_fit": 0,
        "never_fit_needs": None,
    }


def test_where_nobody_waited_nothing_is_to_be_moved_and_a_rare_limit_is_called_rare():
    assert (
        advice_words(advise(HEADER, None, **levels((0, 1, 1, 1, 0))))[0] == "nothing: in the last 1 step nobody waited"
    )
    rare = advise(HEADER, None, **levels((0, 1, 1, 64, 0), *[(0, 1, 1, 1, 0)] * 99))
    assert advice_words(rare, last="")[0] == "hardly anything: tokens a step in 1 of 100 steps"


@pytest.mark.parametrize(("held", "rare"), [(4, True), (5, False), (9, False)])
def test_a_limit_is_worth_moving_from_a_twentieth_of_the_steps_on(held, rare):
    advice = advise(HEADER, None, **levels(*[(2, 8, 8, 8, 0)] * held, *[(0, 1, 1, 1, 0)] * (100 - held)))
    assert advice_words(advice)[0].startswith("hardly anything" if rare else "places in")
    assert advice_brief(advice)[:1] == ([] if rare else ["held up by places: raise --max-num-seqs (now 8)"])


def test_every_shorter_form_is_shorter():
    for row in ((2, 8, 8, 8, 0), (1, 3, 3, 3, 2), (0, 3, 3, 64, 0), (0, 1, 1, 1, 0)):
        forms = [len(form) for form in advice_words(advise(HEADER, None, **levels(row)))]
        assert forms == sorted(forms, reverse=True)


def test_who_waits_for_blocks_is_named_with_what_it_needs_and_what_is_free():
    waits = Decision(DecisionKind.WAITS, 1, Reason.NO_BLOCKS, {"needs": 6, "free": 4})
    counters = step(0).counters._replace(waiting=1)
    trace = Trace().take(arrived(0), arrived(1), step(0, decisions=[waits], counters=counters))
    advice = advise_now(trace.history, trace.state)
    assert advice.head == (1, 6, 4)
    told = advice_words(advice, {1: "rag-1"}.get)[0]
    assert told == "blocks in 1 of the last 1 step: rag-1 needs 6, 4 free; raise --num-blocks (now 10)"
    assert advise_now(History(), PoolState(HEADER)) is None


def test_who_waits_for_fewer_blocks_than_are_free_by_now_is_not_named():
    waits = Decision(DecisionKind.WAITS, 0, Reason.NO_BLOCKS, {"needs": 6, "free": 6})
    counters = step(0).counters._replace(waiting=1)
    trace = Trace().take(arrived(0), step(0, decisions=[waits], counters=counters))
    advice = advise_now(trace.history, trace.state)
    assert advice.head is None
    assert advice_words(advice)[0].startswith("blocks in 1 of the last 1 step: 1 wait;")


def test_requests_that_can_never_fit_are_counted_although_nobody_waits():
    engine = simulated_engine(EngineConfig(cache=CacheConfig(4, 5)))
    messages = []
    engine.add_sink(messages.append)
    for length in (8, 30, 22):
        engine.add_request(list(range(length)), SamplingParams(max_tokens=2))
    while engine.has_work:
        engine.step()
    state, history = PoolState(engine.header), History()
    for message in messages[1:]:
        state.apply(message)
        if isinstance(message, StepTrace):
            history.append(message, state)
    advice = advise_now(history, state)
    assert (advice.limit, advice.never_fit) == (Limit.BLOCKS, (2, 8))
    assert advice_words(advice)[0] == "blocks: 2 requests refused, one needs 8; raise --num-blocks (now 5)"
    assert advice_brief(advice)[0] == "held up by blocks: raise --num-blocks (now 5)"


def test_a_request_that_is_longer_than_any_may_be_is_not_refused_for_want_of_blocks():
    counters = step(0).counters._replace(waiting=0)
    longest = HEADER.max_model_len
    prompts = [arrived(number, prompt=longest - 1 + number) for number in range(2)]
    finished = [(number, "refused", "") for number in range(2)]
    trace = Trace().take(*prompts, step(0, finished=finished, counters=counters))
    assert advise_now(trace.history, trace.state).never_fit == (1, -(-longest // HEADER.block_size))


def test_a_request_that_was_refused_before_the_last_steps_is_not_counted_any_more():
    counters = step(0).counters._replace(waiting=0)
    trace = Trace().take(arrived(0, prompt=47), step(0, finished=[(0, "refused", "")], counters=counters))
    assert advise_now(trace.history, trace.state).never_fit == (1, 12)
    trace.take(*(step(1 + i, counters=counters) for i in range(WINDOW + 1)))
    advice = advise_now(trace.history, trace.state)
    assert (advice.limit, advice.never_fit) == (Limit.NOTHING, (0, 0))


def test_only_the_last_steps_count_as_the_present():
    busy, idle = step(0).counters._replace(waiting=3), step(0).counters
    trace = Trace().take(*(step(i, counters=busy) for i in range(100)))
    assert advise_now(trace.history, trace.state).held == WINDOW
    trace.take(*(step(100 + i, counters=idle) for i in range(WINDOW)))
    assert advise_now(trace.history, trace.state).limit == Limit.NOTHING


@pytest.mark.parametrize(
    ("num_blocks", "limits", "limit"),
    [
        (14, {}, Limit.BLOCKS),
        (200, {"max_num_seqs": 2}, Limit.SEQUENCES),
        (200, {"max_num_batched_tokens": 6}, Limit.TOKENS),
        (400, {"max_num_seqs": 64, "max_num_batched_tokens": 4096}, Limit.NOTHING),
    ],
)
def test_in_a_real_schedule_the_limit_is_the_one_that_the_scheduler_gave_as_its_reason(num_blocks, limits, limit):
    scheduler = dataclasses.replace(SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=256), **limits)
    engine = simulated_engine(EngineConfig(cache=CacheConfig(4, num_blocks), scheduler=scheduler))
    messages = []
    engine.add_sink(messages.append)
    for i in range(12):
        engine.add_request(f"request {i} the block of the page", SamplingParams(max_tokens=20))
    while engine.has_work:
        engine.step()
    state, history = PoolState(engine.header), History()
    reasons = {
        Reason.NO_BLOCKS: Limit.BLOCKS,
        Reason.SEQUENCE_CAP: Limit.SEQUENCES,
        Reason.TOKEN_BUDGET: Limit.TOKENS,
    }
    told, seen = [], set()
    for message in messages[1:]:
        state.apply(message)
        if isinstance(message, StepTrace):
            history.append(message, state)
            seen |= {reasons[d.reason] for d in message.decisions if d.reason in reasons}
            told.append(advise_now(history, state).limit)
    assert seen == ({limit} - {Limit.NOTHING})
    assert set(told) == seen | ({Limit.NOTHING} & set(told))
    assert limit in told
