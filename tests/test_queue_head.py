"""The head of the free queue that is kept equals the one found in the whole pool."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.request import SamplingParams
from engine.simulated import simulated_engine
from engine.trace.state import PoolState
from kvtui import queue_head
from kvtui.queue_head import QueueHead

if TYPE_CHECKING:
    import numpy as np


@pytest.mark.parametrize("kept", [1, 5, 4096])
@pytest.mark.parametrize("num_blocks", [24, 90])
def test_it_is_the_one_of_the_whole_pool_after_every_step_and_jump(
    kept: int, num_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_head, "_KEPT", kept)
    engine = simulated_engine(
        EngineConfig(
            cache=CacheConfig(num_blocks=num_blocks, block_size=4),
            scheduler=SchedulerConfig(max_num_seqs=5, max_num_batched_tokens=48, max_model_len=80),
        )
    )
    state = PoolState(engine.header)
    engine.add_sink(state.apply)
    rng, head, early = random.Random(7), QueueHead(), None
    for step in range(300):
        if step % 9 == 0:
            for _ in range(rng.randint(1, 4)):
                words = "shared words to begin with " * rng.randint(0, 2) + str(rng.randint(0, 5))
                engine.add_request(words, SamplingParams(max_tokens=rng.randint(1, 40), ignore_eos=True))
        engine.step()
        most = rng.choice([0, 1, 8, 40])
        assert head.first(state, most) == state.free_queue(most).tolist()
        if step == 100:
            early = state.copy()
        if early is not None and step % 50 == 0:
            assert head.first(early, 8) == early.free_queue(8).tolist()
    assert state.counters.prefix_hit_tokens > 0


def test_the_pool_is_not_asked_at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = simulated_engine(EngineConfig(cache=CacheConfig(num_blocks=5000)))
    state = PoolState(engine.header)
    engine.add_sink(state.apply)
    engine.add_request("some words", SamplingParams(max_tokens=400, ignore_eos=True))
    asked = []
    found = PoolState.free_queue

    def counted(self: PoolState, most: int) -> np.ndarray:
        asked.append(most)
        return found(self, most)

    monkeypatch.setattr(PoolState, "free_queue", counted)
    head = QueueHead()
    for _ in range(200):
        engine.step()
        head.first(state, 8)
    assert len(asked) == 1
