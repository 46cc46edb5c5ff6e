"""A lane as it is played: its state and its figures at a moment of the race, forward and backward."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.trace.events import RequestArrived, StepTrace
from engine.trace.marks import Marks, marks_of
from engine.trace.state import PoolState
from engine.trace.step_columns import StepColumns
from kvtui.history import History
from kvtui.names import Names
from kvtui.race.lane_time import BatchOverTime, LaneMarks, began_ns, end_of
from kvtui.race.report import result_of
from kvtui.sources.moved import MovedSource

if TYPE_CHECKING:
    from engine.trace.events import Header
    from kvtui.race.lane import Lane
    from kvtui.race.report import Result

CHECKPOINT_STEPS = 256
"""A copy of the state is kept after so many steps, so that going back folds no more than these."""

_CHECKPOINT_BYTES = 1 << 28
"""Most memory that the copies of a lane take; where it is too little, there are more steps between them."""
_BYTES_PER_BLOCK = 64
_BYTES_PER_COPY = 1 << 20


@dataclass(slots=True)
class Moment:
    """What has happened in a lane by now.

    Attributes:
        steps: Iterations with a batch.
        members: Of all their batches.
        tokens: Generated.
        seconds: When the last step ended.
    """

    steps: int = 0
    members: int = 0
    tokens: int = 0
    seconds: float = 0.0

    @property
    def average_batch(self) -> float:
        """Requests in a batch, in the mean."""
        return self.members / self.steps if self.steps else 0.0

    @property
    def tokens_per_s(self) -> float:
        """New tokens a second since the race began."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


class LanePlayer(MovedSource):
    """Folds a lane's trace up to a time; it is its own `Source`, one that is moved from outside.

    Attributes:
        lane: What is played.
        result: Of the whole lane.
        batch: How many were computed together, over all of its time.
        marks_in_time: What each request did, likewise.
        ends: When each step ends, in seconds since the first request arrived.
        state: After the steps that have ended by now.
        moment: Likewise, counted.
        names: What the requests are called; all of them, so that they take the same room from start to finish.
        history: Of nothing: a lane is drawn over time, not over steps.
        position: Index of the last step that has ended; -1 before the first.
    """

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.result: Result = result_of(lane)
        self.header: Header = lane.header
        self.batch = BatchOverTime(lane)
        self.marks_in_time = LaneMarks(lane)
        self.names = Names()
        self.names.follow({come.request: come for come in lane.messages if isinstance(come, RequestArrived)})
        self.history = History(1)
        self.position = -1
        self.paused = True
        self.marks = Marks()
        self._steps: list[StepTrace] = []
        self._arrivals: list[list[RequestArrived]] = [[]]
        for message in lane.messages:
            if isinstance(message, StepTrace):
                self._steps.append(message)
                self.marks.append(marks_of(message))
                self._arrivals.append([])
            else:
                self._arrivals[-1].append(message)
        began = began_ns(lane)
        self.ends = [(end_of(step) - began) / 1e9 for step in self._steps]
        self._moments = [Moment()]
        for step, end in zip(self._steps, self.ends, strict=True):
            before = self._moments[-1]
            self._moments.append(
                Moment(
                    before.steps + bool(step.batch),
                    before.members + len(step.batch),
                    before.tokens + len(step.tokens),
                    end,
                )
            )
        self.state = PoolState(lane.header)
        self._kept = {-1: self.state.copy()}
        copies = max(1, _CHECKPOINT_BYTES // (_BYTES_PER_COPY + lane.header.num_blocks * _BYTES_PER_BLOCK))
        self._apart = max(CHECKPOINT_STEPS, -(-len(self._steps) // copies))

    @property
    def length(self) -> int:
        """Steps of the lane."""
        return len(self._steps)

    @property
    def moment(self) -> Moment:
        """Counted up to the present position."""
        return self._moments[self.position + 1]

    @property
    def done(self) -> bool:
        """Whether its last step has ended."""
        return self.position + 1 >= len(self._steps)

    def show(self, seconds: float) -> list[StepTrace] | None:
        """Go to a time.

        Returns:
            The steps that came in; None where it went back, so that all drawn before is void.
        """
        target = bisect_right(self.ends, seconds) - 1
        back = target < self.position
        if back:
            kept = max(step for step in self._kept if step <= target)
            self.state = self._kept[kept].copy()
            self.position = kept
            self.generation += 1
        came: list[StepTrace] = []
        for index in range(self.position + 1, target + 1):
            for arrived in self._arrivals[index]:
                self.state.apply(arrived)
            step = self._steps[index]
            self.state.apply(step)
            self.position = index
            came.append(step)
            if (index + 1) % self._apart == 0 and index not in self._kept:
                self._kept[index] = self.state.copy()
        return None if back else came

    def context(self, most: int) -> StepColumns:
        """At most so many steps up to the present position."""
        first = max(0, self.position + 1 - most)
        return StepColumns.of(first, self._steps[first : self.position + 1])
