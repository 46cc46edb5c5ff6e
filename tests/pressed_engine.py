"""A session without a model in which everything happens: shared prefixes, evictions, preemptions, forks, refusals."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.request import SamplingParams
from engine.simulated import simulated_engine

if TYPE_CHECKING:
    from engine.engine import PagedEngine


def pressed_engine(num_cpu_blocks: int = 12, preemption: str = "swap") -> PagedEngine:
    """An engine whose pool is too small for what it is asked for by `ask`."""
    return simulated_engine(
        EngineConfig(
            cache=CacheConfig(num_blocks=26, block_size=4, num_cpu_blocks=num_cpu_blocks),
            scheduler=SchedulerConfig(
                max_num_seqs=6, max_num_batched_tokens=32, max_model_len=96, preemption=preemption
            ),
        )
    )


def ask(engine: PagedEngine, i: int) -> int:
    """The i-th request: every third begins as the others do, some fork, some are refused."""
    if i % 11 == 10:
        return engine.add_request(list(range(300)), SamplingParams(max_tokens=4), name=f"too-long-{i}")
    prompt = "the same beginning of all " if i % 3 == 0 else f"{i} begins by itself "
    params = SamplingParams(max_tokens=12 + i % 17, n=2 if i % 7 == 3 else 1, temperature=0.5, seed=i)
    return engine.add_request(f"{prompt}{'x' * (i % 5)}{i}", params, name=f"r{i}")


def run(engine: PagedEngine, num_steps: int, start: int = 0) -> None:
    """So many steps with always some requests to come."""
    for i in range(start, start + num_steps):
        if i % 6 == 0:
            number = ask(engine, i // 6)
            if i % 54 == 48:
                engine.abort(number)
        engine.step()
