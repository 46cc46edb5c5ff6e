from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest

from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.loop import EngineLoop
from engine.request import SamplingParams
from engine.simulated import simulated_engine
from engine.trace.events import RequestArrived, StepTrace
from kvtui.workloads.catalog import load_workload
from kvtui.workloads.driver import WorkloadDriver
from kvtui.workloads.workload import Message, Session, SyntheticPrompt, Workload

if TYPE_CHECKING:
    from engine.engine import PagedEngine


@pytest.fixture
def engine() -> PagedEngine:
    return simulated_engine(
        EngineConfig(cache=CacheConfig(num_blocks=512), scheduler=SchedulerConfig(max_model_len=1024))
    )


def session(name: str = "s", at: float = 0.0, *follow_ups: str, pause: float = 0.0) -> Session:
    params = SamplingParams(max_tokens=5)
    return Session(name, at, params, messages=(Message("user", "hi"),), follow_ups=follow_ups, pause=pause)


def arrivals(engine: PagedEngine) -> list[RequestArrived]:
    seen: list[RequestArrived] = []
    engine.add_sink(lambda message: seen.append(message) if isinstance(message, RequestArrived) else None)
    return seen


def finish(engine: PagedEngine) -> None:
    while engine.has_work:
        engine.step()


def test_requests_come_when_they_are_due_and_not_before(engine, clock):
    seen = arrivals(engine)
    driver = WorkloadDriver(engine, Workload("w", "", (session("a"), session("b", 2.0))), clock=clock)

    assert driver.poll() == 2.0
    clock.now += 1.5
    assert driver.poll() == 0.5
    clock.now += 0.5
    assert driver.poll() is None
    finish(engine)
    driver.poll()

    assert [request.name for request in seen] == ["a", "b"]
    assert driver.done
    assert driver.num_done == 2


def test_the_next_turn_waits_for_the_answer_and_its_pause_and_sends_both_along(engine, clock):
    seen = arrivals(engine)
    driver = WorkloadDriver(engine, Workload("w", "", (session("a", 0.0, "more", pause=3.0),)), clock=clock)
    driver.poll()
    engine.step()
    driver.poll()
    finish(engine)
    assert [request.name for request in seen] == ["a turn 1"]

    assert driver.poll() == 3.0
    clock.now += 3.0
    driver.poll()
    finish(engine)
    driver.poll()

    first, second = ("".join(request.prompt_pieces) for request in seen)
    assert second.startswith(first)
    assert second.removeprefix(first).endswith("user: more\nassistant:")
    assert len(second) > len(first) + len("\nuser: more\nassistant:")
    assert driver.done


def test_a_refused_request_ends_its_session_and_leaves_the_others(clock):
    engine = simulated_engine(EngineConfig(cache=CacheConfig(num_blocks=4)))
    long = Session("long", 0.0, SamplingParams(max_tokens=5), prompt=tuple(range(100)), follow_ups=("more",))
    driver = WorkloadDriver(engine, Workload("w", "", (long, session("short"))), clock=clock)
    driver.poll()
    finish(engine)
    driver.poll()

    assert driver.done
    assert (driver.num_sent, driver.num_done, driver.num_failed) == (2, 2, 1)


def test_a_prompt_that_the_engine_will_not_take_counts_as_failed(engine, clock):
    wrong = Session("wrong", 0.0, SamplingParams(), prompt=(10**9,))
    driver = WorkloadDriver(engine, Workload("w", "", (wrong,)), clock=clock)
    driver.poll()
    driver.poll()

    assert driver.done
    assert driver.num_failed == 1


def test_text_ids_and_lengths_all_become_prompts(engine, clock):
    seen = arrivals(engine)
    prompts = ("the block", (300, 301), SyntheticPrompt(40))
    sessions = tuple(Session(f"{i}", 0.0, SamplingParams(max_tokens=2), prompt=p) for i, p in enumerate(prompts))
    WorkloadDriver(engine, Workload("w", "", sessions), clock=clock).poll()
    finish(engine)

    assert seen[0].prompt_token_ids == engine.codec.encode("the block")
    assert seen[1].prompt_token_ids == [300, 301]
    assert len(seen[2].prompt_token_ids) == 40


def test_a_repeating_workload_starts_again_after_its_pause(engine, clock):
    driver = WorkloadDriver(engine, Workload("w", "", (session(),)), repeat_after=5.0, clock=clock)
    driver.poll()
    finish(engine)

    assert driver.poll() == 5.0
    assert not driver.done
    clock.now += 5.0
    driver.poll()
    finish(engine)
    driver.poll()
    assert driver.num_done == 2


def test_the_chat_workload_finds_its_history_in_the_cache(engine, clock):
    counters = []
    engine.add_sink(lambda message: counters.append(message.counters) if isinstance(message, StepTrace) else None)
    driver = WorkloadDriver(engine, load_workload("chat").take(2), clock=clock)
    while not driver.done:
        driver.poll()
        finish(engine)
        clock.now += 1.0

    assert (driver.num_done, driver.num_failed) == (7, 0)
    assert counters[-1].prefix_hit_tokens > counters[-1].prefix_queried_tokens / 3


def test_nothing_is_added_while_paused_and_everything_after(engine):
    loop = EngineLoop(engine)
    stop, paused = threading.Event(), threading.Event()
    paused.set()
    driver = WorkloadDriver(engine, Workload("w", "", (session(),)))
    thread = driver.run_in_thread(stop, paused.is_set)
    loop.start()
    time.sleep(0.15)
    assert driver.num_sent == 0

    paused.clear()
    thread.join(10)
    loop.stop()
    assert driver.done
    assert not thread.is_alive()
