"""The engine: requests in, tokens out, one trace message per iteration.

State changes only inside `step()`. `add_request` and `abort` may be called from any thread: they put a note into an
inbox, and the next step begins with it. So a trace is one sequence, and every block operation belongs to a step.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Literal

from engine.baselines.policy import scheduler_for
from engine.request import Request, RequestError, RequestOutput, SamplingParams
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
        self.scheduler = scheduler_for(config, max_model_len=self.max_model_len, eos_token_ids=runner.eos_token_ids)
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
            prefix_caching=self.scheduler.kv.prefix_caching,
            max_num_seqs=config.scheduler.max_num_seqs,
            max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
            max_prefill_chunk=config.scheduler.max_prefill_chunk,
            max_model_len=self.max_model_len,
            preemption=config.scheduler.preemption if config.scheduler.policy == "paged" else "none",
            policy=config.scheduler.policy,
            started_at=time.time(),
        )
        self._tracer = Tracer(self.header)
        self._inbox: list[Session | int] = []
        self._inbox_lock = threading.Lock()
        self._next_id = 0
        self._sessions: dict[int, Session] = {}

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
        pieces = self.codec.pieces(token_ids) if self._tracer.active else None
        with self._inbox_lock:
            request_id = self._next_id
            self._next_id += 1
            request = Request(request_id, name[:MAX_NAME_LENGTH], token_ids, params, arrival_ns=self._now())
            self._inbox.append(Session(request, pieces, on_output))
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
        scheduler, runner = self.scheduler, self.runner
        scheduler.kv.pool.ops = [] if self._tracer.active else None
        start_ns = self._drain_inbox()
        output = scheduler.schedule()
        batch = output.scheduled
        scheduled_ns = self._now()
        sampled = self._execute(output) if batch else []
        executed_ns = self._now()
        failed = sampled is None
        tokens = [self._take(token) for token in scheduler.update(output, sampled)] if sampled is not None else []
        ended, scheduler.ended = scheduler.ended, []
        decisions, scheduler.decisions = scheduler.decisions, []
        outputs = self._outputs(batch, ended)
        if batch or ended or decisions:
            execute_ns, sample_ns = executed_ns - scheduled_ns, 0
            if batch and not failed:
                execute_ns, sample_ns = runner.last_execute_ns, runner.last_sample_ns
            update_ns = self._now() - executed_ns
            times = (start_ns, scheduled_ns - start_ns, execute_ns, sample_ns, update_ns)
            self._tracer.stepped(times, batch, tokens, ended, decisions, scheduler, failed=failed)
        for session, request_output in outputs:
            session.deliver(request_output)
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
            if self._tracer.active:
                pieces = note.pieces if note.pieces is not None else self.codec.pieces(request.prompt_token_ids)
                self._tracer.arrived(request, pieces, max(1, self.scheduler.max_tokens(request)))
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

    def _outputs(
        self, batch: Sequence[ScheduledRequest], ended: Sequence[Request]
    ) -> list[tuple[Session, RequestOutput]]:
        """What is new for each request that was in the batch or has ended."""
        sessions = [self._sessions[share.request.request_id] for share in batch]
        outputs = [(s, s.take_output()) for s in sessions if s.has_news and s.request.finish_reason is None]
        for request in ended:
            session = self._sessions.pop(request.request_id)
            self.runner.forget(request.request_id)
            session.flush()
            outputs.append((session, session.take_output()))
        return outputs


def _one_line(error: Exception) -> str:
    """An exception's text as one bounded line."""
    return " ".join(str(error).split())[:300] or type(error).__name__
