"""The steps that one wants to find again: where requests were preempted, blocks evicted or copied, requests ended.

A step has one byte, a bit for each kind of mark that it has. A recording brings them along; of one that does not, they
are found segment by segment, when there is time or when somebody asks for the next one.
"""

from __future__ import annotations

import enum
import time
from typing import TYPE_CHECKING, Protocol

import msgspec
import numpy as np

from engine.request import FinishReason
from engine.trace.columns import unpack
from engine.trace.events import Decision, DecisionKind, Finish, Op
from engine.trace.file_format import DAMAGE
from engine.trace.segment import MAX_ROWS

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from engine.trace.columns import Column
    from engine.trace.events import StepTrace

    Flags = npt.NDArray[np.uint8]


class MarkKind(enum.IntEnum):
    """What happened in a step; the bit `1 << kind` of its byte."""

    PREEMPTED = 0
    """A request lost its blocks."""
    EVICTED = 1
    """Cached content was lost."""
    REFUSED = 2
    """A request was refused, or failed."""
    COPIED = 3
    """A block was copied: on write, or swapped with the CPU pool."""
    FINISHED = 4
    """A request stopped, reached its length, or was aborted."""


ALL_KINDS = (1 << len(MarkKind)) - 1
MAX_MARKED_STEPS = 1 << 26
"""Steps of a trace whose marks are kept."""

_OF_OP = {int(Op.EVICT): 1 << MarkKind.EVICTED} | {
    int(op): 1 << MarkKind.COPIED for op in (Op.COPY, Op.SWAP_OUT, Op.SWAP_IN)
}
_OF_DECISION = {
    int(DecisionKind.PREEMPTED): 1 << MarkKind.PREEMPTED,
    int(DecisionKind.REFUSED): 1 << MarkKind.REFUSED,
    int(DecisionKind.FAILED): 1 << MarkKind.REFUSED,
}
_WELL = frozenset((FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT))


def marks_of(step: StepTrace) -> int:
    """The byte of a step."""
    flags = 0
    for op in {row[0] for row in step.ops}:
        flags |= _OF_OP.get(op, 0)
    return flags | _of_the_rest(step.decisions, step.finished)


def _of_the_rest(decisions: Sequence[Decision], finished: Sequence[Finish]) -> int:
    flags = 0
    for decision in decisions:
        flags |= _OF_DECISION.get(decision[0], 0)
    for finish in finished:
        flags |= 1 << (MarkKind.FINISHED if finish[1] in _WELL else MarkKind.REFUSED)
    return flags


class MarkedPart(msgspec.Struct, frozen=True, tag="segment"):
    """What of a segment its marks follow from; the rest is not made into anything."""

    first_step: int
    num_steps: int
    ops: list[bytes]
    finished: list[tuple[int, Finish]]
    decisions: list[tuple[int, Decision]]


def marks_of_part(part: MarkedPart) -> Flags:
    """The bytes of a segment's steps.

    Raises:
        ValueError: the segment contradicts itself.
    """
    n = part.num_steps
    flags = np.zeros(n, np.uint8)
    counts = unpack(part.ops[0], n)
    if n and not (counts.min() >= 0 and counts.max() <= MAX_ROWS and counts.sum() <= MAX_ROWS):
        raise ValueError("a segment has too many rows")
    kinds = unpack(part.ops[1], int(counts.sum()))
    step_of = np.repeat(np.arange(n), counts)
    for op, flag in _OF_OP.items():
        flags[step_of[kinds == op]] |= flag
    for at, decision in part.decisions:
        if 0 <= at < n:
            flags[at] |= _of_the_rest((decision,), ())
    for at, finish in part.finished:
        if 0 <= at < n:
            flags[at] |= _of_the_rest((), (finish,))
    return flags


class MarkTable(msgspec.Struct, frozen=True):
    """The marks of a recording, at its end: the names of the kinds by bit, and a byte a step."""

    kinds: list[str]
    flags: bytes


class MarkedParts(Protocol):
    """A trace whose marks have to be found.

    Attributes:
        segments: int64[n, 5]: first step and steps of each segment, and more.
    """

    @property
    def segments(self) -> Column: ...  # noqa: D102 - see Attributes

    def marked_part(self, at: int) -> MarkedPart:
        """What of a segment its marks follow from; raises what is in `DAMAGE` where it cannot be read."""
        ...


