"""Some hundred steps of a trace as columns: the form in which a recording keeps them.

In memory a step is a `StepTrace`; written row by row it would cost four times the bytes. Here the numbers of one kind
stand side by side (`engine.trace.columns`), predictable ones as the difference from the prediction, and a token is
its number in the recording's vocabulary of (token id, text) pairs. `docs/trace.md` describes every column.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt

from engine.trace.columns import Column, column, differences, pack, surprise
from engine.trace.events import (
    Decision,
    Finish,
    Op,
    RequestArrived,
    StepTrace,
)
from engine.trace.vocabulary import encodable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from engine.trace.vocabulary import VocabularyWriter

MAX_STEPS = 4096
"""Steps in a segment at most."""
MAX_ROWS = 1 << 20
"""Rows of one table (batch, operations, tokens) in a segment at most."""
MAX_PROMPT = 1 << 23
"""Tokens of one prompt at most."""

_ALLOCATE, _FILL, _HASH, _EVICT = int(Op.ALLOCATE), int(Op.FILL), int(Op.HASH), int(Op.EVICT)
FOLLOWS = ((_ALLOCATE, _EVICT), (_HASH, _FILL))
"""Operations that often concern the block of the operation right before them, in the order in which that is undone."""


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
    filling, run = runs(kind, abc[1])
    is_fill = kind == _FILL
    blocks = abc[0].copy()
    blocks[filling] = np.where(is_fill[filling], surprise(run, abc[0][filling], np.zeros_like(run)), abc[0][filling])
    for op, before in FOLLOWS:
        follows = following(kind, op, before)
        blocks[follows] -= abc[0][follows - 1]
    counts = abc[2].copy()
    counts[is_fill] = surprise(abc[0][is_fill], counts[is_fill] - 1, np.ones_like(counts[is_fill]))
    by_kind: dict[int, list[bytes]] = {}
    for op in np.unique(kind).tolist():
        of_kind = kind == op
        by_kind[op] = [pack(values[of_kind]) for values in (blocks, abc[1], counts)]
    return [pack(column(len(step.ops) for step in steps)), pack(kind)], by_kind


def runs(kind: Column, request: Column) -> tuple[npt.NDArray[np.intp], Column]:
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


def following(kind: Column, op: int, before: int) -> npt.NDArray[np.intp]:
    """The rows of one kind that come right after one of another."""
    return np.flatnonzero((kind[1:] == op) & (kind[:-1] == before)) + 1
