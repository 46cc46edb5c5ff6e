"""Which steps of a damaged trace cannot be read, and where it can be read again."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, NamedTuple

from engine.trace.file_format import DAMAGE, RecordingError

if TYPE_CHECKING:
    from engine.trace.trace_reader import TraceReader


class Damage(NamedTuple):
    """A part of a trace that cannot be read.

    Attributes:
        first: The first step that cannot be read.
        last: The last one before others can be.
        beyond: The first step behind it that can be shown, since a keyframe tells the state there; -1 where none does.
        num_readable: Steps of the whole trace that can be read.
    """

    first: int
    last: int
    beyond: int
    num_readable: int


def damage_of(trace: TraceReader, error: RecordingError) -> Damage | None:
    """What is behind an error that reading some steps raised; None where it does not say which steps.

    Every segment of the trace is tried: this takes as long as reading it.
    """
    if error.steps is None:
        return None
    first, last = error.steps
    runs = unreadable(trace)
    for start, stop in runs:
        if start <= first < stop:
            last = max(last, stop - 1)
    lost = sum(stop - start for start, stop in runs) or last - first + 1
    return Damage(first, last, readable_after(trace, last), trace.num_steps - trace.first_step - lost)


def unreadable(trace: TraceReader) -> list[tuple[int, int]]:
    """The runs of steps that cannot be read: of each, its first step and the one after its last."""
    runs: list[tuple[int, int]] = []
    for at, (first, num_steps) in enumerate(trace.parts.segments[:, :2].tolist()):
        if first + num_steps <= trace.first_step:
            continue
        try:
            trace.parts.segment(at)
        except DAMAGE:
            if runs and runs[-1][1] == first:
                runs[-1] = (runs[-1][0], first + num_steps)
            else:
                runs.append((first, first + num_steps))
    return runs


def readable_after(trace: TraceReader, step: int) -> int:
    """The first step behind this one whose state does not depend on it; -1 where there is none."""
    keyframes = [row[0] for row in trace.parts.keyframes]
    for index in keyframes[bisect_left(keyframes, step) :]:
        shown = max(index, step + 1)
        if shown >= trace.num_steps:
            break
        try:
            trace.state_at(shown)
        except RecordingError:
            continue
        return shown
    return -1
