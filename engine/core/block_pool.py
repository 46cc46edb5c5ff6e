"""The pool of physical blocks: who refers to each, which are free, and which contents can still be found.

A block is in exactly one of three conditions: used (references), cached (no references, content findable) or free (no
references, no content). Cached and free ones are in one queue, and allocation takes from its head: a block that was
released longest ago goes first, and its content is lost only then.

The loops over many blocks are written out by hand: they run for every block that a request takes or returns.
"""

from __future__ import annotations

from itertools import repeat
from typing import TYPE_CHECKING, Final

from engine.core.block_hash import trace_key
from engine.trace.events import BlockOp, Op

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from engine.core.scheduler_output import BlockCopy

# Plain ints: the attribute look-up of an enum member costs as much as the rest of a loop's round.
_ALLOCATE: Final = int(Op.ALLOCATE)
_SHARE: Final = int(Op.SHARE)
_HASH: Final = int(Op.HASH)
_RELEASE: Final = int(Op.RELEASE)
_EVICT: Final = int(Op.EVICT)


class BlockPoolError(RuntimeError):
    """An operation that would break the pool's accounting. The pool is as it was before."""


class KVCacheBlock:
    """One physical block.

    Attributes:
        block_id: Its place in the cache tensor, 0 to num_blocks - 1.
        ref_cnt: References from block tables; a block is in the free queue exactly while this is 0.
        block_hash: Digest of its content once it is full and published, else None.
        prev_free: The block in front of it in the free queue; meaningless while it is used.
        next_free: The block behind it.
    """

    __slots__ = ("block_hash", "block_id", "next_free", "prev_free", "ref_cnt")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_cnt = 0
        self.block_hash: bytes | None = None
        self.prev_free: KVCacheBlock = self
        self.next_free: KVCacheBlock = self

    def __repr__(self) -> str:
        return f"KVCacheBlock({self.block_id}, ref_cnt={self.ref_cnt}, hashed={self.block_hash is not None})"


class FreeBlockQueue:
    """A doubly linked list through the blocks themselves, so that a hit leaves its middle in constant time.

    `head` is a sentinel that closes the ring: head.next_free is the next to be allocated, head.prev_free the last.
    """

    __slots__ = ("head", "num_free")

    def __init__(self, blocks: Sequence[KVCacheBlock]) -> None:
        self.head = KVCacheBlock(-1)
        self.num_free = len(blocks)
        last = self.head
        for block in blocks:
            last.next_free = block
            block.prev_free = last
            last = block
        last.next_free = self.head
        self.head.prev_free = last

    def remove(self, block: KVCacheBlock) -> None:
        """Take a queued block out, wherever it stands."""
        block.prev_free.next_free = block.next_free
        block.next_free.prev_free = block.prev_free
        self.num_free -= 1

    def __iter__(self) -> Iterator[KVCacheBlock]:
        block = self.head.next_free
        while block is not self.head:
            yield block
            block = block.next_free

    def __len__(self) -> int:
        return self.num_free


