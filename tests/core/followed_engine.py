"""An engine without a model whose trace is folded and checked after every step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.engine import PagedEngine
from engine.simulated import SimulatedCodec, SimulatedRunner
from engine.trace.events import BlockOp, Decision, Header, Op, StepTrace, TraceMessage
from engine.trace.invariants import check
from engine.trace.state import PoolState

if TYPE_CHECKING:
    from engine.request import RequestOutput, SamplingParams

ALONE = EngineConfig(cache=CacheConfig(64, 8, prefix_caching=False))


class Followed:
    """What came of every request, and what the trace said about it."""

    def __init__(self, config: EngineConfig, **runner: float) -> None:
        self.engine = PagedEngine(config, SimulatedRunner(config, **runner), SimulatedCodec())  # type: ignore[arg-type]
        self.state: PoolState
        self.ops: list[BlockOp] = []
        self.decisions: list[Decision] = []
        self.tokens: dict[int, list[int]] = {}
        self.last: dict[int, RequestOutput] = {}
        self.engine.add_sink(self.follow)

    def follow(self, message: TraceMessage) -> None:
        """The sink."""
        if isinstance(message, Header):
            self.state = PoolState(message)
            return
        self.state.apply(message)
        if isinstance(message, StepTrace):
            self.ops += message.ops
            self.decisions += message.decisions
            assert self.state.violations == []
            assert check(self.state) == []

    def step(self, times: int = 1) -> None:
        """Iterations; outputs are kept by the number that the trace has for the request."""
        for _ in range(times):
            for output in self.engine.step():
                number = output.request_id + output.index
                self.tokens.setdefault(number, []).extend(output.token_ids)
                self.last[number] = output

    def run(self) -> None:
        """To the end."""
        for _ in range(2000):
            if not self.engine.has_work:
                return
            self.step()
        raise AssertionError("it does not end")

    def count(self, op: Op) -> int:
        """How often a block operation was made."""
        return sum(row[0] == op for row in self.ops)


def config_of(block_size: int, num_blocks: int, *, prefix_caching: bool = True, **limits: object) -> EngineConfig:
    """A small pool; `num_cpu_blocks` among the limits goes to the cache."""
    cpu = {"num_cpu_blocks": limits.pop("num_cpu_blocks")} if "num_cpu_blocks" in limits else {}
    return EngineConfig(
        cache=CacheConfig(block_size, num_blocks, prefix_caching, **cpu),  # type: ignore[arg-type]
        scheduler=SchedulerConfig(**limits),  # type: ignore[arg-type]
    )


def alone(prompt: list[int], params: SamplingParams, **runner: float) -> list[int]:
    """Tokens of a request that has a large pool to itself."""
    followed = Followed(ALONE, **runner)
    request = followed.engine.add_request(prompt, params)
    followed.run()
    return followed.tokens[request]
