"""Any step of a trace that is kept as segments and keyframes, wherever those lie: in a file, or in memory."""

from __future__ import annotations

import gc
from bisect import bisect_right
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

import numpy as np

from engine.trace.damage import damage_of
from engine.trace.events import RequestArrived, StepTrace
from engine.trace.file_format import DAMAGE, RecordingError, one_line
from engine.trace.restore import restore_requests
from engine.trace.state import PoolState
from engine.trace.step_columns import StepColumns

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from engine.trace.columns import Column
    from engine.trace.damage import Damage
    from engine.trace.events import Header
    from engine.trace.keyframe import Keyframe
    from engine.trace.segment_reader import SegmentReader
    from engine.trace.vocabulary import Vocabulary

_KEPT_SEGMENTS = 48
"""Segments kept as columns: as many as the text of all requests of a state usually comes from."""
_KEPT_BYTES = 64 << 20
"""Bytes of their columns."""
_KEPT_ROWS = 200_000
"""Rows of batches, operations and tokens kept as objects, of the segments read last."""
_KEPT_STATES = 4
_STRIDE = 16
"""A fold leaves a copy of the state so many steps before its end: going back step by step begins there."""
_LARGE_POOL = 65_536
"""Blocks of a pool of which no copies are kept."""


class Parts(Protocol):
    """Where the parts of a trace are.

    Attributes:
        segments: int64[n, 5]: first step, steps, two numbers of its own, arrivals of each segment.
        keyframes: Of each, its step and two numbers of its own.
        num_steps: Steps in the segments.
    """

    @property
    def header(self) -> Header: ...  # noqa: D102 - see Attributes

    @property
    def segments(self) -> Column: ...  # noqa: D102 - see Attributes

    @property
    def keyframes(self) -> Sequence[tuple[int, int, int]]: ...  # noqa: D102 - see Attributes

    @property
    def num_steps(self) -> int: ...  # noqa: D102 - see Attributes

    def segment(self, at: int) -> SegmentReader:
        """A segment; raises what is in `DAMAGE` where it cannot be read."""
        ...

    def keyframe(self, at: int) -> Keyframe:
        """A keyframe; raises what is in `DAMAGE` where it cannot be read."""
        ...

    def vocabulary(self) -> Vocabulary:
        """All entries; raises what is in `DAMAGE` where they cannot be read."""
        ...


