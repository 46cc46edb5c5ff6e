"""Small races for tests."""

from __future__ import annotations

from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.request import SamplingParams
from kvtui.race.arrivals import Arrivals, from_workload
from kvtui.race.lane import POLICIES, Lane, run_lane
from kvtui.workloads.workload import Session, Workload


def arrivals(count: int = 8, *, num_blocks: int = 24, n: int = 1, max_tokens: int = 24) -> Arrivals:
    """Requests that all come at once and reserve more than there is."""
    sessions = tuple(
        Session(
            name=f"ask-{i}",
            at=0.01 * i,
            prompt="the block of the page " * (1 + i % 3) + str(i),
            params=SamplingParams(max_tokens=max_tokens, n=n),
        )
        for i in range(count)
    )
    config = EngineConfig(
        cache=CacheConfig(block_size=4, num_blocks=num_blocks),
        scheduler=SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=64, max_model_len=120),
    )
    return from_workload(Workload("small", "", sessions), config)


def lanes(raced: Arrivals) -> list[Lane]:
    return [run_lane(raced, policy) for policy in POLICIES]
