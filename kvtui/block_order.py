"""In which order the grid shows the blocks: by address, by owner or by last use.

Sorting costs time in proportion to the pool, so it is not done in every frame: `OrderKeeper` sorts again when a fixed
part of the time allows it, and says which step its order is of.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from engine.trace.state import PoolState

ADDRESS, OWNER, USE = "address", "owner", "last use"
ORDERS = (ADDRESS, OWNER, USE)

MOST_OF_THE_TIME = 1 / 40
"""The part of the time that sorting may take while a session runs."""

_KEY_BITS = 63


def sorted_blocks(state: PoolState, order: str) -> NDArray[np.int64]:
    """All blocks of a pool in an order.

    By owner: the oldest request's blocks first, in the order of its table, then those that are cached, then the free
    ones. By last use: those that the latest step touched first; among equals the address decides.
    """
    num_blocks = state.header.num_blocks
    blocks = np.arange(num_blocks, dtype=np.int64)
    if order == ADDRESS:
        return blocks
    bits = max(1, (num_blocks - 1).bit_length())
    if order == USE:
        key = np.int64(2**31) - 1 - state.touched.astype(np.int64)
    else:
        used = state.refs > 0
        last = int(state.owner.max(initial=0)) + 1
        key = np.where(used, state.owner, np.where(state.key != 0, last, last + 1)).astype(np.int64)
        places = int(state.logical.max(initial=0)).bit_length()
        if (last + 1).bit_length() + places + bits <= _KEY_BITS:
            key = (key << places) | np.where(used, np.maximum(state.logical, 0), 0)
    # One sort of packed numbers takes a tenth of the time of an argsort.
    packed = (key << bits) | blocks
    packed.sort()
    return packed & ((1 << bits) - 1)


class OrderKeeper:
    """The order in use, as a permutation and its inverse; both None where it is the address.

    Args:
        clock: Seconds that only grow.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._due = float("-inf")
        self.order = ADDRESS
        self.step = -1
        """The step whose state was sorted."""
        self.blocks: NDArray[np.int64] | None = None
        """By place in the order, the block there."""
        self.places: NDArray[np.int64] | None = None
        """By block, its place in the order."""

    def choose(self, order: str, state: PoolState) -> None:
        """Change the order."""
        self.order = order
        self._sort(state)

    def stale(self, state: PoolState) -> bool:
        """Whether the order is of another step than the one shown."""
        return self.blocks is not None and self.step != state.step

    def keep(self, state: PoolState, at_once: bool, jumped: bool = False) -> bool:
        """Sort again where the state is another one and there is time for it; whether it was done.

        Args:
            state: What is shown.
            at_once: Take the time: nothing streams by.
            jumped: The state is not what the last one became.
        """
        if self.order == ADDRESS or not (jumped or self.stale(state)):
            return False
        if not (jumped or at_once) and self._clock() < self._due:
            return False
        self._sort(state)
        return True

    def _sort(self, state: PoolState) -> None:
        self.step = state.step
        if self.order == ADDRESS:
            self.blocks = self.places = None
            return
        began = time.perf_counter()
        self.blocks = sorted_blocks(state, self.order)
        self.places = np.empty_like(self.blocks)
        self.places[self.blocks] = np.arange(len(self.blocks))
        self._due = self._clock() + (time.perf_counter() - began) / MOST_OF_THE_TIME

    def place(self, block: int) -> int:
        """Where a block is in the order."""
        return block if self.places is None else int(self.places[block])

    def block(self, place: int) -> int:
        """Which block is at a place of the order."""
        return place if self.blocks is None else int(self.blocks[place])

    def places_of(self, blocks: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where blocks are in the order."""
        return blocks if self.places is None else self.places[blocks]

    def at(self, places: slice | NDArray[np.int64]) -> slice | NDArray[np.int64]:
        """What to index an array by block with, for places of the order."""
        return places if self.blocks is None else self.blocks[places]
