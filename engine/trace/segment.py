"""Some hundred steps of a trace as columns: the form in which a recording keeps them.

In memory a step is a `StepTrace`; written row by row it would cost four times the bytes. Here the numbers of one kind
stand side by side (`engine.trace.columns`), predictable ones as the difference from the prediction, and a token is
its number in the recording's vocabulary of (token id, text) pairs. `docs/trace.md` describes every column.
"""

from __future__ import annotations

from itertools import chain, repeat
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from engine.trace.columns import Column, column, differences, pack, sums, surprise, undo_surprise, unpack
from engine.trace.events import (
    BatchMember,
    BlockOp,
    Counters,
    Decision,
    Finish,
    NewToken,
    Op,
    RequestArrived,
    StepTrace,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MAX_STEPS = 4096
"""Steps in a segment at most."""
MAX_ROWS = 1 << 20
"""Rows of one table (batch, operations, tokens) in a segment at most, and tokens of one prompt."""
MAX_VOCABULARY = 1 << 22
"""Entries of a recording's vocabulary at most."""

_Row = TypeVar("_Row", BatchMember, BlockOp, NewToken, Counters)

_ALLOCATE, _FILL, _HASH, _EVICT = int(Op.ALLOCATE), int(Op.FILL), int(Op.HASH), int(Op.EVICT)
_FOLLOWS = ((_ALLOCATE, _EVICT), (_HASH, _FILL))
"""Operations that often concern the block of the operation right before them, in the order in which that is undone."""
_NUM_COUNTERS = len(Counters._fields)


class Arrival(msgspec.Struct, frozen=True, array_like=True):
    """A `RequestArrived` whose prompt is a column of vocabulary entries.

    Attributes:
        offset: It came before the segment's step of this offset.
    """

    offset: int
    request: int
    name: str
    time_ns: int
    max_tokens: int
    temperature: float
    parent: int
    num_tokens: int
    prompt: bytes


class Segment(msgspec.Struct, frozen=True, tag="segment"):
    """Consecutive steps as columns; a column is bytes as `engine.trace.columns.pack` makes them.

    Attributes:
        first_step: Index of the first step.
        num_steps: How many; 0 only at the end of a recording, for requests that came after the last step.
        times: start_ns (less the end of the step before), schedule_ns, execute_ns, sample_ns, update_ns.
        counters: The counters in their order, each less the step before.
        batch: Members of each step; then, over all members: request, phase, computed_before (less what the request had
            computed when last in a batch), num_scheduled.
        ops: Operations of each step; then the kind of each operation.
        op_rows: By kind, the columns a, b, c of its operations. The block of an ALLOCATE right after an EVICT, and of a
            HASH right after a FILL, is less that operation's block; the block of a FILL is less the one that its
            request was allocated or filled before; the n of a FILL is less one more than the block had.
        tokens: New tokens of each step; then request and vocabulary entry of each.
        finished: (offset of the step, what it says).
        decisions: (offset of the step, what it says).
        arrivals: Requests that came, in order.
        vocabulary_start: Number of the first new entry.
        vocabulary_ids: Column: token ids of the new entries.
        vocabulary_texts: Their texts.
    """

    first_step: int
    num_steps: int
    times: list[bytes]
    counters: list[bytes]
    batch: list[bytes]
    ops: list[bytes]
    op_rows: dict[int, list[bytes]]
    tokens: list[bytes]
    finished: list[tuple[int, Finish]]
    decisions: list[tuple[int, Decision]]
    arrivals: list[Arrival]
    vocabulary_start: int
    vocabulary_ids: bytes
    vocabulary_texts: list[str]


def encodable(text: str) -> str:
    """The text with a question mark for what UTF-8 cannot hold: lone surrogates, which files and JSON can bring in."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


class VocabularyWriter:
    """Numbers (token id, text) pairs in the order in which they first occur."""

    def __init__(self) -> None:
        self.entries: dict[tuple[int, str], int] = {}
        self.ids: list[int] = []
        self.texts: list[str] = []

    def entry(self, token_id: int, text: str) -> int:
        """The number of a pair, a new one where it has none."""
        pair = (token_id, text)
        entry = self.entries.get(pair)
        if entry is None:
            entry = self.entries[pair] = len(self.ids)
            self.ids.append(token_id)
            self.texts.append(encodable(text))
        return entry


class Vocabulary:
    """The pairs by number, for reading."""

    def __init__(self) -> None:
        self.ids: Column = np.zeros(0, np.int64)
        self.texts: list[str] = []
        self._text_array: npt.NDArray[np.object_] | None = None

    def extend(self, start: int, ids: Column, texts: list[str]) -> None:
        """Take in new entries.

        Raises:
            ValueError: they do not continue it, or are too many.
        """
        if start != len(self.texts) or len(ids) != len(texts) or start + len(texts) > MAX_VOCABULARY:
            raise ValueError(f"{len(texts)} vocabulary entries from {start} on do not continue {len(self.texts)}")
        self.ids = np.concatenate((self.ids, ids))
        self.texts.extend(texts)
        self._text_array = None

    def look_up(self, entries: Column) -> tuple[list[int], list[str]]:
        """Token ids and texts of entries.

        Raises:
            ValueError: one of them is not in it.
        """
        if len(entries) and not (entries.min() >= 0 and entries.max() < len(self.texts)):
            raise ValueError(f"an entry is not in the vocabulary of {len(self.texts)}")
        if self._text_array is None:
            self._text_array = np.array(self.texts, np.object_)
        return self.ids[entries].tolist(), self._text_array[entries].tolist()


def encode(first_step: int, messages: Sequence[RequestArrived | StepTrace], vocabulary: VocabularyWriter) -> Segment:
    """Arrivals and steps, in order, as a segment; new pairs go into the vocabulary.

    Raises:
        OverflowError: a number that does not fit 64 bits.
    """
    vocabulary_start = len(vocabulary.ids)
    entry = vocabulary.entry
    arrivals: list[Arrival] = []
    steps: list[StepTrace] = []
    for message in messages:
        if isinstance(message, StepTrace):
            steps.append(message)
            continue
        pieces = message.prompt_pieces
        prompt = [
            entry(token_id, pieces[at] if at < len(pieces) else "")
            for at, token_id in enumerate(message.prompt_token_ids)
        ]
        arrivals.append(
            Arrival(
                offset=len(steps),
                request=message.request,
                name=encodable(message.name),
                time_ns=message.time_ns,
                max_tokens=message.max_tokens,
                temperature=message.temperature,
                parent=message.parent,
                num_tokens=len(prompt),
                prompt=pack(column(prompt)),
            )
        )
    op_columns, op_rows = _encode_ops(steps)
    num_tokens = column(len(step.tokens) for step in steps)
    return Segment(
        first_step=first_step,
        num_steps=len(steps),
        times=_encode_times(steps),
        counters=[
            pack(differences(values)) for values in _table(chain.from_iterable(step.counters for step in steps), 10)
        ],
        batch=_encode_batch(steps),
        ops=op_columns,
        op_rows=op_rows,
        tokens=[
            pack(num_tokens),
            pack(column(token.request for step in steps for token in step.tokens)),
            pack(column(entry(token_id, text) for step in steps for _, token_id, text in step.tokens)),
        ],
        finished=[
            (at, Finish(number, encodable(reason), encodable(why)))
            for at, step in enumerate(steps)
            for number, reason, why in step.finished
        ],
        decisions=[(at, decision) for at, step in enumerate(steps) for decision in step.decisions],
        arrivals=arrivals,
        vocabulary_start=vocabulary_start,
        vocabulary_ids=pack(column(vocabulary.ids[vocabulary_start:])),
        vocabulary_texts=vocabulary.texts[vocabulary_start:],
    )


def _table(values: Iterator[int], width: int) -> list[Column]:
    """Rows of `width` numbers, one after the other, as columns."""
    return list(np.ascontiguousarray(column(values).reshape(-1, width).T))


def _encode_times(steps: list[StepTrace]) -> list[bytes]:
    rows = ((s.start_ns, s.schedule_ns, s.execute_ns, s.sample_ns, s.update_ns) for s in steps)
    start, *durations = _table(chain.from_iterable(rows), 5)
    length = np.sum(durations, axis=0)
    return [pack(surprise(np.zeros_like(start), start, length)), *map(pack, durations)]


def _encode_batch(steps: list[StepTrace]) -> list[bytes]:
    rows = chain.from_iterable(chain.from_iterable(step.batch for step in steps))
    request, phase, before, scheduled = _table(rows, 4)
    sizes = column(len(step.batch) for step in steps)
    return [pack(sizes), pack(request), pack(phase), pack(surprise(request, before, scheduled)), pack(scheduled)]


def _encode_ops(steps: list[StepTrace]) -> tuple[list[bytes], dict[int, list[bytes]]]:
    rows = chain.from_iterable(chain.from_iterable(step.ops for step in steps))
    kind, *abc = _table(rows, 4)
    filling, run = _runs(kind, abc[1])
    is_fill = kind == _FILL
    blocks = abc[0].copy()
    blocks[filling] = np.where(is_fill[filling], surprise(run, abc[0][filling], np.zeros_like(run)), abc[0][filling])
    for op, before in _FOLLOWS:
        follows = _following(kind, op, before)
        blocks[follows] -= abc[0][follows - 1]
    counts = abc[2].copy()
    counts[is_fill] = surprise(abc[0][is_fill], counts[is_fill] - 1, np.ones_like(counts[is_fill]))
    by_kind: dict[int, list[bytes]] = {}
    for op in np.unique(kind).tolist():
        of_kind = kind == op
        by_kind[op] = [pack(values[of_kind]) for values in (blocks, abc[1], counts)]
    return [pack(column(len(step.ops) for step in steps)), pack(kind)], by_kind


def _runs(kind: Column, request: Column) -> tuple[npt.NDArray[np.intp], Column]:
    """Where a request fills the same blocks on: rows that allocate or fill, and the run that each belongs to.

    A run starts with a request's first such row in the segment and again with each block that is allocated to it.
    """
    rows = np.flatnonzero((kind == _FILL) | (kind == _ALLOCATE))
    owner = request[rows]
    order = np.argsort(owner, kind="stable")
    starts = kind[rows][order] == _ALLOCATE
    starts[1:] |= np.diff(owner[order]) != 0
    run = np.empty_like(owner)
    run[order] = np.cumsum(starts)
    return rows, run


def _following(kind: Column, op: int, before: int) -> npt.NDArray[np.intp]:
    """The rows of one kind that come right after one of another."""
    return np.flatnonzero((kind[1:] == op) & (kind[:-1] == before)) + 1


class SegmentReader:
    """A segment's columns, checked and ready to be cut into steps.

    Raises:
        ValueError: the segment contradicts itself.
    """

    def __init__(self, segment: Segment) -> None:
        n = segment.num_steps
        if not (0 <= n <= MAX_STEPS and 0 <= segment.first_step <= 2**31 - 1 - n):
            raise ValueError(f"a segment of {n} steps from step {segment.first_step} on is not possible")
        self.segment = segment
        self.first_step = segment.first_step
        self.num_steps = n
        self.arrivals = segment.arrivals
        if not all(0 <= arrival.offset <= n for arrival in segment.arrivals):
            raise ValueError("a request arrived outside its segment")
        self._token_starts = _starts(segment.tokens, 3, n)
        num_tokens = int(self._token_starts[-1])
        self._token_request = unpack(segment.tokens[1], num_tokens)
        self._token_entry = unpack(segment.tokens[2], num_tokens)
        self._steps_ready = False

    def token_columns(self, stop: int) -> tuple[Column, Column, Column]:
        """Index of the step, request and vocabulary entry of the new tokens before step `stop`."""
        n = max(0, min(stop - self.first_step, self.num_steps))
        last = int(self._token_starts[n])
        offsets = np.repeat(np.arange(n), np.diff(self._token_starts[: n + 1]))
        return self.first_step + offsets, self._token_request[:last], self._token_entry[:last]

    def add_vocabulary(self, vocabulary: Vocabulary) -> None:
        """Put the segment's new entries into the vocabulary.

        Raises:
            ValueError: they do not continue it.
        """
        segment = self.segment
        ids = unpack(segment.vocabulary_ids, len(segment.vocabulary_texts))
        vocabulary.extend(segment.vocabulary_start, ids, segment.vocabulary_texts)

    def prompt(self, arrival: Arrival) -> Column:
        """The vocabulary entries of an arrival's prompt."""
        if not 0 <= arrival.num_tokens <= MAX_ROWS:
            raise ValueError(f"a prompt of {arrival.num_tokens} tokens is not possible")
        return unpack(arrival.prompt, arrival.num_tokens)

    def arrived(self, arrival: Arrival, vocabulary: Vocabulary) -> RequestArrived:
        """The arrival as the message that it was."""
        ids, pieces = vocabulary.look_up(self.prompt(arrival))
        return RequestArrived(
            request=arrival.request,
            name=arrival.name,
            time_ns=arrival.time_ns,
            prompt_token_ids=ids,
            prompt_pieces=pieces,
            max_tokens=arrival.max_tokens,
            temperature=arrival.temperature,
            parent=arrival.parent,
        )

    def _prepare(self) -> None:
        if self._steps_ready:
            return
        segment, n = self.segment, self.num_steps
        if len(segment.times) != 5 or len(segment.counters) != _NUM_COUNTERS:
            raise ValueError("a segment lacks columns")
        start, *durations = (unpack(data, n) for data in segment.times)
        start = undo_surprise(np.zeros_like(start), start, np.sum(durations, axis=0))
        self._times = np.stack((start, *durations), axis=1)
        self._counters = [sums(unpack(data, n)) for data in segment.counters]

        self._batch_starts = _starts(segment.batch, 5, n)
        request, phase, before, scheduled = (unpack(data, int(self._batch_starts[-1])) for data in segment.batch[1:])
        before = undo_surprise(request, before, scheduled)
        self._batch = [request, phase, before, scheduled]

        self._op_starts = _starts(segment.ops, 2, n)
        kind = unpack(segment.ops[1], int(self._op_starts[-1]))
        self._ops = [kind, np.zeros_like(kind), np.zeros_like(kind), np.zeros_like(kind)]
        for op in np.unique(kind).tolist():
            of_kind = np.flatnonzero(kind == op)
            columns = segment.op_rows.get(op, [])
            if len(columns) != 3:
                raise ValueError(f"a segment lacks the columns of operation {op}")
            a, b, c = (unpack(data, len(of_kind)) for data in columns)
            for values, part in zip(self._ops[1:], (a, b, c), strict=True):
                values[of_kind] = part
        _, blocks, requests, counts = self._ops
        for op, preceding in _FOLLOWS:
            if op == _HASH:
                filling, run = _runs(kind, requests)
                blocks[filling] = undo_surprise(run, blocks[filling], np.zeros_like(run))
            follows = _following(kind, op, preceding)
            blocks[follows] += blocks[follows - 1]
        fills = np.flatnonzero(kind == _FILL)
        counts[fills] = undo_surprise(blocks[fills], counts[fills], np.ones(len(fills), np.int64)) + 1
        self._finished: dict[int, list[Finish]] = {}
        for at, finish in segment.finished:
            self._finished.setdefault(at, []).append(finish)
        self._decisions: dict[int, list[Decision]] = {}
        for at, decision in segment.decisions:
            self._decisions.setdefault(at, []).append(decision)
        self._steps_ready = True

    def steps(self, start: int, stop: int, vocabulary: Vocabulary) -> list[StepTrace]:
        """The steps from index `start` to `stop` - 1, as far as they are in this segment.

        Raises:
            ValueError: the segment contradicts itself or the vocabulary.
        """
        self._prepare()
        low = max(start - self.first_step, 0)
        high = max(min(stop - self.first_step, self.num_steps), low)
        batch = _rows(BatchMember, self._batch, self._batch_starts, low, high)
        ops = _rows(BlockOp, self._ops, self._op_starts, low, high)
        first, last = int(self._token_starts[low]), int(self._token_starts[high])
        ids, texts = vocabulary.look_up(self._token_entry[first:last])
        tokens = _named(NewToken, self._token_request[first:last].tolist(), ids, texts)
        token_at = (self._token_starts[low : high + 1] - first).tolist()
        counters = _named(Counters, *(values[low:high].tolist() for values in self._counters))
        steps: list[StepTrace] = []
        for at, (start_ns, schedule_ns, execute_ns, sample_ns, update_ns) in enumerate(self._times[low:high].tolist()):
            steps.append(
                StepTrace(
                    self.first_step + low + at,
                    start_ns,
                    schedule_ns,
                    execute_ns,
                    sample_ns,
                    update_ns,
                    batch[at],
                    ops[at],
                    tokens[token_at[at] : token_at[at + 1]],
                    self._finished.get(low + at, []),
                    self._decisions.get(low + at, []),
                    counters[at],
                )
            )
        return steps


def _starts(columns: list[bytes], num_columns: int, num_steps: int) -> Column:
    """Where each step's rows start, and after them where the last ends, from the column of counts."""
    if len(columns) != num_columns:
        raise ValueError("a segment lacks columns")
    counts = unpack(columns[0], num_steps)
    if num_steps and (counts.min() < 0 or counts.max() > MAX_ROWS or counts.sum() > MAX_ROWS):
        raise ValueError("a segment has too many rows")
    return np.concatenate(([0], np.cumsum(counts)))


def _rows(make: type[_Row], table: list[Column], starts: Column, low: int, high: int) -> list[list[_Row]]:
    first, last = int(starts[low]), int(starts[high])
    rows = _named(make, *(values[first:last].tolist() for values in table))
    at = (starts[low : high + 1] - first).tolist()
    return [rows[at[i] : at[i + 1]] for i in range(high - low)]


def _named(make: type[_Row], *columns: list[Any]) -> list[_Row]:
    """Named tuples of columns. `_make` would do the same in Python code, at three times the cost."""
    return list(map(tuple.__new__, repeat(make), zip(*columns, strict=True)))
