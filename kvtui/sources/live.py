"""A running engine as a source: its trace arrives in a queue, is folded at the screen's pace, and is kept to look back.

Looking back is a place of its own in the kept trace (`Playback`). The engine does not notice it: its messages are
folded into the newest state all the time, whatever is shown.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

from engine.trace.events import Header, RequestArrived, StepTrace
from engine.trace.kept import MOST_BYTES, KeptTrace
from engine.trace.state import PoolState
from kvtui.sources.playback import Playback

if TYPE_CHECKING:
    from engine.engine import PagedEngine
    from engine.loop import EngineLoop
    from engine.trace.events import TraceMessage
    from engine.trace.marks import Marks
    from engine.trace.step_columns import StepColumns

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
        most_bytes: What the kept trace may take before its oldest steps are let go.

    Attributes:
        newest: The fold of all that was polled, whatever is shown.
        kept: The trace so far.
    """

    live = True
    damage = None
    cut_off = False

    def __init__(self, engine: PagedEngine, loop: EngineLoop, most_bytes: int = MOST_BYTES) -> None:
        self.header: Header = engine.header
        self.newest = PoolState(self.header)
        self.kept = KeptTrace(self.header, most_bytes)
        self.loop = loop
        self._past: Playback | None = None
        """Where one looks back; None while the newest step is shown."""
        self._past_speed = 1.0
        self._window: tuple[int, int] | None = None
        self._engine_speed = 1.0
        self._jumps = 0
        self._step_ns = 0.0
        """Running mean of how long a step takes when nothing holds it up."""
        self._queue: deque[TraceMessage] = deque()
        self._engine = engine
        engine.add_sink(self._queue.append)

    # -- what is shown -------------------------------------------------------------------------------------------

    @property
    def state(self) -> PoolState:
        """The fold up to the step shown."""
        return self.newest if self._past is None else self._past.state

    @property
    def position(self) -> int:
        """Index of the step shown."""
        return self.state.step

    @property
    def first(self) -> int:
        """The first step that can still be shown."""
        return self.kept.first_step

    @property
    def marks(self) -> Marks:
        """The marks of the trace so far."""
        return self.kept.marks

    @property
    def length(self) -> int:
        """Steps known so far, those not yet folded included."""
        try:
            last = self._queue[-1]
        except IndexError:
            return self.newest.step + 1
        return last.index + 1 if isinstance(last, StepTrace) else self.newest.step + 1

    @property
    def generation(self) -> int:
        """Grows when what is shown jumps."""
        return self._jumps + (0 if self._past is None else self._past.generation)

    @property
    def looking_back(self) -> bool:
        """Whether another step than the newest is shown."""
        return self._past is not None

    @property
    def num_arrived(self) -> int:
        """Requests that came since the last step and that the next one takes in."""
        return self._engine.num_arrived

    @property
    def engine_paused(self) -> bool:
        """Whether the engine is held."""
        return self.loop.paused

    @property
    def paused(self) -> bool:
        """Whether what is shown stands still: the past that one looks at, or else the engine."""
        return self.loop.paused if self._past is None else self._past.paused

    @property
    def speed(self) -> float:
        """Of what is shown: the past is played at any speed, an engine is only slowed down."""
        return self._engine_speed if self._past is None else self._past.speed

    @property
    def error(self) -> str | None:
        """Why the engine's thread ended, in one line."""
        error = self.loop.error
        return None if error is None else f"{type(error).__name__}: {error}".splitlines()[0]

    def context(self, most: int) -> StepColumns:
        """At most so many steps up to the position, as columns."""
        if self._past is not None:
            return self._past.context(most)
        stop = self.newest.step + 1
        return self.kept.columns(stop - most, stop)

    def poll(self) -> list[StepTrace]:
        """Fold what the engine has said since the last call, as much as fits into the budget."""
        steps = self._fold()
        past = self._past
        if past is None:
            return steps
        playing = not past.paused
        shown = past.poll()
        if past.error is not None:
            # What was to come was let go meanwhile: history goes on where it begins now.
            past.error = None
            past.seek(self.kept.first_step)
            past.paused = not playing
        elif playing and past.at_end and self._window is None:
            self.follow()  # Played up to the present: there it goes on by itself.
            return []
        return shown

    def _fold(self) -> list[StepTrace]:
        queue, apply, keep = self._queue, self.newest.apply, self.kept.append
        steps: list[StepTrace] = []
        deadline = time.monotonic_ns() + POLL_BUDGET_NS
        while queue:
            message = queue.popleft()
            apply(message)
            if isinstance(message, StepTrace):
                steps.append(message)
                keep(message, self.newest)
                if len(steps) % _CHECK_CLOCK_EVERY == 0 and time.monotonic_ns() > deadline:
                    break
            elif isinstance(message, RequestArrived):
                keep(message, self.newest)
        if steps:
            self._measure(steps[-1])
        return steps

    # -- the engine ----------------------------------------------------------------------------------------------

    def pause(self) -> None:
        """Hold the engine after the step it is in."""
        self.loop.pause()

    def resume(self) -> None:
        """Let the engine run."""
        self.loop.resume()

    def set_speed(self, speed: float) -> None:
        """Play the past faster or slower; where the present is shown, slow the engine to a fraction of its own pace."""
        if self._past is not None:
            self._past.set_speed(speed)
            self._past_speed = self._past.speed
            return
        self._engine_speed = min(1.0, max(MIN_SPEED, speed))
        self._limit()

    # -- the past ------------------------------------------------------------------------------------------------

    def step(self, n: int) -> None:
        """Go n steps through the past; where the present is shown, hold the engine and let it do n steps."""
        if self._past is not None:
            self._past.step(n)
            if self.loop.paused and self._past.at_end:
                self.follow()
        elif n < 0:
            self.seek(self.newest.step + n)
        else:
            self.loop.pause()
            for _ in range(n):
                self.loop.step_once()

    def seek(self, step: int) -> None:
        """Look back at a step; the newest one is the present again. The engine goes on as it was."""
        if step >= self.newest.step:
            self.follow()
            return
        if self._past is None:
            self._jumps += 1
            self._past = Playback(self.kept, step)
            self._past.speed = self._past_speed
            self._past.set_window(self._window)
            self._past.pause()
        else:
            self._past.seek(step)

    @property
    def window(self) -> tuple[int, int] | None:
        """The first and the last step of what is played again and again."""
        return self._window

    def set_window(self, window: tuple[int, int] | None) -> None:
        """Play these steps of the past again and again; None: play on to the present."""
        self._window = None if window is None else (min(window), max(window))
        if self._past is not None:
            self._past.set_window(self._window)

    def play(self) -> None:
        """Let the past move on from where one looks at it; the present does so by itself, unless there is a window."""
        if self._past is None and self._window is not None:
            self.seek(min(self._window[0], self.newest.step - 1))
        if self._past is not None:
            self._past.resume()

    def hold(self) -> None:
        """Stop the past again."""
        if self._past is not None:
            self._past.pause()

    def follow(self) -> None:
        """Show the present again."""
        if self._past is not None:
            self._jumps = self.generation + 1
            self._past = None

    def close(self, timeout: float) -> bool:
        """Stop the engine's thread; False where it is stuck in a step for longer than the timeout (seconds)."""
        return self.loop.stop(timeout)

    def _measure(self, step: StepTrace) -> None:
        took = step.schedule_ns + step.execute_ns + step.sample_ns + step.update_ns
        self._step_ns = took if not self._step_ns else self._step_ns + (took - self._step_ns) * _SMOOTHING
        if self._engine_speed < 1:
            self._limit()

    def _limit(self) -> None:
        if self._engine_speed >= 1:
            self.loop.set_speed(None)
        elif self._step_ns > 0:
            self.loop.set_speed(self._engine_speed * 1e9 / self._step_ns)
