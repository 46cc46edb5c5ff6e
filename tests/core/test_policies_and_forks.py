"""What an older policy cannot do is refused in one line."""

from __future__ import annotations

import pytest

from engine.config import CacheConfig, ConfigError, EngineConfig, SchedulerConfig
from engine.request import RequestError, SamplingParams
from engine.simulated import simulated_engine


@pytest.mark.parametrize("policy", ["contiguous", "static"])
def test_an_older_policy_refuses_to_share_blocks(policy: str) -> None:
    engine = simulated_engine(EngineConfig(scheduler=SchedulerConfig(policy=policy)))
    first = engine.add_request("one output is fine", SamplingParams(max_tokens=3))

    with pytest.raises(RequestError, match=policy):
        engine.add_request("several are not", SamplingParams(n=2))
    with pytest.raises(RequestError, match=policy):
        engine.fork(first)


def test_an_older_policy_has_no_cpu_pool() -> None:
    with pytest.raises(ConfigError, match="--cpu-blocks"):
        EngineConfig(cache=CacheConfig(num_cpu_blocks=4), scheduler=SchedulerConfig(policy="static"))
