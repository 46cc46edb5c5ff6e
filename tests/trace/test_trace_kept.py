"""A trace kept in memory: any step of it is what it was, in bounded memory, as in a recording of the same session."""

from __future__ import annotations

import random

import pytest
from pressed_engine import pressed_engine, run

from engine.trace.events import Header, RequestArrived, StepTrace
from engine.trace.file_format import RecordingError
from engine.trace.kept import KeptTrace
from engine.trace.reader import Recording
from engine.trace.recording import RecordingWriter
from engine.trace.state import PoolState
from engine.trace.step_columns import StepColumns

NUM_STEPS = 420


class Kept:
    """A session that is kept, with all its messages, and the state after each step as the fold made it."""

    def __init__(self, num_steps: int = NUM_STEPS, most_bytes: int = 1 << 30, **engine) -> None:
        self.engine = pressed_engine(**engine)
        self.messages: list[RequestArrived | StepTrace] = []
        self.states: list[PoolState] = []
        self.sizes: list[int] = []
        self.state = PoolState(self.engine.header)
        self.trace = KeptTrace(self.engine.header, most_bytes)
        self.engine.add_sink(self.take)
        run(self.engine, num_steps)

    def take(self, message) -> None:
        if isinstance(message, Header):
            return
        self.messages.append(message)
        self.state.apply(message)
        self.trace.append(message, self.state)
        self.sizes.append(self.trace.num_bytes)
        if isinstance(message, StepTrace):
            self.states.append(self.state.copy())

    @property
    def steps(self) -> list[StepTrace]:
        return [message for message in self.messages if isinstance(message, StepTrace)]


@pytest.fixture(scope="module")
def kept() -> Kept:
    return Kept()


def test_the_session_has_all_that_can_happen(kept) -> None:
    ops = {op[0] for step in kept.steps for op in step.ops}
    assert ops == set(range(10)), "every operation occurs"
    assert {finish.reason for step in kept.steps for finish in step.finished} >= {"length", "abort", "refused"}
    assert kept.state.num_violations == 0


def test_the_state_at_every_step_is_the_one_that_was(kept) -> None:
    assert kept.trace.num_steps == len(kept.states)
    assert kept.trace.state_at(-1).same_as(PoolState(kept.engine.header)) == []
    for step, state in enumerate(kept.states):
        assert kept.trace.state_at(step).same_as(state) == []


def test_going_backward_and_anywhere_comes_to_the_same_states(kept) -> None:
    order = [*range(len(kept.states) - 1, len(kept.states) - 80, -1)]
    order += random.Random(3).choices(range(len(kept.states)), k=40)
    for step in order:
        assert kept.trace.state_at(step).same_as(kept.states[step]) == []


def test_a_state_that_was_handed_out_is_not_shared(kept) -> None:
    first = kept.trace.state_at(300)
    for message in kept.trace.messages(301, 360):
        first.apply(message)
    assert kept.trace.state_at(300).same_as(kept.states[300]) == []
    assert kept.trace.state_at(284).same_as(kept.states[284]) == []


def test_the_messages_and_columns_are_those_that_were_taken_in(kept) -> None:
    assert list(kept.trace.messages()) == kept.messages[: kept.messages.index(kept.steps[-1]) + 1]
    for start, stop in ((0, len(kept.steps)), (100, 101), (63, 129), (len(kept.steps) - 3, len(kept.steps))):
        assert list(kept.trace.steps(start, stop)) == kept.steps[start:stop]
        columns, expected = kept.trace.columns(start, stop), StepColumns.of(start, kept.steps[start:stop])
        for name, value in expected._asdict().items():
            found = getattr(columns, name)
            assert found == value if isinstance(value, int | list) else found.tolist() == value.tolist(), name
    assert kept.trace.columns(50, 50).num_steps == 0


@pytest.mark.parametrize("backward", [False, True])
def test_the_segments_have_all_steps_the_newest_too(kept, backward) -> None:
    found = [
        segment.first_step + at for segment in kept.trace.segments(backward=backward) for at in range(segment.num_steps)
    ]
    assert sorted(found) == list(range(len(kept.steps)))
    assert next(kept.trace.segments(backward=True)).first_step > next(kept.trace.segments()).first_step
    newest = next(kept.trace.segments(backward=True))
    last = len(kept.steps)
    assert newest.steps(newest.first_step, last, kept.trace._vocabulary) == kept.steps[newest.first_step :]
    assert [segment.first_step for segment in kept.trace.segments(70, 80)] == [64]


def test_a_recording_has_the_same_columns(kept, tmp_path) -> None:
    with RecordingWriter(tmp_path / "r.mcap", kept.engine.header) as writer:
        for message in kept.messages:
            writer(message)
    with Recording.open(tmp_path / "r.mcap") as recording:
        mine, theirs = kept.trace.columns(100, 400), recording.columns(100, 400)
        assert all(
            a == b if isinstance(a, int | list) else a.tolist() == b.tolist() for a, b in zip(mine, theirs, strict=True)
        )


def test_an_empty_trace_has_the_state_before_the_first_step() -> None:
    trace = KeptTrace(pressed_engine().header)
    assert (trace.first_step, trace.num_steps, list(trace.messages())) == (0, 0, [])
    assert trace.state_at(-1).step == -1
    assert trace.columns(0).num_steps == 0
    with pytest.raises(IndexError, match="step 0 is not in this session's history"):
        trace.state_at(0)


def test_memory_is_bounded_and_what_is_left_is_as_it_was() -> None:
    most = 30_000
    small = Kept(most_bytes=most)
    assert max(small.sizes) <= most * 1.2
    assert small.sizes[-1] < most
    first = small.trace.first_step
    assert 0 < first < NUM_STEPS - 60
    for step in (first - 1, *range(first, len(small.states), 7), len(small.states) - 1):
        assert small.trace.state_at(step).same_as(small.states[step]) == []
    for step in (-1, 0, first - 2):
        with pytest.raises(IndexError, match=f"it has steps {first} to"):
            small.trace.state_at(step)
    assert next(small.trace.steps()).index == first
    assert small.trace.columns(0).first == first


def test_who_reads_on_while_the_oldest_go_is_told_in_one_line() -> None:
    small = Kept(num_steps=200)
    reading = small.trace.messages(0)
    next(reading)
    small.trace._most_bytes = 12_000
    run(small.engine, 200, start=200)
    small.trace._cache.clear()
    with pytest.raises(RecordingError, match=r"steps \d+ to \d+ cannot be read \(they were let go\)"):
        list(reading)
