"""Where everything lies in a recording: from the index at its end, or found by going through a file that has none."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, BinaryIO

import msgspec
import numpy as np
import zstandard

from engine.trace import container
from engine.trace.columns import Column, sums, unpack
from engine.trace.container import DamagedError
from engine.trace.events import SCHEMA_VERSION, Header
from engine.trace.file_format import (
    DAMAGE,
    HEADER_TOPIC,
    INDEX_NAME,
    KEYFRAME_TOPIC,
    MARKS_NAME,
    MAX_BLOCKS,
    PROFILE,
    SEGMENT_TOPIC,
    VOCABULARY_NAME,
    Index,
    RecordingError,
    VocabularyTable,
)
from engine.trace.keyframe import Keyframe
from engine.trace.marks import ALL_KINDS, MAX_MARKED_STEPS, MarkedPart, MarkKind, Marks, MarkTable
from engine.trace.segment import Segment
from engine.trace.segment_reader import SegmentReader
from engine.trace.vocabulary import Vocabulary

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_MAX_PART = 64 << 20
"""Bytes of a segment or an attachment at most, compressed or not."""
_MAX_HEADER = 1 << 20
"""Bytes of the header at most."""
_BYTES_PER_BLOCK = 64
"""Of an uncompressed keyframe, at most."""
_OTHERS = 64
"""Records between two chunks at most; kvtui writes next to none, a made-up file may have millions."""
_MAX_ROWS = 1 << 24
"""Segments or keyframes of a recording at most."""


class _Version(msgspec.Struct):
    """What every version's header has."""

    schema_version: int
    producer: str = ""


