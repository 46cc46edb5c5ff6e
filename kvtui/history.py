"""What happened at each of the last steps: the series behind the panels with a time axis.

Everything lies in arrays of fixed size that are written in a ring, so an hour of session costs the memory of its first
minute. One row of `codes` belongs to one step and one column to one request; columns of requests that ended are taken
over by new ones.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from engine.request import FinishReason, RequestStatus
from engine.trace.events import Counters, DecisionKind, Op, Phase

if TYPE_CHECKING:
    import numpy.typing as npt

    from engine.trace.columns import Column
    from engine.trace.events import Finish, StepTrace
    from engine.trace.state import PoolState, RequestState
    from engine.trace.step_columns import StepColumns

_RATE_STEPS = 64
_RATE_NS = 5_000_000_000


class Mark(enum.IntEnum):
    """What one request did in one step."""

    ABSENT = 0
    """It had not arrived, or had ended."""
    WAITING = 1
    """Live and not in the batch."""
    PREFILL = 2
    DECODE = 3
    RECOMPUTE = 4
    PREEMPTED = 5
    """It lost its blocks in this step."""
    ENDED = 6
    """Its last step; it stopped by itself or reached its length."""
    ENDED_BADLY = 7
    """Refused or failed in this step."""
    REDONE = 8
    """It lost its blocks in this step and was in the batch all the same, computing them again."""
    ABORTED = 9
    """Its caller gave it up in this step."""
    OVERRUN = 10
    """It was in the batch in vain: it had ended when the step's tokens came."""


# Plain integers: an append happens at every step of the engine, and enum members cost several times as much.
_MARK_OF_PHASE = {
    int(Phase.PREFILL): int(Mark.PREFILL),
    int(Phase.DECODE): int(Mark.DECODE),
    int(Phase.RECOMPUTE): int(Mark.RECOMPUTE),
}
_TOKENS_OF_PHASE = {
    "prefill_tokens": int(Phase.PREFILL),
    "decode_tokens": int(Phase.DECODE),
    "recompute_tokens": int(Phase.RECOMPUTE),
}
_DECODE, _EVICT, _PREEMPTED = int(Phase.DECODE), int(Op.EVICT), int(DecisionKind.PREEMPTED)
_OVERRUN, _OVERRUN_MARK = int(Phase.OVERRUN), int(Mark.OVERRUN)
_END_OF_REASON: dict[str, Mark] = {
    FinishReason.STOP: Mark.ENDED,
    FinishReason.LENGTH: Mark.ENDED,
    FinishReason.ABORT: Mark.ABORTED,
}

_STEP = np.dtype(
    [
        ("index", np.int64),
        ("start_ns", np.int64),
        ("schedule_ns", np.int64),
        ("execute_ns", np.int64),
        ("sample_ns", np.int64),
        ("update_ns", np.int64),
        ("used", np.int64),
        ("cached", np.int64),
        ("free", np.int64),
        ("running", np.int64),
        ("waiting", np.int64),
        ("preempted", np.int64),
        ("batch", np.int64),
        ("prefill_tokens", np.int64),
        ("recompute_tokens", np.int64),
        ("decode_tokens", np.int64),
        ("generated", np.int64),
        ("preemptions", np.int64),
        ("evictions", np.int64),
    ]
)


_MOST = 2**52
"""Largest number taken out of a trace, 52 days in ns: sums over the whole ring stay within 64 bits."""


def _bounded(value: int) -> int:
    """A number out of a trace, which may hold anything, as one that can be reckoned with."""
    return min(max(value, 0), _MOST)


def _preempted_over(mark: int) -> Mark:
    """The mark of a preempted request that had another mark in the same step."""
    return Mark.PREEMPTED if mark in (Mark.ABSENT, Mark.WAITING, Mark.PREEMPTED) else Mark.REDONE


