"""The engine's iteration with Python one step ahead: while the device computes a step, the next one is scheduled.

`PagedEngine.step` decides, computes and keeps books one after the other, and the device has nothing to do meanwhile.
Here a call of `step` finds step N in flight; it schedules N + 1 as if N had ended, launches it behind N, and only then
waits for N's tokens, appends them, finds out who has ended, and tells of N. The device goes from N to N + 1 by itself.

As if N had ended: its members have computed what they were scheduled for, and whoever samples has one token more, whose
value is not known (`UNKNOWN_TOKEN`); the runner takes it from N's samples on the device. Whoever is at its length by
that count is left out. This holds only while N + 1 is scheduled and packed. Everything else (publishing, stop
conditions, texts) sees requests as they are known, so that nothing is published of a token before it is there.

A member of a step in flight that turns out to have ended in the step before it, or is aborted, is an overrun: its token
is thrown away, and the trace has it in the batch under `Phase.OVERRUN`. Its blocks are free from its end on, while the
step may still write to them. That harms nobody: it writes behind the tokens that are known to be computed, so never
into a block that is shared (whoever is scheduled has a tail of its own) or published (that one is full); and whoever
gets a block next, moves of contents included, is launched after the step and comes after it on the device.

Nobody looks ahead, and the step is waited for first, where

- a running request might have to give way: what would be freed, swapped or computed again is still being written;
- a choice begins with the step's tokens (n > 1), or a fork waits in the inbox: both go on from tokens to be known;
- the step was thrown away, because the one before it failed: its requests are where they were before both.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal

from engine.config import ConfigError
from engine.core.scheduler_output import Fork
from engine.engine import PagedEngine
from engine.request import RequestStatus
from engine.runner import UNKNOWN_TOKEN
from engine.trace.events import Phase

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from engine.config import EngineConfig
    from engine.core.scheduler_output import ScheduledRequest, SchedulerOutput
    from engine.request import RequestOutput
    from engine.runner import LaunchedStep, LaunchingRunner, Runner, TextCodec

logger = logging.getLogger("engine")


@dataclass(slots=True)
class _Flight:
    """A step that was launched.

    Attributes:
        output: Its batch, never empty.
        samples: Of each member, whether a token comes of it.
        launched: What to wait for; None where it could not be launched.
        failure: Why it could not be launched.
        thrown_away: The step before it failed, so that nothing of it counts.
    """

    output: SchedulerOutput
    samples: list[bool]
    launched: LaunchedStep | None
    failure: Exception | None = None
    thrown_away: bool = False

    @property
    def leads_on(self) -> bool:
        """Whether the next step can go on from it before its tokens are known."""
        return self.launched is not None and not self.thrown_away and not self.output.forks

    def wait(self) -> list[int | None]:
        if self.launched is None:
            assert self.failure is not None
            raise self.failure
        return self.launched.wait()


class OverlappedEngine(PagedEngine):
    """A `PagedEngine` that schedules the next step while the device computes one.

    Requests, outputs and their order are the same. Between two calls of `step` one step may be in flight; a paused loop
    leaves it there.
    """

    overlaps: ClassVar[bool] = True

    runner: LaunchingRunner
    _flight: _Flight | None = None

    @property
    def has_work(self) -> bool:
        """Whether a step would do something; a step in flight is to be taken in, whoever is left of it."""
        return self._flight is not None or super().has_work

    def step(self) -> list[RequestOutput]:
        """Launch the next step where that is sound, then wait for the one in flight.

        Returns:
            What is new for each request concerned; each was also handed to its `on_output`.
        """
        self.scheduler.kv.pool.ops = [] if self._tracer.active else None
        flight, self._flight = self._flight, None
        schedule_ns = 0
        if flight is None:
            start_ns = self._drain_inbox()
            output = self.scheduler.schedule()
            schedule_ns = self._now() - start_ns
            flight = self._launch(output)
            goes_on = flight is not None and self._can_go_on(flight)
        else:
            start_ns, goes_on = self._drain_behind(flight)
        if flight is None:
            return self._conclude(output, [], [], (start_ns, schedule_ns, 0, 0), self._now())
        if goes_on:
            schedule_ns += self._look_ahead(flight)
        ended = [share.request.finish_reason is not None for share in flight.output.scheduled]
        sampled = self._collect(flight)
        executed_ns = self._now()
        waited_ns = executed_ns - start_ns - schedule_ns
        # Sampling is the last thing that is waited for.
        sample_ns = min(self.runner.last_sample_ns, waited_ns) if sampled is not None else 0
        times = (start_ns, schedule_ns, waited_ns - sample_ns, sample_ns)
        told = _told(flight, ended)
        output, sampled = _of_the_living(flight.output, ended, sampled)
        return self._conclude(output, sampled, told, times, executed_ns)

    def _can_go_on(self, flight: _Flight) -> bool:
        """Whether the next step can be scheduled before the tokens of the one in flight are known."""
        if not flight.leads_on:
            return False
        if self.scheduler.has_plenty_of_room:
            return True
        with _as_if_done(self, flight):
            return self.scheduler.has_room

    def _drain_behind(self, flight: _Flight) -> tuple[int, bool]:
        """Take in what came if it can be scheduled behind the step in flight; the time, and whether it can."""
        # Whom an abort ends frees blocks, and who arrives runs only where there are some: room there is stays.
        can_go_on = self._can_go_on(flight)
        with self._inbox_lock:
            now = self._now()
            if not can_go_on or self._fork_waits():
                return now, False
            inbox, self._inbox = self._inbox, []
        self._take_notes(inbox)
        return now, True

    def _look_ahead(self, flight: _Flight) -> int:
        """Schedule and launch the step after one in flight; the time that deciding took, in ns."""
        began_ns = self._now()
        with _as_if_done(self, flight):
            output = self.scheduler.schedule()
            schedule_ns = self._now() - began_ns
            self._flight = self._launch(output)
        return schedule_ns

    def _launch(self, output: SchedulerOutput) -> _Flight | None:
        if output.copies:
            self.runner.copy_blocks(output.copies)
        if not output.scheduled:
            return None
        samples = [share.samples for share in output.scheduled]
        try:
            return _Flight(output, samples, self.runner.launch(output))
        except Exception as error:  # told of when its turn comes, as if the device had failed
            return _Flight(output, samples, None, error)

    def _collect(self, flight: _Flight) -> list[int | None] | None:
        """The tokens of a step; None where it failed, and the step behind it is thrown away then."""
        if flight.thrown_away:
            try:
                flight.wait()
            except Exception as error:
                logger.debug("a step that was thrown away failed: %s", error)
            return None
        sampled = self._attempt(flight.output, flight.wait)
        if sampled is None and self._flight is not None:
            self._flight.thrown_away = True
        return sampled


@contextmanager
def _as_if_done(engine: OverlappedEngine, flight: _Flight) -> Iterator[None]:
    """Requests as they will be if nobody of a step in flight ends by its token."""
    moved: list[tuple[ScheduledRequest, bool]] = []
    for share, samples in zip(flight.output.scheduled, flight.samples, strict=True):
        request = share.request
        if request.finish_reason is not None:
            continue
        moved.append((share, samples))
        request.num_computed_tokens = share.computed_before + share.num_scheduled
        if samples:
            request.output_token_ids.append(UNKNOWN_TOKEN)
            if engine.scheduler.at_limit(request):
                # It keeps its place and its blocks until it has ended, and the scheduler passes it by.
                request.status = RequestStatus.FINISHED_LENGTH
    try:
        yield
    finally:
        for share, samples in moved:
            request = share.request
            request.num_computed_tokens = share.computed_before
            if samples:
                request.output_token_ids.pop()
            request.status = RequestStatus.RUNNING


def _told(flight: _Flight, ended: Sequence[bool]) -> list[ScheduledRequest]:
    """The batch as the trace tells of it."""
    batch = flight.output.scheduled
    if flight.thrown_away:
        batch = [share._replace(computed_before=share.request.num_computed_tokens) for share in batch]
    if any(ended):
        batch = [
            share._replace(phase=Phase.OVERRUN) if over else share for share, over in zip(batch, ended, strict=True)
        ]
    return batch


def _of_the_living(
    output: SchedulerOutput, ended: Sequence[bool], sampled: list[int | None] | None
) -> tuple[SchedulerOutput, list[int | None] | None]:
    """A batch, and its tokens, without the requests that had ended."""
    if not any(ended):
        return output, sampled
    place = {old: new for new, old in enumerate(at for at, over in enumerate(ended) if not over)}
    alive = [*place, *(at for at, fork in enumerate(output.forks, len(ended)) if fork.share in place)]
    forks = [Fork(place[fork.share], fork.request) for fork in output.forks if fork.share in place]
    living = replace(output, scheduled=[output.scheduled[at] for at in place], forks=forks)
    return living, None if sampled is None else [sampled[at] for at in alive]


def engine_for(
    config: EngineConfig,
    runner: Runner,
    codec: TextCodec,
    *,
    title: str = "",
    description: str = "",
    source: Literal["engine", "simulator"] = "engine",
    provenance: Literal["measured", "simulated", "inferred"] = "measured",
) -> PagedEngine:
    """The engine that `config.scheduler.async_scheduling` asks for: an `OverlappedEngine` or a plain `PagedEngine`.

    Args:
        config: Of the engine.
        runner: For an `OverlappedEngine` one that has `launch`.
        codec: Text to tokens and back.
        title: As in the trace's header, and so are the others.
        description: Likewise.
        source: Likewise.
        provenance: Likewise.

    Raises:
        ConfigError: the runner must be waited for.
    """
    kind = PagedEngine
    if config.scheduler.async_scheduling:
        if not hasattr(runner, "launch"):
            name = type(runner).__name__
            raise ConfigError(f"{name} cannot be launched without waiting for it: use --no-async-scheduling")
        kind = OverlappedEngine
    return kind(config, runner, codec, title=title, description=description, source=source, provenance=provenance)
