"""In which order the grid shows the blocks: by address, by owner or by last use.

Sorting costs time in proportion to the pool, so it is not done in every frame: `OrderKeeper` sorts again when a fixed
part of the time allows it, a large pool piece by piece over many frames, and says which step its order is of.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from numpy.typing import NDArray

    from engine.trace.state import PoolState

ADDRESS, OWNER, USE = "address", "owner", "last use"
ORDERS = (ADDRESS, OWNER, USE)

MOST_OF_THE_TIME = 1 / 40
"""The part of the time that sorting may take while a session runs."""

_KEY_BITS = 63

_PIECE = 1 << 16
"""Blocks that are sorted at once while a session runs."""
_SAMPLE = 1 << 10
_FRAME_SECONDS = 0.002
"""How long one frame sorts a larger pool."""


def sorted_blocks(state: PoolState, order: str) -> NDArray[np.int64]:
    """All blocks of a pool in an order.

    By owner: the oldest request's blocks first, in the order of its table, then those that are cached, then the free
    ones. By last use: those that the latest step touched first. Among equals the address decides.
    """
    num_blocks = state.header.num_blocks
    if order == ADDRESS:
        return np.arange(num_blocks, dtype=np.int64)
    keys = _Keys(state, order)
    packed = keys.of(0, num_blocks)
    packed.sort()
    return packed & keys.mask


class _Keys:
    """Packs what blocks are sorted by, and their addresses, into one number each.

    One sort of packed numbers takes a tenth of the time of an argsort. The state may go on between two calls: what does
    not fit any more is sorted as the last that does.
    """

    def __init__(self, state: PoolState, order: str) -> None:
        self._state, self._order = state, order
        self._bits = max(1, (state.header.num_blocks - 1).bit_length())
        self.mask = (1 << self._bits) - 1
        self._last = int(state.owner.max(initial=0)) + 1
        places = int(state.logical.max(initial=0)).bit_length()
        self._places = places if (self._last + 1).bit_length() + places + self._bits <= _KEY_BITS else 0

    def of(self, start: int, stop: int) -> NDArray[np.int64]:
        """Those of the blocks from one address to another."""
        state = self._state
        if self._order == USE:
            key = np.int64(2**31) - 1 - state.touched[start:stop].astype(np.int64)
        else:
            used, last = state.refs[start:stop] > 0, self._last
            owner = np.minimum(state.owner[start:stop], last - 1)
            key = np.where(used, owner, np.where(state.key[start:stop] != 0, last, last + 1)).astype(np.int64)
            if self._places:
                place = np.clip(state.logical[start:stop], 0, (1 << self._places) - 1)
                key = (key << self._places) | np.where(used, place, 0)
        return (key << self._bits) | np.arange(start, stop, dtype=np.int64)


def sorted_piece_by_piece(
    state: PoolState, order: str
) -> Generator[None, None, tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """The same as `sorted_blocks` and its inverse, in pieces of work that do not grow with the pool.

    A sample sort: pieces are sorted, regular samples of them part the pool into ranges of about as many blocks, and the
    ranges are sorted. Where the state goes on meanwhile, a block's place is what it was when its turn came; each block
    has one place in any case.
    """
    num_blocks, keys = state.header.num_blocks, _Keys(state, order)
    pieces = []
    for start in range(0, num_blocks, _PIECE):
        piece = keys.of(start, min(start + _PIECE, num_blocks))
        piece.sort()
        pieces.append(piece)
        yield
    samples = np.sort(np.concatenate([piece[::_SAMPLE] for piece in pieces]))
    limits = samples[_PIECE // _SAMPLE :: _PIECE // _SAMPLE]
    cuts = [(0, *np.searchsorted(piece, limits).tolist(), len(piece)) for piece in pieces]
    blocks, places = np.empty(num_blocks, dtype=np.int64), np.empty(num_blocks, dtype=np.int64)
    done = 0
    for at in range(len(limits) + 1):
        range_of = np.concatenate([piece[cut[at] : cut[at + 1]] for piece, cut in zip(pieces, cuts, strict=True)])
        range_of.sort()
        range_of &= keys.mask
        blocks[done : done + len(range_of)] = range_of
        places[range_of] = np.arange(done, done + len(range_of))
        done += len(range_of)
        yield
    return blocks, places


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
        self._sorting: Generator[None, None, tuple[NDArray[np.int64], NDArray[np.int64]]] | None = None
        self._sorted_for = -1
        self._spent = 0.0

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
        if not (jumped or at_once):
            if self._sorting is None and self._clock() < self._due:
                return False
            if state.header.num_blocks > _PIECE:
                return self._sort_on(state)
        self._sort(state)
        return True

    def _sort(self, state: PoolState) -> None:
        self.step = state.step
        self._sorting = None
        if self.order == ADDRESS:
            self.blocks = self.places = None
            return
        began = time.perf_counter()
        self.blocks = sorted_blocks(state, self.order)
        self.places = np.empty_like(self.blocks)
        self.places[self.blocks] = np.arange(len(self.blocks))
        self._due = self._clock() + (time.perf_counter() - began) / MOST_OF_THE_TIME

    def _sort_on(self, state: PoolState) -> bool:
        """Sort for as long as a frame may; whether the order is another one now."""
        if self._sorting is None:
            self._sorting = sorted_piece_by_piece(state, self.order)
            self._sorted_for, self._spent = state.step, 0.0
        began = time.perf_counter()
        finished = False
        while not finished:
            try:
                next(self._sorting)
            except StopIteration as end:
                self.blocks, self.places = end.value
                finished = True
            if time.perf_counter() - began > _FRAME_SECONDS:
                break
        self._spent += time.perf_counter() - began
        if finished:
            self._sorting, self.step = None, self._sorted_for
            self._due = self._clock() + self._spent / MOST_OF_THE_TIME
        return finished

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
