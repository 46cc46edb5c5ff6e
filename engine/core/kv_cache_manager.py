"""Which blocks a request has: block tables, prefix hits, and when a block's content becomes findable."""

from __future__ import annotations

from itertools import repeat
from typing import TYPE_CHECKING, Final

from engine.core.block_hash import block_digest, root_digest
from engine.core.block_pool import BlockPool
from engine.core.cpu_pool import CpuPool
from engine.core.found_prefix import NOTHING_FOUND, FoundPrefix, longest_prefix, num_places_behind
from engine.core.scheduler_output import BlockCopy
from engine.trace.events import NO_BLOCK, Op

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.config import CacheConfig
    from engine.request import Request

_FILL: Final = int(Op.FILL)
_COPY: Final = int(Op.COPY)


class KVCacheManager:
    """One block table per request, over one pool.

    Attributes:
        pool: The physical blocks.
        block_size: Tokens a block holds.
        prefix_caching: Whether full blocks are published and looked for.
        cpu: The CPU pool, where there is one.
        window: Tokens that attention looks back at most, the newest included; 0 where it sees all of them. Blocks
            wholly behind it are released as a request goes on: their places in its table hold `NO_BLOCK`.
        shared_tails: Requests that may share a partly filled last block, as forks do: who writes next copies it.
    """

    def __init__(self, config: CacheConfig, pool: BlockPool | None = None, *, window: int = 0) -> None:
        self.pool = pool or BlockPool(config.num_blocks)
        self.block_size = config.block_size
        self.prefix_caching = config.prefix_caching
        self.cpu: CpuPool | None = None
        if config.num_cpu_blocks:
            self.cpu = CpuPool(config.num_cpu_blocks, self.pool)
            self.pool.on_evict = self.cpu.offload
        self.window = window
        self.shared_tails: set[int] = set()
        self._num_behind: dict[int, int] = {}
        self._tables: dict[int, list[int]] = {}
        self._num_published: dict[int, int] = {}
        self._digests: dict[int, list[bytes]] = {}

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that a sequence of this many tokens takes."""
        return -(-num_tokens // self.block_size)

    def most_held(self, num_tokens: int, chunk: int) -> int:
        """Blocks that a sequence of this many tokens holds at once, computed in chunks of at most so many tokens."""
        blocks = self.num_blocks_for(num_tokens)
        # A stretch of tokens touches most blocks where its first one is the last of a block.
        return min(blocks, 1 + self.num_blocks_for(self.window - 2 + chunk)) if self.window else blocks

    def num_behind(self, request_id: int) -> int:
        """Places at the front of the request's table whose blocks were released, being behind the window."""
        return self._num_behind.get(request_id, 0)

    def block_table(self, request_id: int) -> list[int]:
        """The request's blocks in logical order. The manager's own list, to read only: it grows as the request does."""
        return self._tables[request_id]

    def get_computed_blocks(self, request: Request) -> FoundPrefix:
        """The longest prefix of the request's known tokens that is in the cache or the CPU pool; nothing is changed.

        It ends at least one token before the last known one: with every token cached there would be nothing to run
        through the model, and so nothing to sample the next token from. Of a request that was swapped out it is what
        went there, those of its blocks that can still be found in the cache among it.
        """
        find = self.pool.find
        swapped = self.cpu.swapped(request.request_id) if self.cpu is not None else None
        if swapped is not None:
            blocks = [NO_BLOCK] * len(swapped.cpu_blocks)
            for at, digest in enumerate(swapped.digests):
                block_id = find(digest)
                if block_id is not None:
                    blocks[at] = block_id
            return FoundPrefix(swapped.num_tokens, swapped.num_behind, blocks, swapped=True)
        if not self.prefix_caching:
            return NOTHING_FOUND
        digests = self._digests_up_to(request, (request.num_tokens - 1) // self.block_size)
        return longest_prefix(digests, find if self.cpu is None else self._where, self.block_size, self.window)

    def _where(self, digest: bytes) -> int | None:
        """A block with this content; NO_BLOCK where it is in the CPU pool, None where it is nowhere."""
        block_id = self.pool.find(digest)
        if block_id is None and self.cpu is not None and self.cpu.find(digest):
            return NO_BLOCK
        return block_id

    def swap_out(self, request: Request) -> int:
        """Copy the request's computed tokens to the CPU pool; its blocks are still to be freed.

        Returns:
            How many blocks went there: 0 where they do not fit, or nothing is computed.
        """
        computed, behind = request.num_computed_tokens, self.num_behind(request.request_id)
        stop = self.num_blocks_for(computed)
        if self.cpu is None or not 0 < stop - behind <= self.cpu.num_available:
            return 0
        digests = self._digests_up_to(request, computed // self.block_size)[behind:] if self.prefix_caching else []
        held = self._tables[request.request_id][behind:stop]
        self.cpu.swap_out(request.request_id, held, computed, digests, num_behind=behind)
        return len(held)

    def num_free_needed(self, num_tokens: int, found: FoundPrefix, chunk: int = 0) -> int:
        """Free blocks that an admission uses up: the new ones, and the hits that wait in the free queue themselves.

        Args:
            num_tokens: Tokens to have slots.
            found: As for `allocate_slots`.
            chunk: With a window, and where the tokens are computed in chunks of at most so many: what it takes at once
                at most until all are computed.
        """
        blocks = self.pool.blocks
        in_use = sum(1 for block_id in found.blocks if block_id >= 0 and blocks[block_id].ref_cnt)
        held = self.num_blocks_for(num_tokens) - found.num_behind
        return (min(held, self.most_held(num_tokens, chunk)) if chunk else held) - in_use

    def allocate_slots(self, request: Request, num_tokens: int, found: FoundPrefix = NOTHING_FOUND) -> bool:
        """Make the request's table long enough for its first num_tokens tokens.

        Args:
            request: A running one, or one to be admitted.
            num_tokens: Tokens that must have a slot, those computed already included.
            found: From `get_computed_blocks` just before; only for a request without a table. What of it is in the CPU
                pool is brought back.

        Returns:
            Whether it fits. If not, nothing has changed: hits are referred to only once all is known to fit, since a
            reference taken too early takes a block from the very free queue that is being counted.
        """
        request_id = request.request_id
        table = self._tables.get(request_id)
        pool = self.pool
        if table is not None:
            missing = -(-num_tokens // self.block_size) - len(table)
            if missing <= 0:
                return True
            if missing > pool.free_queue.num_free:
                return False
            table += pool.allocate(missing, request_id, len(table))
            return True
        if self.num_free_needed(num_tokens, found) > pool.num_free:
            return False
        # Allocating may offload what it evicts, and must not push out what is about to be brought back.
        offloaded = self._take_offloaded(request_id, found)
        num_places, behind = self.num_blocks_for(num_tokens), found.num_behind
        table = [*repeat(NO_BLOCK, behind), *found.blocks]
        table += repeat(NO_BLOCK, num_places - len(table))
        shared, to_allocate = found.runs(num_places)
        for run in shared:
            pool.touch(table[run.start : run.stop], request_id, run.start)
        for run in to_allocate:
            table[run.start : run.stop] = pool.allocate(len(run), request_id, run.start)
        self._tables[request_id] = table
        self._num_published[request_id] = found.num_tokens // self.block_size
        if behind:
            self._num_behind[request_id] = behind
        if self.cpu is not None:
            self._bring_back(request_id, table, found, offloaded)
        return True

    def _take_offloaded(self, request_id: int, found: FoundPrefix) -> list[tuple[int, bytes, int]]:
        """Place, key and CPU block of what is to be brought back, where it is not the request's own."""
        if self.cpu is None or found.swapped or not found.num_brought:
            return []
        digests = self._digests[request_id]
        places = [place for place, block_id in enumerate(found.blocks, found.num_behind) if block_id < 0]
        taken = self.cpu.take([digests[place] for place in places])
        return [(place, digests[place], cpu_block) for place, cpu_block in zip(places, taken, strict=True)]

    def _bring_back(
        self, request_id: int, table: list[int], found: FoundPrefix, offloaded: Sequence[tuple[int, bytes, int]]
    ) -> None:
        # The copy comes before the forward, and so before anybody who finds the block reads it.
        assert self.cpu is not None
        for place, digest, cpu_block in offloaded:
            self.cpu.restore(cpu_block, table[place], request_id)
            self.pool.publish(table[place], digest)
        if found.swapped:
            swapped = self.cpu.swap_in(request_id, table, found.blocks)
            for at, digest in enumerate(swapped.digests):
                if found.blocks[at] < 0:
                    self.pool.publish(table[found.num_behind + at], digest)

    def fork(self, parent: Request, child: Request) -> int:
        """Give a request without a table the blocks that hold its parent's computed tokens; takes no free block.

        Both go on writing behind those tokens. Where that is in the middle of a block, see `needs_copy`.

        Returns:
            How many blocks they share.
        """
        computed = parent.num_computed_tokens
        num_full, num_in_tail = divmod(computed, self.block_size)
        behind = self.num_behind(parent.request_id)
        table = self._tables[parent.request_id][: num_full + (num_in_tail > 0)]
        self.pool.touch(table[behind:], child.request_id, behind)
        self._tables[child.request_id] = table
        if behind:
            self._num_behind[child.request_id] = behind
        self._num_published[child.request_id] = min(num_full, self._num_published[parent.request_id])
        if child.params.cache_salt == parent.params.cache_salt:
            known = self._digests.get(parent.request_id, [])
            self._digests[child.request_id] = known[: child.num_tokens // self.block_size]
        if num_in_tail:
            self.shared_tails |= {parent.request_id, child.request_id}
        return len(table) - behind

    def needs_copy(self, request: Request) -> bool:
        """Whether the request's next token goes into a block that others hold as well; only for `shared_tails`."""
        request_id = request.request_id
        tail = self._tables[request_id][request.num_computed_tokens // self.block_size]
        if self.pool.blocks[tail].ref_cnt > 1:
            return True
        self.shared_tails.discard(request_id)
        return False

    def copy_tail(self, request: Request) -> bool:
        """Copy on write: put a block of its own in the place of the shared tail; False where none is free."""
        request_id = request.request_id
        logical, num_filled = divmod(request.num_computed_tokens, self.block_size)
        pool = self.pool
        if not pool.num_free:
            return False
        # Another list, so that whoever keeps the old one sees that it has changed.
        table = self._tables[request_id] = self._tables[request_id].copy()
        source = table[logical]
        (destination,) = pool.allocate(1, request_id, logical)
        table[logical] = destination
        if pool.ops is not None:
            pool.ops += (_COPY, source, destination, num_filled)
        pool.copies.append(BlockCopy(Op.COPY, source, destination))
        pool.release([source], request_id)
        self.shared_tails.discard(request_id)
        return True

    def publish(self, request: Request, computed_before: int, table: Sequence[int]) -> None:
        """Note what a forward has written; blocks that are full now can be found from here on.

        Args:
            request: Its `num_computed_tokens` already counts the tokens of this forward.
            computed_before: The count before it.
            table: Its block table.
        """
        request_id, size = request.request_id, self.block_size
        computed = request.num_computed_tokens
        num_full, num_filled = divmod(computed, size)
        ops = self.pool.ops
        if ops is not None:
            for logical in range(computed_before // size, num_full):
                ops += (_FILL, table[logical], request_id, size)
            if num_filled:
                ops += (_FILL, table[num_full], request_id, num_filled)
        if not self.prefix_caching or num_full == self._num_published[request_id]:
            return
        digests = self._digests_up_to(request, num_full)
        for logical in range(self._num_published[request_id], num_full):
            self.pool.publish(table[logical], digests[logical])
        self._num_published[request_id] = num_full

    def release_behind(self, request: Request) -> None:
        """Release the blocks that no token to come looks back at; the table keeps its last block in any case."""
        request_id = request.request_id
        first = self._num_behind.get(request_id, 0)
        stop = num_places_behind(request.num_computed_tokens, self.block_size, self.window)
        table = self._tables[request_id]
        stop = min(stop, len(table) - 1)
        if stop <= first:
            return
        self.pool.release(table[first:stop], request_id)
        table[first:stop] = [NO_BLOCK] * (stop - first)
        self._num_behind[request_id] = stop

    def free(self, request_id: int) -> int:
        """Release all blocks of a request, its tail first; nothing happens where it has none.

        Returns:
            How many it had.
        """
        table = self._tables.pop(request_id, None)
        if table is None:
            return 0
        del self._num_published[request_id]
        self.shared_tails.discard(request_id)
        held = table[self._num_behind.pop(request_id, 0) :]
        self.pool.release(held[::-1], request_id)
        return len(held)

    def forget(self, request_id: int) -> None:
        """`free`, and drop the keys computed for its tokens and its contents in the CPU pool: the request has ended."""
        self.free(request_id)
        if self.cpu is not None:
            self.cpu.drop(request_id)
        self._digests.pop(request_id, None)

    def _digests_up_to(self, request: Request, num_blocks: int) -> list[bytes]:
        """Keys of the request's first num_blocks blocks, computed once: a waiting request is looked up every step."""
        digests = self._digests.setdefault(request.request_id, [])
        if len(digests) < num_blocks:
            size = self.block_size
            if digests:
                parent = digests[-1]
            else:
                salt = request.params.cache_salt
                parent = root_digest(() if salt is None else (("salt", salt),))
            for logical in range(len(digests), num_blocks):
                parent = block_digest(parent, request.tokens(logical * size, (logical + 1) * size))
                digests.append(parent)
        return digests[:num_blocks]
