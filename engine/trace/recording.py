"""Writing a trace to a file while the engine runs.

The file is MCAP (https://mcap.dev), so that a killed process loses only what it had not written yet. The engine's
thread only appends to a queue; a thread of the writer's own makes columns of it (`engine.trace.segment`), at the
latest every two seconds, each segment a chunk of its own, and adds a keyframe now and then. `docs/trace.md` describes
the file.
"""

from __future__ import annotations

import threading
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import zstandard
from mcap.writer import CompressionType, IndexType, Writer

from engine.trace.columns import column, differences, pack
from engine.trace.events import Header, RequestArrived, StepTrace, TraceMessage
from engine.trace.file_format import (
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
from engine.trace.marks import MarkKind, MarkTable, marks_of
from engine.trace.segment import MAX_PROMPT, MAX_ROWS, Segment, encode
from engine.trace.state import PoolState
from engine.trace.vocabulary import VocabularyWriter, encodable

if TYPE_CHECKING:
    from types import TracebackType

SEGMENT_STEPS = 256
"""Steps in a segment at most."""
SEGMENT_SECONDS = 2.0
"""A step waits at most this long before it is written."""
SEGMENT_ROWS = 65_536
"""Rows in a segment, after which it is closed early."""
VOCABULARY_SEGMENTS = 128
"""Segments from which on the vocabulary is written once more as a whole; with fewer, reading them all is quick."""
KEYFRAME_STEPS = 256
"""Steps between two keyframes at least; more where a keyframe is larger than the steps since the last one."""
KEYFRAME_STEPS_MAX = 1024
"""Steps between two keyframes at most, for pools up to `LARGE_POOL` blocks."""
LARGE_POOL = 65_536
_MAX_PENDING = 8192
"""Messages waiting to be written before the engine's thread has to help."""


class RecordingWriter:
    """A sink that writes a recording.

    A failure to write (a full disk) ends the recording, not the engine: it is kept in `error`, and `close` raises it.

    Args:
        path: The file; one that exists is replaced.
        header: Of the trace; its title and description go with it.

    Raises:
        RecordingError: the file cannot be created.
    """

    def __init__(self, path: str | Path, header: Header) -> None:
        self.path = Path(path)
        self.header = msgspec.structs.replace(
            header, title=encodable(header.title), description=encodable(header.description)
        )
        self.error: RecordingError | None = None
        if header.num_blocks > MAX_BLOCKS:
            raise RecordingError(f"a pool of {header.num_blocks} blocks cannot be recorded: at most {MAX_BLOCKS} can")
        try:
            self._file = self.path.open("wb")
        except OSError as error:
            raise RecordingError(f"cannot record to {self.path}: {error.strerror or error}") from None
        self._pending: deque[RequestArrived | StepTrace] = deque()
        self._held: list[RequestArrived | StepTrace] = []
        """Arrivals after the last step written, which wait for the next one."""
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._closed = False
        self._encoder = msgspec.msgpack.Encoder()
        self._vocabulary = VocabularyWriter()
        self._state = PoolState(header)
        self._segments: list[tuple[int, int, int, int, int]] = []
        self._keyframes: list[tuple[int, int, int]] = []
        self._marks = bytearray()
        self._steps_at_keyframe = 0
        self._bytes_at_keyframe = 0
        self._keyframe_length = 0
        self._end_ns = 0
        self._num_requests = 0
        try:
            self._start()
        except OSError as error:
            self._close_file()
            raise RecordingError(f"cannot record to {self.path}: {error.strerror or error}") from None
        self._thread = threading.Thread(target=self._run, name="recording", daemon=True)
        self._thread.start()

    def __call__(self, message: TraceMessage) -> None:
        """Take a message; costs the caller about a microsecond."""
        if isinstance(message, Header) or self._closed:
            return
        self._pending.append(message)
        waiting = len(self._pending)
        if waiting >= SEGMENT_STEPS:
            self._wake.set()
            if waiting >= _MAX_PENDING:
                self._write_pending(final=False)

    def close(self) -> None:
        """Write what is left and the index.

        Raises:
            RecordingError: something could not be written; the file is readable up to there.
        """
        if not self._closed:
            self._closed = True
            self._wake.set()
            self._thread.join()
            self._write_pending(final=True)
            self._close_file()
        if self.error is not None:
            raise self.error

    def __enter__(self) -> RecordingWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _close_file(self) -> None:
        try:
            self._file.close()
        except OSError as error:  # What could not be flushed is tried, and fails, once more.
            self.error = self.error or self._ended_early(error)

    def _ended_early(self, error: Exception) -> RecordingError:
        why = error.strerror if isinstance(error, OSError) and error.strerror else repr(error)
        return RecordingError(f"recording to {self.path} ended early: {why}")

    # -- the writer's thread -------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closed:
            self._wake.wait(SEGMENT_SECONDS)
            self._wake.clear()
            if not self._closed:
                self._write_pending(final=False)

    def _write_pending(self, *, final: bool) -> None:
        with self._lock:
            if self.error is not None:
                self._pending.clear()
                return
            try:
                while messages := self._take(final):
                    self._write_segment(messages)
                if final:
                    self._finish()
            except Exception as error:  # A trace that cannot be written must not end the engine.
                self.error = self._ended_early(error)

    def _take(self, final: bool) -> list[RequestArrived | StepTrace]:
        """The next segment's messages: up to a step, so that arrivals come before the steps that mention them."""
        steps = rows = last_step = 0
        held = self._held
        while (steps < SEGMENT_STEPS and (rows < SEGMENT_ROWS or not steps)) and self._pending:
            message = self._pending.popleft()
            held.append(message)
            if isinstance(message, StepTrace):
                steps += 1
                last_step = len(held)
                most = max(len(message.ops), len(message.batch), len(message.tokens))
                rows += most
                if most > MAX_ROWS - SEGMENT_ROWS:
                    raise ValueError(f"step {message.index} has {most} rows")
            else:
                rows += len(message.prompt_token_ids)
                if len(message.prompt_token_ids) > MAX_PROMPT:
                    raise ValueError(
                        f"request {message.request} has a prompt of {len(message.prompt_token_ids)} tokens"
                    )
        if final and not self._pending:
            last_step = len(held)
        self._held = held[last_step:]
        return held[:last_step]

    def _start(self) -> None:
        self._mcap = Writer(
            self._file,
            chunk_size=1,  # Every message ends its chunk; a segment is one message.
            compression=CompressionType.ZSTD,
            index_types=IndexType.ATTACHMENT | IndexType.METADATA | IndexType.CHUNK,
        )
        self._mcap.start(profile=PROFILE)
        self._channels: dict[str, int] = {}
        for topic, kind in ((HEADER_TOPIC, Header), (SEGMENT_TOPIC, Segment), (KEYFRAME_TOPIC, Keyframe)):
            schema = msgspec.json.encode(msgspec.json.schema(kind))
            schema_id = self._mcap.register_schema(kind.__name__, "jsonschema", schema)
            self._channels[topic] = self._mcap.register_channel(topic, "msgpack", schema_id)
        self._mcap.add_metadata("kvtui", {"title": self.header.title, "description": self.header.description})
        self._add(HEADER_TOPIC, 0, self._encoder.encode(self.header))

    def _add(self, topic: str, time_ns: int, data: bytes) -> tuple[int, int]:
        """Write a message as a chunk; where the chunk's content starts and how long it is."""
        time = max(0, int(self.header.started_at * 1e9) + time_ns)
        start = self._file.tell()
        self._mcap.add_message(self._channels[topic], log_time=time, publish_time=time, data=data)
        self._file.flush()
        return start + 9, self._file.tell() - start - 9

    def _write_segment(self, messages: list[RequestArrived | StepTrace]) -> None:
        first = self._state.step + 1
        index = first
        for message in messages:
            if isinstance(message, StepTrace):
                if message.index != index:
                    raise ValueError(f"step {message.index} came where step {index} was due")
                index += 1
                self._end_ns = (
                    message.start_ns + message.schedule_ns + message.execute_ns + message.sample_ns + message.update_ns
                )
        segment = encode(first, messages, self._vocabulary)
        offset, length = self._add(SEGMENT_TOPIC, self._end_ns, self._encoder.encode(segment))
        self._segments.append((first, segment.num_steps, offset, length, len(segment.arrivals)))
        self._num_requests += len(segment.arrivals)
        for message in messages:
            self._state.apply(message)
            if isinstance(message, StepTrace):
                self._marks.append(marks_of(message))
        if self._keyframe_due(length):
            self._write_keyframe()

    def _keyframe_due(self, segment_length: int) -> bool:
        self._bytes_at_keyframe += segment_length
        steps = self._state.step + 1 - self._steps_at_keyframe
        if steps < KEYFRAME_STEPS:
            return False
        return self._bytes_at_keyframe >= self._keyframe_length or (
            steps >= KEYFRAME_STEPS_MAX and self.header.num_blocks <= LARGE_POOL
        )

    def _write_keyframe(self) -> None:
        state = self._state
        offset, length = self._add(KEYFRAME_TOPIC, state.time_ns, self._encoder.encode(state.to_keyframe()))
        self._keyframes.append((state.step, offset, length))
        self._steps_at_keyframe = state.step + 1
        self._bytes_at_keyframe = 0
        self._keyframe_length = length

    def _finish(self) -> None:
        segments = _columns(self._segments, 5)
        keyframes = _columns(self._keyframes, 3)
        index = Index(
            num_steps=self._state.step + 1,
            duration_ns=self._end_ns,
            num_requests=self._num_requests,
            num_segments=len(self._segments),
            segments=[pack(c if at in (1, 3, 4) else differences(c)) for at, c in enumerate(segments)],
            num_keyframes=len(self._keyframes),
            keyframes=[pack(c if at == 2 else differences(c)) for at, c in enumerate(keyframes)],
        )
        self._attach(INDEX_NAME, index)
        self._attach(MARKS_NAME, MarkTable(kinds=[kind.name.lower() for kind in MarkKind], flags=bytes(self._marks)))
        if len(self._segments) >= VOCABULARY_SEGMENTS:
            ids = pack(column(self._vocabulary.ids))
            self._attach(VOCABULARY_NAME, VocabularyTable(ids=ids, texts=self._vocabulary.texts))
        self._mcap.finish()  # type: ignore[no-untyped-call]
        self._file.flush()

    def _attach(self, name: str, value: msgspec.Struct) -> None:
        data = zstandard.compress(self._encoder.encode(value))
        self._mcap.add_attachment(0, 0, name, "application/zstd", data)


def _columns(rows: list[Any], width: int) -> list[Any]:
    return [column(row[at] for row in rows) for at in range(width)]
