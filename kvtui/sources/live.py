"""A running engine as a source: its trace arrives in a queue and is folded at the screen's pace."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

from engine.trace.events import Header, StepTrace
from engine.trace.state import PoolState

if TYPE_CHECKING:
    from engine.engine import PagedEngine
    from engine.loop import EngineLoop
    from engine.trace.events import TraceMessage

POLL_BUDGET_NS = 40_000_000
"""Longest that one poll folds before it lets the screen breathe; what is left is taken by the next poll."""

MIN_SPEED = 1 / 64

_CHECK_CLOCK_EVERY = 16
_SMOOTHING = 0.1


class LiveSource:
    """What a screen draws while an engine runs in the same process; see `Source` for the attributes.

    The engine never waits for the screen: it appends its immutable messages to a deque, which `poll` drains.

    Args:
        engine: Before its first step.
        loop: The thread that drives it.
    """

    live = True

    def __init__(self, engine: PagedEngine, loop: EngineLoop) -> None:
        self.header: Header = engine.header
        self.state = PoolState(self.header)
        self.generation = 0
        self.loop = loop
        self.speed = 1.0
        self._step_ns = 0.0
        """Running mean of how long a step takes when nothing holds it up."""
        self._queue: deque[TraceMessage] = deque()
        self._length = 0
        engine.add_sink(self._queue.append)

    @property
    def position(self) -> int:
        """Index of the step shown."""
        return self.state.step

    @property
    def length(self) -> int:
        """Steps known so far, those not yet folded included."""
        try:
            last = self._queue[-1]
        except IndexError:
            return self.state.step + 1
        return last.index + 1 if isinstance(last, StepTrace) else max(self._length, self.state.step + 1)

    @property
    def paused(self) -> bool:
        """Whether the engine is held."""
        return self.loop.paused

    @property
    def error(self) -> str | None:
        """Why the engine's thread ended, in one line."""
        error = self.loop.error
        return None if error is None else f"{type(error).__name__}: {error}".splitlines()[0]

    def poll(self) -> list[StepTrace]:
        """Fold what the engine has said since the last call, as much as fits into the budget."""
        queue, apply = self._queue, self.state.apply
        steps: list[StepTrace] = []
        deadline = time.monotonic_ns() + POLL_BUDGET_NS
        while queue:
            message = queue.popleft()
            apply(message)
            if isinstance(message, StepTrace):
                steps.append(message)
                if len(steps) % _CHECK_CLOCK_EVERY == 0 and time.monotonic_ns() > deadline:
                    break
        self._length = max(self._length, self.state.step + 1)
        if steps:
            self._measure(steps[-1])
        return steps

    def pause(self) -> None:
        """Hold the engine after the step it is in."""
        self.loop.pause()

    def resume(self) -> None:
        """Let the engine run."""
        self.loop.resume()

    def step(self, n: int) -> None:
        """Let the held engine do n steps; it cannot go back."""
        self.loop.pause()
        for _ in range(n):
            self.loop.step_once()

    def seek(self, step: int) -> None:
        """A running engine shows the present: there is nowhere else to go."""

    def set_speed(self, speed: float) -> None:
        """Slow the engine down to a fraction of its own pace; 1 lets it run as fast as it can."""
        self.speed = min(1.0, max(MIN_SPEED, speed))
        self._limit()

    def close(self, timeout: float) -> bool:
        """Stop the engine's thread; False where it is stuck in a step for longer than the timeout (seconds)."""
        return self.loop.stop(timeout)

    def _measure(self, step: StepTrace) -> None:
        took = step.schedule_ns + step.execute_ns + step.sample_ns + step.update_ns
        self._step_ns = took if not self._step_ns else self._step_ns + (took - self._step_ns) * _SMOOTHING
        if self.speed < 1:
            self._limit()

    def _limit(self) -> None:
        if self.speed >= 1:
            self.loop.set_speed(None)
        elif self._step_ns > 0:
            self.loop.set_speed(self.speed * 1e9 / self._step_ns)
