"""A trace kept in memory while it is made: whoever folds a running engine can look back with it.

The steps are kept as a recording keeps them, as compressed segments with a keyframe now and then, so that a long
session takes little memory; the newest ones stay as they came until they fill a segment. Where the segments take more
than they may, the oldest are let go, and the trace begins later.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import zstandard

from engine.trace.container import DamagedError
from engine.trace.events import RequestArrived, StepTrace
from engine.trace.keyframe import Keyframe
from engine.trace.marks import Marks, marks_of
from engine.trace.segment import Segment, encode
from engine.trace.segment_reader import SegmentReader
from engine.trace.step_columns import StepColumns
from engine.trace.trace_reader import TraceReader
from engine.trace.vocabulary import Vocabulary, VocabularyWriter

if TYPE_CHECKING:
    from collections.abc import Iterator

    from engine.trace.columns import Column
    from engine.trace.damage import Damage
    from engine.trace.events import Header
    from engine.trace.file_format import RecordingError
    from engine.trace.state import PoolState

MOST_BYTES = 64 << 20
"""Bytes of segments and keyframes kept: some hundred thousand steps of 32 running requests."""
SEGMENT_STEPS = 64
"""Steps in a segment at most. Fewer than in a recording: making one must not be felt on the screen."""
SEGMENT_ROWS = 16_384
"""Rows in a segment, after which it is closed early."""
KEYFRAME_STEPS = 256
"""Steps between two keyframes at least; more where a keyframe is larger than the segments since the last one."""

_FIRST_DROP = 4
"""The part of the bytes that is let go at once is one over this."""


class _Store:
    """Compressed segments and keyframes; see `engine.trace.trace_reader.Parts`."""

    def __init__(self, header: Header) -> None:
        self.header = header
        self.segments: Column = np.zeros((0, 5), np.int64)
        self.keyframes: list[tuple[int, int, int]] = []
        self.num_steps = 0
        self.num_bytes = 0
        self.written = VocabularyWriter()
        self._known = Vocabulary()
        self._segment_data: dict[int, bytes] = {}
        self._keyframe_data: dict[int, bytes] = {}
        self._encoder = msgspec.msgpack.Encoder()
        self._compressor = zstandard.ZstdCompressor(level=1)

    def add_segment(self, segment: Segment) -> int:
        """Keep a segment; its size in bytes."""
        data = self._pack(segment)
        self._segment_data[len(self.segments)] = data
        row = (segment.first_step, segment.num_steps, 0, len(data), len(segment.arrivals))
        self.segments = np.concatenate((self.segments, np.array([row], np.int64)))
        self.num_steps += segment.num_steps
        return len(data)

    def add_keyframe(self, keyframe: Keyframe) -> int:
        """Keep a keyframe; its size in bytes."""
        data = self._pack(keyframe)
        self._keyframe_data[keyframe.step] = data
        self.keyframes.append((keyframe.step, 0, len(data)))
        return len(data)

    def _pack(self, part: Segment | Keyframe) -> bytes:
        data = self._compressor.compress(self._encoder.encode(part))
        self.num_bytes += len(data)
        return data

    def oldest_to_keep(self, most_bytes: int) -> int:
        """Number of the first segment that can stay where so many bytes may; at least the last one does."""
        excess = self.num_bytes - most_bytes
        for at in sorted(self._segment_data)[:-1]:
            if excess <= 0:
                return at
            first, steps = self.segments[at, :2].tolist()
            excess -= len(self._segment_data[at])
            excess -= sum(len(self._keyframe_data[row[0]]) for row in self.keyframes if first <= row[0] < first + steps)
        return len(self.segments) - 1

    def let_go_before(self, at: int) -> None:
        """Forget the segments before a number, and the keyframes in them."""
        first = int(self.segments[at, 0])
        for old in [old for old in self._segment_data if old < at]:
            self.num_bytes -= len(self._segment_data.pop(old))
        for step in [step for step in self._keyframe_data if step < first]:
            self.num_bytes -= len(self._keyframe_data.pop(step))
        self.keyframes = [row for row in self.keyframes if row[0] >= first]

    def segment(self, at: int) -> SegmentReader:
        data = self._segment_data.get(at)
        if data is None:
            raise DamagedError("they were let go")
        return SegmentReader(msgspec.msgpack.decode(zstandard.decompress(data), type=Segment))

    def keyframe(self, at: int) -> Keyframe:
        data = self._keyframe_data[self.keyframes[at][0]]
        return msgspec.msgpack.decode(zstandard.decompress(data), type=Keyframe)

    def vocabulary(self) -> Vocabulary:
        known, written = self._known, self.written
        start = len(known.texts)
        if start < len(written.ids):
            known.extend(start, np.array(written.ids[start:], np.int64), written.texts[start:])
        return known


class KeptTrace(TraceReader):
    """The trace of a running engine, in memory; written and read in one thread.

    Args:
        header: Of the trace.
        most_bytes: What segments and keyframes may take before the oldest are let go.

    Attributes:
        marks: Of all steps, those that were let go included.
    """

    def __init__(self, header: Header, most_bytes: int = MOST_BYTES) -> None:
        self._store = _Store(header)
        super().__init__("this session's history", self._store)
        self._most_bytes = most_bytes
        self.marks = Marks()
        self._tail: list[RequestArrived | StepTrace] = []
        self._tail_steps = self._tail_rows = 0
        self._steps_since_keyframe = self._bytes_since_keyframe = self._keyframe_bytes = 0

    def damage(self, error: RecordingError) -> Damage | None:
        """None: what cannot be read in memory was let go meanwhile."""
        return None

    @property
    def num_steps(self) -> int:
        """Steps taken in: the last is num_steps - 1."""
        return self._store.num_steps + self._tail_steps

    @property
    def num_bytes(self) -> int:
        """What segments and keyframes take."""
        return self._store.num_bytes

    # -- writing -------------------------------------------------------------------------------------------------

    def append(self, message: RequestArrived | StepTrace, state: PoolState) -> None:
        """Take in the next message; `state` has just folded it."""
        self._tail.append(message)
        if isinstance(message, RequestArrived):
            self._tail_rows += len(message.prompt_token_ids)
            return
        self.marks.append(marks_of(message))
        self._tail_steps += 1
        self._tail_rows += max(len(message.ops), len(message.batch), len(message.tokens))
        if self._tail_steps >= SEGMENT_STEPS or self._tail_rows >= SEGMENT_ROWS:
            self._close_segment(state)

    def _close_segment(self, state: PoolState) -> None:
        store = self._store
        size = store.add_segment(encode(store.num_steps, self._tail, store.written))
        self._bytes_since_keyframe += size
        self._steps_since_keyframe += self._tail_steps
        self._tail = []
        self._tail_steps = self._tail_rows = 0
        if self._steps_since_keyframe >= KEYFRAME_STEPS and self._bytes_since_keyframe >= self._keyframe_bytes:
            self._keyframe_bytes = store.add_keyframe(state.to_keyframe())
            self._steps_since_keyframe = self._bytes_since_keyframe = 0
        if store.num_bytes > self._most_bytes:
            self._let_go()

    def _let_go(self) -> None:
        """Let the oldest segments go; what they led to is kept as the state that the trace begins with."""
        store = self._store
        at = store.oldest_to_keep(self._most_bytes - self._most_bytes // _FIRST_DROP)
        first = int(store.segments[at, 0])
        if first <= self.first_step:
            return
        base = self.state_at(first - 1)
        store.let_go_before(at)
        self._base = base
        self._cache = {number: reader for number, reader in self._cache.items() if number >= at}
        self._steps_read = {number: kept for number, kept in self._steps_read.items() if number >= at}
        self._states = {step: kept for step, kept in self._states.items() if step >= first}

    # -- reading -------------------------------------------------------------------------------------------------

    def messages(self, start: int = 0, stop: int | None = None) -> Iterator[RequestArrived | StepTrace]:
        """As `TraceReader.messages`; what is taken in later is not among them."""
        start, stop = self._range(start, stop)
        closed = self._store.num_steps
        newest: list[RequestArrived | StepTrace] = []
        step = closed
        for message in self._tail if stop > closed else ():
            if start <= step < stop:
                newest.append(message)
            step += isinstance(message, StepTrace)
        return chain(super().messages(start, min(stop, closed)), newest)

    def segments(self, start: int = 0, stop: int | None = None, *, backward: bool = False) -> Iterator[SegmentReader]:
        """As `TraceReader.segments`; the newest steps are made a segment for it."""
        start, stop = self._range(start, stop)
        closed = self._store.num_steps
        parts: list[Iterator[SegmentReader]] = [super().segments(start, min(stop, closed), backward=backward)]
        if stop > closed and start < stop:
            parts.append(iter((self._newest_segment(),)))
        return chain.from_iterable(reversed(parts) if backward else parts)

    def _newest_segment(self) -> SegmentReader:
        return SegmentReader(encode(self._store.num_steps, self._tail, self._store.written))

    def columns(self, start: int, stop: int | None = None) -> StepColumns:
        """As `TraceReader.columns`."""
        start, stop = self._range(start, stop)
        closed = self._store.num_steps
        newest = [message for message in self._tail if isinstance(message, StepTrace) and start <= message.index < stop]
        parts = [super().columns(start, min(stop, closed))] if start < closed else []
        return StepColumns.join(start, [*parts, StepColumns.of(max(start, closed), newest)] if newest else parts)

    @property
    def _vocabulary(self) -> Vocabulary:
        return self._store.vocabulary()
