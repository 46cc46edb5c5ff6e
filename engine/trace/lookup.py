"""Looking things up in a trace that is kept: what concerns one block or one request, in any stretch of steps.

Nothing is made of the rest of the steps, so a thousand of them cost milliseconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from engine.trace.file_format import RecordingError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from engine.trace.events import BlockOp, Decision, StepTrace
    from engine.trace.segment_reader import SegmentReader


class Kept(Protocol):
    """A trace that is kept as segments, in a file or in memory."""

    def segments(self, start: int = 0, stop: int | None = None, *, backward: bool = False) -> Iterator[SegmentReader]:
        """The segments that have the steps `start` to `stop` - 1."""
        ...

    def steps(self, start: int = 0, stop: int | None = None) -> Iterator[StepTrace]:
        """The steps `start` to `stop` - 1."""
        ...


class RequestDecision(NamedTuple):
    """A decision about a request, and the step in which it was taken."""

    step: int
    decision: Decision


class Lookup:
    """Looks up what concerns one block or one request.

    Args:
        kept: The trace.
    """

    def __init__(self, kept: Kept) -> None:
        self._kept = kept

    def block_ops(self, block: int, start: int, stop: int) -> list[tuple[int, BlockOp]]:
        """The operations on a block in the steps `start` to `stop` - 1, oldest first, each with its step.

        Raises:
            RecordingError: a part of the trace is damaged.
        """
        found: list[tuple[int, BlockOp]] = []
        for segment in self._kept.segments(start, stop):
            try:
                found += segment.block_ops(block, start, stop)
            except ValueError as error:
                raise _damaged(segment, error) from None
        return found

    def decisions(self, request: int, start: int, stop: int) -> list[RequestDecision]:
        """The decisions about a request in the steps `start` to `stop` - 1, oldest first.

        Raises:
            RecordingError: a part of the trace is damaged.
        """
        return [
            RequestDecision(segment.first_step + at, decision)
            for segment in self._kept.segments(start, stop)
            for at, decision in segment.segment.decisions
            if decision.request == request and start <= segment.first_step + at < stop
        ]

    def end_of(self, request: int) -> int | None:
        """The step in which a request ended; None where it did not.

        Raises:
            RecordingError: a part of the trace is damaged.
        """
        for segment in self._kept.segments(backward=True):
            for at, finish in segment.segment.finished:
                if finish.request == request:
                    return segment.first_step + at
        return None

    def step(self, index: int) -> StepTrace | None:
        """One step; None where it is not kept.

        Raises:
            RecordingError: the part of the trace that has it is damaged.
        """
        return next(iter(self._kept.steps(index, index + 1)), None) if index >= 0 else None


def _damaged(segment: SegmentReader, error: Exception) -> RecordingError:
    first = segment.first_step
    return RecordingError(f"steps {first} to {first + segment.num_steps - 1} cannot be read ({error})"[:300])
