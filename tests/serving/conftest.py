"""A listener on a free port over the engine without a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.loop import EngineLoop
from engine.serving.listener import Listener, bind
from engine.simulated import simulated_engine

if TYPE_CHECKING:
    from engine.engine import PagedEngine

Serve = Callable[..., "Served"]


class Served:
    """A running session: its engine, its loop, its listener."""

    def __init__(self, engine: PagedEngine, loop: EngineLoop, listener: Listener) -> None:
        self.engine = engine
        self.loop = loop
        self.listener = listener
        self.url = listener.url
        self.http = httpx.Client(base_url=listener.url, timeout=20, trust_env=False)


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Make a session; everything is taken down at the end."""
    with ExitStack() as stack:

        def make(
            *,
            num_blocks: int = 256,
            max_model_len: int = 512,
            seconds_per_step: float = 0.0,
            eos_rate: float = 0.0,
            token: str | None = None,
            start_loop: bool = True,
            **listener: Any,
        ) -> Served:
            config = EngineConfig(
                cache=CacheConfig(num_blocks=num_blocks), scheduler=SchedulerConfig(max_model_len=max_model_len)
            )
            engine = simulated_engine(config, step_seconds=seconds_per_step, eos_rate=eos_rate)
            loop = EngineLoop(engine)
            server = Listener(engine, bind("127.0.0.1", 0), token=token, **listener)
            served = Served(engine, loop, server)
            stack.callback(loop.stop)
            stack.callback(server.stop)
            stack.callback(served.http.close)
            if start_loop:
                loop.start()
            server.start()
            return served

        yield make


@pytest.fixture
def served(serve: Serve) -> Served:
    """A session with nothing special about it."""
    return serve()
