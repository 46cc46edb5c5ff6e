"""The dashboard over an engine without a model that steps only when it is told to."""

from __future__ import annotations

from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.loop import EngineLoop
from engine.request import SamplingParams
from engine.simulated import simulated_engine
from kvtui.app import KvtuiApp
from kvtui.sources.live import LiveSource

PROMPT = "the shared beginning of all questions here: "


class Live:
    """An engine that only steps when told, and the app over it."""

    def __init__(self, num_blocks: int = 48, block_size: int = 4, **app) -> None:
        self.engine = simulated_engine(
            EngineConfig(
                cache=CacheConfig(num_blocks=num_blocks, block_size=block_size),
                scheduler=SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=64, max_model_len=160),
            )
        )
        self.loop = EngineLoop(self.engine)
        self.source = LiveSource(self.engine, self.loop)
        self.app = KvtuiApp(self.source, theme=app.pop("theme", "dark"), **app)

    def ask(self, count: int = 1, max_tokens: int = 40, text: str = PROMPT) -> None:
        for i in range(count):
            self.engine.add_request(f"{text}{i}", SamplingParams(max_tokens=max_tokens), name=f"ask-{i}")

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.engine.step()
