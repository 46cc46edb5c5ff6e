"""A running engine as a source: what it says is folded, at whatever rate; its errors come out as one line."""

from __future__ import annotations

import time

import pytest

from engine.config import CacheConfig, EngineConfig
from engine.loop import EngineLoop
from engine.request import SamplingParams
from engine.simulated import simulated_engine
from kvtui.sources import live
from kvtui.sources.live import LiveSource


@pytest.fixture
def engine():
    return simulated_engine(EngineConfig(cache=CacheConfig(num_blocks=64, block_size=4)))


@pytest.fixture
def loop(engine):
    loop = EngineLoop(engine)
    yield loop
    loop.stop(5)


def wait_until(condition) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in 20 s"
        time.sleep(0.005)


def poll_until(source: LiveSource, position: int) -> list[int]:
    seen: list[int] = []

    def reached() -> bool:
        seen.extend(step.index for step in source.poll())
        return source.position >= position

    wait_until(reached)
    return seen


def test_every_step_is_handed_out_once_and_in_order(engine, loop) -> None:
    source = LiveSource(engine, loop)
    assert (source.live, source.position, source.length, source.error) == (True, -1, 0, None)
    loop.start()
    engine.add_request("a prompt", SamplingParams(max_tokens=60))
    seen = poll_until(source, 50)
    assert seen == list(range(len(seen)))
    assert source.state.step == source.position


def test_what_is_folded_is_what_the_engine_did(engine, loop) -> None:
    source = LiveSource(engine, loop)
    request = engine.add_request("a prompt", SamplingParams(max_tokens=12))
    while engine.has_work:
        engine.step()
    source.poll()
    assert source.state.num_violations == 0
    assert source.state.requests[request].num_output_tokens == 12
    assert source.length == source.position + 1


def test_a_poll_is_bounded_and_the_rest_comes_with_the_next(engine, loop, monkeypatch) -> None:
    source = LiveSource(engine, loop)
    engine.add_request("a prompt", SamplingParams(max_tokens=200))
    while engine.has_work:
        engine.step()
    monkeypatch.setattr(live, "POLL_BUDGET_NS", -1)
    first = source.poll()
    assert 0 < len(first) < 100
    assert source.length > source.position + 1
    seen = [step.index for step in first]
    for _ in range(100):
        seen += [step.index for step in source.poll()]
    assert seen == list(range(source.length))


def test_pausing_holds_the_engine_and_a_single_step_is_one_step(engine, loop) -> None:
    source = LiveSource(engine, loop)
    source.pause()
    assert source.paused
    loop.start()
    engine.add_request("a prompt", SamplingParams(max_tokens=50))
    source.step(1)
    poll_until(source, 0)
    source.step(3)
    poll_until(source, 3)
    time.sleep(0.05)
    assert source.poll() == []
    source.resume()
    assert not source.paused
    poll_until(source, 20)


def test_the_engine_can_be_slowed_down_and_let_go_again(engine, loop) -> None:
    source = LiveSource(engine, loop)
    engine.add_request("a prompt", SamplingParams(max_tokens=50))
    engine.step()
    source.poll()
    source.set_speed(0.25)
    assert source.speed == 0.25
    assert loop.speed is not None
    assert loop.speed > 0
    source.set_speed(8)
    assert source.speed == 1
    assert loop.speed is None


def test_what_ends_the_engine_comes_out_as_one_line(engine, loop) -> None:
    source = LiveSource(engine, loop)

    def burn() -> None:
        raise RuntimeError("the cache caught fire\nand more")

    engine.step = burn
    loop.start()
    engine.add_request("a prompt", SamplingParams(max_tokens=50))
    wait_until(lambda: source.error is not None)
    assert source.error == "RuntimeError: the cache caught fire"


def test_closing_ends_the_thread_or_says_that_it_is_stuck(engine, loop) -> None:
    source = LiveSource(engine, loop)
    step = engine.step

    def crawl():
        time.sleep(0.4)
        return step()

    engine.step = crawl
    loop.start()
    engine.add_request("a prompt", SamplingParams(max_tokens=3))
    time.sleep(0.1)
    assert not source.close(0.01)
    assert source.close(10)
