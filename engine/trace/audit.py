"""A recording gone through from end to end: what it counts, and whether its states hold together."""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from engine.request import FinishReason
from engine.trace.damage import readable_after
from engine.trace.events import DecisionKind, Op, Phase, Reason, StepTrace
from engine.trace.explain import verb
from engine.trace.file_format import RecordingError
from engine.trace.invariants import Violation, check, quick_check
from engine.trace.marks import MarkKind, marks_of
from engine.trace.state import PoolState

if TYPE_CHECKING:
    from engine.trace.reader import Recording

MAX_VIOLATIONS = 64
"""Violations that are named, the earliest."""
_MOST = 1 << 52
"""Largest level that is believed."""
_BLOCKS_PER_CHECK = 2048
"""A pool of so many blocks is checked after every step, one twice as large after every second, and so on."""

_NEVER_FITS = (Reason.NEVER_FITS, Reason.RESERVATION_NEVER_FITS)


class _Known(dict[Any, str]):
    """Names of what is known, and one name for everything else, of which a made-up file may have any number."""

    def __missing__(self, key: Any) -> str:
        return "unknown"


_OP_NAMES = _Known({int(op): op.name.lower() for op in Op})
_VERBS = _Known({int(kind): verb(kind) for kind in DecisionKind})
_REASONS = _Known({str(reason): str(reason) for reason in FinishReason})


@dataclass(slots=True)
class Audit:
    """What was found.

    Attributes:
        num_steps: Steps gone through.
        finished: Requests that ended, by reason.
        computed_tokens: Tokens that went through the model, prefills included.
        ops: Block operations by name.
        decisions: Decisions by their verb.
        overruns: Members of batches whose token was thrown away, as they had ended.
        peak_used: Most blocks in use after a step.
        regret_blocks: See `PoolState.regret_blocks`.
        never_fit: Requests refused since they need more blocks than the pool has, and the most that one of them needs.
        marked_steps: In how many steps something of each `MarkKind` happened.
        levels: Five numbers a step: requests waiting, running, in its batch; tokens scheduled, and preemptions.
        check_interval: All invariants were checked after every so many steps, and after the last.
        violations: The earliest broken invariants.
        num_violations: How many were found.
        checked: Steps after which the state is known, so that it could be checked.
        damage: Why the first of the steps that cannot be read cannot; empty where all can.
        lost: The runs of them: of each, its first and its last step.
    """

    num_steps: int = 0
    num_requests: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    duration_ns: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    computed_tokens: int = 0
    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0
    preemptions: int = 0
    overruns: int = 0
    ops: Counter[str] = field(default_factory=Counter)
    decisions: Counter[str] = field(default_factory=Counter)
    peak_used: int = 0
    peak_running: int = 0
    peak_waiting: int = 0
    regret_blocks: int = 0
    never_fit: tuple[int, int] = (0, 0)
    marked_steps: list[int] = field(default_factory=lambda: [0] * len(MarkKind))
    levels: array[int] = field(default_factory=lambda: array("q"))
    check_interval: int = 1
    violations: list[Violation] = field(default_factory=list)
    num_violations: int = 0
    checked: int = 0
    damage: str = ""
    lost: list[tuple[int, int]] = field(default_factory=list)

    @property
    def evictions(self) -> int:
        """Cached blocks whose content was lost to reuse."""
        return self.ops[Op.EVICT.name.lower()]

    @property
    def prefix_hit_rate(self) -> float:
        """Share of the admitted prompts' tokens that the prefix cache had; 0 where it was never asked."""
        return self.prefix_hit_tokens / self.prefix_queried_tokens if self.prefix_queried_tokens else 0.0


