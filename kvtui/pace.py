"""How often to draw: as often as the eye likes, and never so often that the engine feels it."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BEST_SECONDS = 1 / 30
WORST_SECONDS = 0.5

MOST_OF_A_CORE = 0.1
"""The part of one core that drawing may take."""

MOST_BESIDE_A_MODEL = 0.03
"""Where a model computes on the same cores.

It waits for the slowest of them after every operation, so what drawing takes from one core is lost on all.
"""

MOST_SLOWED = 5.0
"""How many times as long panels that can wait do so at most."""

_SMOOTHING = 0.2
_SLOWER, _FASTER = 1.1, 0.97
_ODD_SECONDS = 0.005
"""What one frame may cost, beside twice the mean, and still count as it is.

Now and then one costs many times as much: the first of all, a new layout, garbage that is looked for.
"""
_EARLY = 0.1
"""The part of an interval that a frame may come early by: a timer is not exact."""


class Pace:
    """Says when the next frame is due, from what the last ones cost this thread.

    Where frames cost more than they may, panels that can wait do so longer; frames come less often only for as long as
    that does not suffice. What following the engine costs is not part of it: each step is taken in once, however many
    frames are drawn.

    Args:
        clock: Seconds that only grow.
        cpu_clock: Seconds of processor time of the calling thread.
        frame_rate: The most frames a second.
        most_of_a_core: The part of one core that drawing may take.

    Attributes:
        interval: Seconds between two frames.
        slowness: How many times as long panels that can wait do so, from 1 to `MOST_SLOWED`.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.thread_time,
        frame_rate: float = 1 / BEST_SECONDS,
        most_of_a_core: float = MOST_OF_A_CORE,
    ) -> None:
        self._best = 1 / frame_rate
        self._most_of_a_core = most_of_a_core
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._due_at = float("-inf")
        self._cpu_at_frame: float | None = None
        self._followed = 0.0
        """Processor time since the last frame that was no drawing."""
        self._cost = 0.0
        self.interval = self._best
        self.slowness = 1.0

    def due(self) -> bool:
        """Whether it is time for a frame."""
        return self._clock() >= self._due_at - self.interval * _EARLY

    def wait(self) -> float:
        """Seconds until it is worth asking again; a whole interval where a frame is due, but there was none to draw."""
        left = self._due_at - self._clock()
        return left if left > self.interval * _EARLY else self.interval

    def hurry(self) -> None:
        """Make a frame due now: the user waits for an answer."""
        self._due_at = float("-inf")

    @contextmanager
    def following(self) -> Iterator[None]:
        """What is done in it follows the engine, and is no drawing."""
        began = self._cpu_clock()
        try:
            yield
        finally:
            self._followed += self._cpu_clock() - began

    def drew(self) -> None:
        """Note that a frame begins. The time since the one before counts as its cost, drawing and terminal included."""
        cpu, now = self._cpu_clock(), self._clock()
        if self._cpu_at_frame is not None:
            cost = max(0.0, cpu - self._cpu_at_frame - self._followed)
            self._cost += (min(cost, 2 * self._cost + _ODD_SECONDS) - self._cost) * _SMOOTHING
            needed = self._cost / self._most_of_a_core
            self.interval = min(WORST_SECONDS, max(self._best, needed))
            changed = self.slowness * (_SLOWER if needed > self._best else _FASTER)
            self.slowness = min(MOST_SLOWED, max(1.0, changed))
        self._cpu_at_frame, self._followed = cpu, 0.0
        # Counted from when it was due, a frame that comes a little late does not make the next one late.
        on_time = now - self._due_at < self.interval / 2
        self._due_at = (self._due_at if on_time else now) + self.interval
