"""Hands the engine's trace to whoever follows it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from engine.trace.events import (
    NO_REQUEST,
    BatchMember,
    Counters,
    Decision,
    Finish,
    Header,
    NewToken,
    RequestArrived,
    StepTrace,
    TraceMessage,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.core.scheduler import Scheduler
    from engine.core.scheduler_output import ScheduledRequest
    from engine.request import Request

logger = logging.getLogger("engine")

Sink = Callable[[TraceMessage], None]


class Tracer:
    """The sinks of one engine, and the messages that they get.

    Attributes:
        header: The first message.
        active: Whether anybody follows; while nobody does, nothing is noted and this is all that it costs.
        num_steps: Steps so far, followed or not.
    """

    def __init__(self, header: Header) -> None:
        self.header = header
        self.active = False
        self.num_steps = 0
        self._sinks: list[Sink] = []
        self._generated_tokens = 0

    def add(self, sink: Sink) -> None:
        """Let somebody follow.

        Raises:
            RuntimeError: steps have been made already, and a trace without its beginning cannot be followed.
        """
        if self.num_steps:
            raise RuntimeError("a sink must be added before the first step: the trace has begun without it")
        sink(self.header)
        self._sinks.append(sink)
        self.active = True

    def arrived(self, request: Request, pieces: list[str], max_tokens: int) -> None:
        """A request came in."""
        self._emit(
            RequestArrived(
                request=request.request_id,
                name=request.name,
                time_ns=request.arrival_ns,
                prompt_token_ids=request.prompt_token_ids,
                prompt_pieces=pieces,
                max_tokens=max_tokens,
                temperature=request.params.temperature,
                parent=NO_REQUEST if request.parent is None else request.parent,
            )
        )

    def stepped(
        self,
        times: tuple[int, int, int, int, int],
        batch: Sequence[ScheduledRequest],
        tokens: list[NewToken],
        ended: Sequence[Request],
        decisions: list[Decision],
        scheduler: Scheduler,
        *,
        failed: bool,
    ) -> None:
        """A step was made.

        Args:
            times: start, schedule, execute, sample and update, in ns, as in `StepTrace`.
            batch: Who was in it.
            tokens: What came of it.
            ended: Requests that ended in it.
            decisions: What was decided in it.
            scheduler: For the operations and the levels after the step.
            failed: Whether the forward failed, so that nothing was computed.
        """
        index = self.num_steps
        self.num_steps += 1
        self._generated_tokens += len(tokens)
        if not self.active:
            return
        members = [
            BatchMember(request.request_id, int(phase), start, 0 if failed else num_scheduled)
            for request, phase, start, num_scheduled, _ in batch
        ]
        finished = [Finish(r.request_id, r.finish_reason or "", r.error or "") for r in ended]
        ops = scheduler.kv.pool.take_ops()
        self._emit(StepTrace(index, *times, members, ops, tokens, finished, decisions, self._counters(scheduler)))

    def _counters(self, scheduler: Scheduler) -> Counters:
        pool = scheduler.kv.pool
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
                self.active = bool(self._sinks)
