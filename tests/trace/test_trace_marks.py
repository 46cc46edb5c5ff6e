"""Marks: in which steps something of a kind happened, the same live, from a recording, and from one without them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from pressed_engine import pressed_engine, run

from engine.trace import recording as recording_module
from engine.trace.events import DecisionKind, Header, Op, StepTrace
from engine.trace.kept import KeptTrace
from engine.trace.marks import ALL_KINDS, MarkKind, Marks, marks_of
from engine.trace.reader import Recording
from engine.trace.recording import RecordingWriter
from engine.trace.state import PoolState

if TYPE_CHECKING:
    from pathlib import Path

NUM_STEPS = 300


@pytest.fixture(scope="module")
def messages():
    engine = pressed_engine()
    taken = []
    engine.add_sink(taken.append)
    run(engine, NUM_STEPS)
    return engine.header, [message for message in taken if not isinstance(message, Header)]


@pytest.fixture
def path(messages, tmp_path, monkeypatch):
    monkeypatch.setattr(recording_module, "SEGMENT_STEPS", 32)
    header, taken = messages
    with RecordingWriter(tmp_path / "r.mcap", header) as writer:
        for message in taken:
            writer(message)
    return tmp_path / "r.mcap"


def steps_of(messages) -> list[StepTrace]:
    return [message for message in messages[1] if isinstance(message, StepTrace)]


def happened(step: StepTrace) -> set[MarkKind]:
    """What a reader of the trace would say, told without the module's own tables."""
    ops = {row.op for row in step.ops}
    found = set()
    if any(d.kind == DecisionKind.PREEMPTED for d in step.decisions):
        found.add(MarkKind.PREEMPTED)
    if Op.EVICT in ops:
        found.add(MarkKind.EVICTED)
    if any(d.kind in (DecisionKind.REFUSED, DecisionKind.FAILED) for d in step.decisions):
        found.add(MarkKind.REFUSED)
    if any(f.reason in ("refused", "error") for f in step.finished):
        found.add(MarkKind.REFUSED)
    if ops & {Op.COPY, Op.SWAP_IN, Op.SWAP_OUT}:
        found.add(MarkKind.COPIED)
    if any(f.reason in ("stop", "length", "abort") for f in step.finished):
        found.add(MarkKind.FINISHED)
    return found


def test_each_kind_is_marked_where_it_happened_and_nowhere_else(messages) -> None:
    steps = steps_of(messages)
    seen = set()
    for step in steps:
        flags = marks_of(step)
        assert {kind for kind in MarkKind if flags >> kind & 1} == happened(step)
        seen |= happened(step)
    assert seen == set(MarkKind), "the session has marks of every kind"


def all_of(marks: Marks) -> tuple[list[int], list[int]]:
    return marks.flags(0, marks.num_steps).tolist(), marks.counts


def test_live_recorded_and_found_again_are_the_same(messages, path) -> None:
    header, taken = messages
    state, kept = PoolState(header), KeptTrace(header)
    for message in taken:
        state.apply(message)
        kept.append(message, state)
    expected = [marks_of(step) for step in steps_of(messages)]
    assert all_of(kept.marks)[0] == expected
    with Recording.open(path) as recording:
        assert recording.marks.known == 1
        assert all_of(recording.marks) == all_of(kept.marks)
    with Recording.open(path) as recording:
        recording._layout._marks_at = None
        marks = recording.marks
        assert marks.known == 0
        while marks.look(0):
            assert 0 < marks.known <= 1
        assert all_of(marks) == all_of(kept.marks)


def test_a_recording_that_was_cut_off_has_marks_as_well(messages, path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) * 2 // 3])
    with Recording.open(path) as recording:
        assert not recording.complete
        while recording.marks.look(1):
            pass
        expected = [marks_of(step) for step in steps_of(messages)][: recording.num_steps]
        assert all_of(recording.marks)[0] == expected


