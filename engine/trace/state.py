"""The fold of a trace: what the pool and the requests look like after each step, as arrays.

Live sessions, playback, recordings and tests all use this one fold, so a picture drawn live and one drawn from a file
are the same. A step costs time proportional to what happened in it, never to the pool. A trace may come from a file
that somebody made up, so nothing in it is believed: what contradicts the state is noted in `violations` and the fold
goes on.
"""

from __future__ import annotations

from collections import deque
from copy import copy as shallow_copy
from typing import TYPE_CHECKING

from engine.request import FinishReason, RequestStatus
from engine.trace.block_fold import ARRAYS, INT32_MAX, BlockFold
from engine.trace.events import (
    NO_REQUEST,
    Counters,
    Decision,
    DecisionKind,
    Header,
    Phase,
    RequestArrived,
    StepTrace,
    TraceMessage,
)
from engine.trace.request_state import RequestState

if TYPE_CHECKING:
    from engine.trace.keyframe import Keyframe

__all__ = ["PoolState", "RequestState"]

MAX_FINISHED = 256
"""Finished requests that are kept, newest last."""
MAX_REQUESTS = 65_536
"""Requests kept at all; a trace with more live ones than this is not believed."""
MAX_TOKENS = 1 << 23
"""Tokens kept over all requests; beyond it finished requests go first, then new text is not kept."""
MAX_TEXT = 4096
"""Longest name or message kept, in characters."""

_LAST_PHASE = int(max(Phase))
_RECOMPUTE = int(Phase.RECOMPUTE)
_OVERRUN = int(Phase.OVERRUN)


class PoolState(BlockFold):
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
        parent: int64: key of the block in front of it where it was hashed; 0 where it is the first of its text, or that
            is not known.
        hits: int32: how often it was shared since it was hashed.
        last_owner: int32: who held it last; -1 where nobody did.
        last_op: int8: the last `Op` on it; -1 where none was.
        touched: int32: index of the step of that operation; -1 where none was.
        free_order: int64: among blocks without references the smallest is allocated next.
        cpu_owner: int32[num_cpu_blocks]: whose content was swapped out to the CPU block; -1 where none.
        cpu_logical: int32: that content's place in its owner's table.
        cpu_filled: int32: its slots; 0 where the CPU block is free. A filled one without an owner holds a cached
            content that was evicted from the cache.
        cpu_key: int64: content key, 0 where it was not hashed.
        cpu_parent: int64: as `parent`.
        cpu_used: CPU blocks with a content.
        requests: Live requests and the last 256 finished, by number, in order of arrival.
        counters: As the last step told them.
        last_step: The last step applied.
        used: Blocks with references.
        shared: Those of them with several.
        held_slots: Filled slots of the blocks with references, each block counted once.
        cached: Blocks without references whose content can still be found.
        free: Blocks without either.
        evicted: Content keys that were evicted, the latest last, as many as the pool has blocks (at most 4,096), each
            with the steps in which it was last evicted and, -1 where it was not, computed again.
        regret_blocks: Blocks whose content a prompt computed although the cache had had it, and evicted it within as
            many evictions as `evicted` remembers: what twice the blocks would have saved.
        regret_since: The first step that `regret_blocks` counts; 0 unless the trace was joined in the middle.
        violations: What contradicted the state, the earliest 64.
        num_violations: How many did.
    """

    def __init__(self, header: Header) -> None:
        super().__init__(header)
        self.time_ns = 0
        self.counters = Counters(0, 0, 0, 0, 0, header.num_blocks, 0, 0, 0, 0)
        self.last_step: StepTrace | None = None
        self._finished: deque[int] = deque()
        self._num_tokens = 0

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

    def _apply_arrival(self, arrived: RequestArrived) -> None:
        number = arrived.request
        if not 0 <= number <= INT32_MAX:
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
            self._num_tokens -= gone.num_tokens

    def _apply_step(self, step: StepTrace) -> None:
        if step.index != self.step + 1:
            self._violate("sequence", -1, f"step {step.index} came after step {self.step}")
        self.step = min(max(step.index, 0), INT32_MAX)
        self.time_ns = step.start_ns
        end_ns = step.start_ns + step.schedule_ns + step.execute_ns + step.sample_ns + step.update_ns
        for decision in step.decisions:
            self._apply_decision(decision, step.start_ns)
        self._apply_batch(step)
        self.apply_ops(step.ops)
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
            request.num_computed = min(max(decision.numbers.get("cached_tokens", 0), 0), INT32_MAX)
            request.run_again(start_ns)
            if request.admitted_ns < 0:
                request.admitted_ns = start_ns
                request.admitted_step = self.step
                request.num_cached = request.num_computed
        elif kind == DecisionKind.WAITS:
            request.waiting_for = decision
        elif kind == DecisionKind.PREEMPTED:
            request.status = RequestStatus.PREEMPTED
            request.waiting_for = decision
            request.preemptions += 1
            request.num_computed = 0
            request.stall(start_ns)

    def _apply_batch(self, step: StepTrace) -> None:
        requests = self.requests
        index = self.step
        running = RequestStatus.RUNNING
        for number, phase, before, scheduled in step.batch:
            if phase == _OVERRUN:
                continue  # it has ended, and may be forgotten: nothing comes of it
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
                request.run_again(step.start_ns)
            if request.recompute_since_ns >= 0 and phase != _RECOMPUTE:
                request.caught_up(step.start_ns)
            computed = before + scheduled
            if not 0 <= computed <= INT32_MAX:
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
            if request.recompute_since_ns >= 0:
                request.caught_up(end_ns)
            if request.first_token_step < 0:
                request.first_token_step = index
                request.first_token_ns = end_ns
                if request.preemptions:
                    request.note_first_token()

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
        request.finished_step = self.step
        request.waiting_for = None
        request.run_again(end_ns)
        request.caught_up(end_ns)
        self._finished.append(number)
        if len(self._finished) > MAX_FINISHED:
            self._forget_oldest()

    # -- whole states --------------------------------------------------------------------------------------------

    def copy(self) -> PoolState:
        """Another one, equal and sharing nothing that changes; time proportional to the pool."""
        other = shallow_copy(self)
        for name in ARRAYS:
            setattr(other, name, getattr(self, name).copy())
        other.requests = {number: request.copy() for number, request in self.requests.items()}
        other.violations = self.violations.copy()
        other.evicted = self.evicted.copy()
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
