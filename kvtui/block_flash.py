"""Which blocks the last steps changed, lit up for a moment."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from engine.trace.events import Op
from kvtui import block_codes as bc

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from engine.trace.events import StepTrace

FLASH_SECONDS = 0.45
"""How long a change stays lit while the session runs; while it is paused, it stays lit."""

_STEPS_WORTH_A_FLASH = 32

_FLASH_OF_OP: dict[int, int] = {
    Op.ALLOCATE: bc.FLASH_CHANGED,
    Op.SHARE: bc.FLASH_CHANGED,
    Op.RELEASE: bc.FLASH_CHANGED,
    Op.EVICT: bc.FLASH_EVICTED,
    Op.SWAP_OUT: bc.FLASH_SWAPPED,
    Op.COPY: bc.FLASH_CHANGED,
    Op.SWAP_IN: bc.FLASH_SWAPPED,
}
_SECOND_BLOCK = frozenset((int(Op.COPY), int(Op.SWAP_IN)))
_NO_BLOCK = frozenset((int(Op.DROP),))
_NONE: NDArray[np.int64] = np.zeros(0, dtype=np.int64)


def changes_of(steps: Sequence[StepTrace], num_blocks: int) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """The blocks that some steps touched, each once, and the flash that each deserves (0: none)."""
    kinds: dict[int, int] = {}
    dim = len(steps) - _STEPS_WORTH_A_FLASH
    for number, step in enumerate(steps):
        flash_of_op = _FLASH_OF_OP if number >= dim else {}
        for op, a, b, _ in step.ops:
            block = b if op in _SECOND_BLOCK else a
            kind = flash_of_op.get(op, 0)
            if kind >= kinds.get(block, 0) and op not in _NO_BLOCK:
                kinds[block] = kind
    if not kinds:
        return _NONE, _NONE.astype(np.uint8)
    if min(kinds) < 0 or max(kinds) >= num_blocks:
        kinds = {block: kind for block, kind in kinds.items() if 0 <= block < num_blocks}
    return (
        np.fromiter(kinds.keys(), dtype=np.int64, count=len(kinds)),
        np.fromiter(kinds.values(), dtype=np.uint8, count=len(kinds)),
    )


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
