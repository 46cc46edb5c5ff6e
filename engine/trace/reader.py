"""Reading recordings: opened by their index, any step reached from the keyframe before it.

Files may be cut off, damaged or made up. Whatever is in them, reading takes bounded memory and raises nothing but
`RecordingError`; a file whose writer was killed is read up to its last whole segment.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from engine.trace import container
from engine.trace.columns import Column, sums, unpack
from engine.trace.container import DamagedError
from engine.trace.events import SCHEMA_VERSION, Header, RequestArrived, StepTrace
from engine.trace.keyframe import Keyframe, num_tokens
from engine.trace.recording import (
    HEADER_TOPIC,
    INDEX_NAME,
    KEYFRAME_TOPIC,
    PROFILE,
    SEGMENT_TOPIC,
    VOCABULARY_NAME,
    Index,
    RecordingError,
    VocabularyTable,
)
from engine.trace.segment import Segment, SegmentReader, Vocabulary
from engine.trace.state import MAX_TEXT, MAX_TOKENS, PoolState

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

MAX_BLOCKS = 1 << 22
"""Blocks of a pool that a recording may have: the state of one takes 60 bytes."""
_MAX_PART = 64 << 20
"""Bytes of a segment or an attachment at most, compressed or not."""
_MAX_HEADER = 1 << 20
"""Bytes of the header at most."""
_BYTES_PER_BLOCK = 64
"""Of an uncompressed keyframe, at most."""
_MAX_ROWS = 1 << 24
"""Segments or keyframes of a recording at most."""
_KEPT_SEGMENTS = 8

_ERRORS = (DamagedError, ValueError, TypeError, KeyError, IndexError, OverflowError, msgspec.MsgspecError)
"""What reading a damaged or hostile part can raise."""


class _Version(msgspec.Struct):
    """What every version's header has."""

    schema_version: int
    producer: str = ""


