"""A recording as a source: played by its timestamps, stepped both ways, and jumped in."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from damaged_recording import damaged_recording

from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.request import SamplingParams
from engine.simulated import simulated_engine
from engine.trace.events import Counters, RequestArrived, StepTrace
from engine.trace.file_format import RecordingError
from engine.trace.reader import Recording
from engine.trace.recording import RecordingWriter
from engine.trace.step_columns import StepColumns
from kvtui.sources.playback import LONGEST_GAP_NS
from kvtui.sources.recorded import RecordingSource

if TYPE_CHECKING:
    from pathlib import Path

MS = 1_000_000


class Clock:
    """Nanoseconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 5_000 * MS

    def __call__(self) -> int:
        return self.now

    def passes(self, milliseconds: float) -> None:
        self.now += round(milliseconds * MS)


def step(index: int, start_ms: float) -> StepTrace:
    counters = Counters(0, 0, 0, 0, 0, 8, 0, 0, 0, index)
    return StepTrace(index, round(start_ms * MS), 10, 20, 30, 40, [], [], [], [], [], counters)


class Timed:
    """Stands for a recording of empty steps at given times."""

    first_step = 0
    complete = True

    def __init__(self, starts_ms: list[float], broken_from: int | None = None) -> None:
        self.engine = simulated_engine(EngineConfig(cache=CacheConfig(num_blocks=8)))
        self.header = self.engine.header
        self.all = [step(i, start) for i, start in enumerate(starts_ms)]
        self.num_steps = len(self.all)
        self.broken_from = broken_from

    def messages(self, start=0, stop=None):
        for message in self.all[start:stop]:
            if self.broken_from is not None and message.index >= self.broken_from:
                raise RecordingError("steps 3 to 9 cannot be read")
            yield message

    def columns(self, start, stop=None):
        return StepColumns.of(start, list(self.messages(start, stop)))

    def state_at(self, index):
        from engine.trace.state import PoolState

        state = PoolState(self.header)
        for message in self.messages(0, index + 1):
            state.apply(message)
        return state

    def damage(self, error):
        return None

    def close(self) -> None:
        pass


def indices(steps: list[StepTrace]) -> list[int]:
    return [s.index for s in steps]


def test_steps_come_when_their_time_has_come() -> None:
    clock = Clock()
    source = RecordingSource(Timed([0, 100, 200, 400]), clock=clock)
    assert (source.position, source.length, source.live) == (-1, 4, False)
    assert indices(source.poll()) == [0]
    clock.passes(99)
    assert source.poll() == []
    clock.passes(2)
    assert indices(source.poll()) == [1]
    clock.passes(100)
    assert indices(source.poll()) == [2]
    clock.passes(1000)
    assert indices(source.poll()) == [3]
    assert source.position == 3
    source.poll()
    assert source.paused, "the end pauses"


@pytest.mark.parametrize(("speed", "expected"), [(0.25, 3), (1.0, 11), (4.0, 41), (16.0, 161)])
def test_speed_multiplies_the_recorded_time(speed, expected) -> None:
    clock = Clock()
    source = RecordingSource(Timed([10.0 * i for i in range(400)]), clock=clock)
    source.set_speed(speed)
    seen = indices(source.poll())
    for _ in range(25):
        clock.passes(4)
        seen += indices(source.poll())
    assert seen == list(range(len(seen)))
    assert abs(len(seen) - expected) <= 1


def test_speed_stays_between_a_quarter_and_sixteen() -> None:
    source = RecordingSource(Timed([0, 10]), clock=Clock())
    source.set_speed(0.0001)
    assert source.speed == 0.25
    source.set_speed(1000)
    assert source.speed == 16


def test_a_long_idle_time_is_shortened() -> None:
    clock = Clock()
    source = RecordingSource(Timed([0, 60_000, 60_010]), clock=clock)
    source.poll()
    clock.passes(LONGEST_GAP_NS / MS - 1)
    assert source.poll() == []
    clock.passes(2)
    assert indices(source.poll()) == [1]


def test_time_that_goes_backward_in_a_recording_does_not_stop_it() -> None:
    clock = Clock()
    source = RecordingSource(Timed([0, 500, 100, 600]), clock=clock)
    source.poll()
    for _ in range(4):
        clock.passes(600)
        source.poll()
    assert source.position == 3


def test_pausing_stops_the_clock_and_resuming_goes_on_from_there() -> None:
    clock = Clock()
    source = RecordingSource(Timed([0, 100, 200]), clock=clock)
    source.poll()
    source.pause()
    clock.passes(10_000)
    assert source.poll() == []
    source.resume()
    assert indices(source.poll()) == [1]
    assert source.poll() == []


def test_resuming_at_the_end_starts_over() -> None:
    clock = Clock()
    source = RecordingSource(Timed([0, 100, 200]), clock=clock)
    source.seek(2)
    source.pause()
    source.poll()
    source.resume()
    assert indices(source.poll()) == [0]


