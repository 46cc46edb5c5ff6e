"""A recording as a source: played by its own timestamps, forward, backward and anywhere."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from engine.trace.events import StepTrace
from engine.trace.recording import RecordingError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from engine.trace.events import Header, RequestArrived
    from engine.trace.reader import Recording

LONGEST_GAP_NS = 2_000_000_000
"""An idle time longer than this between two steps is played as if it were this long."""

MIN_SPEED, MAX_SPEED = 0.25, 16.0

CONTEXT_STEPS = 1024
"""Steps before the new position that `poll` hands out after a jump."""

POLL_BUDGET_NS = 40_000_000
"""Longest that one poll folds; what is due beyond it waits, and the clock waits with it."""

_MOST_STEPS_FOLDED = 256
"""A longer way forward is jumped."""


class RecordingSource:
    """What a screen draws while a recording plays; see `Source` for the attributes.

    Args:
        recording: Open.
        start: The step to begin at.
        clock: Nanoseconds that only grow; tests bring their own.
    """

    live = False

    def __init__(self, recording: Recording, start: int = -1, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self.recording = recording
        self.header: Header = recording.header
        self.length = recording.num_steps
        self.generation = 0
        self.speed = 1.0
        self.paused = False
        self.error: str | None = None
        self._clock = clock
        self._last_ns = clock()
        self._due_ns = 0
        """Playing time still to pass before the next step is due; behind where negative."""
        self._out: list[StepTrace] = []
        self._arrived: list[RequestArrived] = []
        self._next: StepTrace | None = None
        self._ahead: Iterator[RequestArrived | StepTrace] = recording.messages(0)
        self.state = recording.state_at(-1)
        if start >= 0:
            self.seek(start)

    @property
    def position(self) -> int:
        """Index of the step shown."""
        return self.state.step

    @property
    def at_end(self) -> bool:
        """Whether the last step is shown."""
        return self.position >= self.length - 1

    def poll(self) -> list[StepTrace]:
        """Apply the steps whose time has come, by the recorded timestamps and the speed."""
        now = self._clock()
        elapsed, self._last_ns = now - self._last_ns, now
        if not self.paused:
            self._due_ns -= int(elapsed * self.speed)
            deadline = now + POLL_BUDGET_NS
            while self._due_ns <= 0:
                if not self._advance():
                    self.paused = True
                    break
                self._due_ns += self._gap_ns()
                if self._clock() > deadline:
                    self._due_ns = max(self._due_ns, 0)
        steps, self._out = self._out, []
        return steps

    def pause(self) -> None:
        """Stop the clock."""
        self.paused = True

    def resume(self) -> None:
        """Play on; from the start where the end is shown."""
        if self.at_end and self.length:
            self.seek(-1)
        self.paused = False
        self._due_ns = 0
        self._last_ns = self._clock()

    def step(self, n: int) -> None:
        """Pause, and go n steps forward or backward."""
        self.paused = True
        if n < 0 or n > _MOST_STEPS_FOLDED:
            self.seek(self.position + n)
            return
        for _ in range(n):
            if not self._advance():
                break

    def seek(self, step: int) -> None:
        """Show the state after a step; clamped to the recording, -1 is before the first."""
        step = max(-1, min(step, self.length - 1))
        try:
            self.state = self.recording.state_at(step)
            context = list(self.recording.steps(max(0, step + 1 - CONTEXT_STEPS), step + 1))
        except RecordingError as error:
            self.error, self.paused = str(error), True
            return
        self.generation += 1
        self._ahead = self.recording.messages(step + 1)
        self._next = None
        self._out = context
        self._due_ns = 0

    def set_speed(self, speed: float) -> None:
        """Play at so many times real time, within 0.25 and 16."""
        self.speed = min(MAX_SPEED, max(MIN_SPEED, speed))

    def close(self, timeout: float) -> bool:
        """Close the file."""
        self.recording.close()
        return True

    def _advance(self) -> bool:
        """Apply the next step, and the arrivals before it; False where there is none."""
        step = self._peek()
        if step is None:
            return False
        for arrived in self._arrived:
            self.state.apply(arrived)
        self.state.apply(step)
        self._out.append(step)
        self._next = None
        return True

    def _peek(self) -> StepTrace | None:
        """The next step, read but not yet applied; None at the end, or where the file is damaged."""
        if self._next is None:
            self._arrived = []
            try:
                for message in self._ahead:
                    if isinstance(message, StepTrace):
                        self._next = message
                        break
                    self._arrived.append(message)
            except RecordingError as error:
                self.error = str(error)
        return self._next

    def _gap_ns(self) -> int:
        """Playing time from the step just applied to the next one."""
        following = self._peek()
        return 0 if following is None else max(0, min(following.start_ns - self.state.time_ns, LONGEST_GAP_NS))