class Rates(NamedTuple):
    """Averages over the last steps: at most 64 of them, from at most 5 s before the last one began.

    Attributes:
        steps_per_s: Steps / (end of the last - start of the first), by the trace's own clock.
        tokens_per_s: Tokens generated in them / the same time.
        average_batch: Mean number of requests in a batch, steps without one left out.
    """

    steps_per_s: float
    tokens_per_s: float
    average_batch: float


class History:
    """Per-step series of the last `capacity` steps.

    Attributes:
        capacity: Steps that are remembered, W.
        codes: `Mark` per step and request, uint8 `[W, max_requests]`; a step's row is `index % W`.
        total: Steps appended since the start or the last `clear`.
    """

    def __init__(self, capacity: int = 1024, max_requests: int = 512) -> None:
        if capacity < 1 or max_requests < 1:
            raise ValueError(f"a history of {capacity} steps and {max_requests} requests: use at least 1 of each")
        self.capacity = capacity
        self.codes: npt.NDArray[np.uint8] = np.zeros((capacity, max_requests), np.uint8)
        self._ring = np.zeros(capacity, _STEP)
        self._live = np.zeros(max_requests, np.bool_)
        self._last_seen = np.full(max_requests, -1, np.int64)
        self._column_of: dict[int, int] = {}
        self._last_index = -1
        self._prefix = (0, 0)
        self._free_columns = list(range(max_requests - 1, -1, -1))
        self._newest = -1
        self._pending: list[RequestState] = []
        self.total = 0

    def __len__(self) -> int:
        """Steps that can be read."""
        return min(self.total, self.capacity)

    def clear(self) -> None:
        """Forget everything."""
        self.codes[:] = 0
        self._live[:] = False
        self._last_seen[:] = -1
        self._column_of.clear()
        self._free_columns = list(range(len(self._live) - 1, -1, -1))
        self._newest = -1
        self._pending.clear()
        self.total = 0

    def rebuild(self, columns: StepColumns, state: PoolState) -> None:
        """Start anew from the steps that led to a state; the last `capacity` of them count.

        The outcome is that of `append` step by step, except where there were more requests than fit: those that are
        still there, or were there last, are kept.
        """
        self.clear()
        skipped = max(0, columns.num_steps - self.capacity)
        first, stop = columns.first + skipped, columns.first + columns.num_steps
        if first >= stop:
            return
        at = np.arange(first, stop, dtype=np.int64) % self.capacity
        starts = np.concatenate(([0], np.cumsum(columns.batch_sizes)))[skipped:]
        batch = columns.batch[starts[0] :]
        sizes = columns.batch_sizes[skipped:]
        step_of = np.repeat(np.arange(len(sizes)), sizes)
        preempted = [(step, request) for step, request in columns.preempted if step >= first]
        finished = [(step, finish) for step, finish in columns.finished if step >= first]
        self._fill_ring(columns, skipped, at, step_of, batch, preempted)
        alive = batch[:, 1] != _OVERRUN
        lives = _lives(first, stop, step_of[alive], batch[alive], preempted, finished, state)
        kept = sorted(lives.items(), key=lambda item: (item[1].live, item[1].last_seen))[-len(self._live) :]
        for number, life in sorted(kept):
            column = self._free_columns.pop()
            self._column_of[number] = column
            self._live[column] = life.live
            self._last_seen[column] = life.last_seen
            self.codes[at[life.first - first : life.stop - first], column] = Mark.WAITING
        numbers = np.array(sorted(self._column_of), np.int64)
        places = np.array([self._column_of[number] for number in numbers.tolist()], np.int64)
        if len(numbers) and len(batch):
            found = np.minimum(np.searchsorted(numbers, batch[:, 0]), len(numbers) - 1)
            ours = numbers[found] == batch[:, 0]
            self.codes[at[step_of[ours]], places[found[ours]]] = _mark_of(batch[ours, 1])
        for step, request in preempted:
            if request in self._column_of:
                cell = step % self.capacity, self._column_of[request]
                self.codes[cell] = _preempted_over(int(self.codes[cell]))
        for step, finish in finished:
            if finish.request in self._column_of:
                mark = _END_OF_REASON.get(finish.reason, Mark.ENDED_BADLY)
                self.codes[step % self.capacity, self._column_of[finish.request]] = mark
        self._newest = max((*state.requests, *lives), default=-1)
        self._pending = [request for request in state.requests.values() if request.arrival_step >= stop]
        self._last_index = stop - 1
        self.total = stop - first

    def _fill_ring(
        self,
        columns: StepColumns,
        skipped: int,
        at: Column,
        step_of: Column,
        batch: Column,
        preempted: list[tuple[int, int]],
    ) -> None:
        """The levels of the steps; arguments as `rebuild` calls them."""
        rows = np.zeros(len(at), _STEP)
        rows["index"] = np.arange(len(at)) + columns.first + skipped
        for place, name in enumerate(("start_ns", "schedule_ns", "execute_ns", "sample_ns", "update_ns")):
            rows[name] = columns.times[skipped:, place]
        for name in ("used", "cached", "free"):
            rows[name] = columns.counters[skipped:, Counters._fields.index(f"{name}_blocks")]
        for name in ("running", "waiting", "preempted"):
            rows[name] = columns.counters[skipped:, Counters._fields.index(name)]
        rows["batch"] = columns.batch_sizes[skipped:]
        phases = np.where(np.isin(batch[:, 1], list(_MARK_OF_PHASE)), batch[:, 1], _DECODE)
        scheduled = np.clip(batch[:, 2], 0, _MOST)
        for name, phase in _TOKENS_OF_PHASE.items():
            rows[name] = np.bincount(step_of, scheduled * (phases == phase), len(at))
        rows["generated"] = columns.num_tokens[skipped:]
        rows["evictions"] = columns.num_evictions[skipped:]
        np.add.at(rows["preemptions"], [step - columns.first - skipped for step, _ in preempted], 1)
        for name in rows.dtype.names or ():
            np.clip(rows[name], 0, _MOST, out=rows[name])
        self._ring[at] = rows
        hits, queried = (Counters._fields.index(f"prefix_{name}_tokens") for name in ("hit", "queried"))
        self._prefix = (int(columns.counters[-1, hits]), int(columns.counters[-1, queried]))

    def append(self, step: StepTrace, state: PoolState) -> None:
        """Add a step. The state may be ahead of it: only who has arrived is read from there.

        A step that does not follow the last one starts the series anew.
        """
        index = _bounded(step.index)
        if self.total and index != self.last_index + 1:
            self.clear()
        place = index % self.capacity
        marks = self.codes[place]
        self._arrivals(step, state)
        np.multiply(self._live, np.uint8(Mark.WAITING), out=marks)
        scheduled = [0, 0, 0]
        columns = self._column_of
        there: list[int] = []
        codes: list[int] = []
        for request, phase, _, num_scheduled in step.batch:
            column = columns.get(request)
            if phase == _OVERRUN:
                # Tokens of a step all the same, computed as a decode's is.
                scheduled[1] += num_scheduled
                if column is not None:
                    marks[column] = _OVERRUN_MARK
                continue
            if column is None:
                column = self._column(request, index)
            known = phase if phase in _MARK_OF_PHASE else _DECODE
            there.append(column)
            codes.append(_MARK_OF_PHASE[known])
            scheduled[known] += num_scheduled
        marks[there] = codes
        self._last_seen[there] = index
        preemptions = 0
        for decision in step.decisions:
            if decision.kind == _PREEMPTED:
                preemptions += 1
                column = self._column(decision.request, index)
                marks[column] = _preempted_over(int(marks[column]))
        for finish in step.finished:
            column = self._column(finish.request, index)
            marks[column] = _END_OF_REASON.get(finish.reason, Mark.ENDED_BADLY)
            self._live[column] = False
            self._last_seen[column] = index
        counters = step.counters
        values: tuple[int, ...] = (
            index,
            step.start_ns,
            step.schedule_ns,
            step.execute_ns,
            step.sample_ns,
            step.update_ns,
            counters.used_blocks,
            counters.cached_blocks,
            counters.free_blocks,
            counters.running,
            counters.waiting,
            counters.preempted,
            len(step.batch),
            scheduled[0],
            scheduled[2],
            scheduled[1],
            len(step.tokens),
            preemptions,
            [op[0] for op in step.ops].count(_EVICT),
        )
        if min(values) < 0 or max(values) > _MOST:
            values = tuple(map(_bounded, values))
        self._ring[place] = values
        self._prefix = (counters.prefix_hit_tokens, counters.prefix_queried_tokens)
        self._last_index = index
        self.total += 1

    @property
    def last_index(self) -> int:
        """Index of the last step, -1 before the first."""
        return self._last_index if self.total else -1

    def places(self, first: int, stop: int) -> npt.NDArray[np.int64]:
        """Places in the ring of the steps `first` to `stop - 1`; all must be remembered."""
        if first < stop and not self.last_index - len(self) < first <= stop - 1 <= self.last_index:
            raise IndexError(f"steps {first} to {stop - 1} are not all among the last {len(self)}")
        return np.arange(first, stop, dtype=np.int64) % self.capacity

    def series(self, name: str, first: int, stop: int) -> npt.NDArray[np.int64]:
        """One field of the steps `first` to `stop - 1`.

        Args:
            name: `index`, `start_ns`, `schedule_ns`, `execute_ns`, `sample_ns`, `update_ns` (ns); `used`, `cached`,
                `free` (blocks); `running`, `waiting`, `preempted`, `batch` (requests); `prefill_tokens`,
                `recompute_tokens`, `decode_tokens` (scheduled), `generated` (tokens sampled); `preemptions`,
                `evictions` (events in the step).
            first: A remembered step.
            stop: One past the last.
        """
        values: npt.NDArray[np.int64] = self._ring[name][self.places(first, stop)]
        return values

    def marks(self, request: int, first: int, stop: int) -> npt.NDArray[np.uint8]:
        """What a request did in the steps `first` to `stop - 1`, as `Mark` codes; all absent for an unknown one."""
        column = self._column_of.get(request)
        if column is None:
            return np.zeros(max(0, stop - first), np.uint8)
        codes: npt.NDArray[np.uint8] = self.codes[self.places(first, stop), column]
        return codes

    def requests(self, first: int) -> list[tuple[int, bool]]:
        """The requests that were there at step `first` or later, in order of arrival, and whether each still is."""
        live, last_seen = self._live, self._last_seen
        return sorted(
            (r, bool(live[column]))
            for r, column in self._column_of.items()
            if live[column] or last_seen[column] >= first
        )

    def recent(self) -> npt.NDArray[np.void]:
        """The steps that `rates` averages over, a row each with the fields of `series`."""
        stop = self.last_index + 1
        rows: npt.NDArray[np.void] = self._ring[self.places(stop - min(len(self), _RATE_STEPS), stop)]
        return rows[rows["start_ns"] >= rows["start_ns"][-1] - _RATE_NS] if len(rows) else rows

    def remembered(self) -> npt.NDArray[np.void]:
        """All steps that can be read, likewise."""
        stop = self.last_index + 1
        rows: npt.NDArray[np.void] = self._ring[self.places(stop - len(self), stop)]
        return rows

    def rates(self) -> Rates:
        """Running averages; zeros before the first step."""
        rows = self.recent()
        if not len(rows):
            return Rates(0.0, 0.0, 0.0)
        last = rows[-1]
        end = last["start_ns"] + last["schedule_ns"] + last["execute_ns"] + last["sample_ns"] + last["update_ns"]
        seconds = float(end - rows["start_ns"][0]) / 1e9
        batches = rows["batch"][rows["batch"] > 0]
        return Rates(
            steps_per_s=len(rows) / seconds if seconds > 0 else 0.0,
            tokens_per_s=float(rows["generated"].sum()) / seconds if seconds > 0 else 0.0,
            average_batch=float(batches.mean()) if len(batches) else 0.0,
        )

    @property
    def prefix_hit_rate(self) -> float | None:
        """Prompt tokens found in the prefix cache / prompt tokens looked up, since the trace began; None if none."""
        hits, queried = self._prefix if self.total else (0, 0)
        return hits / queried if queried else None

    def _arrivals(self, step: StepTrace, state: PoolState) -> None:
        """Give a column to every request that has arrived by the end of this step."""
        for request in reversed(state.requests):
            if request <= self._newest:
                break
            self._pending.append(state.requests[request])
        if not self._pending:
            return
        self._newest = max(self._newest, max(r.request for r in self._pending))
        later = []
        for arrived in sorted(self._pending, key=lambda r: r.request):
            over = RequestStatus(arrived.status).is_finished and arrived.finished_ns < step.start_ns
            if arrived.arrival_step > step.index:
                later.append(arrived)
            elif not over and arrived.request not in self._column_of:
                self._column(arrived.request, step.index)
        self._pending = later

    def _column(self, request: int, index: int) -> int:
        """The column of a request, made live and given a column if it has none."""
        column = self._column_of.get(request)
        if column is None:
            column = self._free_columns.pop() if self._free_columns else self._take_over()
            self.codes[:, column] = 0
            self._column_of[request] = column
            self._live[column] = True
            self._last_seen[column] = index
        return column

    def _take_over(self) -> int:
        """A column from the request that ended first or, where none has ended, from the one longest out of a batch."""
        request, column = min(self._column_of.items(), key=lambda item: (self._live[item[1]], self._last_seen[item[1]]))
        del self._column_of[request]
        return column


