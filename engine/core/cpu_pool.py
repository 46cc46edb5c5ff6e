"""The CPU pool: where contents of blocks wait that had to leave the cache.

It holds two kinds: the blocks of requests that were swapped out, until those run again or end, and cached contents
that were evicted, until they are found again or their place is needed (the one that came longest ago goes first). A
content that is brought back leaves its CPU block free.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, Final, NamedTuple

from engine.core.block_hash import trace_key
from engine.core.scheduler_output import BlockCopy
from engine.trace.events import NO_REQUEST, Op

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.core.block_pool import BlockPool

_SWAP_OUT: Final = int(Op.SWAP_OUT)
_SWAP_IN: Final = int(Op.SWAP_IN)
_DROP: Final = int(Op.DROP)


class SwappedOut(NamedTuple):
    """A request's contents in the CPU pool.

    Attributes:
        cpu_blocks: In logical order.
        num_tokens: Computed tokens that it had.
        digests: Keys of the full ones; empty without prefix caching.
        num_behind: Places in front of its table that held no block, being behind a sliding window.
    """

    cpu_blocks: list[int]
    num_tokens: int
    digests: tuple[bytes, ...]
    num_behind: int


class CpuPool:
    """Blocks in the host's memory.

    Attributes:
        num_blocks: Size of the pool.
    """

    def __init__(self, num_blocks: int, pool: BlockPool) -> None:
        """An empty pool beside `pool`, to whose operations and copies it adds its own."""
        self.num_blocks = num_blocks
        self._pool = pool
        self._free = list(range(num_blocks))[::-1]
        self._offloaded: OrderedDict[bytes, int] = OrderedDict()
        self._swapped: dict[int, SwappedOut] = {}
        self._swapped_digests: Counter[bytes] = Counter()

    @property
    def num_available(self) -> int:
        """Blocks that a request can be swapped out to; offloaded contents give way to it."""
        return len(self._free) + len(self._offloaded)

    @property
    def num_used(self) -> int:
        """Blocks with a content."""
        return self.num_blocks - len(self._free)

    # ------------------------------------------------------------------ requests

    def swapped(self, request_id: int) -> SwappedOut | None:
        """What a request has here."""
        return self._swapped.get(request_id)

    def swap_out(
        self, request_id: int, block_ids: Sequence[int], num_tokens: int, digests: Sequence[bytes], num_behind: int = 0
    ) -> None:
        """Copy a request's blocks here; there must be room for them. Who else holds one of them keeps it.

        Args:
            request_id: Whose.
            block_ids: In logical order, from place num_behind on.
            num_tokens: As in `SwappedOut`, and so are the others.
            digests: Likewise.
            num_behind: Likewise.
        """
        cpu_blocks = []
        for block_id in block_ids:
            cpu_block = self._take()
            cpu_blocks.append(cpu_block)
            self._note(_SWAP_OUT, block_id, cpu_block, request_id)
            self._pool.copies.append(BlockCopy(Op.SWAP_OUT, block_id, cpu_block))
        self._swapped[request_id] = SwappedOut(cpu_blocks, num_tokens, tuple(digests), num_behind)
        self._swapped_digests.update(digests)

    def swap_in(self, request_id: int, table: Sequence[int], found: Sequence[int]) -> SwappedOut:
        """Bring a request's contents back to the blocks of its new table.

        Args:
            request_id: Whose.
            table: As long as what it had.
            found: For each of `SwappedOut.cpu_blocks` the block that has its content already, or NO_BLOCK.

        Returns:
            What it had here.
        """
        swapped = self._forget(request_id)
        for logical, (cpu_block, block_id) in enumerate(
            zip(swapped.cpu_blocks, found, strict=True), swapped.num_behind
        ):
            if block_id >= 0:
                self._note(_DROP, cpu_block, request_id, 0)
            else:
                self._bring_back(cpu_block, table[logical], request_id)
        self._free += swapped.cpu_blocks[::-1]
        return swapped

    def drop(self, request_id: int) -> None:
        """The request has ended: let its contents go, if there are any."""
        if request_id in self._swapped:
            for cpu_block in self._forget(request_id).cpu_blocks:
                self._note(_DROP, cpu_block, request_id, 0)
                self._free.append(cpu_block)

    def _forget(self, request_id: int) -> SwappedOut:
        swapped = self._swapped.pop(request_id)
        for digest in swapped.digests:
            self._swapped_digests[digest] -= 1
            if not self._swapped_digests[digest]:
                del self._swapped_digests[digest]
        return swapped

    # ------------------------------------------------------------------ cached contents

    def offload(self, block_id: int, digest: bytes) -> None:
        """A cached block is about to be evicted: keep its content, where there is room and it is not here already."""
        if digest in self._offloaded:
            self._offloaded.move_to_end(digest)
        elif self.num_available and digest not in self._swapped_digests:
            cpu_block = self._take()
            self._offloaded[digest] = cpu_block
            self._note(_SWAP_OUT, block_id, cpu_block, NO_REQUEST)
            self._pool.copies.append(BlockCopy(Op.SWAP_OUT, block_id, cpu_block))

    def find(self, digest: bytes) -> bool:
        """Whether this content was offloaded."""
        return digest in self._offloaded

    def take(self, digests: Sequence[bytes]) -> list[int]:
        """The CPU blocks of offloaded contents, which nobody else can find or push out from here on."""
        return [self._offloaded.pop(digest) for digest in digests]

    def restore(self, cpu_block: int, block_id: int, request_id: int) -> None:
        """Bring back a content that was taken."""
        self._bring_back(cpu_block, block_id, request_id)
        self._free.append(cpu_block)

    # ------------------------------------------------------------------ both

    def _take(self) -> int:
        if self._free:
            return self._free.pop()
        digest, cpu_block = self._offloaded.popitem(last=False)
        self._note(_DROP, cpu_block, NO_REQUEST, trace_key(digest))
        return cpu_block

    def _bring_back(self, cpu_block: int, block_id: int, request_id: int) -> None:
        self._note(_SWAP_IN, cpu_block, block_id, request_id)
        self._pool.copies.append(BlockCopy(Op.SWAP_IN, cpu_block, block_id))

    def _note(self, op: int, a: int, b: int, c: int) -> None:
        ops = self._pool.ops
        if ops is not None:
            ops += (op, a, b, c)