class Marks:
    """The marks of a trace, which may grow.

    Attributes:
        num_steps: Steps that have a byte; of those that are not known yet it is 0.
        counts: Steps with a mark of each kind, as far as they are known.
        version: Grows when something becomes known.
    """

    def __init__(self, flags: Flags | None = None) -> None:
        self._flags: Flags = np.zeros(1024, np.uint8)
        self.num_steps = 0
        self.counts = [0] * len(MarkKind)
        self.version = 0
        self._missing: MarkedParts | None = None
        self._known: npt.NDArray[np.bool_] = np.zeros(0, np.bool_)
        if flags is not None:
            self._flags, self.num_steps = flags, len(flags)
            self._count(flags)

    @staticmethod
    def to_be_found(num_steps: int, parts: MarkedParts) -> Marks:
        """Those of a trace that did not bring them along."""
        marks = Marks(np.zeros(num_steps, np.uint8))
        marks._missing = parts
        marks._known = np.zeros(len(parts.segments), np.bool_)
        return marks

    def append(self, flags: int) -> None:
        """Take in the byte of the next step."""
        if self.num_steps >= MAX_MARKED_STEPS:
            return
        if self.num_steps == len(self._flags):
            self._flags = np.concatenate((self._flags, np.zeros_like(self._flags)))
        self._flags[self.num_steps] = flags
        self.num_steps += 1
        if flags:
            self.version += 1
            for kind in MarkKind:
                self.counts[kind] += flags >> kind & 1

    def _count(self, flags: Flags) -> None:
        self.version += 1
        for kind in MarkKind:
            self.counts[kind] += int(np.count_nonzero(flags & (1 << kind)))

    @property
    def known(self) -> float:
        """The part of the trace that has been looked at, 0 to 1."""
        return 1.0 if self._missing is None else float(self._known.mean())

    def flags(self, start: int, stop: int) -> Flags:
        """The bytes of the steps `start` to `stop` - 1."""
        return self._flags[max(0, start) : max(0, min(stop, self.num_steps))]

    def cells(self, first: int, last: int, num_cells: int) -> Flags:
        """Bytes for the cells of a bar over the steps `first` to `last`: of each the bits of all steps in it.

        Step s lies in cell round((s - first) / (last - first) * (num_cells - 1)).
        """
        cells = np.zeros(max(0, num_cells), np.uint8)
        flags, span = self.flags(first, last + 1), last - first
        if num_cells < 1:
            return cells
        if num_cells < 2 or span < 1:
            cells[0] = np.bitwise_or.reduce(flags) if len(flags) else 0
        elif span < 4 * num_cells:
            np.bitwise_or.at(cells, np.rint(np.arange(len(flags)) * ((num_cells - 1) / span)).astype(np.int64), flags)
        else:
            starts = np.ceil((np.arange(num_cells) - 0.5) * (span / (num_cells - 1))).astype(np.int64)
            starts = np.maximum(starts, 0)
            there = starts < len(flags)
            cells[there] = np.bitwise_or.reduceat(flags, starts[there])
        return cells

    # -- finding -------------------------------------------------------------------------------------------------

    def find(self, step: int, kinds: int, forward: bool, *, first: int = 0, seconds: float = 1.0) -> int | None:
        """The nearest step after or before `step` with a mark of one of the kinds (bits); None where there is none.

        Of a trace whose marks are not known yet, segments are looked at on the way for so many seconds at most.

        Raises:
            TimeoutError: that was not enough; what was looked at is known now.
        """
        deadline = time.monotonic() + seconds
        missing = self._missing
        if missing is None:
            return self._find_in(step, kinds, forward, first, self.num_steps)
        starts = missing.segments[:, 0]
        at = int(np.searchsorted(starts, max(step, 0), side="right")) - 1
        while 0 <= at < len(starts):
            if not self._known[at]:
                if time.monotonic() > deadline:
                    raise TimeoutError
                self._look_at(at)
            low, num_steps = missing.segments[at, :2].tolist()
            found = self._find_in(step, kinds, forward, max(low, first), low + num_steps)
            if found is not None:
                return found
            at += 1 if forward else -1
        return None

    def _find_in(self, step: int, kinds: int, forward: bool, low: int, high: int) -> int | None:
        low, high = (max(low, step + 1), high) if forward else (low, min(high, step))
        found = np.flatnonzero(self.flags(low, high) & kinds)
        return None if low >= high or not len(found) else low + int(found[0 if forward else -1])

    def look(self, seconds: float) -> bool:
        """Look at segments that are not known yet for so many seconds; whether something became known."""
        if self._missing is None:
            return False
        deadline = time.monotonic() + seconds
        for at in np.flatnonzero(~self._known).tolist():
            self._look_at(at)
            if time.monotonic() > deadline:
                return True
        self._missing = None
        return True

    def _look_at(self, at: int) -> None:
        assert self._missing is not None
        self._known[at] = True
        self.version += 1
        first, num_steps = self._missing.segments[at, :2].tolist()
        try:
            flags = marks_of_part(self._missing.marked_part(at))
        except DAMAGE:
            return  # What cannot be read has no marks; whoever goes there is told.
        if len(flags) == num_steps and first + num_steps <= self.num_steps:
            self._flags[first : first + num_steps] = flags
            self._count(flags)
