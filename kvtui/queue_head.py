"""The blocks that are taken next, without asking all of the pool at every step.

A block that is released goes to the end of the free queue. So a head of the queue that was found once stays its head:
it only loses the blocks that are taken, until too few are left and it is found anew.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from engine.trace.state import PoolState

_KEPT = 4096


class QueueHead:
    """The head of one state's free queue while the state goes forward; another state's is found anew."""

    def __init__(self) -> None:
        self._state: PoolState | None = None
        self._step = -1
        self._blocks: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self._stamps: NDArray[np.int64] = self._blocks

    def first(self, state: PoolState, most: int) -> list[int]:
        """The blocks that are taken next, the first one first; as `PoolState.free_queue`.

        Time proportional to the pool now and then: after a jump, and once for some thousand blocks that are taken.
        """
        if state is not self._state or state.step < self._step:
            self._find(state, most)
        else:
            kept = self._blocks
            stay = (state.refs[kept] == 0) & (state.free_order[kept] == self._stamps)
            if not stay.all():
                self._blocks, self._stamps = kept[stay], self._stamps[stay]
            if len(self._blocks) < min(most, state.cached + state.free):
                self._find(state, most)
        self._step = state.step
        blocks: list[int] = self._blocks[: max(0, most)].tolist()
        return blocks

    def _find(self, state: PoolState, most: int) -> None:
        self._state = state
        self._blocks = state.free_queue(max(most, _KEPT))
        self._stamps = state.free_order[self._blocks]
