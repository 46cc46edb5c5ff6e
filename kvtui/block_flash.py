"""Which blocks the last steps changed, lit up for a moment."""

from __future__ import annotations

from collections import deque
from itertools import chain
from operator import itemgetter
from typing import TYPE_CHECKING

import numpy as np

from engine.trace.events import Op
from kvtui import block_codes as bc

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from engine.trace.events import BlockOp, StepTrace
    from engine.trace.state import PoolState

FLASH_SECONDS = 0.45
"""How long a change stays lit while the session runs; while it is paused, it stays lit."""

_STEPS_WORTH_A_FLASH = 32

_FEW_OPS = 48
_MOST = 2**63
"""Operations with numbers that need more bits are of no trace."""
_DROP = int(Op.DROP)

_NUM_OPS = int(max(Op)) + 1
_FLASH_OF_OP: NDArray[np.int64] = np.zeros(_NUM_OPS, dtype=np.int64)
_FLASH_OF_OP[[Op.ALLOCATE, Op.SHARE, Op.RELEASE, Op.COPY]] = bc.FLASH_CHANGED
_FLASH_OF_OP[Op.EVICT] = bc.FLASH_EVICTED
_FLASH_OF_OP[[Op.SWAP_OUT, Op.SWAP_IN]] = bc.FLASH_SWAPPED
_KIND_OF_OP: list[int] = _FLASH_OF_OP.tolist()
_SECOND_BLOCK = (int(Op.COPY), int(Op.SWAP_IN))
"""Operations whose block of the pool is `b`; `DROP` has none."""
_NONE: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
_NO_KINDS: NDArray[np.uint8] = np.zeros(0, dtype=np.uint8)
_KIND_BITS = 2
_MOST_GROUPS = 1 << 16
"""Far more than there are frames in which a change stays lit."""


def changes_of(steps: Sequence[StepTrace], state: PoolState) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """The blocks that some steps touched, each once and in order, and the flash that each deserves (0: none).

    Args:
        steps: Which; the state has taken them in.
        state: Whose pool it is.
    """
    if len(steps) <= _STEPS_WORTH_A_FLASH and sum(len(step.ops) for step in steps) <= _FEW_OPS:
        return _changes_of_few(steps, state.header.num_blocks)
    early, late = steps[:-_STEPS_WORTH_A_FLASH], steps[-_STEPS_WORTH_A_FLASH:]
    packed = _touched_by(late, state)
    if early:
        packed = np.concatenate((packed, _touched_by(early, state) >> _KIND_BITS << _KIND_BITS))
    if not len(packed):
        return _NONE, _NO_KINDS
    packed.sort()
    blocks, kinds = packed >> _KIND_BITS, packed.astype(np.uint8) & np.uint8((1 << _KIND_BITS) - 1)
    # Of several on one block, the last has the largest kind.
    last = blocks[1:] != blocks[:-1]
    if last.all():
        return blocks, kinds
    last = np.append(last, True)
    return blocks[last], kinds[last]


def _changes_of_few(steps: Sequence[StepTrace], num_blocks: int) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """The same of few operations, where a dozen calls of numpy take longer than to look at each."""
    kinds: dict[int, int] = {}
    for step in steps:
        for op, a, b, c in step.ops:
            block = b if op in _SECOND_BLOCK else a
            if 0 <= op < _DROP and 0 <= block < num_blocks and min(a, b, c) >= -_MOST and max(a, b, c) < _MOST:
                kind = _KIND_OF_OP[op]
                if kind > kinds.get(block, -1):
                    kinds[block] = kind
    blocks = sorted(kinds)
    return np.array(blocks, dtype=np.int64), np.array([kinds[block] for block in blocks], dtype=np.uint8)


def _touched_by(steps: Sequence[StepTrace], state: PoolState) -> NDArray[np.int64]:
    """`block << 2 | kind of flash` for each operation of some steps; what no block can be is left out."""
    lists = [step.ops for step in steps if step.ops]
    if not lists:
        return _NONE
    ops = lists[0] if len(lists) == 1 else list(chain.from_iterable(lists))
    columns = state.columns_of(ops)
    try:
        op, block = _blocks_of(ops) if columns is None else _blocks_in(*columns[:3])
    except OverflowError:
        op, block = _blocks_of([op for op in ops if all(-(2**63) <= value < 2**63 for value in op)])
    kinds = _FLASH_OF_OP.take(op, mode="clip")
    # A look at the ends is all that honest operations need.
    if len(op) and (op.min() < 0 or op.max() >= Op.DROP or block.min() < 0 or block.max() >= state.header.num_blocks):
        known = (op >= 0) & (op < _NUM_OPS) & (op != Op.DROP) & (block >= 0) & (block < state.header.num_blocks)
        kinds, block = kinds[known], block[known]
    return (block << _KIND_BITS) | kinds


def _blocks_of(ops: Sequence[BlockOp]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Of each operation, which it is and its block."""
    return _blocks_in(*(np.fromiter(map(itemgetter(column), ops), np.int64, len(ops)) for column in range(3)))


def _blocks_in(
    op: NDArray[np.int64], a: NDArray[np.int64], b: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The same, of operations in columns."""
    if len(op) and op.max() < min(_SECOND_BLOCK):
        return op, a
    return op, np.where((op == _SECOND_BLOCK[0]) | (op == _SECOND_BLOCK[1]), b, a)


class Flash:
    """What is lit up, by block.

    Attributes:
        kinds: uint8[num_blocks]: 0, or the FLASH_ kind.
    """

    def __init__(self, num_blocks: int) -> None:
        self.kinds: NDArray[np.uint8] = np.zeros(num_blocks, dtype=np.uint8)
        self._lit_by: NDArray[np.uint16] = np.zeros(num_blocks, dtype=np.uint16)
        """The group that a block was lit up with last."""
        self._groups: deque[tuple[float, int, NDArray[np.int64]]] = deque()
        """Those that are lit: until when, the number, the blocks."""
        self._number = 0

    def __bool__(self) -> bool:
        return bool(self._groups)

    def light_up(self, blocks: NDArray[np.int64], kinds: NDArray[np.uint8], now: float) -> NDArray[np.int64]:
        """Light blocks up, those whose kind is not 0; returns which."""
        shown = kinds > 0
        if not shown.all():
            blocks, kinds = blocks[shown], kinds[shown]
        if not len(blocks):
            return _NONE
        self.kinds[blocks] = kinds
        self._number = (self._number + 1) % _MOST_GROUPS
        self._lit_by[blocks] = self._number
        self._groups.append((now + FLASH_SECONDS, self._number, blocks))
        return blocks

    def put_out(self, now: float) -> NDArray[np.int64]:
        """Put out what has been lit long enough; returns which blocks, each once."""
        out = []
        while self._groups and self._groups[0][0] <= now:
            _, number, blocks = self._groups.popleft()
            over = blocks[self._lit_by[blocks] == number]
            self.kinds[over] = 0
            out.append(over)
        return np.concatenate(out) if out else _NONE
