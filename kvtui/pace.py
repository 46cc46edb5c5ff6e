"""How often to draw: as often as the eye likes, and never so often that the engine feels it."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BEST_SECONDS = 1 / 30
WORST_SECONDS = 0.5

TICK_SECONDS = BEST_SECONDS / 2
"""The timer's interval; a frame is drawn at most every other tick."""

MOST_OF_A_CORE = 0.1
"""The part of one core that drawing may take."""

MOST_BESIDE_A_MODEL = 0.05
"""Where a model computes on the same cores.

It waits for the slowest of them after every operation, so what drawing takes from one core is lost on all.
"""

_SMOOTHING = 0.2


class Pace:
    """Says when the next frame is due, from what the last ones cost this thread.

    What following the engine costs is not part of it: each step is taken in once, however many frames are drawn.

    Args:
        clock: Seconds that only grow.
        cpu_clock: Seconds of processor time of the calling thread.
        frame_rate: The most frames a second.
        most_of_a_core: The part of one core that drawing may take.

    Attributes:
        tick_seconds: How often to ask whether a frame is due.
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
        self.tick_seconds = min(TICK_SECONDS, self._best / 2)
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._drew_at = float("-inf")
        self._cpu_at_frame: float | None = None
        self._followed = 0.0
        """Processor time since the last frame that was no drawing."""
        self._cost = 0.0
        self.interval = self._best

    def due(self) -> bool:
        """Whether it is time for a frame. Half a tick early is on time, or every frame would come a tick late."""
        return self._clock() - self._drew_at >= self.interval - self.tick_seconds / 2

    @property
    def slowness(self) -> float:
        """How many times as far apart frames are as they would be if they cost nothing."""
        return self.interval / self._best

    def hurry(self) -> None:
        """Make a frame due now: the user waits for an answer."""
        self._drew_at = float("-inf")

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
        cpu = self._cpu_clock()
        if self._cpu_at_frame is not None:
            self._cost += (max(0.0, cpu - self._cpu_at_frame - self._followed) - self._cost) * _SMOOTHING
            self.interval = min(WORST_SECONDS, max(self._best, self._cost / self._most_of_a_core))
        self._cpu_at_frame, self._followed = cpu, 0.0
        self._drew_at = self._clock()
