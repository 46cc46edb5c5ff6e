"""What a panel with a time axis needs of many steps, as arrays: making objects of a thousand steps takes too long."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from engine.trace.columns import column
from engine.trace.events import Counters, DecisionKind, Op

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.trace.columns import Column
    from engine.trace.events import Finish, StepTrace

_EVICT, _PREEMPTED = int(Op.EVICT), int(DecisionKind.PREEMPTED)


class StepColumns(NamedTuple):
    """n consecutive steps whose batches have m members together.

    Attributes:
        first: Index of the first step.
        times: int64[n, 5]: start_ns, schedule_ns, execute_ns, sample_ns, update_ns.
        counters: int64[n, 10]: as `Counters`.
        batch_sizes: int64[n]: members of each batch.
        batch: int64[m, 3]: request, phase and num_scheduled of each member.
        num_tokens: int64[n]: tokens sampled.
        num_evictions: int64[n].
        preempted: (index of the step, request).
        finished: (index of the step, how a request ended).
    """

    first: int
    times: Column
    counters: Column
    batch_sizes: Column
    batch: Column
    num_tokens: Column
    num_evictions: Column
    preempted: list[tuple[int, int]]
    finished: list[tuple[int, Finish]]

    @property
    def num_steps(self) -> int:
        """How many."""
        return len(self.times)

    @staticmethod
    def of(first: int, steps: Sequence[StepTrace]) -> StepColumns:
        """Those of consecutive steps, the first of which has the index `first`.

        Raises:
            OverflowError: a number that does not fit 64 bits.
        """
        n = len(steps)
        times = chain.from_iterable((s.start_ns, s.schedule_ns, s.execute_ns, s.sample_ns, s.update_ns) for s in steps)
        batch = chain.from_iterable((member[0], member[1], member[3]) for step in steps for member in step.batch)
        return StepColumns(
            first=first,
            times=column(times).reshape(n, 5),
            counters=column(chain.from_iterable(step.counters for step in steps)).reshape(n, len(Counters._fields)),
            batch_sizes=column(len(step.batch) for step in steps),
            batch=column(batch).reshape(-1, 3),
            num_tokens=column(len(step.tokens) for step in steps),
            num_evictions=column([op[0] for op in step.ops].count(_EVICT) for step in steps),
            preempted=[
                (first + at, decision.request)
                for at, step in enumerate(steps)
                for decision in step.decisions
                if decision.kind == _PREEMPTED
            ],
            finished=[(first + at, finish) for at, step in enumerate(steps) for finish in step.finished],
        )

    @staticmethod
    def join(first: int, parts: Sequence[StepColumns]) -> StepColumns:
        """Those of steps that follow each other; without any, of no step at `first`."""
        if len(parts) < 2:
            return parts[0] if parts else StepColumns.of(first, ())
        return StepColumns(
            first=parts[0].first,
            times=np.concatenate([part.times for part in parts]),
            counters=np.concatenate([part.counters for part in parts]),
            batch_sizes=np.concatenate([part.batch_sizes for part in parts]),
            batch=np.concatenate([part.batch for part in parts]),
            num_tokens=np.concatenate([part.num_tokens for part in parts]),
            num_evictions=np.concatenate([part.num_evictions for part in parts]),
            preempted=[entry for part in parts for entry in part.preempted],
            finished=[entry for part in parts for entry in part.finished],
        )
