"""Reading recordings: opened by their index, any step reached from the keyframe before it.

Files may be cut off, damaged or made up. Whatever is in them, reading takes bounded memory and raises nothing but
`RecordingError`; a file whose writer was killed is read up to its last whole segment.
"""

from __future__ import annotations

from bisect import bisect_right
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from engine.trace.container import DamagedError
from engine.trace.events import Header, RequestArrived, StepTrace
from engine.trace.keyframe import Keyframe, num_tokens
from engine.trace.layout import DAMAGE, Layout
from engine.trace.recording import KEYFRAME_TOPIC, RecordingError
from engine.trace.state import MAX_TEXT, MAX_TOKENS, PoolState

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from engine.trace.columns import Column
    from engine.trace.segment_reader import SegmentReader
    from engine.trace.vocabulary import Vocabulary

_KEPT_SEGMENTS = 8


class Recording:
    """A recording opened for reading; also a context manager.

    Attributes:
        path: The file.
        header: Of the trace.
        num_steps: Steps that can be read: 0 to num_steps - 1.
        num_requests: Requests that arrived in it.
        duration_ns: End of the last step, since the trace began.
        complete: Whether it was closed properly; False where its writer was killed or the file was cut off.
        size: Bytes of the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = path.open("rb")
        except FileNotFoundError:
            raise RecordingError(
                f"there is no recording at {path}: `kvtui recordings` lists those that came along"
            ) from None
        except OSError as error:
            raise RecordingError(f"cannot read {path}: {error.strerror or error}") from None
        try:
            self._layout = Layout(path, self._file)
        except RecordingError:
            self._file.close()
            raise
        except OSError as error:
            self._file.close()
            raise RecordingError(f"cannot read {path}: {error.strerror or error}") from None
        except DAMAGE as error:
            self._file.close()
            raise RecordingError(f"{path} is damaged beyond use: {_one_line(error)}") from None

        self._cache: dict[int, SegmentReader] = {}
        self._vocabulary_read: Vocabulary | None = None
        self._first_steps = self._layout.segments[:, 0]
        self.header: Header = self._layout.header
        self.num_steps = self._layout.num_steps
        self.num_requests = self._layout.num_requests
        self.duration_ns = self._layout.duration_ns
        self.complete = self._layout.complete
        self.size = self._layout.size

    @staticmethod
    def open(path: str | Path) -> Recording:
        """Open a recording.

        Raises:
            RecordingError: it is none, or empty, or cut off before its first step could be, or of a newer schema.
        """
        return Recording(Path(path))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Recording:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- reading -------------------------------------------------------------------------------------------------

    @property
    def _vocabulary(self) -> Vocabulary:
        if self._vocabulary_read is None:
            self._vocabulary_read = self._layout.vocabulary()
        return self._vocabulary_read

    def _segment(self, at: int) -> SegmentReader:
        reader = self._cache.pop(at, None)
        if reader is None:
            reader = self._layout.segment(at)
            while len(self._cache) >= _KEPT_SEGMENTS:
                del self._cache[next(iter(self._cache))]
        self._cache[at] = reader
        return reader

    def _segments_of(self, start: int, stop: int) -> range:
        """The segments that have the steps start to stop - 1."""
        first = int(np.searchsorted(self._first_steps, start, side="right")) - 1
        last = int(np.searchsorted(self._first_steps, stop - 1, side="right"))
        return range(max(first, 0), last)

    def messages(self, start: int = 0, stop: int | None = None) -> Iterator[RequestArrived | StepTrace]:
        """The steps `start` to `stop` - 1, each after the requests that arrived just before it.

        Raises:
            RecordingError: a part of the file is damaged; what came before it was yielded.
        """
        start, stop = self._range(start, stop)
        if start >= stop:
            return
        for at in self._segments_of(start, stop):
            try:
                segment = self._segment(at)
                steps = segment.steps(start, stop, self._vocabulary)
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
            RecordingError: a part of the file is damaged; what came before it was yielded.
        """
        return (message for message in self.messages(start, stop) if isinstance(message, StepTrace))

    def segments(self, start: int = 0, stop: int | None = None, *, backward: bool = False) -> Iterator[SegmentReader]:
        """The segments that have the steps `start` to `stop` - 1, for who needs a part of many steps only.

        Raises:
            RecordingError: a part of the file is damaged; what came before it was yielded.
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
            RecordingError: a part of the file is damaged.
        """
        for at in np.flatnonzero(self._layout.segments[:, 4]).tolist():
            try:
                segment = self._segment(at)
                arrived = [segment.arrived(arrival, self._vocabulary) for arrival in segment.arrivals]
            except DAMAGE as error:
                raise self._damaged(at, error) from None
            yield from arrived

    def state_at(self, step: int) -> PoolState:
        """The state after a step: the keyframe before it, and the steps in between. -1 is the state before step 0.

        Raises:
            IndexError: there is no such step.
            RecordingError: a part of the file that it takes is damaged.
        """
        if not -1 <= step < self.num_steps:
            raise IndexError(f"step {step} is not in {self.path}: it has steps 0 to {self.num_steps - 1}")
        state = self._keyframe_before(step)
        for message in self.messages(state.step + 1, step + 1):
            state.apply(message)
        return state

    def _range(self, start: int, stop: int | None) -> tuple[int, int]:
        return max(start, 0), self.num_steps if stop is None else min(stop, self.num_steps)

    def _damaged(self, at: int, error: Exception) -> RecordingError:
        first, num_steps = self._layout.segments[at, :2].tolist()
        return RecordingError(
            f"{self.path} is damaged: steps {first} to {first + num_steps - 1} cannot be read ({_one_line(error)})"
        )

    # -- keyframes -----------------------------------------------------------------------------------------------

    def _keyframe_before(self, step: int) -> PoolState:
        """The state of the last usable keyframe up to a step, or the state before step 0."""
        for at in range(bisect_right(self._layout.keyframes, step, key=lambda row: row[0]) - 1, -1, -1):
            index, offset, length = self._layout.keyframes[at]
            try:
                message = self._layout.message(offset, length)
                if message.topic != KEYFRAME_TOPIC:
                    raise DamagedError("its index points at something else")
                keyframe = msgspec.msgpack.decode(message.data, type=Keyframe)
                if keyframe.step != index:
                    raise DamagedError(f"its keyframe of step {index} is one of step {keyframe.step}")
                state = PoolState.from_keyframe(self.header, keyframe)
                self._restore_requests(state, num_tokens(keyframe))
                if index == step:
                    state.last_step = next(self.steps(index, index + 1))
            except (*DAMAGE, RecordingError, StopIteration):
                continue  # A damaged keyframe costs time, not the step: the one before it serves as well.
            return state
        return PoolState(self.header)

    def _restore_requests(self, state: PoolState, counts: dict[int, int]) -> None:
        """Give the requests of a keyframe what the segments have: what their arrivals told, and their tokens."""
        requests = state.requests
        if not requests:
            return
        most = sum(counts.values())
        if most > MAX_TOKENS:
            raise ValueError(f"a keyframe with {most} tokens is not possible")
        numbers = np.array(sorted(requests), np.int64)
        arrived = np.array([requests[number].arrival_step for number in numbers.tolist()], np.int64)
        first = np.array([requests[number].first_token_step for number in numbers.tolist()], np.int64)
        last = np.array([requests[number].last_token_step for number in numbers.tolist()], np.int64)
        unknown = set(requests)
        owners: list[Column] = [np.zeros(0, np.int64)]
        entries: list[Column] = [np.zeros(0, np.int64)]
        damaged = False
        found = 0
        for at in self._segments_with(arrived, first, last):
            try:
                segment = self._segment(at)
            except DAMAGE:
                damaged = True
                continue
            for arrival in segment.arrivals:
                request = requests.get(arrival.request)
                at_step = segment.first_step + arrival.offset
                if request is not None and arrival.request in unknown and request.arrival_step == at_step:
                    unknown.remove(arrival.request)
                    request.name = arrival.name[:MAX_TEXT]
                    request.max_tokens = arrival.max_tokens
                    request.arrival_ns = arrival.time_ns
                    request.temperature = arrival.temperature
                    request.parent = arrival.parent
                    prompt = segment.prompt(arrival)[: request.num_prompt_tokens]
                    owners.append(np.full(len(prompt), arrival.request))
                    entries.append(prompt)
            step, owner, entry = segment.token_columns(state.step + 1)
            place = np.minimum(np.searchsorted(numbers, owner), len(numbers) - 1)
            ours = (numbers[place] == owner) & (step >= first[place]) & (first[place] >= 0)
            owners.append(owner[ours])
            entries.append(entry[ours])
            found += len(entries[-1])
            if found > most:
                raise ValueError(f"the requests of a keyframe have more tokens than its {most}")
        all_owners = np.concatenate(owners)
        order = np.argsort(all_owners, kind="stable")
        ids, pieces = self._vocabulary.look_up(np.concatenate(entries)[order])
        stops = np.searchsorted(all_owners[order], numbers, side="right").tolist()
        start = 0
        for number, stop in zip(numbers.tolist(), stops, strict=True):
            request = requests[number]
            request.token_ids = ids[start:stop]
            request.pieces = pieces[start:stop]
            if len(request.token_ids) != counts[number] or number in unknown:
                if not damaged:
                    raise ValueError(f"request {number} has {stop - start} tokens instead of {counts[number]}")
                # A damaged segment costs the text of those who ran in it, not the steps after it.
                request.token_ids = [-1] * counts[number]
                request.pieces = ["\ufffd"] * counts[number]
            state._num_tokens += counts[number]
            start = stop

    def _segments_with(self, arrived: Column, first: Column, last: Column) -> list[int]:
        """The segments in which requests arrived or, from their first token to their last, could have got tokens."""
        started = first >= 0
        starts = np.concatenate((arrived, first[started]))
        stops = np.concatenate((arrived, last[started]))
        if not bool(((starts >= 0) & (starts <= stops) & (stops < self.num_steps)).all()):
            raise ValueError("a keyframe names steps that are not there")
        change = np.zeros(len(self._layout.segments) + 1, np.int64)
        np.add.at(change, np.searchsorted(self._first_steps, starts, side="right") - 1, 1)
        np.add.at(change, np.searchsorted(self._first_steps, stops, side="right"), -1)
        return np.flatnonzero(np.cumsum(change[:-1])).tolist()


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