class TraceReader:
    """Reads a trace at any step. What was read last is kept, as far as it is small.

    Args:
        name: How errors call the trace.
        parts: Where its parts are.
    """

    def __init__(self, name: str, parts: Parts) -> None:
        self._name = name
        self._layout = parts
        self.header: Header = parts.header
        self._cache: dict[int, SegmentReader] = {}
        self._steps_read: dict[int, tuple[int, list[StepTrace]]] = {}
        """By segment: the first of the steps kept, and these."""
        self._states: dict[int, PoolState] = {}
        self._damage: dict[tuple[int, int] | None, Damage | None] = {}
        self._vocabulary_read: Vocabulary | None = None
        self._base: PoolState | None = None
        """The state that the trace begins with, where it does not begin with an empty pool."""

    @property
    def parts(self) -> Parts:
        """Where everything lies."""
        return self._layout

    @property
    def num_steps(self) -> int:
        """Steps of the trace, read or not: the last is num_steps - 1."""
        return self._layout.num_steps

    @property
    def first_step(self) -> int:
        """The first step that can still be read."""
        return 0 if self._base is None else self._base.step + 1

    def forget(self) -> None:
        """Let go of what was read before; it is read again when it is asked for."""
        self._cache.clear()
        self._steps_read.clear()
        self._states.clear()

    # -- messages ------------------------------------------------------------------------------------------------

    def messages(self, start: int = 0, stop: int | None = None) -> Iterator[RequestArrived | StepTrace]:
        """The steps `start` to `stop` - 1, each after the requests that arrived just before it.

        Raises:
            RecordingError: a part of it is damaged; what came before it was yielded.
        """
        start, stop = self._range(start, stop)
        if start >= stop:
            return
        for at in self._segments_of(start, stop):
            try:
                segment = self._segment(at)
                steps = self._steps_of(at, segment, start, stop)
                low = max(start - segment.first_step, 0)
                arrivals: dict[int, list[RequestArrived]] = {}
                for arrival in segment.arrivals:
                    if low <= arrival.offset < low + len(steps):
                        arrived = segment.arrived(arrival, self._vocabulary)
                        arrivals.setdefault(arrival.offset, []).append(arrived)
            except DAMAGE as error:
                raise self._damaged(at, error) from None
            for offset, step in enumerate(steps, low):
                yield from arrivals.get(offset, ())
                yield step

    def steps(self, start: int = 0, stop: int | None = None) -> Iterator[StepTrace]:
        """The steps `start` to `stop` - 1.

        Raises:
            RecordingError: a part of it is damaged; what came before it was yielded.
        """
        return (message for message in self.messages(start, stop) if isinstance(message, StepTrace))

    def segments(self, start: int = 0, stop: int | None = None, *, backward: bool = False) -> Iterator[SegmentReader]:
        """The segments that have the steps `start` to `stop` - 1, for who needs a part of many steps only.

        Raises:
            RecordingError: a part of it is damaged; what came before it was yielded.
        """
        start, stop = self._range(start, stop)
        found = self._segments_of(start, stop) if start < stop else range(0)
        for at in reversed(found) if backward else found:
            try:
                segment = self._segment(at)
            except DAMAGE as error:
                raise self._damaged(at, error) from None
            yield segment

    def requests(self) -> Iterator[RequestArrived]:
        """All arrivals, in order.

        Raises:
            RecordingError: a part of it is damaged.
        """
        for at in np.flatnonzero(self._layout.segments[:, 4]).tolist():
            try:
                segment = self._segment(at)
                arrived = [segment.arrived(arrival, self._vocabulary) for arrival in segment.arrivals]
            except DAMAGE as error:
                raise self._damaged(at, error) from None
            yield from arrived

    def columns(self, start: int, stop: int | None = None) -> StepColumns:
        """The levels, batches and ends of the steps `start` to `stop` - 1, without making objects of the steps.

        Raises:
            RecordingError: a part of it is damaged.
        """
        start, stop = self._range(start, stop)
        parts: list[StepColumns] = []
        for at in self._segments_of(start, stop) if start < stop else ():
            try:
                parts.append(self._segment(at).columns(start, stop))
            except DAMAGE as error:
                raise self._damaged(at, error) from None
        return StepColumns.join(start, parts)

    def _range(self, start: int, stop: int | None) -> tuple[int, int]:
        return max(start, self.first_step), self.num_steps if stop is None else min(stop, self.num_steps)

    def _damaged(self, at: int, error: Exception) -> RecordingError:
        first, num_steps = self._layout.segments[at, :2].tolist()
        last = first + num_steps - 1
        return RecordingError(
            f"{self._name} is damaged: steps {first} to {last} cannot be read ({one_line(error)})", (first, last)
        )

    def damage(self, error: RecordingError) -> Damage | None:
        """What an error that reading raised is about, as far as it says so; see `engine.trace.damage`."""
        if error.steps not in self._damage:
            self._damage[error.steps] = damage_of(self, error)
        return self._damage[error.steps]

    # -- states --------------------------------------------------------------------------------------------------

    def state_at(self, step: int) -> PoolState:
        """The state after a step: the keyframe before it, and the steps in between. -1 is the state before step 0.

        Raises:
            IndexError: there is no such step.
            RecordingError: a part of the trace that it takes is damaged.
        """
        if not self.first_step - 1 <= step < self.num_steps:
            raise IndexError(
                f"step {step} is not in {self._name}: it has steps {self.first_step} to {self.num_steps - 1}"
            )
        with _collector_at_rest():
            state = self._state_before(step)
            leave_at = step - _STRIDE if step - state.step > 2 * _STRIDE else -1
            for message in self.messages(state.step + 1, step + 1):
                state.apply(message)
                if state.step == leave_at and isinstance(message, StepTrace):
                    self._keep_state(state)
            return state

    def _keep_state(self, state: PoolState) -> None:
        if self.header.num_blocks + self.header.num_cpu_blocks <= _LARGE_POOL:
            while len(self._states) >= _KEPT_STATES:
                del self._states[next(iter(self._states))]
            self._states[state.step] = state.copy()

    def _state_before(self, step: int) -> PoolState:
        """A state of its own to go on from, at a step up to this one and as near as one is at hand."""
        kept = max((at for at in self._states if at <= step), default=-1)
        rows = self._layout.keyframes
        at = bisect_right(rows, step, key=_step_of) - 1
        if kept >= 0 and (at < 0 or rows[at][0] <= kept):
            state = self._states[kept] = self._states.pop(kept)
            return state.copy()
        return self._keyframe_before(step)

    def _keyframe_before(self, step: int) -> PoolState:
        """The state of the last usable keyframe up to a step, or the one that the trace begins with."""
        rows = self._layout.keyframes
        for at in range(bisect_right(rows, step, key=_step_of) - 1, -1, -1):
            index = rows[at][0]
            if index < self.first_step:
                break
            try:
                keyframe = self._layout.keyframe(at)
                state = PoolState.from_keyframe(self.header, keyframe)
                restore_requests(self, state, keyframe)
                if index == step:
                    state.last_step = next(self.steps(index, index + 1))
            except (*DAMAGE, RecordingError, StopIteration):
                continue  # A damaged keyframe costs time, not the step: the one before it serves as well.
            return state
        return self._base.copy() if self._base is not None else PoolState(self.header)

    # -- parts ---------------------------------------------------------------------------------------------------

    @property
    def _vocabulary(self) -> Vocabulary:
        if self._vocabulary_read is None:
            self._vocabulary_read = self._layout.vocabulary()
        return self._vocabulary_read

    def _segment(self, at: int) -> SegmentReader:
        reader = self._cache.pop(at, None)
        if reader is None:
            reader = self._layout.segment(at)
            size = reader.num_bytes + sum(kept.num_bytes for kept in self._cache.values())
            while self._cache and (len(self._cache) >= _KEPT_SEGMENTS or size > _KEPT_BYTES):
                size -= self._cache.pop(next(iter(self._cache))).num_bytes
        self._cache[at] = reader
        return reader

    def _segments_of(self, start: int, stop: int) -> range:
        """The segments that have the steps start to stop - 1."""
        firsts = self._layout.segments[:, 0]
        first = int(np.searchsorted(firsts, start, side="right")) - 1
        last = int(np.searchsorted(firsts, stop - 1, side="right"))
        return range(max(first, 0), last)

    def _steps_of(self, at: int, segment: SegmentReader, start: int, stop: int) -> list[StepTrace]:
        """The steps of a segment from `start` to `stop` - 1, kept: who looks around asks for the same ones again."""
        low = max(start, segment.first_step)
        high = min(stop, segment.first_step + segment.num_steps)
        if high <= low:
            return []
        first, steps = self._steps_read.pop(at, (low, []))
        if low > first + len(steps) or high < first:
            first, steps = low, []
        if low < first or not steps:
            steps = segment.steps(low, first if steps else high, self._vocabulary) + steps
            first = low
        if high > first + len(steps):
            steps = steps + segment.steps(first + len(steps), high, self._vocabulary)
        self._steps_read[at] = (first, steps)
        while len(self._steps_read) > 1 and self._rows_read() > _KEPT_ROWS:
            del self._steps_read[next(iter(self._steps_read))]
        return steps[low - first : high - first]

    def _rows_read(self) -> int:
        return sum(self._cache[at].num_rows for at in self._steps_read if at in self._cache)


@contextmanager
def _collector_at_rest() -> Iterator[None]:
    """Hold garbage collection: tens of thousands of tuples are about to be made, and all are kept.

    Looking for garbage among them, again and again, takes a third of the time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _step_of(row: tuple[int, int, int]) -> int:
    return row[0]
