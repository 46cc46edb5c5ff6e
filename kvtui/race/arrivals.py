"""What is raced: who comes when and with what, in which memory, and how long a step takes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.request import SamplingParams
from engine.simulated import SIMULATED_MODEL
from engine.trace.events import RequestArrived, StepTrace
from kvtui.workloads.workload import Session, Workload, WorkloadError

if TYPE_CHECKING:
    from engine.trace.events import ModelInfo
    from engine.trace.reader import Recording

MOST_SLOTS = 1 << 24
"""Slots of the pool that is raced in at most; the runner without a model keeps 8 bytes for each."""

EOS_RATE = 0.01
"""Share of the tokens made up for a workload that end an output: answers of different lengths, as models give."""


class RaceError(WorkloadError):
    """Arrivals that cannot be raced. Its text is one line."""


@dataclass(frozen=True, slots=True)
class Cost:
    """How long a step takes.

    Attributes:
        seconds: Of any step.
        seconds_per_token: And of each token that is computed in it.
        source: Where the two come from.
    """

    seconds: float
    seconds_per_token: float
    source: str


DEFAULT_COST = Cost(0.02, 0.0002, "made up, as with --model simulated")


@dataclass(frozen=True, slots=True)
class Arrivals:
    """What every lane is given.

    Attributes:
        name: Of the workload or the recording.
        workload: The sessions; where they come from a recording, one for each request at its recorded time.
        config: Memory and limits; each lane puts its own policy in.
        cost: Of a step.
        lengths: Tokens that each request generates, in order of arrival; None: as the made-up tokens end it.
        model: For the header.
        notes: What was left out or changed, one line each.
    """

    name: str
    workload: Workload
    config: EngineConfig
    cost: Cost
    lengths: tuple[int, ...] | None = None
    model: ModelInfo = SIMULATED_MODEL
    notes: tuple[str, ...] = ()


def from_workload(workload: Workload, config: EngineConfig) -> Arrivals:
    """A workload's sessions. Several choices of one prompt become as many requests: the old policies share nothing.

    Raises:
        RaceError: there is no session.
    """
    if not workload.sessions:
        raise RaceError(f"{workload.name} has no requests: there is nothing to race")
    sessions: list[Session] = []
    for session in workload.sessions:
        params = replace(session.params, n=1)
        sessions += [
            replace(session, params=params, name=f"{session.name}/{i + 1}" if i else session.name)
            for i in range(session.params.n)
        ]
    notes = workload.notes
    if len(sessions) > len(workload.sessions):
        notes += ("several answers to one prompt are raced as so many requests",)
    return Arrivals(workload.name, replace(workload, sessions=tuple(sessions)), config, DEFAULT_COST, notes=notes)


def from_recording(recording: Recording, name: str) -> Arrivals:
    """The requests of a recording, with the lengths that they came to and the cost of its steps.

    Raises:
        RaceError: none of them generated anything.
        ConfigError: its header has limits that no engine can run with.
        RecordingError: a part of the file is damaged.
    """
    header = recording.header
    arrived: list[RequestArrived] = []
    generated: Counter[int] = Counter()
    tokens: list[int] = []
    times: list[int] = []
    for message in recording.messages():
        if isinstance(message, RequestArrived):
            arrived.append(message)
        elif isinstance(message, StepTrace):
            generated.update(token[0] for token in message.tokens)
            if message.batch:
                tokens.append(sum(member[3] for member in message.batch))
                times.append(message.schedule_ns + message.execute_ns + message.sample_ns + message.update_ns)
    known = [request for request in arrived if generated[request.request] and request.prompt_token_ids]
    if not known:
        raise RaceError(f"no request of {name} generated a token: there is nothing to race")
    known.sort(key=lambda request: request.time_ns)
    began = known[0].time_ns
    sessions = tuple(
        Session(
            name=request.name,
            at=max(0, request.time_ns - began) / 1e9,
            params=SamplingParams(max_tokens=max(1, request.max_tokens, generated[request.request])),
            prompt=tuple(request.prompt_token_ids),
        )
        for request in known
    )
    notes: tuple[str, ...] = ()
    if len(known) < len(arrived):
        notes += (f"{len(arrived) - len(known):,} of {len(arrived):,} requests generated nothing and are left out",)
    if header.num_cpu_blocks:
        notes += ("its CPU pool is left out: the old policies have none",)
    config = EngineConfig(
        cache=CacheConfig(
            block_size=header.block_size, num_blocks=header.num_blocks, prefix_caching=header.prefix_caching
        ),
        scheduler=SchedulerConfig(
            max_num_seqs=header.max_num_seqs,
            max_num_batched_tokens=header.max_num_batched_tokens,
            max_prefill_chunk=header.max_prefill_chunk,
            max_model_len=header.max_model_len,
        ),
    )
    return Arrivals(
        name=name,
        workload=Workload(name=name, title=header.title, sessions=sessions),
        config=config,
        cost=fitted_cost(tokens, times),
        lengths=tuple(generated[request.request] for request in known),
        model=header.model,
        notes=notes,
    )


def require_room(arrivals: Arrivals) -> None:
    """Check that the pool can be raced in.

    Raises:
        RaceError: it is too large.
    """
    cache = arrivals.config.cache
    if cache.num_blocks * cache.block_size > MOST_SLOTS:
        raise RaceError(
            f"a pool of {cache.num_blocks:,} blocks of {cache.block_size} is too large to race in: ask for at most "
            f"{MOST_SLOTS // cache.block_size:,} blocks (--num-blocks)"
        )


def fitted_cost(tokens: list[int], times_ns: list[int]) -> Cost:
    """The line that fits the steps best (least squares), with neither part below 0."""
    x, y = np.array(tokens, float), np.array(times_ns, float) / 1e9
    if not len(x) or y.sum() <= 0:
        return DEFAULT_COST
    slope = float(((x - x.mean()) * (y - y.mean())).sum() / max(((x - x.mean()) ** 2).sum(), 1e-12))
    base = float(y.mean() - slope * x.mean())
    if slope < 0:
        slope, base = 0.0, float(y.mean())
    elif base < 0:
        slope, base = float((x * y).sum() / max((x * x).sum(), 1e-12)), 0.0
    return Cost(base, slope, f"fitted to the {len(x):,} recorded steps")