class Layout:
    """The parts of an open file.

    Attributes:
        header: Of the trace.
        segments: int64[n, 5]: first step, steps, offset and length of the chunk's content, arrivals of each segment.
        keyframes: (step, offset, length) of each.
        num_steps: Steps in the segments.
        num_requests: Arrivals in them.
        duration_ns: End of the last step.
        complete: Whether the file has its index.
        size: Bytes of the file.
        unread: Bytes behind the last part that could be read, of a file that has no index.

    Raises:
        RecordingError: it is no recording, or not one that can be read.
        DamagedError: as the other exceptions of `DAMAGE`: it contradicts itself.
    """

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path = path
        self._file = file
        self._topics: dict[int, str] = {}
        self._vocabulary_at: container.Record | None = None
        self._marks_at: container.Record | None = None
        self.size = os.fstat(file.fileno()).st_size
        self.segments: Column = np.zeros((0, 5), np.int64)
        self.keyframes: list[tuple[int, int, int]] = []
        self.num_steps = self.num_requests = self.duration_ns = self.unread = 0
        self._require_recording()
        self.header = self._read_header()
        try:
            self._read_index()
            self.complete = True
        except DAMAGE:
            self._scan()
            self.complete = False

    def _chunks(self) -> Iterator[container.Record]:
        """The chunks one after the other, up to where the file ends or is none of ours any more."""
        others = 0
        for record in container.records(self._file, self.size):
            if record.opcode == container.CHUNK:
                others = 0
                yield record
            elif (others := others + 1) > _OTHERS:
                return

    def _require_recording(self) -> None:
        path = self.path
        start = self._file.read(len(container.MAGIC))
        if not start:
            raise RecordingError(f"{path} is empty: record again with `kvtui run --record FILE`")
        if start != container.MAGIC:
            if container.MAGIC.startswith(start):
                raise RecordingError(f"{path} is cut off after {len(start)} bytes: nothing in it can be read")
            raise RecordingError(f"{path} is not a recording: those are .mcap files that kvtui wrote")
        try:
            profile = container.read_profile(self._file, self.size)
        except DamagedError:
            raise RecordingError(f"{path} is cut off after {self.size} bytes: nothing in it can be read") from None
        if profile != PROFILE:
            raise RecordingError(f"{path} is an MCAP file, but not a kvtui recording (its profile is {profile[:40]!r})")

    def _read_header(self) -> Header:
        path = self.path
        first = next(self._chunks(), None)
        messages = (
            container.read_chunk(self._file, first.offset, first.length, self._topics, _MAX_HEADER) if first else []
        )
        if not messages or messages[0].topic != HEADER_TOPIC:
            raise RecordingError(f"{path} is cut off before its first step: nothing in it can be read")
        version = msgspec.msgpack.decode(messages[0].data, type=_Version)
        if version.schema_version > SCHEMA_VERSION:
            raise RecordingError(
                f"{path} was made by a newer kvtui (schema {version.schema_version}); "
                f"this one reads up to {SCHEMA_VERSION}: upgrade"
            )
        header = msgspec.msgpack.decode(messages[0].data, type=Header)
        if not (
            1 <= header.num_blocks <= MAX_BLOCKS
            and 0 <= header.num_cpu_blocks <= MAX_BLOCKS
            and 1 <= header.block_size <= 1 << 20
        ):
            size = f"{header.num_blocks} blocks of {header.block_size}"
            raise RecordingError(f"{path} has a pool of {size}; recordings have up to {MAX_BLOCKS}")
        return header

    def _read_index(self) -> None:
        found = container.find_attachments(self._file, self.size)
        index = msgspec.msgpack.decode(self._attachment(found[INDEX_NAME]), type=Index)
        self._vocabulary_at = found.get(VOCABULARY_NAME)
        self._marks_at = found.get(MARKS_NAME)
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
        self.segments = np.stack((first, steps, offset, length, arrivals), axis=1)
        step, offset, length = (unpack(data, m) for data in index.keyframes)
        step, offset = sums(step), sums(offset)
        if not bool((np.diff(step) > 0).all() and (offset >= 0).all() and (length >= 0).all()):
            raise ValueError("its index contradicts itself")
        self.keyframes = list(zip(step.tolist(), offset.tolist(), length.tolist(), strict=True))
        self.num_steps = index.num_steps
        self.num_requests = index.num_requests
        self.duration_ns = index.duration_ns

    def _attachment(self, record: container.Record) -> bytes:
        data = container.read_attachment(self._file, record, _MAX_PART)
        try:
            size = zstandard.frame_content_size(data)
        except zstandard.ZstdError as error:
            raise DamagedError(f"an attachment does not decompress: {error}") from None
        return container.decompress(data, size, _MAX_PART)

    def _scan(self) -> None:
        """Find the segments one by one, as far as they are whole: there is no index."""
        rows: list[tuple[int, int, int, int, int]] = []
        vocabulary = Vocabulary()
        self.keyframes = []
        self._vocabulary_at = self._marks_at = None
        self.num_steps = self.num_requests = self.duration_ns = 0
        last: SegmentReader | None = None
        end = 0
        for record in self._chunks():
            try:
                message = self.message(record.offset, record.length)
                if message.topic == KEYFRAME_TOPIC:
                    self.keyframes.append((self.num_steps - 1, record.offset, record.length))
                elif message.topic == SEGMENT_TOPIC:
                    segment = msgspec.msgpack.decode(message.data, type=Segment)
                    if segment.first_step != self.num_steps:
                        raise ValueError(f"step {segment.first_step} follows step {self.num_steps - 1}")
                    reader = SegmentReader(segment)
                    reader.add_vocabulary(vocabulary)
            except DAMAGE:
                break
            end = record.offset + record.length
            if message.topic != SEGMENT_TOPIC:
                continue
            rows.append((self.num_steps, reader.num_steps, record.offset, record.length, len(reader.arrivals)))
            self.num_steps += reader.num_steps
            self.num_requests += len(reader.arrivals)
            last = reader if reader.num_steps else last
        self.unread = self.size - end if end else 0
        self.segments = np.array(rows, np.int64).reshape(-1, 5)
        if last is not None:
            try:
                step = last.steps(self.num_steps - 1, self.num_steps, vocabulary)[-1]
                self.duration_ns = step.start_ns + (
                    step.schedule_ns + step.execute_ns + step.sample_ns + step.update_ns
                )
            except DAMAGE:
                self.duration_ns = 0

    def message(self, offset: int, length: int) -> container.Message:
        """The message of the chunk whose content lies there.

        Raises:
            DamagedError: as the other exceptions of `DAMAGE`: it cannot be read.
        """
        limit = _MAX_PART + _BYTES_PER_BLOCK * self.header.num_blocks
        return container.read_chunk(self._file, offset, length, self._topics, limit)[0]

    def segment(self, at: int) -> SegmentReader:
        """A segment, read from the file.

        Raises:
            DamagedError: as the other exceptions of `DAMAGE`: it cannot be read.
        """
        first_step, num_steps, offset, length, _ = self.segments[at].tolist()
        message = self.message(offset, length)
        if message.topic != SEGMENT_TOPIC:
            raise DamagedError("its index points at something else")
        reader = SegmentReader(msgspec.msgpack.decode(message.data, type=Segment))
        if (reader.first_step, reader.num_steps) != (first_step, num_steps):
            raise DamagedError("its index names other steps than are there")
        return reader

    def keyframe(self, at: int) -> Keyframe:
        """A keyframe, read from the file.

        Raises:
            DamagedError: as the other exceptions of `DAMAGE`: it cannot be read.
        """
        index, offset, length = self.keyframes[at]
        message = self.message(offset, length)
        if message.topic != KEYFRAME_TOPIC:
            raise DamagedError("its index points at something else")
        keyframe = msgspec.msgpack.decode(message.data, type=Keyframe)
        if keyframe.step != index:
            raise DamagedError(f"its keyframe of step {index} is one of step {keyframe.step}")
        return keyframe

    def marked_part(self, at: int) -> MarkedPart:
        """What of a segment its marks follow from.

        Raises:
            DamagedError: as the other exceptions of `DAMAGE`: it cannot be read.
        """
        first_step, num_steps, offset, length, _ = self.segments[at].tolist()
        part = msgspec.msgpack.decode(self.message(offset, length).data, type=MarkedPart)
        if (part.first_step, part.num_steps) != (first_step, num_steps):
            raise DamagedError("its index names other steps than are there")
        return part

    def marks(self) -> Marks:
        """The marks of all steps: those that the recording brings along, or such as have yet to be found."""
        if self.num_steps > MAX_MARKED_STEPS:
            return Marks()
        if self._marks_at is not None:
            try:
                table = msgspec.msgpack.decode(self._attachment(self._marks_at), type=MarkTable)
                flags = np.frombuffer(table.flags, np.uint8)
                if table.kinds == [kind.name.lower() for kind in MarkKind] and len(flags) == self.num_steps:
                    return Marks(flags & np.uint8(ALL_KINDS))
            except DAMAGE:
                pass  # They can be found again.
        return Marks.to_be_found(self.num_steps, self)

    def vocabulary(self) -> Vocabulary:
        """All entries. Those that only a damaged segment had are unknown text."""
        if self._vocabulary_at is not None:
            try:
                table = msgspec.msgpack.decode(self._attachment(self._vocabulary_at), type=VocabularyTable)
                vocabulary = Vocabulary()
                vocabulary.extend(0, unpack(table.ids, len(table.texts)), table.texts)
            except DAMAGE:
                pass  # The segments have it as well, each what is new in it.
            else:
                return vocabulary
        vocabulary = Vocabulary()
        damaged = False
        for at in range(len(self.segments)):
            try:
                self.segment(at).add_vocabulary(vocabulary, gap=damaged)
            except DAMAGE:
                damaged = True
        return vocabulary