@pytest.mark.parametrize("looked_at", [False, True])
@pytest.mark.parametrize("kinds", [ALL_KINDS, *(1 << kind for kind in MarkKind)])
def test_the_next_and_the_last_mark_are_found_from_everywhere(messages, path, kinds, looked_at) -> None:
    marked = [step.index for step in steps_of(messages) if marks_of(step) & kinds]
    for step in (-1, 0, 31, 32, 33, 150, NUM_STEPS - 1, NUM_STEPS + 10):
        with Recording.open(path) as recording:
            if not looked_at:
                recording._layout._marks_at = None
            marks = recording.marks
            assert marks.find(step, kinds, True) == next((at for at in marked if at > step), None)
            assert marks.find(step, kinds, False) == next((at for at in reversed(marked) if at < step), None)
            assert marks.find(step, kinds, False, first=100) == next(
                (at for at in reversed(marked) if 100 <= at < step), None
            )


def test_a_search_that_takes_too_long_says_so_and_what_it_saw_is_known(messages, path) -> None:
    with Recording.open(path) as recording:
        recording._layout._marks_at = None
        with pytest.raises(TimeoutError):
            recording.marks.find(-1, 0, True, seconds=-1)
        assert recording.marks.find(-1, 0, True) is None
        assert recording.marks.known == 1


def test_marks_that_do_not_fit_their_recording_are_found_again(messages, path) -> None:
    with Recording.open(path) as recording:
        recording._layout.num_steps -= 1
        assert recording._layout.marks().known == 0


def damage_a_segment(recording: Recording, path: Path) -> None:
    """Of steps 96 to 127, whose marks must then be looked for in the segments."""
    offset, length = recording._layout.segments[3, 2:4].tolist()
    recording._layout._marks_at = None
    data = bytearray(path.read_bytes())
    data[offset + length // 2] ^= 255
    path.write_bytes(data)


def test_a_damaged_segment_has_no_marks_and_the_others_keep_theirs(messages, path) -> None:
    with Recording.open(path) as recording:
        damage_a_segment(recording, path)
        marks = recording.marks
        while marks.look(1):
            pass
        expected = [marks_of(step) for step in steps_of(messages)]
        expected[96:128] = [0] * 32
        assert all_of(marks)[0] == expected


@pytest.mark.parametrize("num_steps", [1, 2, 7, 100, 5000])
@pytest.mark.parametrize("num_cells", [0, 1, 2, 60, 151])
def test_a_cell_of_the_bar_has_the_marks_of_all_its_steps(num_steps, num_cells) -> None:
    flags = np.random.default_rng(num_steps).choice([0, 0, 0, 0, 1, 2, 4, 8, 16, 3], num_steps).astype(np.uint8)
    marks = Marks()
    for flag in flags.tolist():
        marks.append(flag)
    for first in (0, num_steps // 3):
        expected = [0] * num_cells
        span = num_steps - 1 - first
        for step in range(first, num_steps) if num_cells else ():
            expected[round((step - first) / span * (num_cells - 1)) if span else 0] |= int(flags[step])
        found = marks.cells(first, num_steps - 1, num_cells).tolist()
        off = [at for at in range(num_cells) if found[at] != expected[at]]
        # A step half way between two cells may lie in either.
        assert not off or span % (2 * (num_cells - 1)) == 0 or len(off) <= num_cells // 20
        assert np.bitwise_or.reduce(found or [0]) == np.bitwise_or.reduce(expected or [0])


def test_whoever_draws_marks_hears_of_every_segment_that_was_looked_at_a_damaged_one_too(path) -> None:
    with Recording.open(path) as recording:
        damage_a_segment(recording, path)
        marks = recording.marks
        versions = {marks.known: marks.version}
        while marks.look(0):
            versions.setdefault(marks.known, marks.version)
        assert len(versions) > 4
        assert sorted(set(versions.values())) == list(versions.values())
