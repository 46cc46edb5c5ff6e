"""The blocks' half of the fold: arrays indexed by block, and what each operation does to them.

An operation costs the same in a pool of any size. One that contradicts the state is noted in `violations`, and as much
of it as makes sense is done.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from engine.trace.bulk_fold import LEAST, Columns, apply_in_bulk, columns_of
from engine.trace.events import NO_BLOCK, NO_REQUEST, Op, Phase
from engine.trace.invariants import Violation

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from engine.trace.events import BlockOp, Header
    from engine.trace.request_state import RequestState

MAX_VIOLATIONS = 64
"""Violations kept, the earliest; `num_violations` counts them all."""

MAX_EVICTED = 4096
"""Evicted contents that are remembered, and never more than the pool has blocks."""

INT32_MAX = 2**31 - 1
_INT64_MAX = 2**63 - 1

# Plain integers: comparing with enum members costs more than the rest of an operation.
_ALLOCATE, _SHARE, _FILL, _HASH = int(Op.ALLOCATE), int(Op.SHARE), int(Op.FILL), int(Op.HASH)
_RELEASE, _EVICT, _COPY = int(Op.RELEASE), int(Op.EVICT), int(Op.COPY)
_SWAP_OUT, _SWAP_IN = int(Op.SWAP_OUT), int(Op.SWAP_IN)
_DROP = int(Op.DROP)
_PREFILL = int(Phase.PREFILL)
_SECOND_BLOCK = (_COPY, _SWAP_IN)
"""Operations whose block of the pool is `b`."""

ARRAYS: dict[str, Any] = {
    "owner": np.int32,
    "logical": np.int32,
    "refs": np.int32,
    "filled": np.int32,
    "key": np.int64,
    "parent": np.int64,
    "hits": np.int32,
    "last_owner": np.int32,
    "last_op": np.int8,
    "touched": np.int32,
    "free_order": np.int64,
    "cpu_owner": np.int32,
    "cpu_logical": np.int32,
    "cpu_filled": np.int32,
    "cpu_key": np.int64,
    "cpu_parent": np.int64,
}
"""The arrays of a state and their types."""


class BlockFold:
    """Arrays, block tables and the queue's order; `engine.trace.state.PoolState` describes them."""

    def __init__(self, header: Header) -> None:
        n = header.num_blocks
        cpu = header.num_cpu_blocks
        self.header = header
        self.step = -1
        self.requests: dict[int, RequestState] = {}
        self.owner: npt.NDArray[np.int32] = np.full(n, NO_REQUEST, np.int32)
        self.logical: npt.NDArray[np.int32] = np.full(n, -1, np.int32)
        self.refs: npt.NDArray[np.int32] = np.zeros(n, np.int32)
        self.filled: npt.NDArray[np.int32] = np.zeros(n, np.int32)
        self.key: npt.NDArray[np.int64] = np.zeros(n, np.int64)
        self.parent: npt.NDArray[np.int64] = np.zeros(n, np.int64)
        self.hits: npt.NDArray[np.int32] = np.zeros(n, np.int32)
        self.last_owner: npt.NDArray[np.int32] = np.full(n, NO_REQUEST, np.int32)
        self.last_op: npt.NDArray[np.int8] = np.full(n, -1, np.int8)
        self.touched: npt.NDArray[np.int32] = np.full(n, -1, np.int32)
        self.free_order: npt.NDArray[np.int64] = np.arange(n, dtype=np.int64)
        self.cpu_owner: npt.NDArray[np.int32] = np.full(cpu, NO_REQUEST, np.int32)
        self.cpu_logical: npt.NDArray[np.int32] = np.full(cpu, -1, np.int32)
        self.cpu_filled: npt.NDArray[np.int32] = np.zeros(cpu, np.int32)
        self.cpu_key: npt.NDArray[np.int64] = np.zeros(cpu, np.int64)
        self.cpu_parent: npt.NDArray[np.int64] = np.zeros(cpu, np.int64)
        self.cpu_used = 0
        self.used = 0
        self.held_slots = 0
        self.cached = 0
        self.free = n
        self.evicted: dict[int, tuple[int, int]] = {}
        self.regret_blocks = 0
        self.regret_since = 0
        self.violations: list[Violation] = []
        self.num_violations = 0
        self._next_order = n
        self._max_evicted = min(n, MAX_EVICTED)
        self._holders: dict[int, list[tuple[int, int]]] = {}
        """Of blocks with several references: (request, place) of each, the longest holder first."""
        self._displaced: list[tuple[int, int]] = []
        """(block, request) whose place in the table was taken by another block in this step."""
        self._in_columns: tuple[Sequence[BlockOp], Columns] | None = None
        """The operations of the last step and the same as columns, where they were many."""
        self._bind()

    def _bind(self) -> None:
        # Reading and writing one element through a memoryview costs half of what it costs through the array.
        self._m_owner = self.owner.data
        self._m_logical = self.logical.data
        self._m_refs = self.refs.data
        self._m_filled = self.filled.data
        self._m_key = self.key.data
        self._m_parent = self.parent.data
        self._m_hits = self.hits.data
        self._m_last_owner = self.last_owner.data
        self._m_last_op = self.last_op.data
        self._m_touched = self.touched.data
        self._m_free_order = self.free_order.data

    @property
    def shared(self) -> int:
        """Blocks with several references."""
        return len(self._holders)

    def _violate(self, name: str, block: int, message: str) -> None:
        self.num_violations += 1
        if len(self.violations) < MAX_VIOLATIONS:
            self.violations.append(Violation(name, block, self.step, message))

    def free_queue(self, most: int) -> npt.NDArray[np.int64]:
        """The blocks that are taken next, the first one first, at most `most`; those with a key lose their content.

        Time proportional to the pool. Only a paged engine takes them in this order: see `Header.policy`.
        """
        idle = np.flatnonzero(self.refs == 0)
        order = self.free_order[idle]
        if 0 < most < len(idle):
            first = np.argpartition(order, most - 1)[:most]
            idle, order = idle[first], order[first]
        return idle[np.argsort(order)][: max(0, most)]

    def apply_ops(self, ops: Sequence[BlockOp]) -> None:
        """The block operations of the step `self.step`, in order."""
        columns = columns_of(ops) if len(ops) >= LEAST else None
        self._in_columns = None if columns is None else (ops, columns)
        if columns is None:
            self.apply_each(ops)
        else:
            apply_in_bulk(self, ops, columns)
        for block, request in self._displaced:
            self._violate("tables", block, f"request {request} put another block in its place without releasing it")
        self._displaced.clear()

    def columns_of(self, ops: Sequence[BlockOp]) -> Columns | None:
        """Operations as columns, where these are the last ones that were applied and making columns was worth it."""
        known = self._in_columns
        return known[1] if known is not None and known[0] is ops else None

    def apply_each(self, ops: Iterable[BlockOp]) -> None:
        """Some operations of a step, one by one."""
        n = self.header.num_blocks
        size = self.header.block_size
        refs, filled, keys = self._m_refs, self._m_filled, self._m_key
        last_op, touched = self._m_last_op, self._m_touched
        index = self.step
        for op, a, b, c in ops:
            if op == _DROP:
                self._drop(a, b)
                continue
            block = b if op in _SECOND_BLOCK else a
            if not 0 <= block < n:
                self._violate("operation", -1, f"operation {op} on block {block}, of a pool of {n}")
                continue
            if op == _FILL:
                if refs[block] <= 0:
                    self._violate("operation", block, f"request {b} filled it without holding it")
                elif 0 <= c <= size:
                    self.held_slots += c - filled[block]
                    filled[block] = c
                else:
                    self._violate("operation", block, f"{c} slots were filled of {size}")
            elif op == _ALLOCATE:
                self._allocate(block, b, c)
            elif op == _HASH:
                self._hash(block, b)
            elif op == _RELEASE:
                self._release(block, b)
            elif op == _SHARE:
                self._share(block, b, c)
            elif op == _EVICT:
                if keys[block] == 0:
                    self._violate("operation", block, "it was evicted, but its content could not be found anyway")
                elif keys[block] != b:
                    self._violate("operation", block, f"it was evicted under key {b}, but holds {keys[block]}")
                self._evict(block)
            elif op == _COPY:
                if 0 <= a < n and 0 <= c <= size and refs[block] > 0:
                    self.held_slots += c - filled[block]
                    filled[block] = c
                else:
                    self._violate("operation", block, f"{c} slots were copied into it from block {a}")
            elif op == _SWAP_OUT:
                self._swap_out(block, b, c)
            elif op == _SWAP_IN:
                self._swap_in(a, block, c)
            else:
                self._violate("operation", block, f"unknown operation {op}")
                continue
            last_op[block] = op
            touched[block] = index

    @property
    def displaces(self) -> bool:
        """Whether a block of this step lost its place in a table and may still be released in due form."""
        return bool(self._displaced)

    def queue_up(self, blocks: npt.NDArray[np.int64]) -> None:
        """Put released blocks at the end of the free queue, in order."""
        self.free_order[blocks] = np.arange(self._next_order, self._next_order + len(blocks))
        self._next_order += len(blocks)

    def place(self, block: int, request: int, logical: int) -> None:
        """Put a block into a request's table."""
        state = self.requests.get(request)
        if state is None:
            self._violate("request", block, f"it went to request {request}, which never arrived")
            return
        table = state.table
        if logical == len(table):
            table.append(block)
        elif 0 <= logical < len(table):
            if table[logical] != NO_BLOCK:
                self._displaced.append((table[logical], request))
            table[logical] = block
        elif 0 <= logical * self.header.block_size < state.num_tokens:
            # Those in front of it are behind a sliding window, or come next. No table is longer than its tokens take.
            table.extend([NO_BLOCK] * (logical - len(table)))
            table.append(block)
        else:
            self._violate(
                "tables", block, f"it went to place {logical} of request {request}, whose table has {len(table)}"
            )

    def _allocate(self, block: int, request: int, logical: int) -> None:
        refs = self._m_refs
        if refs[block] > 0:
            self._violate("operation", block, f"request {request} allocated it while it has {refs[block]} references")
            self._share(block, request, logical)
            return
        if self._m_key[block] != 0:
            self._violate("operation", block, f"request {request} allocated it before its cached content was evicted")
            self._evict(block)
        refs[block] = 1
        self.free -= 1
        self.used += 1
        self._m_filled[block] = 0
        self._own(block, request, logical)
        self.place(block, request, logical)

    def _own(self, block: int, request: int, logical: int) -> None:
        self._m_owner[block] = request if 0 <= request <= INT32_MAX else NO_REQUEST
        self._m_logical[block] = logical if 0 <= logical <= INT32_MAX else -1

    def _share(self, block: int, request: int, logical: int) -> None:
        refs = self._m_refs
        held = refs[block]
        if held <= 0:
            if self._m_key[block] != 0:
                self.cached -= 1
            else:
                self._violate("operation", block, f"request {request} shared it, but it has no content")
                self.free -= 1
            self.used += 1
            self.held_slots += self._m_filled[block]
            refs[block] = 1
            self._own(block, request, logical)
        elif held < INT32_MAX:
            holders = self._holders.get(block)
            if holders is None:
                holders = self._holders[block] = [(self._m_owner[block], self._m_logical[block])]
            holders.append((request, logical))
            refs[block] = held + 1
        if self._m_key[block] != 0 and self._m_hits[block] < INT32_MAX:
            self._m_hits[block] += 1
        self.place(block, request, logical)

    def _release(self, block: int, request: int) -> None:
        refs = self._m_refs
        held = refs[block]
        if held <= 0:
            self._violate("free_queue", block, f"request {request} released it, but it is free already")
            return
        self.unplace(block, request)
        if held > 1:
            refs[block] = held - 1
            self._hand_over(block, request)
            return
        refs[block] = 0
        self.used -= 1
        self.held_slots -= self._m_filled[block]
        self._m_owner[block] = NO_REQUEST
        self._m_last_owner[block] = request if 0 <= request <= INT32_MAX else NO_REQUEST
        self._m_free_order[block] = self._next_order
        self._next_order += 1
        if self._m_key[block] != 0:
            self.cached += 1
        else:
            self.free += 1
            self._m_filled[block] = 0
            self._m_logical[block] = -1

    def unplace(self, block: int, request: int) -> None:
        """Take a block out of a request's table."""
        if self._displaced and (block, request) in self._displaced:
            self._displaced.remove((block, request))
            return
        state = self.requests.get(request)
        if state is None:
            self._violate("request", block, f"request {request} released it, but never arrived")
            return
        table = state.table
        if table and table[-1] == block:
            table.pop()
            while table and table[-1] == NO_BLOCK:
                table.pop()
        elif self._m_owner[block] == request and table[self._m_logical[block] : self._m_logical[block] + 1] == [block]:
            table[self._m_logical[block]] = NO_BLOCK
        elif block in table:
            table[table.index(block)] = NO_BLOCK
        else:
            self._violate("references", block, f"request {request} released it, but does not have it in its table")

    def _hand_over(self, block: int, request: int) -> None:
        holders = self._holders.get(block)
        if holders is None:
            return
        for at, (holder, _) in enumerate(holders):
            if holder == request:
                del holders[at]
                break
        else:
            holders.pop()
        if holders:
            self._own(block, *holders[0])
        if len(holders) <= 1:
            del self._holders[block]

    def _hash(self, block: int, key: int) -> None:
        if key == 0 or not -_INT64_MAX <= key <= _INT64_MAX:
            self._violate("operation", block, f"it was hashed under {key}, which is not a possible key")
            return
        if self._m_filled[block] != self.header.block_size:
            self._violate(
                "hashed_full", block, f"it was hashed with {self._m_filled[block]} of {self.header.block_size} slots"
            )
        if self._m_refs[block] <= 0 and self._m_key[block] == 0:
            self._violate("operation", block, "it was hashed while nobody holds it")
            self.free -= 1
            self.cached += 1
        self._m_key[block] = key
        self._m_parent[block] = self._key_in_front_of(block) or self._m_parent[block]
        self._m_hits[block] = 0
        evicted = self.evicted.get(key)
        if evicted is not None:
            self._come_back(block, key, *evicted)

    def _come_back(self, block: int, key: int, evicted: int, again: int) -> None:
        """A content is there that was evicted once. It is regretted where a prompt computed what it could have found.

        The last token of a prompt is always computed, and its block with it. Who was admitted before the content came
        back missed it as well.
        """
        request = self.requests.get(self._m_owner[block])
        if again < 0:
            self.evicted[key] = (evicted, self.step)
        if request is None or self._m_last_op[block] != _FILL or request.last_phase != _PREFILL:
            return
        findable = (request.num_prompt_tokens - 1) // self.header.block_size
        asked = request.admitted_step
        if self._m_logical[block] < findable and evicted <= asked and (again < 0 or asked <= again):
            self.regret_blocks += 1
            request.regret_blocks += 1
            request.regret_step = max(request.regret_step, evicted)

    def _key_in_front_of(self, block: int) -> int:
        """Key of the block in front of this one in its owner's table; 0 where there is none, or it has no key."""
        place = self._m_logical[block]
        request = self.requests.get(self._m_owner[block])
        if request is None or not 0 < place <= len(request.table):
            return 0
        before = request.table[place - 1]
        return self._m_key[before] if before >= 0 else 0

    def derive_parents(self) -> None:
        """Find `parent` of blocks from who has, or had, them side by side; 0 where that is not known any more."""
        held = self.owner >= 0
        holder = np.where(held, self.owner, self.last_owner)
        hashed = np.flatnonzero((self.key != 0) & (holder >= 0)).tolist()
        block_at = {(int(holder[block]), int(self.logical[block])): block for block in hashed}
        for request in self.requests.values():
            block_at.update(((request.request, place), block) for place, block in enumerate(request.table))
        for block in hashed:
            before = block_at.get((int(holder[block]), int(self.logical[block]) - 1), NO_BLOCK)
            self.parent[block] = self.key[before] if before >= 0 else 0

    def _evict(self, block: int) -> None:
        key = self._m_key[block]
        if key == 0:
            return
        self._m_key[block] = 0
        self._m_parent[block] = 0
        self._m_hits[block] = 0
        remembered = self.evicted
        remembered.pop(key, None)
        remembered[key] = (self.step, -1)
        if len(remembered) > self._max_evicted:
            del remembered[next(iter(remembered))]
        if self._m_refs[block] > 0:
            self._violate("operation", block, f"it was evicted while it has {self._m_refs[block]} references")
            return
        self.cached -= 1
        self.free += 1
        self._m_filled[block] = 0
        self._m_logical[block] = -1

    def _swap_out(self, block: int, cpu_block: int, request: int) -> None:
        if not (0 <= cpu_block < self.header.num_cpu_blocks and NO_REQUEST <= request <= INT32_MAX):
            self._violate("operation", block, f"it was swapped out to CPU block {cpu_block} for request {request}")
            return
        if self._m_filled[block] <= 0:
            self._violate("operation", block, f"it was swapped out to CPU block {cpu_block}, but it holds nothing")
            return
        if self.cpu_filled[cpu_block] > 0:
            self._violate("cpu_pool", block, f"it was swapped out to CPU block {cpu_block}, which is not free")
        else:
            self.cpu_used += 1
        self.cpu_owner[cpu_block] = request
        self.cpu_logical[cpu_block] = self._m_logical[block]
        self.cpu_filled[cpu_block] = self._m_filled[block]
        self.cpu_key[cpu_block] = self._m_key[block]
        self.cpu_parent[cpu_block] = self._m_parent[block]

    def _swap_in(self, cpu_block: int, block: int, request: int) -> None:
        if not 0 <= cpu_block < self.header.num_cpu_blocks:
            self._violate("operation", block, f"it was swapped in from CPU block {cpu_block}")
            return
        if self._m_refs[block] <= 0:
            self._violate("operation", block, f"request {request} swapped content into it without holding it")
            return
        owner = self.cpu_owner[cpu_block]
        if owner not in (request, NO_REQUEST):
            self._violate("cpu_pool", block, f"request {request} swapped in what belongs to request {owner}")
        filled = int(self.cpu_filled[cpu_block])
        # The block in front of it may be behind a sliding window, and then its table does not tell.
        self._m_parent[block] = self.cpu_parent[cpu_block]
        self.held_slots += filled - self._m_filled[block]
        self._m_filled[block] = filled
        self._clear_cpu(cpu_block)

    def _drop(self, cpu_block: int, request: int) -> None:
        if not 0 <= cpu_block < self.header.num_cpu_blocks:
            self._violate("operation", -1, f"CPU block {cpu_block} was let go, of {self.header.num_cpu_blocks}")
            return
        if self.cpu_owner[cpu_block] != request:
            owner = self.cpu_owner[cpu_block]
            self._violate("cpu_pool", -1, f"request {request} let CPU block {cpu_block} of request {owner} go")
        self._clear_cpu(cpu_block)

    def _clear_cpu(self, cpu_block: int) -> None:
        if self.cpu_filled[cpu_block] > 0:
            self.cpu_used -= 1
        else:
            self._violate("cpu_pool", -1, f"CPU block {cpu_block} was emptied, but it holds nothing")
        self.cpu_owner[cpu_block] = NO_REQUEST
        self.cpu_logical[cpu_block] = -1
        self.cpu_filled[cpu_block] = 0
        self.cpu_key[cpu_block] = 0
        self.cpu_parent[cpu_block] = 0