class _Life(NamedTuple):
    """The steps `first` to `stop` - 1 in which a request was there, as far as they are looked at.

    Attributes:
        last_seen: When it was last in a batch or ended; before that, when it came.
    """

    first: int
    stop: int
    live: bool
    last_seen: int


def _lives(
    first: int,
    stop: int,
    step_of: Column,
    batch: Column,
    preempted: list[tuple[int, int]],
    finished: list[tuple[int, Finish]],
    state: PoolState,
) -> dict[int, _Life]:
    """Who was there from step `first` to step `stop` - 1; arguments as `History.rebuild` calls them."""
    came: dict[int, int] = {}
    ended = {finish.request: step for step, finish in finished}
    seen: dict[int, int] = {}
    numbers, firsts = np.unique(batch[:, 0], return_index=True)
    for number, at in zip(numbers.tolist(), firsts.tolist(), strict=True):
        came[number] = first + int(step_of[at])
    _, lasts = np.unique(batch[::-1, 0], return_index=True)
    for number, at in zip(numbers.tolist(), lasts.tolist(), strict=True):
        seen[number] = first + int(step_of[len(batch) - 1 - at])
    for step, number in (*preempted, *((step, finish.request) for step, finish in finished)):
        came[number] = min(came.get(number, step), step)
    for number, request in state.requests.items():
        over = request.status.is_finished and number not in ended
        if request.arrival_step < stop and not over:
            came[number] = min(came.get(number, stop), max(request.arrival_step, first))
    return {
        number: _Life(
            step, ended.get(number, stop - 1) + 1, number not in ended, ended.get(number, seen.get(number, step))
        )
        for number, step in came.items()
    }


def _mark_of(phases: Column) -> npt.NDArray[np.uint8]:
    marks = np.full(len(phases), Mark.DECODE, np.uint8)
    for phase, mark in _MARK_OF_PHASE.items():
        marks[phases == phase] = mark
    marks[phases == _OVERRUN] = _OVERRUN_MARK
    return marks
