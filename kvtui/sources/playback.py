"""Moving through a trace that is kept somewhere: played by its own timestamps, forward, backward and anywhere."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

from engine.trace.events import StepTrace
from engine.trace.file_format import RecordingError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from engine.trace.damage import Damage
    from engine.trace.events import RequestArrived
    from engine.trace.marks import Marks
    from engine.trace.state import PoolState
    from engine.trace.step_columns import StepColumns

LONGEST_GAP_NS = 2_000_000_000
"""An idle time longer than this between two steps is played as if it were this long."""

MIN_SPEED, MAX_SPEED = 0.25, 16.0

POLL_BUDGET_NS = 40_000_000
"""Longest that one poll folds; what is due beyond it waits, and the clock waits with it."""

_REST_NS = 400_000_000
"""How long the last step of a window is shown at least, before its first follows."""

_MOST_STEPS_FOLDED = 256
"""A longer way forward is jumped."""


class PlayableTrace(Protocol):
    """What is played: `engine.trace.trace_reader.TraceReader` says what each of these is."""

    @property
    def num_steps(self) -> int: ...  # noqa: D102 - see the class

    @property
    def first_step(self) -> int: ...  # noqa: D102 - see the class

    @property
    def marks(self) -> Marks: ...  # noqa: D102 - see the class

    def messages(self, start: int = 0, stop: int | None = None) -> Iterator[RequestArrived | StepTrace]: ...  # noqa: D102

    def columns(self, start: int, stop: int | None = None) -> StepColumns: ...  # noqa: D102

    def state_at(self, step: int) -> PoolState: ...  # noqa: D102

    def damage(self, error: RecordingError) -> Damage | None: ...  # noqa: D102


class Playback:
    """A place in a trace, and the clock that moves it. The trace may grow meanwhile.

    Args:
        trace: What is played.
        position: The step to begin at; -1 is before the first.
        clock: Nanoseconds that only grow; tests bring their own.

    Attributes:
        state: The fold up to `position`; another object after every jump.
        generation: Grows with every jump.
        paused: Whether the clock stands still.
        speed: Times the recorded time.
        window: The first and the last step of what is played again and again; None: all is played, once.
        error: Why a part of the trace could not be shown, in one line.
        damage: Which part that is, where the step shown is the last one before it.
    """

    def __init__(self, trace: PlayableTrace, position: int = -1, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self.trace = trace
        self.generation = 0
        self.speed = 1.0
        self.paused = False
        self.window: tuple[int, int] | None = None
        self.error: str | None = None
        self.damage: Damage | None = None
        self._clock = clock
        self._last_ns = clock()
        self._due_ns = 0
        """Playing time still to pass before the next step is due; behind where negative."""
        self._out: list[StepTrace] = []
        self._arrived: list[RequestArrived] = []
        self._next: StepTrace | None = None
        self.state = trace.state_at(trace.first_step - 1)
        self._ahead = trace.messages(trace.first_step)
        if position >= trace.first_step:
            self.seek(position)

    @property
    def position(self) -> int:
        """Index of the step shown."""
        return self.state.step

    @property
    def marks(self) -> Marks:
        """The marks of the trace."""
        return self.trace.marks

    @property
    def at_end(self) -> bool:
        """Whether the last step is shown."""
        return self.position >= self.trace.num_steps - 1

    def context(self, most: int) -> StepColumns:
        """At most so many steps up to the position, as columns; none before a part that cannot be read."""
        stop = self.position + 1
        start = max(stop - most, self.trace.first_step)
        while start < stop:
            try:
                return self.trace.columns(start, stop)
            except RecordingError as error:
                start = stop if error.steps is None else error.steps[1] + 1
        return self.trace.columns(stop, stop)

    def poll(self) -> list[StepTrace]:
        """Apply the steps whose time has come, by the recorded timestamps and the speed."""
        now = self._clock()
        elapsed, self._last_ns = now - self._last_ns, now
        if not self.paused:
            self._due_ns -= int(elapsed * self.speed)
            deadline = now + POLL_BUDGET_NS
            while self._due_ns <= 0:
                looping = self.window is not None and self.position >= self.window[1]
                if not (self._to_window() if looping else self._advance()):
                    self.paused = True
                    break
                self._due_ns += self._gap_ns()
                if self.window is not None and self.position == self.window[1]:
                    self._due_ns = max(self._due_ns, int(_REST_NS * self.speed))
                if looping or self._clock() > deadline:
                    self._due_ns = max(self._due_ns, 0)
                    break
        steps, self._out = self._out, []
        return steps

    def _to_window(self) -> bool:
        """Go to the first step of the window."""
        assert self.window is not None
        due_ns, generation = self._due_ns, self.generation
        self.seek(self.window[0])
        self._due_ns = due_ns
        return self.generation > generation

    def set_window(self, window: tuple[int, int] | None) -> None:
        """Play the steps from the first to the second of the window again and again; None: play on to the end."""
        self.window = None if window is None else (min(window), max(window))

    def pause(self) -> None:
        """Stop the clock."""
        self.paused = True

    def resume(self) -> None:
        """Play on: from the start where the end is shown, from behind the damage where that is in the way."""
        if self._cross_damage():
            pass
        elif self.at_end and self.window is None and self.trace.num_steps > self.trace.first_step:
            self.seek(self.trace.first_step - 1)
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
            if not (self._advance() or self._cross_damage()):
                break

    def seek(self, step: int) -> None:
        """Show the state after a step; clamped to what there is. The next poll hands out that step.

        Where damage is in the way, the last step before it is shown.
        """
        step = max(self.trace.first_step - 1, min(step, self.trace.num_steps - 1))
        in_the_way: RecordingError | None = None
        while True:
            try:
                self.state = self.trace.state_at(step)
                break
            except RecordingError as error:
                in_the_way = error
                if error.steps is None or not self.trace.first_step <= error.steps[0] <= step:
                    self._stop_before(error)
                    return
                step = error.steps[0] - 1
        self.error = self.damage = None  # What could not be read lies elsewhere.
        if in_the_way is not None:
            self._stop_before(in_the_way)
        self.generation += 1
        self._ahead = self.trace.messages(step + 1)
        self._next = None
        self._out = [self.state.last_step] if self.state.last_step is not None else []
        self._due_ns = 0

    def set_speed(self, speed: float) -> None:
        """Play at so many times real time, within 0.25 and 16."""
        self.speed = min(MAX_SPEED, max(MIN_SPEED, speed))

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
        """The next step, read but not yet applied; None at the end, or where the trace is damaged."""
        if self._next is None and not self._read_ahead() and not self.at_end and self.error is None:
            self._ahead = self.trace.messages(self.position + 1)  # The trace has grown since it was asked for.
            self._read_ahead()
        return self._next

    def _read_ahead(self) -> bool:
        self._arrived = []
        try:
            for message in self._ahead:
                if isinstance(message, StepTrace):
                    self._next = message
                    return True
                self._arrived.append(message)
        except RecordingError as error:
            self.error, self.damage = str(error), self.trace.damage(error)
        return False

    def _stop_before(self, error: RecordingError) -> None:
        self.paused = True
        self.error, self.damage = str(error), self.trace.damage(error)

    def _cross_damage(self) -> bool:
        """Go to the first step behind the damage that the step shown stands before; False where there is none."""
        if self.damage is None or self.damage.beyond <= self.position:
            return False
        self.seek(self.damage.beyond)
        return True

    def _gap_ns(self) -> int:
        """Playing time from the step just applied to the next one."""
        following = self._peek()
        return 0 if following is None else max(0, min(following.start_ns - self.state.time_ns, LONGEST_GAP_NS))
