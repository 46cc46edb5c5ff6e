"""The engine: requests in, tokens out, one trace message per iteration.

State changes only inside `step()`. `add_request` and `abort` may be called from any thread: they put a note into an
inbox, and the next step begins with it. So a trace is one sequence, and every block operation belongs to a step.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

from engine.baselines.policy import scheduler_for
from engine.request import FinishReason, Request, RequestError, RequestOutput, SamplingParams
from engine.runner import Runner, RunnerError, TextCodec
from engine.session import OutputCallback, Session
from engine.trace.events import Header, NewToken, Reason
from engine.tracer import Sink, Tracer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from engine.config import EngineConfig
    from engine.core.scheduler_output import SampledToken, ScheduledRequest, SchedulerOutput

logger = logging.getLogger("engine")

MAX_NAME_LENGTH = 200
"""Characters of a request's name that are kept; it comes from outside and goes into every trace."""


class _Forking(NamedTuple):
    """A note in the inbox: a request to be forked; `own_params` says whether its parameters were given."""

    session: Session
    parent: int
    own_params: bool


class PagedEngine:
    """Runs requests over a paged cache.

    Attributes:
        config: As given.
        runner: The model, or what stands for it.
        codec: Text to tokens and back.
        scheduler: The policy and, in `scheduler.kv`, the blocks.
        max_model_len: The configured limit or the model's, whichever is smaller.
        header: First message of the trace.
        on_work: Called, from any thread, after something was put into the inbox; a loop wakes up by it.
        overlaps: Whether the next step is scheduled while one is computed.
    """

    overlaps: ClassVar[bool] = False

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        codec: TextCodec,
        *,
        title: str = "",
        description: str = "",
        source: Literal["engine", "simulator"] = "engine",
        provenance: Literal["measured", "simulated", "inferred"] = "measured",
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self.config = config
        self.runner = runner
        self.codec = codec
        self.max_model_len = min(config.scheduler.max_model_len, runner.max_model_len)
        self.scheduler = scheduler_for(
            config,
            max_model_len=self.max_model_len,
            eos_token_ids=runner.eos_token_ids,
            window=runner.model_info.sliding_window,
        )
        if config.scheduler.preemption == "auto" and config.cache.num_cpu_blocks:
            self.scheduler.preemption_costs = runner.preemption_costs()
        self.on_work: Callable[[], None] | None = None
        self._clock = clock
        self._epoch_ns = clock()
        self.header = Header(
            source=source,
            provenance=provenance,
            title=title,
            description=description,
            model=runner.model_info,
            block_size=config.cache.block_size,
            num_blocks=config.cache.num_blocks,
            num_cpu_blocks=config.cache.num_cpu_blocks,
            prefix_caching=self.scheduler.kv.prefix_caching,
            max_num_seqs=config.scheduler.max_num_seqs,
            max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
            max_prefill_chunk=config.scheduler.max_prefill_chunk,
            max_model_len=self.max_model_len,
            preemption=config.scheduler.preemption if config.scheduler.policy == "paged" else "none",
            policy=config.scheduler.policy,
            async_scheduling=self.overlaps,
            started_at=time.time(),
        )
        self._tracer = Tracer(self.header)
        self._inbox: list[Session | _Forking | int] = []
        self._inbox_lock = threading.Lock()
        self._next_id = 0
        self._sessions: dict[int, Session] = {}
        self._choices: dict[int, set[int]] = {}
        self._ended_choices: list[Session] = []

    # ------------------------------------------------------------------ from any thread

    def add_request(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        name: str = "",
        on_output: OutputCallback | None = None,
    ) -> int:
        """Hand in a request. What the policy refuses comes back as an output with `FinishReason.REFUSED`.

        Args:
            prompt: Text, or tokens of the model's vocabulary.
            params: How to sample and when to stop.
            name: Of the caller's choice; its first 200 characters are kept.
            on_output: Called in the engine's thread with each new output of this request.

        Returns:
            The engine's number for it. Of `params.n` choices it is the first one's; the others are called the numbers
            after it in the trace.

        Raises:
            RequestError: the arguments are not a prompt and sampling parameters, a token is not in the vocabulary, or
                several outputs are asked for and the policy shares no blocks.
        """
        token_ids = self._prompt_tokens(prompt)
        params = _checked(params) or SamplingParams()
        if params.n > 1:
            self._require_paging()
        pieces = self.codec.pieces(token_ids) if self._tracer.active else None
        with self._inbox_lock:
            request_id = self._next_id
            self._next_id += params.n
            request = Request(request_id, name[:MAX_NAME_LENGTH], token_ids, params, arrival_ns=self._now())
            self._inbox.append(Session(request, pieces, on_output))
        self._tell_of_work()
        return request_id

    def fork(
        self,
        request_id: int,
        params: SamplingParams | None = None,
        name: str = "",
        on_output: OutputCallback | None = None,
    ) -> int:
        """Split a live request: another one goes on from the tokens that it has when the next step begins.

        Those tokens, prompt and output, are the fork's prompt. Where the request runs, they are not computed again:
        both share its blocks, and the last, partly filled one is copied when one of them writes to it. Where it has
        ended by then, the fork comes back with `FinishReason.REFUSED`.

        Args:
            request_id: The request; for a choice other than the first of several, that one's own number.
            params: Of the fork. None continues with the request's own and what is left of its max_tokens; a seed is
                made another one by adding the distance of the two numbers.
            name: As for `add_request`; empty takes the request's.
            on_output: As for `add_request`.

        Returns:
            The engine's number for the fork.

        Raises:
            RequestError: there never was such a request, params is no SamplingParams, or the policy shares no blocks.
        """
        own = _checked(params)
        self._require_paging()
        with self._inbox_lock:
            if not 0 <= request_id < self._next_id:
                raise RequestError(f"request {request_id} was never added: fork a live one")
            child_id = self._next_id
            self._next_id += own.n if own is not None else 1
            child = Request(
                child_id, name[:MAX_NAME_LENGTH], [], own or SamplingParams(), arrival_ns=self._now(), parent=request_id
            )
            self._inbox.append(_Forking(Session(child, None, on_output), request_id, own is not None))
        self._tell_of_work()
        return child_id

    def _require_paging(self) -> None:
        policy = self.config.scheduler.policy
        if policy != "paged":
            raise RequestError(f"forks and n > 1 share blocks, and the policy {policy} shares none: use paged, or n 1")

    def abort(self, request_id: int) -> None:
        """End a request, with all its choices, at the start of the next step; by its own number, one choice alone.

        One that has ended, or never was, is left alone.
        """
        with self._inbox_lock:
            self._inbox.append(request_id)
        self._tell_of_work()

    @property
    def num_arrived(self) -> int:
        """Requests handed over since the last step; the next one takes them in."""
        return sum(not isinstance(note, int) for note in tuple(self._inbox))

    @property
    def num_open(self) -> int:
        """Outputs that somebody waits for: of requests handed over or taken in, and not ended."""
        return len(self._sessions) + self.num_arrived

    @property
    def has_work(self) -> bool:
        """Whether a step would do something."""
        return bool(self._inbox or self.scheduler.running or self.scheduler.waiting)

    def add_sink(self, sink: Sink) -> None:
        """Let somebody follow the trace. It gets the header at once, and then every message once, in order.

        Raises:
            RuntimeError: steps have been made already, and a trace without its beginning cannot be followed.
        """
        self._tracer.add(sink)

    def _prompt_tokens(self, prompt: str | Sequence[int]) -> list[int]:
        if isinstance(prompt, str):
            return self.codec.encode(prompt)
        vocab_size = self.runner.model_info.vocab_size
        token_ids = list(prompt) if isinstance(prompt, list | tuple) else None
        if token_ids is None or not all(type(token_id) is int for token_id in token_ids):
            raise RequestError("the prompt is neither text nor a list of whole numbers: pass a str or a list[int]")
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
            wrong = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
            raise RequestError(f"token {wrong} is not in the vocabulary: use 0 to {vocab_size - 1}")
        return token_ids

    def _tell_of_work(self) -> None:
        if self.on_work is not None:
            self.on_work()

    def _now(self) -> int:
        return self._clock() - self._epoch_ns

    # ------------------------------------------------------------------ one iteration

    def step(self) -> list[RequestOutput]:
        """Run one iteration.

        Returns:
            What is new for each request concerned; each was also handed to its `on_output`.
        """
        runner = self.runner
        self.scheduler.kv.pool.ops = [] if self._tracer.active else None
        start_ns = self._drain_inbox()
        output = self.scheduler.schedule()
        batch = output.scheduled
        scheduled_ns = self._now()
        copied_ns = scheduled_ns
        if output.copies:
            runner.copy_blocks(output.copies)
            copied_ns = self._now()
        sampled = self._attempt(output, partial(runner.execute, output)) if batch else []
        executed_ns = self._now()
        execute_ns, sample_ns = executed_ns - scheduled_ns, 0
        if batch and sampled is not None:
            execute_ns = copied_ns - scheduled_ns + runner.last_execute_ns
            sample_ns = runner.last_sample_ns
        times = (start_ns, scheduled_ns - start_ns, execute_ns, sample_ns)
        return self._conclude(output, sampled, batch, times, executed_ns)

    def _conclude(
        self,
        output: SchedulerOutput,
        sampled: Sequence[int | None] | None,
        told: Sequence[ScheduledRequest],
        times: tuple[int, int, int, int],
        executed_ns: int,
    ) -> list[RequestOutput]:
        """Take in what a forward brought, tell the trace and the callers.

        Args:
            output: Its batch, of requests that live.
            sampled: Its tokens; None where it failed.
            told: Its batch as the trace tells of it.
            times: Start, schedule, execute and sample, in ns, as in `StepTrace`.
            executed_ns: When the tokens were there.
        """
        scheduler, failed = self.scheduler, sampled is None
        begun = self._begin_choices(output) if output.forks and not failed else []
        tokens = [self._take(token) for token in scheduler.update(output, sampled)] if sampled is not None else []
        ended, scheduler.ended = scheduler.ended, []
        decisions, scheduler.decisions = scheduler.decisions, []
        outputs = self._outputs([*(share.request for share in output.scheduled), *begun], ended)
        if told or ended or decisions:
            update_ns = self._now() - executed_ns
            self._tracer.stepped((*times, update_ns), told, tokens, ended, decisions, scheduler, failed=failed)
        for session, request_output in outputs:
            session.deliver(request_output)
        return [request_output for _, request_output in outputs]

    def _drain_inbox(self) -> int:
        """Take in what came since the last step; the time at which the inbox was emptied."""
        with self._inbox_lock:
            inbox, self._inbox = self._inbox, []
            now = self._now()
        self._take_notes(inbox)
        return now

    def _fork_waits(self) -> bool:
        """Whether somebody in the inbox, whose lock the caller holds, is to be forked."""
        return any(isinstance(note, _Forking) for note in self._inbox)

    def _take_notes(self, inbox: Sequence[Session | _Forking | int]) -> None:
        for note in inbox:
            if isinstance(note, int):
                self._abort(note)
            elif isinstance(note, _Forking):
                self._fork(note)
            else:
                self._arrive(note)
                self.scheduler.add_request(note.request)

    def _arrive(self, session: Session) -> None:
        """Take in a request that is no choice of another one."""
        request, pieces = session.request, session.pieces
        request_id, params = request.request_id, request.params
        self._sessions[request_id] = session
        if self._tracer.active:
            if pieces is None:
                pieces = self.codec.pieces(request.prompt_token_ids)
            self._tracer.arrived(request, pieces, max(1, self.scheduler.max_tokens(request)))
        session.pieces = None
        if params.n > 1:
            self._choices[request_id] = set(range(request_id, request_id + params.n))
            request.forks = [
                Request(
                    request_id + index,
                    request.name,
                    request.prompt_token_ids,
                    replace(params, n=1, seed=None if params.seed is None else params.seed + index),
                    parent=request_id,
                    index=index,
                )
                for index in range(1, params.n)
            ]

    def _fork(self, note: _Forking) -> None:
        child = note.session.request
        known = self._sessions.get(note.parent)
        if known is None:
            self._arrive(note.session)
            self.scheduler.refuse_fork(child, note.parent)
            return
        parent = known.request
        child.prompt_token_ids = parent.tokens(0, parent.num_tokens)
        child.name = child.name or parent.name
        if not note.own_params:
            params = parent.params
            child.params = replace(
                params,
                n=1,
                max_tokens=params.max_tokens - len(parent.output_token_ids),
                seed=None if params.seed is None else params.seed + child.request_id - parent.request_id,
            )
        self._arrive(note.session)
        self.scheduler.fork(parent, child)

    def _begin_choices(self, output: SchedulerOutput) -> list[Request]:
        """Let the choices arrive whose first token has been sampled."""
        now = self._now()
        begun: list[Request] = []
        pieces: dict[int, list[str]] = {}
        for share, request in output.forks:
            parent = output.scheduled[share].request
            session = self._sessions[parent.request_id].choice(request)
            self._sessions[request.request_id] = session
            request.arrival_ns = now
            if self._tracer.active:
                if parent.request_id not in pieces:
                    pieces[parent.request_id] = self.codec.pieces(parent.prompt_token_ids)
                max_tokens = max(1, self.scheduler.max_tokens(request))
                self._tracer.arrived(request, pieces[parent.request_id], max_tokens)
            begun.append(request)
        return begun

    def _abort(self, request_id: int) -> None:
        for number in sorted(self._choices.get(request_id, {request_id})):
            if self.scheduler.abort(number):
                continue
            # A choice that is not forked yet: its first one keeps it.
            for group, members in self._choices.items():
                if number in members and group in self._sessions:
                    session = self._sessions[group]
                    self._end_choices(session, [c for c in session.request.forks if c.request_id == number])

    def _end_choices(self, session: Session, choices: list[Request]) -> None:
        """End choices that were not forked yet, as their first one ended or, where that goes on, as aborted."""
        first = session.request
        first.forks = [choice for choice in first.forks if choice not in choices]
        for choice in choices:
            choice.finish_reason = first.finish_reason or FinishReason.ABORT
            choice.status, choice.error = choice.finish_reason.status, first.error
            self._ended_choices.append(session.choice(choice))

    def _attempt(self, output: SchedulerOutput, execute: Callable[[], list[int | None]]) -> list[int | None] | None:
        """The sampled tokens, or None where the forward failed and ended the requests that it could not serve."""
        try:
            sampled = execute()
            expected = len(output.scheduled) + len(output.forks)
            if len(sampled) != expected:
                raise RunnerError(f"the runner returned {len(sampled)} tokens for {expected} requests")
        except Exception as error:
            logger.exception("step %d failed", self._tracer.num_steps)
            batch = [share.request for share in output.scheduled]
            named = set(error.request_ids) if isinstance(error, RunnerError) else set()
            message = f"the step failed: {_one_line(error)}"
            for request in [request for request in batch if request.request_id in named] or batch:
                self.scheduler.fail(request, Reason.STEP_FAILED, {}, message)
            return None
        return sampled

    def _take(self, token: SampledToken) -> NewToken:
        """Turn a new token into text, and end its request where the token or the text says so."""
        request, token_id, ends = token
        try:
            piece, ends = self._sessions[request.request_id].push(token_id, ends, self.codec)
        except Exception as error:
            logger.exception("the text of request %d could not be decoded", request.request_id)
            message = f"its text could not be decoded: {_one_line(error)}"
            self.scheduler.fail(request, Reason.STEP_FAILED, {}, message)
            return NewToken(request.request_id, token_id, "")
        if ends is not None:
            self.scheduler.finish(request, ends)
        return NewToken(request.request_id, token_id, piece)

    def _outputs(self, served: Sequence[Request], ended: Sequence[Request]) -> list[tuple[Session, RequestOutput]]:
        """What is new for each request that got a token or has ended."""
        sessions = [self._sessions[request.request_id] for request in served]
        outputs = [(s, s.take_output()) for s in sessions if s.has_news and s.request.finish_reason is None]
        for request in ended:
            session = self._sessions.pop(request.request_id)
            self.runner.forget(request.request_id)
            session.flush()
            outputs.append((session, session.take_output()))
            self._forget_choice(request)
            if request.forks:
                self._end_choices(session, request.forks)
        if self._ended_choices:
            for session in self._ended_choices:
                outputs.append((session, session.take_output()))
                self._forget_choice(session.request)
            self._ended_choices = []
        return outputs

    def _forget_choice(self, request: Request) -> None:
        first = request.request_id - request.index
        members = self._choices.get(first)
        if members is not None:
            members.discard(request.request_id)
            if not members:
                del self._choices[first]


def _checked(params: SamplingParams | None) -> SamplingParams | None:
    if params is not None and not isinstance(params, SamplingParams):
        raise RequestError(f"params is a {type(params).__name__}: pass a SamplingParams")
    return params


def _one_line(error: Exception) -> str:
    """An exception's text as one bounded line."""
    return " ".join(str(error).split())[:300] or type(error).__name__
