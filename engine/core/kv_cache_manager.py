"""Which blocks a request has: block tables, prefix hits, and when a block's content becomes findable."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from engine.core.block_hash import block_digest, root_digest
from engine.core.block_pool import BlockPool
from engine.trace.events import Op

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.config import CacheConfig
    from engine.request import Request

_FILL: Final = int(Op.FILL)


class KVCacheManager:
    """One block table per request, over one pool.

    Attributes:
        pool: The physical blocks.
        block_size: Tokens a block holds.
        prefix_caching: Whether full blocks are published and looked for.
    """

    def __init__(self, config: CacheConfig, pool: BlockPool | None = None) -> None:
        self.pool = pool or BlockPool(config.num_blocks)
        self.block_size = config.block_size
        self.prefix_caching = config.prefix_caching
        self._tables: dict[int, list[int]] = {}
        self._num_published: dict[int, int] = {}
        self._digests: dict[int, list[bytes]] = {}

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that a sequence of this many tokens takes."""
        return -(-num_tokens // self.block_size)

    def block_table(self, request_id: int) -> list[int]:
        """The request's blocks in logical order. The manager's own list, to read only: it grows as the request does."""
        return self._tables[request_id]

    def get_computed_blocks(self, request: Request) -> list[int]:
        """The longest findable prefix of the request's known tokens, as block ids; nothing is changed.

        It ends at least one token before the last known one: with every token cached there would be nothing to run
        through the model, and so nothing to sample the next token from.
        """
        if not self.prefix_caching:
            return []
        hits: list[int] = []
        find = self.pool.find
        for digest in self._digests_up_to(request, (request.num_tokens - 1) // self.block_size):
            block_id = find(digest)
            if block_id is None:
                break
            hits.append(block_id)
        return hits

    def num_free_needed(self, num_tokens: int, hits: Sequence[int]) -> int:
        """Free blocks that an admission uses up: the new ones, and the hits that wait in the free queue themselves."""
        blocks = self.pool.blocks
        return self.num_blocks_for(num_tokens) - sum(1 for block_id in hits if blocks[block_id].ref_cnt)

    def allocate_slots(self, request: Request, num_tokens: int, hits: Sequence[int] = ()) -> bool:
        """Make the request's table long enough for its first num_tokens tokens.

        Args:
            request: A running one, or one to be admitted.
            num_tokens: Tokens that must have a slot, those computed already included.
            hits: From `get_computed_blocks` just before; only for a request without a table.

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
        if self.num_free_needed(num_tokens, hits) > pool.num_free:
            return False
        pool.touch(hits, request_id)
        missing = self.num_blocks_for(num_tokens) - len(hits)
        self._tables[request_id] = [*hits, *pool.allocate(missing, request_id, len(hits))]
        self._num_published[request_id] = len(hits)
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

    def free(self, request_id: int) -> int:
        """Release all blocks of a request, its tail first; nothing happens where it has none.

        Returns:
            How many it had.
        """
        table = self._tables.pop(request_id, None)
        if table is None:
            return 0
        del self._num_published[request_id]
        self.pool.release(table[::-1], request_id)
        return len(table)

    def forget(self, request_id: int) -> None:
        """`free`, and drop the keys computed for its tokens: the request has ended."""
        self.free(request_id)
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
