"""A segment's columns, checked and cut into steps again."""

from __future__ import annotations

from itertools import chain, repeat
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from engine.trace.columns import Column, sums, undo_surprise, unpack
from engine.trace.events import (
    BatchMember,
    BlockOp,
    Counters,
    Decision,
    DecisionKind,
    Finish,
    NewToken,
    Op,
    RequestArrived,
    StepTrace,
)
from engine.trace.segment import FOLLOWS, MAX_PROMPT, MAX_ROWS, MAX_STEPS, Arrival, Segment, following, runs
from engine.trace.step_columns import StepColumns

if TYPE_CHECKING:
    from engine.trace.vocabulary import Vocabulary

_Row = TypeVar("_Row", BatchMember, BlockOp, NewToken, Counters)

_COPY, _SWAP_IN, _DROP = int(Op.COPY), int(Op.SWAP_IN), int(Op.DROP)
_FILL, _HASH, _EVICT = int(Op.FILL), int(Op.HASH), int(Op.EVICT)
_PREEMPTED = int(DecisionKind.PREEMPTED)
_NUM_COUNTERS = len(Counters._fields)


class SegmentReader:
    """A segment's columns, checked and ready to be cut into steps.

    Attributes:
        first_step: Index of its first step.
        num_steps: How many it has.
        arrivals: Requests that came, in order.
        num_rows: Rows of its batches, operations and tokens; of its tokens alone before steps were read.
        num_bytes: Of its columns, about.

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
        self._levels_ready = self._steps_ready = False
        self.num_rows = num_tokens
        packed = chain(
            *(segment.times, segment.counters, segment.batch, segment.ops, segment.tokens),
            *segment.op_rows.values(),
            (arrival.prompt for arrival in segment.arrivals),
        )
        self.num_bytes = sum(map(len, packed)) + 16 * num_tokens

    def token_columns(self, stop: int) -> tuple[Column, Column, Column]:
        """Index of the step, request and vocabulary entry of the new tokens before step `stop`."""
        n = max(0, min(stop - self.first_step, self.num_steps))
        last = int(self._token_starts[n])
        offsets = np.repeat(np.arange(n), np.diff(self._token_starts[: n + 1]))
        return self.first_step + offsets, self._token_request[:last], self._token_entry[:last]

    def add_vocabulary(self, vocabulary: Vocabulary, *, gap: bool = False) -> None:
        """Put the segment's new entries into the vocabulary; where `gap`, after unknown ones for those missing.

        Raises:
            ValueError: they do not continue it.
        """
        segment = self.segment
        if gap:
            vocabulary.skip_to(segment.vocabulary_start)
        ids = unpack(segment.vocabulary_ids, len(segment.vocabulary_texts))
        vocabulary.extend(segment.vocabulary_start, ids, segment.vocabulary_texts)

    def prompt(self, arrival: Arrival) -> Column:
        """The vocabulary entries of an arrival's prompt."""
        if not 0 <= arrival.num_tokens <= MAX_PROMPT:
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

    def columns(self, start: int, stop: int) -> StepColumns:
        """The levels, batches and ends of the steps from index `start` to `stop` - 1, as far as they are in here.

        Raises:
            ValueError: the segment contradicts itself.
        """
        self._prepare_levels()
        segment = self.segment
        low = max(start - self.first_step, 0)
        high = max(min(stop - self.first_step, self.num_steps), low)
        first, last = int(self._batch_starts[low]), int(self._batch_starts[high])
        request, phase, _, scheduled = (values[first:last] for values in self._batch)
        evicted = np.concatenate(([0], np.cumsum(unpack(segment.ops[1], int(self._op_starts[-1])) == _EVICT)))
        return StepColumns(
            first=self.first_step + low,
            times=self._times[low:high],
            counters=np.stack([values[low:high] for values in self._counters], axis=1),
            batch_sizes=np.diff(self._batch_starts[low : high + 1]),
            batch=np.stack((request, phase, scheduled), axis=1),
            num_tokens=np.diff(self._token_starts[low : high + 1]),
            num_evictions=np.diff(evicted[self._op_starts[low : high + 1]]),
            preempted=[
                (self.first_step + at, decision.request)
                for at, decision in segment.decisions
                if low <= at < high and decision.kind == _PREEMPTED
            ],
            finished=[(self.first_step + at, finish) for at, finish in segment.finished if low <= at < high],
        )

    def _prepare_levels(self) -> None:
        if self._levels_ready:
            return
        segment, n = self.segment, self.num_steps
        self._batch_starts = _starts(segment.batch, 5, n)
        self._op_starts = _starts(segment.ops, 2, n)
        self.num_rows = len(self._token_entry) + int(self._batch_starts[-1]) + int(self._op_starts[-1])
        if len(segment.times) != 5 or len(segment.counters) != _NUM_COUNTERS:
            raise ValueError("a segment lacks columns")
        start, *durations = (unpack(data, n) for data in segment.times)
        start = undo_surprise(np.zeros_like(start), start, np.sum(durations, axis=0))
        self._times = np.stack((start, *durations), axis=1)
        self._counters = [sums(unpack(data, n)) for data in segment.counters]

        request, phase, before, scheduled = (unpack(data, int(self._batch_starts[-1])) for data in segment.batch[1:])
        before = undo_surprise(request, before, scheduled)
        self._batch = [request, phase, before, scheduled]
        self._levels_ready = True

    def _prepare(self) -> None:
        self._prepare_levels()
        if self._steps_ready:
            return
        segment = self.segment
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
        for op, preceding in FOLLOWS:
            if op == _HASH:
                filling, run = runs(kind, requests)
                blocks[filling] = undo_surprise(run, blocks[filling], np.zeros_like(run))
            follows = following(kind, op, preceding)
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

    def block_ops(self, block: int, start: int, stop: int) -> list[tuple[int, BlockOp]]:
        """The operations on a block in the steps `start` to `stop` - 1, as far as they are in this segment, in order.

        Raises:
            ValueError: the segment contradicts itself.
        """
        self._prepare()
        low = max(start - self.first_step, 0)
        high = max(min(stop - self.first_step, self.num_steps), low)
        first, last = int(self._op_starts[low]), int(self._op_starts[high])
        kind, a, b, c = (values[first:last] for values in self._ops)
        second = (kind == _COPY) | (kind == _SWAP_IN)
        about = ((a == block) & (kind != _DROP) & (kind != _SWAP_IN)) | ((b == block) & second)
        at = np.flatnonzero(about)
        steps = self.first_step + np.searchsorted(self._op_starts, first + at, side="right") - 1
        rows = zip(*(values[at].tolist() for values in (kind, a, b, c)), strict=True)
        return list(zip(steps.tolist(), (BlockOp(*row) for row in rows), strict=True))

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
