"""The fold of a trace: what the pool and the requests look like after each step, as arrays.

Live sessions, playback, recordings and tests all use this one fold, so a picture drawn live and one drawn from a file
are the same. A step costs time proportional to what happened in it, never to the pool. A trace may come from a file
that somebody made up, so nothing in it is believed: an operation that contradicts the state is noted in `violations`
and the fold goes on.
"""

from __future__ import annotations

from collections import deque
from copy import copy as shallow_copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from engine.request import FinishReason, RequestStatus
from engine.trace.events import (
    NO_BLOCK,
    NO_REQUEST,
    Counters,
    Decision,
    DecisionKind,
    Header,
    Op,
    Phase,
    RequestArrived,
    StepTrace,
    TraceMessage,
)
from engine.trace.invariants import Violation

if TYPE_CHECKING:
    from engine.trace.keyframe import Keyframe

MAX_FINISHED = 256
"""Finished requests that are kept, newest last."""
MAX_REQUESTS = 65_536
"""Requests kept at all; a trace with more live ones than this is not believed."""
MAX_TOKENS = 1 << 23
"""Tokens kept over all requests; beyond it finished requests go first, then new text is not kept."""
MAX_VIOLATIONS = 64
"""Violations kept, the earliest; `num_violations` counts them all."""
MAX_TEXT = 4096
"""Longest name or message kept, in characters."""

_INT32_MAX = 2**31 - 1
_INT64_MAX = 2**63 - 1

# Plain integers: comparing with enum members costs more than the rest of an operation.
_ALLOCATE, _SHARE, _FILL, _HASH = int(Op.ALLOCATE), int(Op.SHARE), int(Op.FILL), int(Op.HASH)
_RELEASE, _EVICT, _COPY = int(Op.RELEASE), int(Op.EVICT), int(Op.COPY)
_SWAP_OUT, _SWAP_IN = int(Op.SWAP_OUT), int(Op.SWAP_IN)
_LAST_PHASE = int(max(Phase))
_SECOND_BLOCK = (_COPY, _SWAP_IN)
"""Operations whose block of the pool is `b`."""


@dataclass(slots=True, eq=False)
class RequestState:
    """One request as the trace tells of it.

    Attributes:
        request: The engine's number for it.
        token_ids: Prompt and output.
        pieces: The text of each token, as many as `token_ids`.
        table: The block table; NO_BLOCK where a place holds none.
        num_computed: Tokens whose keys and values are in the cache.
        num_cached: Prompt tokens that its first admission found in the prefix cache.
        arrival_ns: Since the trace began, as all times here.
        admitted_ns: Start of the step that first admitted it; -1 before, as with the next two.
        first_token_ns: End of the step that brought its first token.
        finished_ns: End of the step that ended it.
        finish_reason: A `FinishReason` value; empty before the end.
        message: Why it ended, where it went wrong.
        waiting_for: The decision that keeps it waiting; None while it does not wait.
        last_phase: `Phase` of its last turn in a batch; -1 before the first.
        last_scheduled: Tokens computed for it in that turn.
        last_batch: Index of that turn's step; -1 before the first.
        arrival_step: Index of the step before which it arrived.
        first_token_step: Index of the step of its first new token; -1 before.
        last_token_step: Index of the step of its newest token; -1 before.
    """

    request: int
    name: str
    num_prompt_tokens: int
    max_tokens: int
    arrival_ns: int
    arrival_step: int = 0
    temperature: float = 0.0
    parent: int = NO_REQUEST
    status: RequestStatus = RequestStatus.WAITING
    token_ids: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    table: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_cached: int = 0
    admitted_ns: int = -1
    first_token_ns: int = -1
    finished_ns: int = -1
    finish_reason: str = ""
    message: str = ""
    waiting_for: Decision | None = None
    preemptions: int = 0
    last_phase: int = -1
    last_scheduled: int = 0
    last_batch: int = -1
    first_token_step: int = -1
    last_token_step: int = -1

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and output."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    def copy(self) -> RequestState:
        """Another one, equal and sharing nothing that changes."""
        other = shallow_copy(self)
        other.token_ids = self.token_ids.copy()
        other.pieces = self.pieces.copy()
        other.table = self.table.copy()
        return other


