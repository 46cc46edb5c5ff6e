from __future__ import annotations

from itertools import islice

import pytest

from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.request import SamplingParams
from engine.simulated import simulated_engine
from engine.trace.events import Reason, RequestArrived, StepTrace
from engine.trace.state import PoolState
from kvtui.workloads.stream import CYCLE, Caller, Room, callers
from kvtui.workloads.stream_driver import GIVES_WAY_S, StreamDriver, stream_driver
from kvtui.workloads.workload import Message, Session

STEP_S = 0.05


def an_engine(num_blocks=512, block_size=16, max_model_len=8192, **scheduler):
    config = EngineConfig(
        cache=CacheConfig(num_blocks=num_blocks, block_size=block_size),
        scheduler=SchedulerConfig(max_model_len=max_model_len, **scheduler),
    )
    return simulated_engine(config)


def room(pool_tokens=8192, max_model_len=2048, *, forks=True):
    return Room(pool_tokens, max_model_len, forks, lambda text: len(text) // 4)


def driver_of(engine, clock, stream, **options):
    return StreamDriver(engine, iter(stream), clock=clock, **options)


def caller(name, *, gap=0.0, at_once=9, max_tokens=5, n=1, follow_ups=()):
    params = SamplingParams(max_tokens=max_tokens, n=n, ignore_eos=True)
    return Caller(Session(name, 0.0, params, messages=(Message("user", "hi"),), follow_ups=follow_ups), gap, at_once)


def names_of(engine):
    seen: list[str] = []
    engine.add_sink(lambda message: seen.append(message.name) if isinstance(message, RequestArrived) else None)
    return seen


def play(engine, driver, clock, seconds):
    """Poll and step in turn, a step taking 0.05 s."""
    until = clock.now + seconds
    while clock.now < until:
        driver.poll()
        if engine.has_work:
            engine.step()
        clock.now += STEP_S


def test_equal_seeds_and_rooms_give_equal_callers_and_others_give_others():
    first, again, other = (list(islice(callers(seed, room()), 60)) for seed in (1, 1, 2))

    assert first == again
    assert [c.session.messages for c in first] != [c.session.messages for c in other]
    assert len({c.session.name for c in first}) == 60, "every caller has a name of its own"
    assert len({c.session.params.max_tokens for c in first}) > 20
    assert len({c.session.params.seed for c in first}) == 60


def test_it_holds_chats_forks_and_questions_that_begin_with_the_same_document():
    drawn = [c.session for c in islice(callers(0, room()), 4 * CYCLE)]
    documents = [s.messages[0].content for s in drawn if len(s.messages[0].content) > 2000]

    assert any(s.follow_ups for s in drawn)
    assert any(s.params.n > 1 for s in drawn)
    assert 2 <= len(set(documents)) < len(documents) / 3
    assert not any(s.params.n > 1 for s in (c.session for c in islice(callers(0, room(forks=False)), 4 * CYCLE)))


@pytest.mark.parametrize(("num_blocks", "block_size"), [(512, 16), (64, 16), (512, 4), (96, 16)])
def test_no_session_is_refused_or_cut_short_by_the_pool(clock, num_blocks, block_size):
    engine = an_engine(num_blocks, block_size)
    stream = stream_driver(engine, 0, num=2 * CYCLE, watched=None, clock=clock)
    while not stream.done:
        play(engine, stream, clock, 1.0)

    assert stream.num_failed == 0
    assert stream.num_done >= 2 * CYCLE


def test_requests_share_prefixes_and_wait_for_blocks_in_a_rush(clock):
    engine = an_engine()
    state, reasons = PoolState(engine.header), set()
    engine.add_sink(state.apply)

    def look(message):
        if isinstance(message, StepTrace):
            reasons.update(d.reason for d in message.decisions)

    engine.add_sink(look)
    driver = stream_driver(engine, 0, num=CYCLE, watched=None, clock=clock)
    while not driver.done:
        play(engine, driver, clock, 1.0)

    assert state.counters.prefix_hit_tokens > state.counters.prefix_queried_tokens / 4
    assert Reason.NO_BLOCKS in reasons


def test_no_more_sessions_are_open_than_a_caller_says_and_they_come_after_their_gaps(clock):
    engine = an_engine()
    seen = names_of(engine)
    stream = [caller("a", at_once=2), caller("b", gap=1.0, at_once=2), caller("c", at_once=2), caller("d", at_once=3)]
    driver = driver_of(engine, clock, stream)
    driver.poll()
    engine.step()
    assert seen == ["a"]
    assert driver.poll() == 1.0

    clock.now += 1.0
    driver.poll()
    engine.step()
    assert seen == ["a", "b"], "a is not answered yet, and c may come only when it is"

    play(engine, driver, clock, 2.0)
    assert seen == ["a", "b", "c", "d"]
    assert driver.done


def test_it_never_ends_and_keeps_no_more_than_what_is_open(clock):
    engine = an_engine()
    seen = names_of(engine)
    driver = driver_of(engine, clock, (caller(str(i), at_once=3) for i in range(10**9)))
    play(engine, driver, clock, 60.0)

    assert len(seen) > 300
    assert not driver.done
    assert engine.num_open <= 3
    assert driver.num_asked <= 3


@pytest.mark.parametrize("n", [1, 3])
def test_it_gives_way_to_others_until_some_time_after_the_last_of_them_and_then_goes_on(clock, n):
    engine = an_engine()
    seen = names_of(engine)
    driver = driver_of(engine, clock, (caller(str(i), at_once=3, n=n, follow_ups=("on",)) for i in range(10**9)))
    play(engine, driver, clock, 3.0)
    assert driver.state == "stream goes on"

    engine.add_request("mine", SamplingParams(max_tokens=100, ignore_eos=True), name="mine")
    driver.poll()
    engine.step()
    before = len(seen)
    assert driver.state == "stream gives way to others"
    play(engine, driver, clock, 100 * STEP_S + GIVES_WAY_S - 1)
    own = [name for name in seen[before:] if name != "mine"]
    assert own == []

    play(engine, driver, clock, 3.0)
    assert driver.state == "stream goes on"
    assert len(seen) > before + 1


@pytest.mark.parametrize("n", [1, 3])
def test_its_own_requests_are_not_taken_for_those_of_others(clock, n):
    engine = an_engine()
    driver = driver_of(engine, clock, (caller(str(i), at_once=4, n=n, max_tokens=3 + i % 5) for i in range(10**9)))
    for _ in range(400):
        play(engine, driver, clock, STEP_S)
        assert driver.state == "stream goes on"


def test_what_nobody_touched_for_long_is_held_until_somebody_does(clock):
    engine = an_engine()
    seen = names_of(engine)
    driver = driver_of(engine, clock, (caller(str(i), gap=1.0) for i in range(10**9)), watched=10.0)
    play(engine, driver, clock, 30.0)
    assert driver.held
    assert driver.state == "stream held"
    before = len(seen)
    assert 8 <= before <= 12

    driver.toggle()
    play(engine, driver, clock, 30.0)
    assert driver.held
    assert 8 <= len(seen) - before <= 12
