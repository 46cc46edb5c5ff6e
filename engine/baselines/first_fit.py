"""A pool whose blocks are handed out in runs of neighbours, from the first hole that is large enough."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Final

from engine.core.block_pool import BlockPool, BlockPoolError
from engine.trace.events import Op

if TYPE_CHECKING:
    from collections.abc import Sequence

_ALLOCATE: Final = int(Op.ALLOCATE)


class Holes:
    """The free runs of a line of places, in order; neighbours are always joined.

    First fit (Knuth, The Art of Computer Programming, vol. 1, 2.5). Time is proportional to the number of holes, of
    which there is at most one more than there are runs in use.

    Args:
        size: Places, all free at first.
    """

    def __init__(self, size: int) -> None:
        self._starts = [0] if size else []
        self._lengths = [size] if size else []

    def __iter__(self) -> zip[tuple[int, int]]:
        """Start and length of each, in order of place."""
        return zip(self._starts, self._lengths, strict=True)

    @property
    def largest(self) -> int:
        """Length of the largest hole; 0 without one."""
        return max(self._lengths, default=0)

    def take(self, num: int) -> int | None:
        """Cut `num` places off the start of the first hole that has them; the first place, or None."""
        for at, length in enumerate(self._lengths):
            if length >= num:
                start = self._starts[at]
                if length == num:
                    del self._starts[at], self._lengths[at]
                else:
                    self._starts[at] += num
                    self._lengths[at] -= num
                return start
        return None

    def give(self, start: int, num: int) -> None:
        """Make a run free again."""
        at = bisect_left(self._starts, start)
        if at < len(self._starts) and start + num == self._starts[at]:
            num += self._lengths[at]
            del self._starts[at], self._lengths[at]
        if at and self._starts[at - 1] + self._lengths[at - 1] == start:
            self._lengths[at - 1] += num
        else:
            self._starts.insert(at, start)
            self._lengths.insert(at, num)


class FirstFitPool(BlockPool):
    """A `BlockPool` that allocates neighbours only.

    Attributes:
        holes: The runs of free blocks.
    """

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.holes = Holes(num_blocks)

    def allocate(self, num: int, request_id: int, first_logical: int = 0) -> list[int]:
        """Take a run of blocks, one reference each.

        Raises:
            BlockPoolError: no hole is large enough. Nothing has changed.
        """
        start = self.holes.take(num)
        if start is None:
            raise BlockPoolError(
                f"request {request_id} asked for {num} blocks in a row and the largest hole has {self.holes.largest} "
                f"of the {self.num_free} free ones: wait until a neighbour ends"
            )
        taken = list(range(start, start + num))
        for logical, block_id in enumerate(taken, first_logical):
            block = self.blocks[block_id]
            self.free_queue.remove(block)
            block.ref_cnt = 1
            if self.ops is not None:
                self.ops += (_ALLOCATE, block_id, request_id, logical)
        return taken

    def release(self, block_ids: Sequence[int], request_id: int) -> None:
        """Give back a run, in whatever order its blocks are named.

        Raises:
            BlockPoolError: a block is free already, comes twice, or does not exist. Nothing was released.
        """
        super().release(block_ids, request_id)
        if block_ids:
            self.holes.give(min(block_ids), len(block_ids))
