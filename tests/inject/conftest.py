"""A session without a model that listens on a free port."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.loop import EngineLoop
from engine.serving.listener import Listener, bind
from engine.simulated import simulated_engine

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def session_url() -> Iterator[str]:
    """Where the session listens."""
    config = EngineConfig(cache=CacheConfig(num_blocks=256), scheduler=SchedulerConfig(max_model_len=512))
    engine = simulated_engine(config, step_seconds=0.001)
    loop = EngineLoop(engine)
    listener = Listener(engine, bind("127.0.0.1", 0))
    loop.start()
    listener.start()
    yield listener.url
    listener.stop()
    loop.stop()
