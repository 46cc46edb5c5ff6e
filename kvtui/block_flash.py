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

FLASH_SECONDS = 0.45
"""How long a change stays lit while the session runs; while it is paused, it stays lit."""

_STEPS_WORTH_A_FLASH = 32

_NUM_OPS = int(max(Op)) + 1
_FLASH_OF_OP: NDArray[np.uint8] = np.zeros(_NUM_OPS, dtype=np.uint8)
_FLASH_OF_OP[[Op.ALLOCATE, Op.SHARE, Op.RELEASE, Op.COPY]] = bc.FLASH_CHANGED
_FLASH_OF_OP[Op.EVICT] = bc.FLASH_EVICTED
_FLASH_OF_OP[[Op.SWAP_OUT, Op.SWAP_IN]] = bc.FLASH_SWAPPED
_SECOND_BLOCK = (Op.COPY, Op.SWAP_IN)
"""Operations whose block of the pool is `b`; `DROP` has none."""
_NONE: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
_NO_KINDS: NDArray[np.uint8] = np.zeros(0, dtype=np.uint8)
_KIND_BITS = 2


def changes_of(steps: Sequence[StepTrace], num_blocks: int) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """The blocks that some steps touched, each once and in order, and the flash that each deserves (0: none)."""
    early, late = steps[:-_STEPS_WORTH_A_FLASH], steps[-_STEPS_WORTH_A_FLASH:]
    touched = [_touched_by(late, num_blocks)]
    if early:
        touched.append(_touched_by(early, num_blocks) >> _KIND_BITS << _KIND_BITS)
    packed = np.concatenate(touched)
    if not len(packed):
        return _NONE, _NO_KINDS
    packed.sort()
    # Of several on one block, the last has the largest kind.
    last = np.append(packed[1:] >> _KIND_BITS != packed[:-1] >> _KIND_BITS, True)
    packed = packed[last]
    return packed >> _KIND_BITS, (packed & ((1 << _KIND_BITS) - 1)).astype(np.uint8)


def _touched_by(steps: Sequence[StepTrace], num_blocks: int) -> NDArray[np.int64]:
    """`block << 2 | kind of flash` for each operation of some steps; what no block can be is left out."""
    lists = [step.ops for step in steps if step.ops]
    if not lists:
        return _NONE
    ops = lists[0] if len(lists) == 1 else list(chain.from_iterable(lists))
    try:
        op, block = _blocks_of(ops)
    except OverflowError:
        op, block = _blocks_of([op for op in ops if all(-(2**63) <= value < 2**63 for value in op)])
    known = (op >= 0) & (op < _NUM_OPS) & (op != Op.DROP) & (block >= 0) & (block < num_blocks)
    if not known.all():
        op, block = op[known], block[known]
    return (block << _KIND_BITS) | _FLASH_OF_OP[op]


def _blocks_of(ops: Sequence[BlockOp]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Of each operation, which it is and its block."""
    n = len(ops)
    op, block = (np.fromiter(map(itemgetter(column), ops), np.int64, n) for column in (0, 1))
    second = (op == _SECOND_BLOCK[0]) | (op == _SECOND_BLOCK[1])
    if second.any():
        block = np.where(second, np.fromiter(map(itemgetter(2), ops), np.int64, n), block)
    return op, block


class Flash:
    """What is lit up, by block.

    Attributes:
        kinds: uint8[num_blocks]: 0, or the FLASH_ kind.
    """

    def __init__(self, num_blocks: int) -> None:
        self.kinds: NDArray[np.uint8] = np.zeros(num_blocks, dtype=np.uint8)
        self._expiry: NDArray[np.float64] = np.zeros(num_blocks)
        self._groups: deque[tuple[float, NDArray[np.int64]]] = deque()

    def __bool__(self) -> bool:
        return bool(self._groups)

    @property
    def lit(self) -> NDArray[np.int64]:
        """The blocks that are lit up; some may be named twice, or be out already."""
        return np.concatenate([blocks for _, blocks in self._groups]) if self._groups else _NONE

    def light_up(self, blocks: NDArray[np.int64], kinds: NDArray[np.uint8], now: float) -> NDArray[np.int64]:
        """Light blocks up, those whose kind is not 0; returns which."""
        shown = kinds > 0
        if not shown.any():
            return _NONE
        blocks = blocks[shown]
        self.kinds[blocks] = kinds[shown]
        self._expiry[blocks] = now + FLASH_SECONDS
        self._groups.append((now + FLASH_SECONDS, blocks))
        return blocks

    def put_out(self, now: float) -> NDArray[np.int64]:
        """Put out what has been lit long enough; returns which blocks."""
        out = []
        while self._groups and self._groups[0][0] <= now:
            _, blocks = self._groups.popleft()
            over = blocks[self._expiry[blocks] <= now]
            self.kinds[over] = 0
            out.append(over)
        return np.concatenate(out) if out else _NONE