def audit(recording: Recording) -> Audit:
    """Fold the whole recording, checking as it goes. Time is proportional to the steps.

    Behind damage the steps are counted on; their states are known again from the next keyframe on.
    """
    found = Audit(check_interval=max(1, recording.header.num_blocks // _BLOCKS_PER_CHECK))
    start, state, known_from = 0, PoolState(recording.header), 0
    while True:
        try:
            _go_through(found, recording, start, state, known_from)
            break
        except RecordingError as error:
            found.damage = found.damage or str(error)
            if error.steps is None:
                break
            _note_lost(found, error.steps)
            start = error.steps[1] + 1
            if start > known_from:
                _close(found, state)
                known_from = readable_after(recording, start - 1)
                state = PoolState(recording.header) if known_from < 0 else recording.state_at(known_from)
                known_from = recording.num_steps if known_from < 0 else known_from
    _close(found, state)
    found.violations.sort(key=lambda violation: violation.step)
    del found.violations[MAX_VIOLATIONS:]
    return found


def _go_through(found: Audit, recording: Recording, start: int, state: PoolState, known_from: int) -> None:
    """Count the steps from `start` on; those from `known_from` on are folded into the state and checked.

    Raises:
        RecordingError: a part of the recording is damaged; what came before it was counted.
    """
    last_good, at = state.step, start - 1
    for message in recording.messages(start):
        if not isinstance(message, StepTrace):
            found.num_requests += 1
            found.prompt_tokens += len(message.prompt_token_ids)
            if at >= state.step:
                state.apply(message)
            continue
        _count(found, message)
        at = message.index
        if message.index < known_from:
            continue
        if message.index > state.step:
            state.apply(message)
        found.checked += 1
        found.peak_used = max(found.peak_used, state.used)
        if state.step % found.check_interval == 0 or state.step == recording.num_steps - 1:
            broken = check(state)
            if broken and last_good < state.step - 1 and not found.violations:
                broken = _first_broken(recording, last_good, state.step) or broken
            elif not broken:
                last_good = state.step
        else:
            broken = quick_check(state)
        _note(found, broken)


def _note_lost(found: Audit, steps: tuple[int, int]) -> None:
    """Remember the steps that cannot be read, those of neighbours as one run."""
    if found.lost and found.lost[-1][1] == steps[0] - 1:
        found.lost[-1] = (found.lost[-1][0], steps[1])
    else:
        found.lost.append(steps)


def _close(found: Audit, state: PoolState) -> None:
    """Take over what a state has gathered that is not gone on with."""
    found.regret_blocks = max(found.regret_blocks, state.regret_blocks)
    found.num_violations += state.num_violations
    # Operations that contradicted the state come first within their step: what they broke follows from them.
    found.violations[:0] = state.violations


def _count(found: Audit, step: StepTrace) -> None:
    found.num_steps += 1
    found.duration_ns = step.start_ns + step.schedule_ns + step.execute_ns + step.sample_ns + step.update_ns
    found.generated_tokens += len(step.tokens)
    scheduled = sum(member[3] for member in step.batch)
    preemptions = sum(decision.kind == DecisionKind.PREEMPTED for decision in step.decisions)
    found.computed_tokens += scheduled
    found.preemptions += preemptions
    found.overruns += sum(member[1] == Phase.OVERRUN and member[3] > 0 for member in step.batch)
    counters = step.counters
    levels = (counters.waiting, counters.running, len(step.batch), scheduled, preemptions)
    found.levels.extend(min(max(level, 0), _MOST) for level in levels)
    found.ops.update(map(_OP_NAMES.__getitem__, (op[0] for op in step.ops)))
    found.decisions.update(map(_VERBS.__getitem__, (decision.kind for decision in step.decisions)))
    for decision in step.decisions:
        if decision.kind == DecisionKind.REFUSED and decision.reason in _NEVER_FITS:
            needs = min(max(decision.numbers.get("needs", 0), 0), _MOST)
            found.never_fit = (found.never_fit[0] + 1, max(found.never_fit[1], needs))
    flags = marks_of(step)
    for kind in MarkKind:
        found.marked_steps[kind] += flags >> kind & 1
    for finish in step.finished:
        found.finished[_REASONS[finish.reason]] += 1
    found.peak_running = max(found.peak_running, step.counters.running)
    found.peak_waiting = max(found.peak_waiting, step.counters.waiting)
    found.prefix_queried_tokens = step.counters.prefix_queried_tokens
    found.prefix_hit_tokens = step.counters.prefix_hit_tokens


def _note(found: Audit, broken: list[Violation]) -> None:
    found.num_violations += len(broken)
    room = MAX_VIOLATIONS - len(found.violations)
    found.violations.extend(broken[:room])


def _first_broken(recording: Recording, good: int, bad: int) -> list[Violation]:
    """What is broken after the first bad step between a good one and a bad one, both checked."""
    state = recording.state_at(good)
    for message in recording.messages(good + 1, bad + 1):
        state.apply(message)
        if isinstance(message, StepTrace):
            broken = check(state)
            if broken:
                return broken
    return []
