"""A lane over time and not over steps: how many were computed together, and what each request did, at any scale."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import numpy as np

from engine.request import FinishReason
from engine.trace.events import DecisionKind, Phase, RequestArrived, StepTrace
from kvtui.history import Mark

if TYPE_CHECKING:
    import numpy.typing as npt

    from kvtui.race.lane import Lane

_MARK_OF_PHASE = {
    int(Phase.PREFILL): Mark.PREFILL,
    int(Phase.DECODE): Mark.DECODE,
    int(Phase.RECOMPUTE): Mark.RECOMPUTE,
}
_MARK_OF_END: dict[str, Mark] = {
    FinishReason.STOP: Mark.ENDED,
    FinishReason.LENGTH: Mark.ENDED,
    FinishReason.ABORT: Mark.ABORTED,
}
_COVERING = (Mark.WAITING, Mark.DECODE, Mark.RECOMPUTE, Mark.PREFILL)
"""What lasts. Of several in one column the last of these is drawn: it is the rarest, and the shortest."""
_RANK = np.array([_COVERING.index(Mark(code)) if code in _COVERING else 0 for code in range(len(Mark))])
_FUZZ = 1e-6
"""Part of a column within which a moment counts as lying on its edge."""


def began_ns(lane: Lane) -> int:
    """When the first request arrived, from which on all times of a race are counted."""
    return min((message.time_ns for message in lane.messages if isinstance(message, RequestArrived)), default=0)


def end_of(step: StepTrace) -> int:
    """When a step ended, in ns."""
    return step.start_ns + step.schedule_ns + step.execute_ns + step.sample_ns + step.update_ns


class BatchOverTime:
    """How many requests were computed together.

    Attributes:
        most: In any step.
    """

    def __init__(self, lane: Lane) -> None:
        began = began_ns(lane)
        steps = [step for step in lane.messages if isinstance(step, StepTrace) and step.batch]
        sizes = np.array([len(step.batch) for step in steps], np.float64)
        times = np.array([(step.start_ns - began, end_of(step) - began) for step in steps], np.float64).reshape(-1, 2)
        self.most = int(sizes.max()) if len(sizes) else 0
        self._knots = times.ravel() / 1e9
        done = np.cumsum(sizes * (times[:, 1] - times[:, 0]) / 1e9)
        # Requests times seconds: it grows within the steps, and stands still between them.
        self._work = np.stack((np.concatenate(([0.0], done[:-1])), done), axis=1).ravel() if len(done) else done

    def mean(self, edges: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """The mean between each two neighbouring moments (seconds, growing); 0 where no step ran."""
        spans = np.diff(edges)
        if not len(self._knots):
            return np.zeros(len(spans))
        work = np.diff(np.interp(edges, self._knots, self._work))
        return np.divide(work, spans, out=np.zeros(len(spans)), where=spans > 0)


class LaneMarks:
    """What each request did, as stretches of time in which that did not change, and moments at which something did."""

    def __init__(self, lane: Lane) -> None:
        self._starts: dict[int, array[float]] = {}
        self._codes: dict[int, array[int]] = {}
        self._moments: dict[int, list[tuple[float, int]]] = {}
        self._ends: dict[int, float] = {}
        began = began_ns(lane)
        in_batch: set[int] = set()
        for message in lane.messages:
            if isinstance(message, RequestArrived):
                self._turn(message.request, (message.time_ns - began) / 1e9, Mark.WAITING)
                continue
            start, end = (message.start_ns - began) / 1e9, (end_of(message) - began) / 1e9
            members = {member[0]: member[1] for member in message.batch}
            for request, phase in members.items():
                self._turn(request, start, _MARK_OF_PHASE.get(phase, Mark.DECODE))
            for request in in_batch - members.keys():
                self._turn(request, start, Mark.WAITING)
            for decision in message.decisions:
                if decision.kind == DecisionKind.PREEMPTED:
                    mark = Mark.REDONE if decision.request in members else Mark.PREEMPTED
                    self._moments.setdefault(decision.request, []).append((start, mark))
            in_batch = set(members)
            for finish in message.finished:
                # Its end lies in the column that it was last computed in.
                moment = (np.nextafter(end, 0.0), int(_MARK_OF_END.get(finish.reason, Mark.ENDED_BADLY)))
                self._moments.setdefault(finish.request, []).append(moment)
                self._turn(finish.request, end, Mark.ABSENT)
                self._ends[finish.request] = end
                in_batch.discard(finish.request)

    def _turn(self, request: int, seconds: float, mark: int) -> None:
        codes = self._codes.setdefault(request, array("b"))
        if not codes or codes[-1] != mark:
            codes.append(mark)
            self._starts.setdefault(request, array("d")).append(seconds)

    def requests(self, start: float, now: float) -> list[tuple[int, bool]]:
        """Who was there between two moments, in order of arrival, and whether each still is at the second."""
        ends = self._ends
        return sorted(
            (request, ends.get(request, np.inf) > now)
            for request, starts in self._starts.items()
            if starts[0] <= now and ends.get(request, np.inf) > start
        )

    def columns(self, request: int, edges: npt.NDArray[np.float64], now: float) -> npt.NDArray[np.uint8]:
        """What a request did in each of some equal columns, as `Mark` codes; absent in those after `now`.

        Args:
            request: Its number; an unknown one is absent everywhere.
            edges: Of the columns, in seconds.
            now: What came later is not shown.
        """
        count, first = len(edges) - 1, float(edges[0])
        out = np.zeros(max(0, count), np.uint8)
        if count < 1 or request not in self._starts:
            return out
        column = (float(edges[-1]) - first) / count
        starts = np.frombuffer(self._starts[request])
        limit = min(now, float(edges[-1]))
        low = max(0, int(np.searchsorted(starts, first, "right")) - 1)
        high = int(np.searchsorted(starts, limit, "left"))
        codes = np.frombuffer(self._codes[request], np.int8)[low:high]
        stops = np.minimum(np.append(starts[1:], np.inf)[low:high], limit)
        there = (codes != Mark.ABSENT) & (stops > first)
        left = np.clip(np.floor((starts[low:high] - first) / column + _FUZZ), 0, count - 1).astype(int)[there]
        right = np.clip(np.ceil((stops - first) / column - _FUZZ), 0, count).astype(int)[there]
        depth = np.zeros((len(_COVERING), count + 1), np.int32)
        ranks = _RANK[codes[there]]
        np.add.at(depth, (ranks, left), 1)
        np.add.at(depth, (ranks, np.maximum(right, left + 1)), -1)
        covered = depth[:, :-1].cumsum(axis=1) > 0
        for rank, lasting in enumerate(_COVERING):
            out[covered[rank]] = lasting
        for seconds, mark in self._moments.get(request, ()):
            if first <= seconds <= limit:
                out[min(count - 1, int((seconds - first) / column + (_FUZZ if _starts_with(mark) else 0)))] = mark
        return out


def _starts_with(mark: int) -> bool:
    """Whether a moment is the start of a step, and belongs to the column on whose left edge it lies."""
    return mark in (Mark.PREEMPTED, Mark.REDONE)
