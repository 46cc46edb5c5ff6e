"""A lane over time against a slow and obvious account of it: each column is asked what happened within it."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
from races import arrivals, lanes

from engine.trace.events import DecisionKind, Phase, RequestArrived, StepTrace
from kvtui.history import Mark
from kvtui.race.lane_time import BatchOverTime, LaneMarks, began_ns, end_of
from kvtui.race.race_time import RaceTime, TimeAxis

RACED = lanes(arrivals(9))
PHASES = {Phase.PREFILL: Mark.PREFILL, Phase.DECODE: Mark.DECODE, Phase.RECOMPUTE: Mark.RECOMPUTE}
ORDER = [Mark.WAITING, Mark.DECODE, Mark.RECOMPUTE, Mark.PREFILL, Mark.PREEMPTED, Mark.REDONE, Mark.ENDED]


def slowly(lane, request, edges, now):
    """The last of `ORDER` among what happened between each two edges, and before `now`."""
    began = began_ns(lane)
    steps = [m for m in lane.messages if isinstance(m, StepTrace)]
    arrived = next(m for m in lane.messages if isinstance(m, RequestArrived) and m.request == request)
    spans = [((arrived.time_ns - began) / 1e9, (steps[0].start_ns - began) / 1e9, Mark.WAITING)]
    points = []
    over = False
    for step, following in zip(steps, [*steps[1:], steps[-1]], strict=True):
        start, end = (step.start_ns - began) / 1e9, (end_of(step) - began) / 1e9
        until = (following.start_ns - began) / 1e9 if following is not step else end
        phase = next((member[1] for member in step.batch if member[0] == request), None)
        if over or until <= spans[0][0]:
            continue
        spans.append((max(start, spans[0][0]), until, Mark.WAITING if phase is None else PHASES[phase]))
        for decision in step.decisions:
            if decision.kind == DecisionKind.PREEMPTED and decision.request == request:
                points.append((start, Mark.PREEMPTED if phase is None else Mark.REDONE))
        if any(finish.request == request for finish in step.finished):
            points.append((end, Mark.ENDED))
            spans[-1] = (*spans[-1][:1], end, spans[-1][2])
            over = True
    column, found = edges[1] - edges[0], []
    for left, right in pairwise(edges):
        slack = column * 1e-5
        marks = [mark for a, b, mark in spans if a < min(right - slack, now) and min(b, now) > left + slack and b > a]
        for at, mark in points:
            inside = left < at <= right if mark == Mark.ENDED else left - slack <= at < right - slack
            if inside and at <= now:
                marks.append(mark)
        found.append(max(marks, key=ORDER.index, default=Mark.ABSENT))
    return found


@pytest.mark.parametrize("seed", range(12))
def test_a_column_shows_what_happened_in_it(seed):
    rng = random.Random(seed)
    lane = RACED[seed % 3]
    marks = LaneMarks(lane)
    total = (end_of(lane.messages[-1]) - began_ns(lane)) / 1e9
    span = total * rng.choice([1.0, 0.5, 0.13, 0.02])
    start = rng.uniform(0, total - span)
    edges = np.linspace(start, start + span, rng.choice([7, 60, 190]) + 1)
    now = rng.choice([total, rng.uniform(start, total)])
    for request in range(9):
        shown = marks.columns(request, edges, now).tolist()
        assert shown == slowly(lane, request, edges, now), (seed, request)


def test_who_is_there_is_told_for_any_stretch_and_nobody_before_coming_or_behind_the_end():
    lane = RACED[2]
    marks = LaneMarks(lane)
    ends = {}
    for message in lane.messages:
        for finish in getattr(message, "finished", ()):
            ends[finish.request] = (end_of(message) - began_ns(lane)) / 1e9
    total = max(ends.values())
    assert marks.requests(0.0, total) == [(request, False) for request in range(9)]
    middle = sorted(ends.values())[4]
    assert marks.requests(middle, middle) == [(r, True) for r in range(9) if ends[r] > middle]
    assert marks.requests(0.0, -1.0) == []
    assert marks.columns(77, np.linspace(0, 1, 11), 1.0).tolist() == [0] * 10


def test_the_mean_batch_is_that_of_the_time_between_two_moments():
    for lane in RACED:
        batch = BatchOverTime(lane)
        began = began_ns(lane)
        steps = [m for m in lane.messages if isinstance(m, StepTrace)]
        assert batch.most == max(len(step.batch) for step in steps)
        step = steps[len(steps) // 2]
        a, b = (step.start_ns - began) / 1e9, (end_of(step) - began) / 1e9
        within = np.array([a + (b - a) * 0.25, a + (b - a) * 0.5])
        assert batch.mean(within)[0] == pytest.approx(len(step.batch))
        assert batch.mean(np.array([1e6, 1e6, 2e6])).tolist() == [0, 0]


@pytest.mark.parametrize("seed", range(20))
def test_ticks_are_round_moments_in_their_columns_and_never_too_close(seed):
    rng = random.Random(seed)
    axis = TimeAxis(rng.uniform(0, 100), 10 ** rng.uniform(-4, 2), rng.randint(1, 200))
    ticks = axis.ticks(12)
    columns = [column for column, _ in ticks]
    assert all(b - a >= 11 for a, b in pairwise(columns))
    for column, words in ticks:
        seconds = float(words.removesuffix(" s").replace(",", ""))
        assert abs(axis.start + column * axis.column - seconds) <= axis.column * 0.51
    assert len(ticks) >= axis.columns // 40


def test_the_axis_follows_the_present_in_whole_columns():
    time = RaceTime(total=100.0, shortest=0.01, label=9, zoom=3)
    width = 110
    for now in np.linspace(0, 100, 57):
        time.now = float(now)
        axis = time.axis(width)
        assert axis.columns == 100
        assert axis.start <= now <= axis.stop + 1e-9
        assert axis.start / axis.column == pytest.approx(round(axis.start / axis.column))
