"""Who runs in the next iteration, with how many tokens, and why the others do not.

One loop without a prefill phase and a decode phase: a running request is given tokens until its computed tokens catch
up with its known ones, within the token budget; then waiting requests are admitted, first come, first served. When a
running request finds no block, the youngest running one gives way: its blocks are released, its tokens kept, and it
goes to the front of the waiting ones, to be computed again.

Both queues are in order of arrival, and every running request came before every waiting one: admission takes the head
only, and who gives way is the youngest that runs and becomes the new head. So nobody is
overtaken; and since a step serves the running ones in that order, whoever gives way in it was not served in it yet.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final

from engine.core.kv_cache_manager import KVCacheManager
from engine.core.scheduler_output import Fork, SampledToken, ScheduledRequest, SchedulerOutput
from engine.core.wait_reasons import WaitReasons
from engine.request import FinishReason, Request, RequestStatus
from engine.trace.events import Decision, DecisionKind, Phase, Reason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.config import EngineConfig

__all__ = ["ScheduledRequest", "Scheduler", "SchedulerOutput"]

# Looked up for every running request in every step.
_RUNNING: Final = RequestStatus.RUNNING
_DECODE: Final = Phase.DECODE


class Scheduler:
    """The policy.

    Attributes:
        kv: The block manager.
        waiting: By request id; the head is served next.
        running: By request id, oldest first.
        decisions: What was decided since the caller last emptied it.
        ended: Requests that ended since the caller last emptied it, in that order, each once.
        preemption_costs: For `auto`: ns to copy a block to the CPU pool or back, and ns to compute a token.
        num_preempted: Of the waiting requests, how many have run before.
        num_preemptions: Since the start.
        prefix_queried_tokens: Prompt tokens of all first admissions.
        prefix_hit_tokens: Of these, tokens found in the prefix cache. A preempted request that finds its own blocks
            again is not counted: that is no sharing.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        max_model_len: int | None = None,
        eos_token_ids: frozenset[int] = frozenset(),
        kv: KVCacheManager | None = None,
        window: int = 0,
    ) -> None:
        limits = config.scheduler
        # What a token looks back at and a chunk may begin with the last token of a block. A pool that cannot hold that
        # at any place never has a block behind the window.
        room = 1 + (config.cache.num_blocks - 1) * config.cache.block_size - (window - 1)
        self.kv = kv or KVCacheManager(config.cache, window=window if room > 0 else 0)
        self.max_num_seqs = limits.max_num_seqs
        self.max_num_batched_tokens = limits.max_num_batched_tokens
        self.max_chunk = limits.max_prefill_chunk or limits.max_num_batched_tokens
        self._slides = self.kv.window > 0
        if self._slides:
            self.max_chunk = min(self.max_chunk, room)
        self.max_model_len = min(limits.max_model_len, max_model_len or limits.max_model_len)
        self.eos_token_ids = eos_token_ids
        self.preemption = limits.preemption
        self.preemption_costs = (0.0, 0.0)
        self.waiting: OrderedDict[int, Request] = OrderedDict()
        self.running: dict[int, Request] = {}
        self.decisions: list[Decision] = []
        self.ended: list[Request] = []
        self.num_preempted = 0
        self.num_preemptions = 0
        self.prefix_queried_tokens = 0
        self.prefix_hit_tokens = 0
        self._computed_once: dict[int, int] = {}
        self._wait_reasons = WaitReasons()

    # ------------------------------------------------------------------ in and out

    def add_request(self, request: Request) -> None:
        """Queue a request, or refuse at once what can never run: it would block everybody behind it for good."""
        tokens, pool = request.num_prompt_tokens, self.kv.pool.num_blocks
        needs = self.kv.most_held(tokens + 1, self.max_chunk)
        if tokens == 0:
            self._refuse(request, Reason.EMPTY_PROMPT, {}, "the prompt is empty: send at least one token")
        elif tokens >= self.max_model_len:
            self._refuse(
                request,
                Reason.TOO_LONG,
                {"tokens": tokens, "limit": self.max_model_len},
                f"the prompt has {tokens} tokens and a request may have {self.max_model_len} with its output: "
                f"shorten it to at most {self.max_model_len - 1}",
            )
        elif needs > pool:
            self._refuse(
                request,
                Reason.NEVER_FITS,
                {"needs": needs, "pool": pool},
                f"the prompt and its first new token need {needs} blocks and the pool has {pool}: "
                "shorten the prompt, or start with more blocks (--num-blocks)",
            )
        else:
            self.waiting[request.request_id] = request
            self._wait_reasons.arrived()

    def fork(self, parent: Request, child: Request) -> None:
        """Split a live request: the child knows the tokens that its parent knows, and goes on in its own way.

        A running parent's blocks are shared, so a child needs none to run: it does so at once, behind all that run,
        where there is a place. Otherwise it waits like any other request.
        """
        if parent.status is _RUNNING and len(self.running) < self.max_num_seqs:
            self._run_fork(parent, child)
        else:
            self.add_request(child)

    def refuse_fork(self, child: Request, parent_id: int) -> None:
        """End a request that was to be forked from one that has ended."""
        message = f"request {parent_id} has ended, and only a live request can be forked"
        self._refuse(child, Reason.PARENT_ENDED, {"parent": parent_id}, message)

    def _run_fork(self, parent: Request, child: Request) -> None:
        child_id, computed = child.request_id, parent.num_computed_tokens
        shared = self.kv.fork(parent, child)
        self.running[child_id] = child
        child.status = RequestStatus.RUNNING
        child.num_computed_tokens = child.num_cached_tokens = computed
        numbers = {"parent": parent.request_id, "shared": shared, "cached_tokens": computed}
        if behind := self.kv.num_behind(child_id):
            numbers["behind"] = behind
        self.decisions.append(Decision(DecisionKind.ADMITTED, child_id, Reason.FORKED, numbers))

    def max_tokens(self, request: Request) -> int:
        """Most tokens that the request will generate: what it asks for, capped by max_model_len."""
        return min(request.params.max_tokens, self.max_model_len - request.num_prompt_tokens)

    def abort(self, request_id: int) -> bool:
        """End a waiting or running request; nothing happens to others. Says whether there was one."""
        request = self.running.get(request_id) or self.waiting.get(request_id)
        if request is None:
            return False
        self.finish(request, FinishReason.ABORT)
        return True

    def fail(self, request: Request, reason: Reason, numbers: dict[str, int], message: str) -> None:
        """End a request with an error; its tokens so far are kept."""
        if not request.status.is_finished:
            self.decisions.append(Decision(DecisionKind.FAILED, request.request_id, reason, numbers))
            self.finish(request, FinishReason.ERROR, message)

    def finish(self, request: Request, reason: FinishReason, error: str | None = None) -> None:
        """The one way in which a request ends, whatever ends it. A second call does nothing."""
        if request.status.is_finished:
            return
        request_id = request.request_id
        if self.running.pop(request_id, None) is None and self.waiting.pop(request_id, None) is not None:
            self._wait_reasons.left(request_id)
            self._wait_reasons.order_changed()
            self.num_preempted -= request.status is RequestStatus.PREEMPTED
        request.status = reason.status
        request.finish_reason = reason
        request.error = error
        self.kv.forget(request_id)
        self._computed_once.pop(request_id, None)
        self.ended.append(request)

    def _refuse(self, request: Request, reason: Reason, numbers: dict[str, int], message: str) -> None:
        self.decisions.append(Decision(DecisionKind.REFUSED, request.request_id, reason, numbers))
        self.finish(request, FinishReason.REFUSED, message)

    # ------------------------------------------------------------------ one iteration

    def schedule(self) -> SchedulerOutput:
        """Choose the next batch and give it its blocks."""
        scheduled: list[ScheduledRequest] = []
        budget = self.max_num_batched_tokens
        forks: list[Fork] = []
        block_table, block_size = self.kv.block_table, self.kv.block_size
        shared_tails = self.kv.shared_tails
        computed_once = self._computed_once
        for request in tuple(self.running.values()):
            if budget == 0:
                break
            if request.status is not _RUNNING:
                continue  # gave way to an older one, in this very loop
            start = request.num_computed_tokens
            num_prompt = len(request.prompt_token_ids)
            num_new = num_prompt + len(request.output_token_ids) - start
            if num_new > 1:
                num_new = min(num_new, self.max_chunk, budget)
            if shared_tails and request.request_id in shared_tails and not self._make_writable(request):
                continue
            table = block_table(request.request_id)
            if start + num_new > len(table) * block_size and not self._make_room(request, start + num_new):
                continue
            if start >= num_prompt and request.request_id not in computed_once:
                phase = _DECODE
            else:
                phase = self._phase_of(request, start)
                if request.forks and start + num_new == request.num_tokens:
                    forks += [Fork(len(scheduled), child) for child in request.forks]
            scheduled.append(ScheduledRequest(request, phase, start, num_new, table))
            budget -= num_new
        budget = self._admit(scheduled, forks, budget)
        self.decisions += self._wait_reasons.others_wait(self.waiting)
        copies, self.kv.pool.copies = self.kv.pool.copies, []
        return SchedulerOutput(scheduled, self.max_num_batched_tokens - budget, copies, forks)

    def update(self, output: SchedulerOutput, sampled: Sequence[int | None]) -> list[SampledToken]:
        """Take in what the forward computed.

        Args:
            output: What `schedule` returned.
            sampled: Of each scheduled request, the next token, or None in the middle of its prefill; then of each fork.

        Returns:
            The new tokens. A request whose `ends` is set goes on until the caller calls `finish`, which may know a
            better reason (a stop string in the text of that token).
        """
        tokens: list[SampledToken] = []
        publish = self.kv.publish
        batch, forks = output.scheduled, output.forks
        for (request, _, start, num_scheduled, table), token_id in zip(batch, sampled[: len(batch)], strict=True):
            request.num_computed_tokens = start + num_scheduled
            publish(request, start, table)
            if token_id is not None:
                request.output_token_ids.append(token_id)
                tokens.append(SampledToken(request, token_id, self._end_of(request, token_id)))
        if self._slides:
            for share in batch:
                self.kv.release_behind(share.request)
        if forks:
            tokens += self._begin_choices(output, sampled[len(batch) :])
        return tokens

    def _begin_choices(self, output: SchedulerOutput, sampled: Sequence[int | None]) -> list[SampledToken]:
        """Fork what was asked for together: the prompt is computed, and each choice has its first token."""
        tokens: list[SampledToken] = []
        waiting: list[Request] = []
        for (share, child), token_id in zip(output.forks, sampled, strict=True):
            assert token_id is not None  # they are scheduled where the prompt's last token is computed
            parent = output.scheduled[share].request
            parent.forks = []
            if len(self.running) < self.max_num_seqs:
                self._run_fork(parent, child)
            else:
                waiting.append(child)
            child.output_token_ids.append(token_id)
            tokens.append(SampledToken(child, token_id, self._end_of(child, token_id)))
        if waiting:
            for child in reversed(waiting):
                # They came with a request that runs, and so before whoever waits.
                self.waiting[child.request_id] = child
                self.waiting.move_to_end(child.request_id, last=False)
            self._wait_reasons.order_changed()
            numbers = {"running": len(self.running), "limit": self.max_num_seqs}
            head = next(iter(self.waiting.values()))
            self.decisions += self._wait_reasons.head_waits(head, Reason.SEQUENCE_CAP, numbers)
            self.decisions += self._wait_reasons.others_wait(self.waiting)
        return tokens

    def _end_of(self, request: Request, token_id: int) -> FinishReason | None:
        params = request.params
        if token_id in params.stop_token_ids or (token_id in self.eos_token_ids and not params.ignore_eos):
            return FinishReason.STOP
        return FinishReason.LENGTH if self.at_limit(request) else None

    def at_limit(self, request: Request) -> bool:
        """Whether the request has as many tokens as it may have."""
        generated = len(request.output_token_ids)
        return generated >= request.params.max_tokens or len(request.prompt_token_ids) + generated >= self.max_model_len

    def _phase_of(self, request: Request, start: int) -> Phase:
        if start < self._computed_once.get(request.request_id, 0):
            return Phase.RECOMPUTE
        return Phase.PREFILL if start < len(request.prompt_token_ids) else Phase.DECODE

    # ------------------------------------------------------------------ pressure

    @property
    def has_plenty_of_room(self) -> bool:
        """Whether `has_room` is True whatever is known of the running requests: a quick look, and often enough."""
        kv = self.kv
        # A stretch of n tokens opens at most n / block_size blocks and one more.
        most = len(self.running) + self.max_num_batched_tokens // kv.block_size + len(kv.shared_tails)
        return most <= kv.pool.num_free

    @property
    def has_room(self) -> bool:
        """Whether the running requests can have the blocks of their next tokens without anybody giving way.

        Never True where one would have to; False here and there where the token budget would have spared it.
        """
        kv = self.kv
        needs = 0
        for request in self.running.values():
            if request.status is _RUNNING:
                start = request.num_computed_tokens
                stop = start + min(request.num_tokens - start, self.max_chunk, self.max_num_batched_tokens)
                needs += max(0, kv.num_blocks_for(stop) - len(kv.block_table(request.request_id)))
                needs += request.request_id in kv.shared_tails
        return needs <= kv.pool.num_free

    def _make_writable(self, request: Request) -> bool:
        """Give a running request a last block of its own, at the cost of younger ones; False if it lost its place."""
        kv = self.kv
        while kv.needs_copy(request) and not kv.copy_tail(request):
            # With everybody else gone nobody would share it.
            victim = next(reversed(self.running.values()))
            self._preempt(victim, request, 1)
            if victim is request:
                return False
        return True

    def _make_room(self, request: Request, num_tokens: int) -> bool:
        """Give a running request the blocks for its tokens, at the cost of younger ones; False if it lost its place."""
        kv = self.kv
        while not kv.allocate_slots(request, num_tokens):
            needs = kv.num_blocks_for(num_tokens)
            if needs - kv.num_behind(request.request_id) > kv.pool.num_blocks:
                # Nobody's giving way would help. Whoever gives way later fits once it is alone: it was not alone, and
                # so had at least one block less than the pool.
                self._outgrew(request, needs - kv.num_behind(request.request_id))
                return False
            victim = next(reversed(self.running.values()))
            self._preempt(victim, request, needs - len(kv.block_table(request.request_id)))
            if victim is request:
                return False
        return True

    def _preempt(self, victim: Request, to: Request, needs: int) -> None:
        request_id = victim.request_id
        free = self.kv.pool.num_free
        swapped = self.kv.swap_out(victim) if self._pays_to_swap(victim) else 0
        released = self.kv.free(request_id)
        numbers = {"needs": needs, "free": free, "released": released}
        reason = Reason.SWAPPED_OUT_ITSELF if swapped else Reason.GAVE_WAY_TO_ITSELF
        if victim is not to:
            reason = Reason.SWAPPED_OUT if swapped else Reason.GAVE_WAY
            numbers["to"] = to.request_id
        if swapped:
            numbers["swapped"] = swapped
        self.decisions.append(Decision(DecisionKind.PREEMPTED, request_id, reason, numbers))
        self._computed_once[request_id] = max(self._computed_once.get(request_id, 0), victim.num_computed_tokens)
        victim.num_computed_tokens = 0
        victim.num_preemptions += 1
        victim.status = RequestStatus.PREEMPTED
        del self.running[request_id]
        self.waiting[request_id] = victim
        self.waiting.move_to_end(request_id, last=False)
        self._wait_reasons.order_changed()
        self.num_preempted += 1
        self.num_preemptions += 1

    def _pays_to_swap(self, victim: Request) -> bool:
        """Whether the victim's blocks are to be copied out, and not computed again.

        `auto` weighs copying every block that it holds out and back against computing every token again, at the
        runner's costs.
        """
        if self.kv.cpu is None or self.preemption == "recompute":
            return False
        if self.preemption == "swap":
            return True
        ns_per_block, ns_per_token = self.preemption_costs
        computed = victim.num_computed_tokens
        held = self.kv.num_blocks_for(computed) - self.kv.num_behind(victim.request_id)
        return 2 * held * ns_per_block < computed * ns_per_token

    def _outgrew(self, request: Request, needs: int) -> None:
        pool = self.kv.pool.num_blocks
        request.outgrew_pool = True
        self.fail(
            request,
            Reason.OUTGREW_POOL,
            {"needs": needs, "pool": pool},
            f"after {len(request.output_token_ids)} new tokens it needs {needs} blocks and the whole pool has {pool}: "
            "ask for fewer tokens, or start with more blocks (--num-blocks)",
        )

    # ------------------------------------------------------------------ admission

    def _admit(self, scheduled: list[ScheduledRequest], forks: list[Fork], budget: int) -> int:
        """Start waiting requests from the head for as long as they fit; the budget that is left."""
        kv, pool = self.kv, self.kv.pool
        while self.waiting:
            request = next(iter(self.waiting.values()))
            closed = self._closed(budget)
            if closed is not None:
                self.decisions += self._wait_reasons.head_waits(request, *closed)
                break
            known = request.num_tokens
            found = kv.get_computed_blocks(request)
            start = found.num_tokens
            # With a window its beginning may be let go before its end is computed: room for all of it is not needed.
            first = min(known, start + self.max_chunk) if self._slides else known
            free = pool.num_free
            # Whoever begins where its first chunk fits, and no more, has to give way before it is through.
            may_begin = not self._slides or kv.num_free_needed(known, found, self.max_chunk) <= free
            if not may_begin or not kv.allocate_slots(request, first, found):
                reason, numbers = self._no_room(request, kv.num_free_needed(known, found, self.max_chunk), free)
                self.decisions += self._wait_reasons.head_waits(request, reason, numbers)
                break
            needs = kv.num_blocks_for(first) - found.num_behind - found.num_shared
            numbers = {"needs": needs, "free": free}
            if found.swapped or found.num_brought:
                numbers["swapped"] = found.num_brought
            if found.num_behind:
                numbers["behind"] = found.num_behind
            self._start(request, start, numbers, Reason.SWAPPED_IN if found.swapped else Reason.FITS)
            num_new = min(known - start, self.max_chunk, budget)
            phase, table = self._phase_of(request, start), kv.block_table(request.request_id)
            if request.forks and start + num_new == known:
                forks += [Fork(len(scheduled), child) for child in request.forks]
            scheduled.append(ScheduledRequest(request, phase, start, num_new, table))
            budget -= num_new
        return budget

    def _closed(self, budget: int) -> tuple[Reason, dict[str, int]] | None:
        """Why nobody is admitted now, whoever it is; None where somebody may be."""
        if len(self.running) >= self.max_num_seqs:
            return Reason.SEQUENCE_CAP, {"running": len(self.running), "limit": self.max_num_seqs}
        if budget == 0:
            return Reason.TOKEN_BUDGET, {"scheduled": self.max_num_batched_tokens, "limit": self.max_num_batched_tokens}
        return None

    def _no_room(self, request: Request, needs: int, free: int) -> tuple[Reason, dict[str, int]]:
        """Why the head of the queue cannot have its blocks."""
        return Reason.NO_BLOCKS, {"needs": needs, "free": free}

    def _start(self, request: Request, start: int, numbers: dict[str, int], reason: Reason) -> None:
        """Move a request that has its blocks, and so many computed tokens in them, from waiting to running."""
        request_id = request.request_id
        resumed = request.status is RequestStatus.PREEMPTED
        del self.waiting[request_id]
        self._wait_reasons.left(request_id)
        self.num_preempted -= resumed
        self.running[request_id] = request
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = start
        if not resumed:
            request.num_cached_tokens = start
            self.prefix_queried_tokens += request.num_prompt_tokens
            self.prefix_hit_tokens += start
        kind = DecisionKind.RESUMED if resumed else DecisionKind.ADMITTED
        self.decisions.append(Decision(kind, request_id, reason, numbers | {"cached_tokens": start}))
