"""Long runs of one operation, done at once: a prompt of ten thousand tokens takes hundreds of blocks in one step.

The arrays change as if each operation had been applied by itself, in a fraction of the time: numpy reaches many places
of a large pool together. A run in which anything contradicts the state is left to the ordinary way, which says what.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from engine.trace.events import NO_BLOCK, NO_REQUEST, Op

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from engine.trace.block_fold import BlockFold
    from engine.trace.events import BlockOp

LEAST = 64
"""Operations of one kind in a row that are worth it."""

_INT32_MAX = 2**31 - 1
Columns = npt.NDArray[np.int64]
"""int64[operations, 4]: the operations of a run."""


def apply_in_bulk(fold: BlockFold, ops: Sequence[BlockOp]) -> None:
    """Apply the operations of a step, in order."""
    try:
        columns = np.fromiter(chain.from_iterable(ops), np.int64, 4 * len(ops)).reshape(-1, 4)
    except OverflowError:
        fold.apply_each(ops)
        return
    kinds = columns[:, 0]
    starts = np.concatenate(([0], np.flatnonzero(kinds[1:] != kinds[:-1]) + 1))
    lengths = np.diff(starts, append=len(ops))
    done = 0
    for at in np.flatnonzero(lengths >= LEAST).tolist():
        start = int(starts[at])
        stop = start + int(lengths[at])
        apply = _BULK.get(int(kinds[start]))
        if apply is None:
            continue
        if done < start:
            fold.apply_each(ops[done:start])
        run = columns[start:stop]
        blocks = run[:, 1]
        if bool(((blocks >= 0) & (blocks < fold.header.num_blocks)).all()) and apply(fold, run):
            fold.last_op[blocks] = kinds[start]
            fold.touched[blocks] = fold.step
        else:
            fold.apply_each(ops[start:stop])
        done = stop
    if done < len(ops):
        fold.apply_each(ops[done:])


def _distinct(blocks: Columns) -> bool:
    ranked = np.sort(blocks)
    return bool((ranked[1:] != ranked[:-1]).all())


def _numbers(values: Columns, missing: int) -> npt.NDArray[np.int32]:
    """Values as the arrays hold them; `missing` where they cannot."""
    return np.where((values >= 0) & (values <= _INT32_MAX), values, missing).astype(np.int32)


def _allocate(fold: BlockFold, run: Columns) -> bool:
    blocks, requests, places = run[:, 1], run[:, 2], run[:, 3]
    if fold.refs[blocks].any() or fold.key[blocks].any() or not _distinct(blocks):
        return False
    fold.refs[blocks] = 1
    fold.filled[blocks] = 0
    fold.owner[blocks] = _numbers(requests, NO_REQUEST)
    fold.logical[blocks] = _numbers(places, -1)
    fold.free -= len(blocks)
    fold.used += len(blocks)
    number, table = NO_REQUEST, None
    for block, request, place in zip(blocks.tolist(), requests.tolist(), places.tolist(), strict=True):
        if request != number:
            known = fold.requests.get(request)
            number, table = request, None if known is None else known.table
        if table is not None and place == len(table):
            table.append(block)
        else:
            fold.place(block, request, place)
    return True


def _release(fold: BlockFold, run: Columns) -> bool:
    blocks, requests = run[:, 1], run[:, 2]
    if (fold.refs[blocks] != 1).any() or fold.displaces or not _distinct(blocks):
        return False
    number, table = NO_REQUEST, None
    # The block's place in its owner's table is still needed for those that are not the last one there.
    for block, request in zip(blocks.tolist(), requests.tolist(), strict=True):
        if request != number:
            known = fold.requests.get(request)
            number, table = request, None if known is None else known.table
        if table and table[-1] == block:
            table.pop()
            while table and table[-1] == NO_BLOCK:
                table.pop()
        else:
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
    blocks, slots = run[:, 1], run[:, 3]
    if (fold.refs[blocks] <= 0).any() or (slots < 0).any() or (slots > fold.header.block_size).any():
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