class _SegmentRow(NamedTuple):
    first_step: int
    num_steps: int
    offset: int
    length: int
    num_arrivals: int


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
            self._open()
        except RecordingError:
            self._file.close()
            raise
        except OSError as error:
            self._file.close()
            raise RecordingError(f"cannot read {path}: {error.strerror or error}") from None
        except _ERRORS as error:
            self._file.close()
            raise RecordingError(f"{path} is damaged beyond use: {_one_line(error)}") from None

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

    # -- opening -------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        self.size = os.fstat(self._file.fileno()).st_size
        start = self._file.read(len(container.MAGIC))
        if not start:
            raise RecordingError(f"{self.path} is empty: record again with `kvtui run --record FILE`")
        if start != container.MAGIC:
            if container.MAGIC.startswith(start):
                raise RecordingError(f"{self.path} is cut off after {len(start)} bytes: nothing in it can be read")
            raise RecordingError(f"{self.path} is not a recording: those are .mcap files that kvtui wrote")
        try:
            profile = container.read_profile(self._file, self.size)
        except DamagedError:
            raise RecordingError(f"{self.path} is cut off after {self.size} bytes: nothing in it can be read") from None
        if profile != PROFILE:
            raise RecordingError(
                f"{self.path} is an MCAP file, but not a kvtui recording (its profile is {profile[:40]!r})"
            )
        self._topics: dict[int, str] = {}
        self._cache: dict[int, SegmentReader] = {}
        self._keyframes: list[tuple[int, int, int]] = []
        self.header = self._read_header()
        try:
            self._read_index()
            self.complete = True
        except _ERRORS:
            self._scan()
            self.complete = False
        self._first_steps = self._segments[:, 0]

    def _read_header(self) -> Header:
        for record in container.records(self._file, self.size):
            if record.opcode == container.CHUNK:
                message = next(
                    iter(container.read_chunk(self._file, record.offset, record.length, self._topics, _MAX_HEADER)),
                    None,
                )
                break
        else:
            message = None
        if message is None or message.topic != HEADER_TOPIC:
            raise RecordingError(f"{self.path} is cut off before its first step: nothing in it can be read")
        version = msgspec.msgpack.decode(message.data, type=_Version)
        if version.schema_version > SCHEMA_VERSION:
            raise RecordingError(
                f"{self.path} was made by a newer kvtui (schema {version.schema_version}); "
                f"this one reads up to {SCHEMA_VERSION}: upgrade"
            )
        header = msgspec.msgpack.decode(message.data, type=Header)
        if not (
            1 <= header.num_blocks <= MAX_BLOCKS
            and 0 <= header.num_cpu_blocks <= MAX_BLOCKS
            and 1 <= header.block_size <= 1 << 20
        ):
            raise RecordingError(
                f"{self.path} has a pool of {header.num_blocks} blocks of {header.block_size}; "
                f"recordings have up to {MAX_BLOCKS}"
            )
        return header

    def _read_index(self) -> None:
        found = container.find_attachments(self._file, self.size)
        index = msgspec.msgpack.decode(self._attachment(found[INDEX_NAME]), type=Index)
        self._vocabulary_record: container.Record | None = found.get(VOCABULARY_NAME)
        self._vocabulary_read: Vocabulary | None = None
        n, m = index.num_segments, index.num_keyframes
        if not (0 <= n <= _MAX_ROWS and 0 <= m <= _MAX_ROWS and len(index.segments) == 5 and len(index.keyframes) == 3):
            raise ValueError("its index is too large")
        first, steps, offset, length, arrivals = (unpack(data, n) for data in index.segments)
        first, offset = sums(first), sums(offset)
        expected = np.cumsum(steps) - steps
        if not (
            bool((first == expected).all())
            and int(steps.sum()) == index.num_steps
            and bool((steps >= 0).all() and (offset >= 0).all() and (length >= 0).all())
        ):
            raise ValueError("its index contradicts itself")
        self._segments = np.stack((first, steps, offset, length, arrivals), axis=1)
        step, offset, length = (unpack(data, m) for data in index.keyframes)
        step, offset = sums(step), sums(offset)
        if not bool((np.diff(step) > 0).all() and (offset >= 0).all() and (length >= 0).all()):
            raise ValueError("its index contradicts itself")
        self._keyframes = list(zip(step.tolist(), offset.tolist(), length.tolist(), strict=True))
        self.num_steps = index.num_steps
        self.num_requests = index.num_requests
        self.duration_ns = index.duration_ns

    def _attachment(self, record: container.Record) -> bytes:
        import zstandard

        data = container.read_attachment(self._file, record, _MAX_PART)
        try:
            size = zstandard.frame_content_size(data)
        except zstandard.ZstdError as error:
            raise DamagedError(f"an attachment does not decompress: {error}") from None
        return container.decompress(data, size, _MAX_PART)

    def _read_chunk(self, offset: int, length: int) -> container.Message:
        limit = _MAX_PART + _BYTES_PER_BLOCK * self.header.num_blocks
        return container.read_chunk(self._file, offset, length, self._topics, limit)[0]

    def _scan(self) -> None:
        """Find the segments one by one, as far as they are whole: there is no index."""
        rows: list[tuple[int, int, int, int, int]] = []
        self._keyframes = []
        self._vocabulary_record = None
        self._vocabulary_read = vocabulary = Vocabulary()
        self.num_steps = self.num_requests = self.duration_ns = 0
        last: SegmentReader | None = None
        for record in container.records(self._file, self.size):
            if record.opcode != container.CHUNK:
                continue
            try:
                message = self._read_chunk(record.offset, record.length)
                if message.topic == SEGMENT_TOPIC:
                    segment = msgspec.msgpack.decode(message.data, type=Segment)
                    if segment.first_step != self.num_steps:
                        raise ValueError(f"step {segment.first_step} follows step {self.num_steps - 1}")
                    reader = SegmentReader(segment)
                    reader.add_vocabulary(vocabulary)
                elif message.topic == KEYFRAME_TOPIC:
                    self._keyframes.append((self.num_steps - 1, record.offset, record.length))
                    continue
                else:
                    continue
            except _ERRORS:
                break
            rows.append((self.num_steps, reader.num_steps, record.offset, record.length, len(reader.arrivals)))
            self.num_steps += reader.num_steps
            self.num_requests += len(reader.arrivals)
            last = reader if reader.num_steps else last
        self._segments = np.array(rows, np.int64).reshape(-1, 5)
        if last is not None:
            try:
                step = last.steps(self.num_steps - 1, self.num_steps, vocabulary)[-1]
                self.duration_ns = step.start_ns + (
                    step.schedule_ns + step.execute_ns + step.sample_ns + step.update_ns
                )
            except _ERRORS:
                self.duration_ns = 0

    # -- reading -------------------------------------------------------------------------------------------------

    @property
    def _vocabulary(self) -> Vocabulary:
        if self._vocabulary_read is None:
            vocabulary = Vocabulary()
            if self._vocabulary_record is not None:
                table = msgspec.msgpack.decode(self._attachment(self._vocabulary_record), type=VocabularyTable)
                vocabulary.extend(0, unpack(table.ids, len(table.texts)), table.texts)
            else:
                for at in range(len(self._segments)):
                    self._segment(at).add_vocabulary(vocabulary)
            self._vocabulary_read = vocabulary
        return self._vocabulary_read

    def _segment(self, at: int) -> SegmentReader:
        reader = self._cache.pop(at, None)
        if reader is None:
            row = self._row(at)
            message = self._read_chunk(row.offset, row.length)
            if message.topic != SEGMENT_TOPIC:
                raise DamagedError("its index points at something else")
            reader = SegmentReader(msgspec.msgpack.decode(message.data, type=Segment))
            if (reader.first_step, reader.num_steps) != (row.first_step, row.num_steps):
                raise DamagedError("its index names other steps than are there")
            while len(self._cache) >= _KEPT_SEGMENTS:
                del self._cache[next(iter(self._cache))]
        self._cache[at] = reader
        return reader

    def _row(self, at: int) -> _SegmentRow:
        return _SegmentRow(*self._segments[at].tolist())

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
            except _ERRORS as error:
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

    def requests(self) -> Iterator[RequestArrived]:
        """All arrivals, in order.

        Raises:
            RecordingError: a part of the file is damaged.
        """
        for at in np.flatnonzero(self._segments[:, 4]).tolist():
            try:
                segment = self._segment(at)
                arrived = [segment.arrived(arrival, self._vocabulary) for arrival in segment.arrivals]
            except _ERRORS as error:
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
        row = self._row(at)
        return RecordingError(
            f"{self.path} is damaged: steps {row.first_step} to {row.first_step + row.num_steps - 1} "
            f"cannot be read ({_one_line(error)})"
        )

    # -- keyframes -----------------------------------------------------------------------------------------------

    def _keyframe_before(self, step: int) -> PoolState:
        """The state of the last usable keyframe up to a step, or the state before step 0."""
        for at in range(bisect_right(self._keyframes, step, key=lambda row: row[0]) - 1, -1, -1):
            index, offset, length = self._keyframes[at]
            try:
                message = self._read_chunk(offset, length)
                if message.topic != KEYFRAME_TOPIC:
                    raise DamagedError("its index points at something else")
                keyframe = msgspec.msgpack.decode(message.data, type=Keyframe)
                if keyframe.step != index:
                    raise DamagedError(f"its keyframe of step {index} is one of step {keyframe.step}")
                state = PoolState.from_keyframe(self.header, keyframe)
                self._restore_requests(state, num_tokens(keyframe))
                if index == step:
                    state.last_step = next(self.steps(index, index + 1))
            except (*_ERRORS, RecordingError, StopIteration):
                continue  # A damaged keyframe costs time, not the step: the one before it serves as well.
            return state
        return PoolState(self.header)

    def _restore_requests(self, state: PoolState, counts: dict[int, int]) -> None:
        """Give the requests of a keyframe what the segments have: what their arrivals told, and their tokens."""
        requests = state.requests
        if not requests:
            return
        numbers = np.array(sorted(requests), np.int64)
        arrived = np.array([requests[number].arrival_step for number in numbers.tolist()], np.int64)
        first = np.array([requests[number].first_token_step for number in numbers.tolist()], np.int64)
        last = np.array([requests[number].last_token_step for number in numbers.tolist()], np.int64)
        unknown = set(requests)
        owners: list[Column] = [np.zeros(0, np.int64)]
        entries: list[Column] = [np.zeros(0, np.int64)]
        damaged = False
        for at in self._segments_with(arrived, first, last):
            try:
                segment = self._segment(at)
            except _ERRORS:
                damaged = True
                continue
            for arrival in segment.arrivals:
                request = requests.get(arrival.request)
                if request is not None and request.arrival_step == segment.first_step + arrival.offset:
                    unknown.discard(arrival.request)
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
                if not damaged or state._num_tokens + counts[number] > MAX_TOKENS:
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
        change = np.zeros(len(self._segments) + 1, np.int64)
        np.add.at(change, np.searchsorted(self._first_steps, starts, side="right") - 1, 1)
        np.add.at(change, np.searchsorted(self._first_steps, stops, side="right"), -1)
        return np.flatnonzero(np.cumsum(change[:-1])).tolist()


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
