"""The engine: requests in, tokens out, one trace message per iteration.

State changes only inside `step()`. `add_request` and `abort` may be called from any thread: they put a note into an
inbox, and the next step begins with it. So a trace is one sequence, and every block operation belongs to a step.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

from engine.core.scheduler import Scheduler
from engine.output_text import OutputText
from engine.request import FinishReason, Request, RequestError, RequestOutput, SamplingParams
from engine.runner import Runner, RunnerError, TextCodec
from engine.trace.events import (
    BatchMember,
    Counters,
    Finish,
    Header,
    NewToken,
    Reason,
    RequestArrived,
    StepTrace,
    TraceMessage,
)

if TYPE_CHECKING:
    from engine.config import EngineConfig
    from engine.core.scheduler_output import SampledToken, ScheduledRequest, SchedulerOutput

logger = logging.getLogger("engine")

Sink = Callable[[TraceMessage], None]
OutputCallback = Callable[[RequestOutput], None]

MAX_NAME_LENGTH = 200
"""Characters of a request's name that are kept; it comes from outside and goes into every trace."""


class _Session:
    """What the engine keeps for a live request besides the request itself."""

    __slots__ = ("new_text", "new_tokens", "on_output", "pieces", "request", "text")

    def __init__(self, request: Request, pieces: list[str] | None, on_output: OutputCallback | None) -> None:
        self.request = request
        self.pieces = pieces
        self.on_output = on_output
        self.text: OutputText | None = None
        self.new_text = ""
        self.new_tokens: list[int] = []

    def take_output(self) -> RequestOutput:
        """What came since the last call."""
        request = self.request
        output = RequestOutput(
            request_id=request.request_id,
            text=self.new_text,
            token_ids=tuple(self.new_tokens),
            finish_reason=request.finish_reason,
            error=request.error,
            num_prompt_tokens=request.num_prompt_tokens,
            num_output_tokens=len(request.output_token_ids),
            num_cached_tokens=request.num_cached_tokens,
        )
        self.new_text = ""
        self.new_tokens = []
        return output


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
    """

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
        self.scheduler = Scheduler(config, max_model_len=self.max_model_len, eos_token_ids=runner.eos_token_ids)
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
            prefix_caching=config.cache.prefix_caching,
            max_num_seqs=config.scheduler.max_num_seqs,
            max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
            max_prefill_chunk=config.scheduler.max_prefill_chunk,
            max_model_len=self.max_model_len,
            preemption=config.scheduler.preemption,
            started_at=time.time(),
        )
        self._sinks: list[Sink] = []
        self._inbox: list[_Session | int] = []
        self._inbox_lock = threading.Lock()
        self._next_id = 0
        self._sessions: dict[int, _Session] = {}
        self._num_steps = 0
        self._generated_tokens = 0

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
            The engine's number for it.

        Raises:
            RequestError: the arguments are not a prompt and sampling parameters, or a token is not in the vocabulary.
        """
        token_ids = self._prompt_tokens(prompt)
        if params is None:
            params = SamplingParams()
        elif not isinstance(params, SamplingParams):
            raise RequestError(f"params is a {type(params).__name__}: pass a SamplingParams")
        pieces = self.codec.pieces(token_ids) if self._sinks else None
        with self._inbox_lock:
            request_id = self._next_id
            self._next_id += 1
            request = Request(request_id, name[:MAX_NAME_LENGTH], token_ids, params, arrival_ns=self._now())
            self._inbox.append(_Session(request, pieces, on_output))
        self._tell_of_work()
        return request_id

    def abort(self, request_id: int) -> None:
        """End a request at the start of the next step. One that has ended, or never was, is left alone."""
        with self._inbox_lock:
            self._inbox.append(request_id)
        self._tell_of_work()

    @property
    def has_work(self) -> bool:
        """Whether a step would do something."""
        return bool(self._inbox or self.scheduler.running or self.scheduler.waiting)

    def add_sink(self, sink: Sink) -> None:
        """Let somebody follow the trace. It gets the header at once, and then every message once, in order.

        Raises:
            RuntimeError: steps have been made already, and a trace without its beginning cannot be followed.
        """
        if self._num_steps:
            raise RuntimeError("a sink must be added before the first step: the trace has begun without it")
        sink(self.header)
        self._sinks.append(sink)

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
        scheduler, pool, tracing = self.scheduler, self.scheduler.kv.pool, bool(self._sinks)
        pool.ops = [] if tracing else None
        start_ns = self._drain_inbox()
        output = scheduler.schedule()
        scheduled_ns = self._now()
        sampled = self._execute(output) if output.scheduled else []
        executed_ns = self._now()
        tokens = [] if sampled is None else [self._take(token) for token in scheduler.update(output, sampled)]
        batch = [] if sampled is None else output.scheduled
        ended, scheduler.ended = scheduler.ended, []
        decisions, scheduler.decisions = scheduler.decisions, []
        outputs = self._outputs(batch, ended)
        if output.scheduled or ended or decisions:
            if tracing:
                forward_ns = executed_ns - scheduled_ns
                self._emit(
                    StepTrace(
                        index=self._num_steps,
                        start_ns=start_ns,
                        schedule_ns=scheduled_ns - start_ns,
                        execute_ns=self.runner.last_execute_ns if batch else forward_ns,
                        sample_ns=self.runner.last_sample_ns if batch else 0,
                        update_ns=self._now() - executed_ns,
                        batch=self._batch_members(output, failed=sampled is None),
                        ops=pool.take_ops(),
                        tokens=tokens,
                        finished=[Finish(r.request_id, r.finish_reason or "", r.error or "") for r in ended],
                        decisions=decisions,
                        counters=self._counters(),
                    )
                )
            self._num_steps += 1
        for session, request_output in outputs:
            self._call_back(session, request_output)
        return [request_output for _, request_output in outputs]

    def _drain_inbox(self) -> int:
        """Take in what came since the last step; the time at which the inbox was emptied."""
        with self._inbox_lock:
            inbox, self._inbox = self._inbox, []
            now = self._now()
        for note in inbox:
            if isinstance(note, int):
                self.scheduler.abort(note)
                continue
            request = note.request
            self._sessions[request.request_id] = note
            if self._sinks:
                pieces = note.pieces if note.pieces is not None else self.codec.pieces(request.prompt_token_ids)
                self._emit(
                    RequestArrived(
                        request=request.request_id,
                        name=request.name,
                        time_ns=request.arrival_ns,
                        prompt_token_ids=request.prompt_token_ids,
                        prompt_pieces=pieces,
                        max_tokens=max(1, self.scheduler.max_tokens(request)),
                        temperature=request.params.temperature,
                    )
                )
            note.pieces = None
            self.scheduler.add_request(request)
        return now

    def _execute(self, output: SchedulerOutput) -> list[int | None] | None:
        """The sampled tokens, or None where the forward failed and ended the requests that it could not serve."""
        try:
            sampled = self.runner.execute(output)
            if len(sampled) != len(output.scheduled):
                raise RunnerError(f"the runner returned {len(sampled)} tokens for {len(output.scheduled)} requests")
        except Exception as error:
            logger.exception("step %d failed", self._num_steps)
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
        session = self._sessions[request.request_id]
        session.new_tokens.append(token_id)
        piece = ""
        try:
            text = session.text
            if text is None:
                stream = self.codec.stream(request.prompt_token_ids)
                text = session.text = OutputText(stream, request.params.stop)
            if ends is not FinishReason.STOP:
                # A token that ends the output is not part of its text.
                piece, shown = text.push(token_id)
                session.new_text += shown
            if ends is not None and not text.stopped:
                rest, shown = text.finish()
                piece += rest
                session.new_text += shown
            if text.stopped:
                ends = FinishReason.STOP
        except Exception as error:
            logger.exception("the text of request %d could not be decoded", request.request_id)
            message = f"its text could not be decoded: {_one_line(error)}"
            self.scheduler.fail(request, Reason.STEP_FAILED, {}, message)
            return NewToken(request.request_id, token_id, "")
        if ends is not None:
            self.scheduler.finish(request, ends)
        return NewToken(request.request_id, token_id, piece)

    def _outputs(
        self, batch: Sequence[ScheduledRequest], ended: Sequence[Request]
    ) -> list[tuple[_Session, RequestOutput]]:
        """What is new for each request that was in the batch or has ended."""
        sessions = [self._sessions[share.request.request_id] for share in batch]
        outputs = [(s, s.take_output()) for s in sessions if s.new_tokens and s.request.finish_reason is None]
        for request in ended:
            session = self._sessions.pop(request.request_id)
            self.runner.forget(request.request_id)
            if session.text is not None and not session.text.stopped:
                try:
                    session.new_text += session.text.finish()[1]
                except Exception:
                    logger.exception("the last text of request %d could not be decoded", request.request_id)
            outputs.append((session, session.take_output()))
        self._generated_tokens += sum(len(output.token_ids) for _, output in outputs)
        return outputs

    @staticmethod
    def _batch_members(output: SchedulerOutput, *, failed: bool) -> list[BatchMember]:
        """The batch as the trace tells it: of a failed forward, that they were in it and nothing was computed."""
        return [
            BatchMember(request.request_id, int(phase), start, 0 if failed else num_scheduled)
            for request, phase, start, num_scheduled, _ in output.scheduled
        ]

    def _counters(self) -> Counters:
        scheduler, pool = self.scheduler, self.scheduler.kv.pool
        return Counters(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            preempted=scheduler.num_preempted,
            used_blocks=pool.num_used,
            cached_blocks=pool.num_cached,
            free_blocks=pool.num_free - pool.num_cached,
            prefix_queried_tokens=scheduler.prefix_queried_tokens,
            prefix_hit_tokens=scheduler.prefix_hit_tokens,
            preemptions=scheduler.num_preemptions,
            generated_tokens=self._generated_tokens,
        )

    def _emit(self, message: TraceMessage) -> None:
        for sink in tuple(self._sinks):
            try:
                sink(message)
            except Exception:
                # A full disk must not end everybody's requests; a sink that missed a message is of no use any more.
                logger.exception("a trace sink failed and gets no more messages")
                self._sinks.remove(sink)

    def _call_back(self, session: _Session, output: RequestOutput) -> None:
        if session.on_output is None:
            return
        try:
            session.on_output(output)
        except Exception:
            logger.exception("on_output of request %d failed and is not called again", output.request_id)
            session.on_output = None


def _one_line(error: Exception) -> str:
    """An exception's text as one bounded line."""
    return " ".join(str(error).split())[:300] or type(error).__name__