class BlockPool:
    """All blocks of the cache.

    Attributes:
        num_blocks: Size of the pool.
        blocks: By block id.
        num_cached: Blocks without references whose content can still be found.
        ops: Where operations are written in order, four integers each, one after the other; None while nobody looks.
            A flat list, since a tuple for each of many blocks costs more than the allocation, most of it in the
            garbage collector; `take_ops` makes rows of it.
        copies: Contents to be moved before the next forward, in this order, since the caller last emptied it.
        on_evict: Called with a block and its digest before that content is lost.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.blocks = [KVCacheBlock(i) for i in range(num_blocks)]
        self.free_queue = FreeBlockQueue(self.blocks)
        self.num_cached = 0
        self.ops: list[int] | None = None
        self.copies: list[BlockCopy] = []
        self.on_evict: Callable[[int, bytes], None] | None = None
        self._by_hash: dict[bytes, int] = {}
        self._duplicates: dict[bytes, dict[int, None]] = {}

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated, cached ones included."""
        return self.free_queue.num_free

    @property
    def num_used(self) -> int:
        """Blocks with references."""
        return self.num_blocks - self.free_queue.num_free

    def allocate(self, num: int, request_id: int, first_logical: int = 0) -> list[int]:
        """Take blocks from the head of the free queue, one reference each; cached contents on the way are lost.

        Args:
            num: How many.
            request_id: For whom.
            first_logical: Place of the first one in the request's block table.

        Returns:
            Their ids.

        Raises:
            BlockPoolError: fewer are free.
        """
        queue = self.free_queue
        if num > queue.num_free:
            raise BlockPoolError(
                f"request {request_id} asked for {num} blocks and {queue.num_free} are free: ask for fewer, or preempt"
            )
        taken: list[int] = []
        append = taken.append
        head = queue.head
        block = head.next_free
        for _ in repeat(None, num):
            if block.block_hash is not None:
                self._evict(block)
            block.ref_cnt = 1
            append(block.block_id)
            block = block.next_free
        head.next_free = block
        block.prev_free = head
        queue.num_free -= num
        if self.ops is not None:
            _record_each(self.ops, _ALLOCATE, taken, request_id, range(first_logical, first_logical + num))
        return taken

    def touch(self, block_ids: Sequence[int], request_id: int, first_logical: int = 0) -> None:
        """Refer to blocks that hold the content wanted; those without references leave the free queue."""
        blocks, queue = self.blocks, self.free_queue
        for block_id in block_ids:
            block = blocks[block_id]
            if block.ref_cnt == 0:
                queue.remove(block)
                if block.block_hash is not None:
                    self.num_cached -= 1
            block.ref_cnt += 1
        if self.ops is not None:
            logical = range(first_logical, first_logical + len(block_ids))
            _record_each(self.ops, _SHARE, block_ids, request_id, logical)

    def release(self, block_ids: Sequence[int], request_id: int) -> None:
        """Drop one reference each; blocks without any join the tail of the free queue in the order given.

        Give a request's tail first: what is released first is lost first, so that a prefix's head survives longest.

        Raises:
            BlockPoolError: a block comes twice, is free already, or does not exist. Nothing was released.
        """
        blocks, num_blocks, head = self.blocks, self.num_blocks, self.free_queue.head
        old_last = last = head.prev_free
        shared: list[KVCacheBlock] = []
        cached = 0
        wrong = ""
        for block_id in block_ids:
            if block_id < 0 or block_id >= num_blocks:
                wrong = f"which does not exist: the pool has 0 to {num_blocks - 1}"
                break
            block = blocks[block_id]
            refs = block.ref_cnt
            if refs == 1:
                block.ref_cnt = 0
                last.next_free = block
                block.prev_free = last
                last = block
                if block.block_hash is not None:
                    cached += 1
            elif refs:
                block.ref_cnt = refs - 1
                shared.append(block)
            else:
                wrong = "which is free: release each block once"
                break
        last.next_free = head
        # Without shared blocks a second occurrence has met a free block above.
        if not wrong and shared and len(set(block_ids)) != len(block_ids):
            block_id = next(block_id for block_id in block_ids if block_ids.count(block_id) > 1)
            wrong = "twice in one list: release each block once"
        if wrong:
            self._undo_release(old_last, shared)
            raise BlockPoolError(f"request {request_id} releases block {block_id}, {wrong}")
        head.prev_free = last
        self.free_queue.num_free += len(block_ids) - len(shared)
        self.num_cached += cached
        if self.ops is not None:
            _record_each(self.ops, _RELEASE, block_ids, request_id, repeat(0, len(block_ids)))

    def _undo_release(self, old_last: KVCacheBlock, shared: list[KVCacheBlock]) -> None:
        """Give back the references dropped so far and cut off the chain of blocks behind the queue's old last one."""
        head = self.free_queue.head
        block = old_last.next_free
        while block is not head:
            block.ref_cnt += 1
            block = block.next_free
        old_last.next_free = head
        for block in shared:
            block.ref_cnt += 1

    def publish(self, block_id: int, digest: bytes) -> None:
        """Make a full block's content findable.

        Where another block holds the same content already, that one goes on being found and this one stands by: it
        takes over when the other is evicted. Tables are never rewritten, so both stay (as in vLLM).

        Raises:
            BlockPoolError: nobody refers to the block, or it is published already.
        """
        block = self.blocks[block_id]
        if block.ref_cnt == 0 or block.block_hash is not None:
            raise BlockPoolError(f"{block!r} cannot be published: it must be in use and not published yet")
        block.block_hash = digest
        if self._by_hash.setdefault(digest, block_id) != block_id:
            self._duplicates.setdefault(digest, {})[block_id] = None
        if self.ops is not None:
            self.ops += (_HASH, block_id, trace_key(digest), 0)

    def find(self, digest: bytes) -> int | None:
        """A block with this content, used or cached."""
        return self._by_hash.get(digest)

    def take_ops(self) -> list[BlockOp]:
        """The operations written since the last call, as rows; `ops` is empty afterwards, or None if it was."""
        if self.ops is None:
            return []
        flat = iter(self.ops)
        self.ops = []
        return list(map(tuple.__new__, repeat(BlockOp), zip(flat, flat, flat, flat, strict=True)))

    def _evict(self, block: KVCacheBlock) -> None:
        digest = block.block_hash
        if digest is None:
            return
        block.block_hash = None
        self.num_cached -= 1
        others = self._duplicates.get(digest)
        if self._by_hash[digest] != block.block_id:
            assert others is not None
            del others[block.block_id]
        elif others:
            self._by_hash[digest] = next(iter(others))
            del others[self._by_hash[digest]]
        else:
            del self._by_hash[digest]
            if self.on_evict is not None:
                self.on_evict(block.block_id, digest)
        if others is not None and not others:
            del self._duplicates[digest]
        if self.ops is not None:
            self.ops += (_EVICT, block.block_id, trace_key(digest), 0)


def _record_each(ops: list[int], op: int, block_ids: Sequence[int], request_id: int, last: Iterable[int]) -> None:
    """Write one operation for each of many blocks, column by column."""
    num = len(block_ids)
    start = len(ops)
    ops += repeat(op, 4 * num)
    ops[start + 1 :: 4] = block_ids
    ops[start + 2 :: 4] = repeat(request_id, num)
    ops[start + 3 :: 4] = last