class PoolState:
    """The pool, block by block, and the requests, after the last step applied.

    Attributes:
        header: Of the trace.
        step: Index of the last applied step; -1 before the first.
        time_ns: Its start, since the trace began.
        owner: int32[num_blocks]: the request that allocated the block, or, once that let go, the one that has shared it
            longest; -1 where none holds it.
        logical: int32: its place in its owner's table; kept while the block is cached, -1 where it has no content.
        refs: int32: references.
        filled: int32: slots holding keys and values; 0 where the content was let go.
        key: int64: content key, 0 where not hashed; a hashed block without references is cached.
        last_owner: int32: who held it last; -1 where nobody did.
        last_op: int8: the last `Op` on it; -1 where none was.
        touched: int32: index of the step of that operation; -1 where none was.
        free_order: int64: among blocks without references the smallest is allocated next.
        cpu_owner: int32[num_cpu_blocks]: whose content was swapped out to the CPU block; -1 where none.
        cpu_logical: int32: that content's place in its owner's table.
        cpu_filled: int32: its slots.
        requests: Live requests and the last 256 finished, by number, in order of arrival.
        counters: As the last step told them.
        last_step: The last step applied.
        used: Blocks with references.
        cached: Blocks without references whose content can still be found.
        free: Blocks without either.
        violations: What contradicted the state, the earliest 64.
        num_violations: How many did.
    """

    def __init__(self, header: Header) -> None:
        n = header.num_blocks
        cpu = header.num_cpu_blocks
        self.header = header
        self.step = -1
        self.time_ns = 0
        self.owner: npt.NDArray[np.int32] = np.full(n, NO_REQUEST, np.int32)
        self.logical: npt.NDArray[np.int32] = np.full(n, -1, np.int32)
        self.refs: npt.NDArray[np.int32] = np.zeros(n, np.int32)
        self.filled: npt.NDArray[np.int32] = np.zeros(n, np.int32)
        self.key: npt.NDArray[np.int64] = np.zeros(n, np.int64)
        self.last_owner: npt.NDArray[np.int32] = np.full(n, NO_REQUEST, np.int32)
        self.last_op: npt.NDArray[np.int8] = np.full(n, -1, np.int8)
        self.touched: npt.NDArray[np.int32] = np.full(n, -1, np.int32)
        self.free_order: npt.NDArray[np.int64] = np.arange(n, dtype=np.int64)
        self.cpu_owner: npt.NDArray[np.int32] = np.full(cpu, NO_REQUEST, np.int32)
        self.cpu_logical: npt.NDArray[np.int32] = np.full(cpu, -1, np.int32)
        self.cpu_filled: npt.NDArray[np.int32] = np.zeros(cpu, np.int32)
        self.requests: dict[int, RequestState] = {}
        self.counters = Counters(0, 0, 0, 0, 0, n, 0, 0, 0, 0)
        self.last_step: StepTrace | None = None
        self.used = 0
        self.cached = 0
        self.free = n
        self.violations: list[Violation] = []
        self.num_violations = 0
        self._next_order = n
        self._holders: dict[int, list[tuple[int, int]]] = {}
        """Of blocks with several references: (request, place) of each, the longest holder first."""
        self._finished: deque[int] = deque()
        self._num_tokens = 0
        self._displaced: list[tuple[int, int]] = []
        """(block, request) whose place in the table was taken by another block in this step."""
        self._bind()

    def _bind(self) -> None:
        # Reading and writing one element through a memoryview costs half of what it costs through the array.
        self._m_owner = self.owner.data
        self._m_logical = self.logical.data
        self._m_refs = self.refs.data
        self._m_filled = self.filled.data
        self._m_key = self.key.data
        self._m_last_owner = self.last_owner.data
        self._m_last_op = self.last_op.data
        self._m_touched = self.touched.data
        self._m_free_order = self.free_order.data

    # -- reading -------------------------------------------------------------------------------------------------

    def table(self, request: int) -> list[int]:
        """The block table of a request; empty where it is unknown or holds nothing."""
        state = self.requests.get(request)
        return state.table if state is not None else []

    def block_tokens(self, block: int) -> tuple[int, int, int]:
        """Whose tokens a block holds: (request, first position, how many); (-1, 0, 0) where that is not known."""
        if not 0 <= block < self.header.num_blocks:
            return NO_REQUEST, 0, 0
        owner = int(self.owner[block])
        if owner < 0:
            owner = int(self.last_owner[block])
        place = int(self.logical[block])
        if owner not in self.requests or place < 0:
            return NO_REQUEST, 0, 0
        return owner, place * self.header.block_size, int(self.filled[block])

    def block_text(self, block: int) -> list[str]:
        """Text of the tokens in a block, one string a token; empty where whose they are is not known any more."""
        request, start, n = self.block_tokens(block)
        return self.requests[request].pieces[start : start + n] if n else []

    # -- folding -------------------------------------------------------------------------------------------------

    def apply(self, message: TraceMessage) -> None:
        """Fold one message in. Never raises for what a message says; see `violations`."""
        if isinstance(message, StepTrace):
            self._apply_step(message)
        elif isinstance(message, RequestArrived):
            self._apply_arrival(message)

    def _violate(self, name: str, block: int, message: str) -> None:
        self.num_violations += 1
        if len(self.violations) < MAX_VIOLATIONS:
            self.violations.append(Violation(name, block, self.step, message))

    def _apply_arrival(self, arrived: RequestArrived) -> None:
        number = arrived.request
        if not 0 <= number <= _INT32_MAX:
            self._violate("request", -1, f"request {number} arrived, which is not a possible number")
            return
        if number in self.requests:
            self._violate("request", -1, f"request {number} arrived twice")
            return
        if len(self.requests) >= MAX_REQUESTS:
            self._violate("size", -1, f"request {number} arrived, but {MAX_REQUESTS} are live already: not followed")
            return
        ids = arrived.prompt_token_ids
        state = RequestState(
            request=number,
            name=arrived.name[:MAX_TEXT],
            num_prompt_tokens=len(ids),
            max_tokens=arrived.max_tokens,
            arrival_ns=arrived.time_ns,
            arrival_step=self.step + 1,
            temperature=arrived.temperature,
            parent=arrived.parent,
        )
        if self._room_for(len(ids)):
            pieces = arrived.prompt_pieces[: len(ids)]
            state.token_ids = list(ids)
            state.pieces = pieces + [""] * (len(ids) - len(pieces))
            self._num_tokens += len(ids)
        else:
            self._violate("size", -1, f"the prompt of request {number} is not kept: over {MAX_TOKENS} tokens are")
            state.num_prompt_tokens = 0
        self.requests[number] = state

    def _room_for(self, n: int) -> bool:
        while self._num_tokens + n > MAX_TOKENS and self._finished:
            self._forget_oldest()
        return self._num_tokens + n <= MAX_TOKENS

    def _forget_oldest(self) -> None:
        gone = self.requests.pop(self._finished.popleft(), None)
        if gone is not None:
            self._num_tokens -= len(gone.token_ids)

    def _apply_step(self, step: StepTrace) -> None:
        if step.index != self.step + 1:
            self._violate("sequence", -1, f"step {step.index} came after step {self.step}")
        self.step = min(max(step.index, 0), _INT32_MAX)
        self.time_ns = step.start_ns
        end_ns = step.start_ns + step.schedule_ns + step.execute_ns + step.sample_ns + step.update_ns
        for decision in step.decisions:
            self._apply_decision(decision, step.start_ns)
        self._apply_batch(step)
        self._apply_ops(step)
        if self._displaced:
            for block, request in self._displaced:
                self._violate("tables", block, f"request {request} put another block in its place without releasing it")
            self._displaced.clear()
        self._apply_tokens(step, end_ns)
        for request, reason, message in step.finished:
            self._apply_finish(request, reason, message, end_ns)
        self.counters = step.counters
        self.last_step = step

    def _apply_decision(self, decision: Decision, start_ns: int) -> None:
        kind = decision.kind
        request = self.requests.get(decision.request)
        if request is None:
            self._violate("request", -1, f"a decision about request {decision.request}, which never arrived")
            return
        if request.status.is_finished:
            self._violate("request", -1, f"a decision about request {decision.request}, which has ended")
            return
        if kind == DecisionKind.ADMITTED or kind == DecisionKind.RESUMED:
            request.status = RequestStatus.RUNNING
            request.waiting_for = None
            request.num_computed = min(max(decision.numbers.get("cached_tokens", 0), 0), _INT32_MAX)
            if request.admitted_ns < 0:
                request.admitted_ns = start_ns
                request.num_cached = request.num_computed
        elif kind == DecisionKind.WAITS:
            request.waiting_for = decision
        elif kind == DecisionKind.PREEMPTED:
            request.status = RequestStatus.PREEMPTED
            request.waiting_for = decision
            request.preemptions += 1
            request.num_computed = 0

    def _apply_batch(self, step: StepTrace) -> None:
        requests = self.requests
        index = self.step
        running = RequestStatus.RUNNING
        for number, phase, before, scheduled in step.batch:
            request = requests.get(number)
            if request is None:
                self._violate("request", -1, f"request {number} is in the batch, but never arrived")
                continue
            if request.status is not running:
                if request.status.is_finished:
                    self._violate("request", -1, f"request {number} is in the batch, but has ended")
                    continue
                request.status = running
                request.waiting_for = None
            computed = before + scheduled
            if not 0 <= computed <= _INT32_MAX:
                self._violate("request", -1, f"request {number} has {computed} computed tokens")
                continue
            request.num_computed = computed
            if not 0 <= phase <= _LAST_PHASE:
                self._violate("request", -1, f"request {number} is in unknown phase {phase}")
                phase = -1
            request.last_phase = phase
            request.last_scheduled = scheduled
            request.last_batch = index

    def _apply_tokens(self, step: StepTrace, end_ns: int) -> None:
        if not step.tokens:
            return
        if not self._room_for(len(step.tokens)):
            self._violate("size", -1, f"new tokens are not kept: over {MAX_TOKENS} tokens are")
            return
        requests = self.requests
        index = self.step
        for number, token_id, text in step.tokens:
            request = requests.get(number)
            if request is None:
                self._violate("request", -1, f"a token of request {number}, which never arrived")
                continue
            request.token_ids.append(token_id)
            request.pieces.append(text)
            request.last_token_step = index
            self._num_tokens += 1
            if request.first_token_step < 0:
                request.first_token_step = index
                request.first_token_ns = end_ns

    def _apply_finish(self, number: int, reason: str, message: str, end_ns: int) -> None:
        request = self.requests.get(number)
        if request is None:
            self._violate("request", -1, f"request {number} ended, but never arrived")
            return
        if request.status.is_finished:
            self._violate("request", -1, f"request {number} ended twice")
            return
        try:
            request.status = FinishReason(reason).status
        except ValueError:
            self._violate("request", -1, f"request {number} ended for an unknown reason, {reason[:40]!r}")
            request.status = RequestStatus.FINISHED_ERROR
        request.finish_reason = reason[:MAX_TEXT]
        request.message = message[:MAX_TEXT]
        request.finished_ns = end_ns
        request.waiting_for = None
        self._finished.append(number)
        if len(self._finished) > MAX_FINISHED:
            self._forget_oldest()

    def _apply_ops(self, step: StepTrace) -> None:
        n = self.header.num_blocks
        size = self.header.block_size
        refs, filled, keys = self._m_refs, self._m_filled, self._m_key
        last_op, touched = self._m_last_op, self._m_touched
        index = self.step
        for op, a, b, c in step.ops:
            block = b if op in _SECOND_BLOCK else a
            if not 0 <= block < n:
                self._violate("operation", -1, f"operation {op} on block {block}, of a pool of {n}")
                continue
            if op == _FILL:
                if refs[block] <= 0:
                    self._violate("operation", block, f"request {b} filled it without holding it")
                elif 0 <= c <= size:
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
                    filled[block] = c
                else:
                    self._violate("operation", block, f"{c} slots were copied into it from block {a}")
            elif op == _SWAP_OUT:
                self._swap_out(block, b, c)
            elif op == _SWAP_IN:
                self._swap_in(a, block)
            else:
                self._violate("operation", block, f"unknown operation {op}")
                continue
            last_op[block] = op
            touched[block] = index

    def _place(self, block: int, request: int, logical: int) -> None:
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
        self._place(block, request, logical)

    def _own(self, block: int, request: int, logical: int) -> None:
        self._m_owner[block] = request if 0 <= request <= _INT32_MAX else NO_REQUEST
        self._m_logical[block] = logical if 0 <= logical <= _INT32_MAX else -1

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
            refs[block] = 1
            self._own(block, request, logical)
        elif held < _INT32_MAX:
            holders = self._holders.get(block)
            if holders is None:
                holders = self._holders[block] = [(self._m_owner[block], self._m_logical[block])]
            holders.append((request, logical))
            refs[block] = held + 1
        self._place(block, request, logical)

    def _release(self, block: int, request: int) -> None:
        refs = self._m_refs
        held = refs[block]
        if held <= 0:
            self._violate("free_queue", block, f"request {request} released it, but it is free already")
            return
        self._unplace(block, request)
        if held > 1:
            refs[block] = held - 1
            self._hand_over(block, request)
            return
        refs[block] = 0
        self.used -= 1
        self._m_owner[block] = NO_REQUEST
        self._m_last_owner[block] = request if 0 <= request <= _INT32_MAX else NO_REQUEST
        self._m_free_order[block] = self._next_order
        self._next_order += 1
        if self._m_key[block] != 0:
            self.cached += 1
        else:
            self.free += 1
            self._m_filled[block] = 0
            self._m_logical[block] = -1

    def _unplace(self, block: int, request: int) -> None:
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

    def _evict(self, block: int) -> None:
        if self._m_key[block] == 0:
            return
        self._m_key[block] = 0
        if self._m_refs[block] > 0:
            self._violate("operation", block, f"it was evicted while it has {self._m_refs[block]} references")
            return
        self.cached -= 1
        self.free += 1
        self._m_filled[block] = 0
        self._m_logical[block] = -1

    def _swap_out(self, block: int, cpu_block: int, request: int) -> None:
        if not (0 <= cpu_block < self.header.num_cpu_blocks and 0 <= request <= _INT32_MAX):
            self._violate("operation", block, f"it was swapped out to CPU block {cpu_block} for request {request}")
            return
        self.cpu_owner[cpu_block] = request
        self.cpu_logical[cpu_block] = self._m_logical[block]
        self.cpu_filled[cpu_block] = self._m_filled[block]

    def _swap_in(self, cpu_block: int, block: int) -> None:
        if not 0 <= cpu_block < self.header.num_cpu_blocks:
            self._violate("operation", block, f"it was swapped in from CPU block {cpu_block}")
            return
        self._m_filled[block] = int(self.cpu_filled[cpu_block])
        self.cpu_owner[cpu_block] = NO_REQUEST
        self.cpu_logical[cpu_block] = -1
        self.cpu_filled[cpu_block] = 0

    # -- whole states --------------------------------------------------------------------------------------------

    def copy(self) -> PoolState:
        """Another one, equal and sharing nothing that changes; time proportional to the pool."""
        other = shallow_copy(self)
        for name in ARRAYS:
            setattr(other, name, getattr(self, name).copy())
        other.requests = {number: request.copy() for number, request in self.requests.items()}
        other.violations = self.violations.copy()
        other._holders = {block: holders.copy() for block, holders in self._holders.items()}
        other._finished = self._finished.copy()
        other._displaced = self._displaced.copy()
        other._bind()
        return other

    def same_as(self, other: PoolState) -> list[str]:
        """How two states differ, one line each; empty where they are equal in everything that can be seen."""
        from engine.trace.keyframe import differences

        return differences(self, other)

    def to_keyframe(self) -> Keyframe:
        """This state without the requests' text, for a recording."""
        from engine.trace.keyframe import to_keyframe

        return to_keyframe(self)

    @staticmethod
    def from_keyframe(header: Header, keyframe: Keyframe) -> PoolState:
        """The state that a keyframe was made from, without the requests' text.

        Raises:
            ValueError: the keyframe does not belong to such a header, or contradicts itself.
        """
        from engine.trace.keyframe import from_keyframe

        return from_keyframe(header, keyframe)


ARRAYS: dict[str, Any] = {
    "owner": np.int32,
    "logical": np.int32,
    "refs": np.int32,
    "filled": np.int32,
    "key": np.int64,
    "last_owner": np.int32,
    "last_op": np.int8,
    "touched": np.int32,
    "free_order": np.int64,
    "cpu_owner": np.int32,
    "cpu_logical": np.int32,
    "cpu_filled": np.int32,
}
"""The arrays of a state and their types."""