def test_a_jump_hands_out_its_step_and_has_those_before_it_as_context() -> None:
    source = RecordingSource(Timed([10.0 * i for i in range(2000)]), clock=Clock())
    source.pause()
    generation = source.generation
    source.seek(1500)
    assert source.generation > generation
    assert indices(source.poll()) == [1500]
    assert source.poll() == []
    context = source.context(200)
    assert (context.first, context.num_steps) == (1301, 200)
    assert context.times[:, 0].tolist() == [10 * MS * i for i in range(1301, 1501)]
    source.seek(99_999)
    assert source.position == 1999
    source.seek(-50)
    assert source.position == -1
    assert source.poll() == []


def test_a_damaged_part_stops_the_playing_and_says_so() -> None:
    clock = Clock()
    source = RecordingSource(Timed([0, 10, 20, 30, 40], broken_from=3), clock=clock)
    for _ in range(6):
        clock.passes(10)
        source.poll()
    assert source.position == 2
    assert source.paused
    assert source.error == "steps 3 to 9 cannot be read"
    source.seek(4)
    assert source.position == 2
    assert source.error == "steps 3 to 9 cannot be read"
    source.step(-1)
    assert source.position == 1
    assert source.error is None, "there the trace is whole"
    source.step(5)
    assert source.position == 2
    assert source.error == "steps 3 to 9 cannot be read"


def test_behind_damage_the_recording_goes_on_at_its_next_keyframe(tmp_path) -> None:
    num_steps = damaged_recording(tmp_path / "a.mcap", 2)
    source = RecordingSource(Recording.open(tmp_path / "a.mcap"), clock=Clock())
    source.seek(15)
    assert source.damage is None
    source.step(2)
    assert (source.position, source.damage) == (17, None)
    source.step(1)
    assert source.position == 27, "18 to 26 are lost"
    assert (source.error, source.damage) == (None, None)
    assert source.context(100).first == 27, "what lies before it cannot be told in one go"
    source.step(-1)
    assert source.position == 17
    assert source.damage == (18, 26, 27, num_steps - 9)
    assert source.paused
    source.resume()
    assert (source.position, source.damage) == (27, None)
    source.seek(17)
    source.step(10)
    assert source.position == 36, "the jump counts as one step"
    source.follow()
    assert (source.position, source.damage) == (num_steps - 1, None), "damage elsewhere is none of its end"
    source.close(1.0)


def test_the_end_of_a_recording_that_no_keyframe_leads_to_is_the_last_step_before_the_damage(tmp_path) -> None:
    num_steps = damaged_recording(tmp_path / "a.mcap", 1, 3, keyframes=10_000)
    source = RecordingSource(Recording.open(tmp_path / "a.mcap"), clock=Clock())
    source.follow()
    assert source.position == 8
    assert source.damage == (9, 17, -1, num_steps - 18)
    source.step(1)
    source.resume()
    source.poll()
    assert source.position == 8
    source.step(-3)
    assert (source.position, source.damage, source.error) == (5, None, None)
    source.close(1.0)


def test_an_empty_recording_can_be_played_stepped_and_jumped_in() -> None:
    source = RecordingSource(Timed([]), clock=Clock())
    for act in (source.poll, source.pause, source.resume, lambda: source.step(1), lambda: source.step(-1)):
        act()
    source.seek(0)
    source.seek(-1)
    assert source.position == -1
    assert source.poll() == []


@pytest.fixture(scope="module")
def real(tmp_path_factory) -> Path:
    """A recording of an engine under pressure."""
    path = tmp_path_factory.mktemp("recordings") / "r.mcap"
    engine = simulated_engine(
        EngineConfig(
            cache=CacheConfig(num_blocks=24, block_size=4),
            scheduler=SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=32, max_model_len=96),
        )
    )
    writer = RecordingWriter(path, engine.header)
    engine.add_sink(writer)
    for i in range(14):
        engine.add_request("the same beginning " + "x" * (i % 5), SamplingParams(max_tokens=12 + i), name=f"r{i}")
    for _ in range(400):
        if not engine.has_work:
            break
        engine.step()
    writer.close()
    return path


def same(first, second) -> bool:
    arrays = ("owner", "refs", "filled", "key", "logical")
    return (
        first.step == second.step
        and all(np.array_equal(getattr(first, a), getattr(second, a)) for a in arrays)
        and {r: (s.table, s.token_ids, s.status) for r, s in first.requests.items()}
        == {r: (s.table, s.token_ids, s.status) for r, s in second.requests.items()}
    )


def test_playing_stepping_and_jumping_come_to_the_same_state(real) -> None:
    with Recording.open(real) as recording:
        assert recording.num_steps > 40
        played = RecordingSource(recording, clock=Clock())
        played.step(30)
        jumped = RecordingSource(recording, start=30, clock=Clock())
        assert jumped.position == 30
        jumped.step(-1)
        assert played.position == jumped.position == 29
        assert same(played.state, jumped.state)
        assert same(played.state, recording.state_at(29))
        played.step(5)
        jumped.step(5)
        assert same(played.state, jumped.state)
        assert indices(jumped.poll())[-1] == 34


def test_arrivals_are_applied_before_their_step(real) -> None:
    with Recording.open(real) as recording:
        source = RecordingSource(recording, clock=Clock())
        first = next(m for m in recording.messages(0) if isinstance(m, RequestArrived))
        source.step(1)
        assert source.state.requests[first.request].name == first.name
        assert source.state.num_violations == 0
