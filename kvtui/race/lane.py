"""One policy's run: the whole engine without a model, in a time that is reckoned and not waited for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from engine.engine import PagedEngine
from engine.simulated import EOS_TOKEN_ID, SimulatedCodec, SimulatedRunner, SimulatedStream
from engine.trace.events import Header, RequestArrived, StepTrace
from kvtui.race.arrivals import EOS_RATE
from kvtui.workloads.driver import WorkloadDriver

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from engine.config import EngineConfig, Policy
    from engine.core.scheduler_output import ScheduledRequest, SchedulerOutput
    from engine.request import Request
    from engine.runner import TextCodec
    from engine.trace.events import ModelInfo, TraceMessage
    from kvtui.race.arrivals import Arrivals, Cost

POLICIES: tuple[Policy, ...] = ("static", "contiguous", "paged")
"""In the order in which they are shown: each is one idea more than the one before."""

MOST_STEPS = 200_000


class RaceClock:
    """A time that only the work moves on."""

    def __init__(self) -> None:
        self.ns = 0

    def __call__(self) -> int:
        """Nanoseconds since the start."""
        return self.ns

    def seconds(self) -> float:
        """The same in seconds."""
        return self.ns / 1e9


class RaceRunner(SimulatedRunner):
    """Takes the time that a step costs, and ends each request where it ended in the recording, if there is one."""

    def __init__(
        self, config: EngineConfig, clock: RaceClock, cost: Cost, model: ModelInfo, lengths: Sequence[int] | None
    ) -> None:
        super().__init__(config, eos_rate=0.0 if lengths is not None else EOS_RATE)
        self.model_info = model
        self._clock = clock
        self._cost = cost
        self._lengths = lengths

    def execute(self, output: SchedulerOutput) -> list[int | None]:
        """One step; the clock goes on by what it costs."""
        tokens = super().execute(output)
        cost = self._cost.seconds + self._cost.seconds_per_token * output.num_batched_tokens
        self.last_execute_ns = max(1, round(cost * 1e9))
        self.last_sample_ns = 0
        self._clock.ns += self.last_execute_ns
        return tokens

    def _next_token(self, share: ScheduledRequest, request: Request) -> int:
        token = super()._next_token(share, request)
        lengths, number = self._lengths, request.request_id
        if lengths is not None and number < len(lengths) and len(request.output_token_ids) + 1 >= lengths[number]:
            return EOS_TOKEN_ID
        return token


class WordlessCodec(SimulatedCodec):
    """For a recording's tokens, which are of another vocabulary: their text is not shown."""

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """Nothing for each token."""
        return [""] * len(token_ids)

    def stream(self, prompt_token_ids: Sequence[int]) -> SimulatedStream:
        """A stream of the made-up output."""
        return SimulatedStream()


@dataclass(frozen=True, slots=True)
class Lane:
    """What one policy made of the arrivals.

    Attributes:
        policy: Its name.
        header: Of the trace.
        messages: The trace: arrivals and steps in order. Its time is the reckoned one.
        num_failed: Requests that the policy refused or could not finish.
    """

    policy: Policy
    header: Header
    messages: list[RequestArrived | StepTrace]
    num_failed: int


def run_lane(arrivals: Arrivals, policy: Policy, progress: Callable[[int], None] = lambda _: None) -> Lane:
    """Run all arrivals under one policy.

    Args:
        arrivals: The same for every lane.
        policy: Who runs when, and how memory is handed out.
        progress: Called with the number of steps, now and then.
    """
    config = replace(arrivals.config, scheduler=replace(arrivals.config.scheduler, policy=policy))
    clock = RaceClock()
    codec: TextCodec = SimulatedCodec() if arrivals.lengths is None else WordlessCodec()
    engine = PagedEngine(
        config,
        RaceRunner(config, clock, arrivals.cost, arrivals.model, arrivals.lengths),
        codec,
        title=f"{arrivals.name}: {policy}",
        source="simulator",
        provenance="simulated",
        clock=clock,
    )
    heard: list[TraceMessage] = []
    engine.add_sink(heard.append)
    driver = WorkloadDriver(engine, arrivals.workload, clock=clock.seconds)
    steps = 0
    while steps < MOST_STEPS:
        due = driver.poll()
        if engine.has_work:
            engine.step()
            steps += 1
            if steps % 64 == 0:
                progress(steps)
        elif driver.done or due is None:
            break
        else:
            clock.ns += max(1, round(due * 1e9))
    messages = [message for message in heard if not isinstance(message, Header)]
    return Lane(policy, engine.header, messages, driver.num_failed)
