"""Long runs of one operation, done at once: a prompt of ten thousand tokens takes hundreds of blocks in one step.

The arrays change as if each operation had been applied by itself, in a fraction of the time: numpy reaches many places
of a large pool together. A run in which anything contradicts the state is left to the ordinary way, which says what.
"""

from __future__ import annotations

import struct
from itertools import chain, pairwise
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from engine.trace.events import NO_BLOCK, NO_REQUEST, Op

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from engine.trace.block_fold import BlockFold
    from engine.trace.events import BlockOp

LEAST = 64
"""Operations of one kind in a row that are worth it."""

_INT32_MAX = 2**31 - 1
Columns = npt.NDArray[np.int64]
"""int64[4, operations]: the operations of a step, or of a run in it."""
Column = npt.NDArray[np.int64]


def columns_of(ops: Sequence[BlockOp]) -> Columns | None:
    """Operations as columns: which it is, a, b and c; None where a number does not fit 64 bits."""
    try:
        rows = struct.pack(f"{4 * len(ops)}q", *chain.from_iterable(ops))  # Quicker than `np.fromiter`.
    except struct.error:
        return None
    return np.ascontiguousarray(np.frombuffer(rows, np.int64).reshape(-1, 4).T)


def apply_in_bulk(fold: BlockFold, ops: Sequence[BlockOp], columns: Columns) -> None:
    """Apply the operations of a step, in order; `columns` are the same as columns."""
    kinds = columns[0]
    starts = np.concatenate(([0], np.flatnonzero(kinds[1:] != kinds[:-1]) + 1, [len(ops)]))
    lengths = starts[1:] - starts[:-1]
    done = 0
    for at in np.flatnonzero(lengths >= LEAST).tolist():
        start, stop = int(starts[at]), int(starts[at + 1])
        apply = _BULK.get(int(kinds[start]))
        if apply is None:
            continue
        if done < start:
            fold.apply_each(ops[done:start])
        run = columns[:, start:stop]
        blocks = run[1]
        if blocks.min() >= 0 and blocks.max() < fold.header.num_blocks and apply(fold, run):
            fold.last_op[blocks] = kinds[start]
            fold.touched[blocks] = fold.step
        else:
            fold.apply_each(ops[start:stop])
        done = stop
    if done < len(ops):
        fold.apply_each(ops[done:])


def _distinct(blocks: Column) -> bool:
    ranked = np.sort(blocks)
    return bool((ranked[1:] != ranked[:-1]).all())


def _numbers(values: Column, missing: int) -> npt.NDArray[np.int32]:
    """Values as the arrays hold them; `missing` where they cannot."""
    if values.min() < 0 or values.max() > _INT32_MAX:
        values = np.where((values >= 0) & (values <= _INT32_MAX), values, missing)
    return values.astype(np.int32)


def _by_request(requests: Column) -> Iterator[tuple[int, int, int]]:
    """Stretches of one request: its number, where the stretch begins, and where it ends."""
    changes = np.flatnonzero(requests[1:] != requests[:-1]) + 1
    for start, stop in pairwise((0, *changes.tolist(), len(requests))):
        yield int(requests[start]), start, stop


def _allocate(fold: BlockFold, run: Columns) -> bool:
    _, blocks, requests, places = run
    if fold.refs[blocks].any() or fold.key[blocks].any() or not _distinct(blocks):
        return False
    fold.refs[blocks] = 1
    fold.filled[blocks] = 0
    fold.owner[blocks] = _numbers(requests, NO_REQUEST)
    fold.logical[blocks] = _numbers(places, -1)
    fold.free -= len(blocks)
    fold.used += len(blocks)
    numbers = blocks.tolist()
    for request, start, stop in _by_request(requests):
        known = fold.requests.get(request)
        if known is not None:
            end = len(known.table)
            if (places[start:stop] == np.arange(end, end + stop - start)).all():
                known.table.extend(numbers[start:stop])
                continue
        for block, place in zip(numbers[start:stop], places[start:stop].tolist(), strict=True):
            fold.place(block, request, place)
    return True


def _release(fold: BlockFold, run: Columns) -> bool:
    _, blocks, requests, _ = run
    if (fold.refs[blocks] != 1).any() or fold.displaces or not _distinct(blocks):
        return False
    # The block's place in its owner's table is still needed for those that are not the last one there.
    numbers = blocks.tolist()
    for request, start, stop in _by_request(requests):
        known = fold.requests.get(request)
        if known is not None and known.table[start - stop :] == numbers[start:stop][::-1]:
            table = known.table
            del table[start - stop :]
            while table and table[-1] == NO_BLOCK:
                table.pop()
            continue
        for block in numbers[start:stop]:
            fold.unplace(block, request)
    fold.refs[blocks] = 0
    fold.held_slots -= int(fold.filled[blocks].sum(dtype=np.int64))
    fold.owner[blocks] = NO_REQUEST
    fold.last_owner[blocks] = _numbers(requests, NO_REQUEST)
    fold.queue_up(blocks)
    empty = blocks[fold.key[blocks] == 0]
    fold.filled[empty] = 0
    fold.logical[empty] = -1
    fold.used -= len(blocks)
    fold.cached += len(blocks) - len(empty)
    fold.free += len(empty)
    return True


def _fill(fold: BlockFold, run: Columns) -> bool:
    _, blocks, _, slots = run
    if (fold.refs[blocks] <= 0).any() or slots.min() < 0 or slots.max() > fold.header.block_size:
        return False
    if not _distinct(blocks):
        return False
    fold.held_slots += int(slots.sum()) - int(fold.filled[blocks].sum(dtype=np.int64))
    fold.filled[blocks] = slots
    return True


_BULK: dict[int, Callable[[BlockFold, Columns], bool]] = {
    int(Op.ALLOCATE): _allocate,
    int(Op.RELEASE): _release,
    int(Op.FILL): _fill,
}
"""What each kind of run does; False where something in it contradicts the state, which then is as it was."""
