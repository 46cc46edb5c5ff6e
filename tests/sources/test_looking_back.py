"""Looking back in a live session: the past is what it was, and the engine does not notice."""

from __future__ import annotations

import pytest
from pressed_engine import pressed_engine, run

from engine.loop import EngineLoop
from engine.trace.events import StepTrace
from engine.trace.state import PoolState
from kvtui.sources.live import LiveSource

NUM_STEPS = 200


class Session:
    """A session that only steps when told, and the state after each of its steps as a fold of its own made it."""

    def __init__(self, every: int = 1, **source) -> None:
        self.engine = pressed_engine()
        self.loop = EngineLoop(self.engine)
        self.source = LiveSource(self.engine, self.loop, **source)
        self.states: list[PoolState | None] = []
        self.every = every
        self.asked = 0
        self._state = PoolState(self.engine.header)
        self.engine.add_sink(self._take)

    def _take(self, message) -> None:
        self._state.apply(message)
        if isinstance(message, StepTrace):
            self.states.append(self._state.copy() if message.index % self.every == 0 else None)

    def run(self, num_steps: int) -> None:
        run(self.engine, num_steps, start=self.asked)
        self.asked += num_steps


@pytest.fixture
def session() -> Session:
    session = Session()
    session.run(NUM_STEPS)
    while session.source.poll():
        pass
    return session


def test_scrubbing_shows_every_step_as_it_was_live(session) -> None:
    source, states = session.source, session.states
    assert source.state.same_as(states[-1]) == []
    for step in range(len(states) - 2, -1, -1):
        source.step(-1)
        assert (source.position, source.looking_back) == (step, True)
        assert source.state.same_as(states[step]) == []
    source.step(-10)
    assert source.position == -1
    assert source.state.same_as(PoolState(session.engine.header)) == []
    for step in range(len(states) - 1):
        source.step(1)
        assert source.position == step
        assert source.state.same_as(states[step]) == []
    source.seek(77)
    assert source.state.same_as(states[77]) == []


def test_the_engine_runs_on_and_what_it_does_meanwhile_is_kept(session) -> None:
    source = session.source
    source.seek(100)
    shown = source.state
    session.run(60)
    while source.newest.step < len(session.states) - 1:
        assert source.poll() in ([], [shown.last_step]), "only the step that was jumped to is handed out"
    assert source.state is shown
    assert (source.position, source.length) == (100, len(session.states))
    assert not source.engine_paused
    assert source.newest.same_as(session.states[-1]) == []
    source.seek(NUM_STEPS + 30)
    assert source.state.same_as(session.states[NUM_STEPS + 30]) == []


@pytest.mark.parametrize("back", ["follow", "seek"])
def test_the_present_comes_back_whole(session, back) -> None:
    source = session.source
    generation = source.generation
    source.step(-50)
    assert source.generation > generation
    generation = source.generation
    session.run(5)
    source.poll()
    if back == "follow":
        source.follow()
    else:
        source.seek(10**9)
    assert not source.looking_back
    assert source.generation > generation
    assert source.state is source.newest
    assert source.state.same_as(session.states[-1]) == []
    context = source.context(64)
    assert (context.first, context.num_steps) == (len(session.states) - 64, 64)
    session.run(2)
    assert [step.index for step in source.poll()] == [len(session.states) - 2, len(session.states) - 1]


def test_no_way_of_moving_through_the_past_touches_the_engine(session) -> None:
    source = session.source
    assert not session.loop.paused
    for move in (
        lambda: source.step(-10),
        lambda: source.step(3),
        lambda: source.step(500),
        lambda: source.seek(4),
        lambda: source.play(),
        lambda: source.set_speed(16),
        lambda: source.hold(),
    ):
        move()
        source.poll()
        assert not session.loop.paused
        assert session.loop.speed is None
    assert source.looking_back, "not even the last step known is the present while the engine runs"


def test_pausing_the_engine_while_looking_back_leaves_the_past_shown(session) -> None:
    source = session.source
    source.seek(50)
    source.pause()
    assert source.engine_paused
    assert (source.position, source.looking_back) == (50, True)
    source.resume()
    assert not source.engine_paused
    assert (source.position, source.looking_back) == (50, True)


def test_stepping_up_to_the_present_of_a_paused_engine_arrives_there_and_does_not_step_it(session) -> None:
    source = session.source
    source.pause()
    newest = source.position
    source.step(-3)
    source.step(10)
    assert (source.position, source.looking_back) == (newest, False)
    assert session.loop._single_steps == 0
    source.step(1)
    assert session.loop._single_steps == 1


def test_the_past_can_be_played_and_ends_in_the_present(session) -> None:
    source = session.source
    source.seek(len(session.states) - 12)
    source._past._clock = clock = iter(range(0, 10**15, 10**9)).__next__
    source.play()
    assert not source.paused
    seen = []
    for _ in range(400):
        seen += [step.index for step in source.poll()]
        if not source.looking_back:
            break
    assert clock is not None
    assert seen == list(range(seen[0], seen[0] + len(seen)))
    assert not source.looking_back
    assert source.state is source.newest


def test_speed_is_that_of_the_past_while_one_looks_back_and_of_the_engine_else(session) -> None:
    source = session.source
    source.set_speed(0.5)
    source.seek(10)
    assert source.speed == 1
    source.set_speed(16)
    assert source.speed == 16
    source.follow()
    assert source.speed == 0.5
    source.seek(10)
    assert source.speed == 16


def test_what_was_let_go_is_not_gone_to(session) -> None:
    small = Session(most_bytes=24_000)
    small.run(400)
    while small.source.poll():
        pass
    source, first = small.source, small.source.first
    assert first > 0
    assert source.kept.num_bytes <= 30_000
    source.seek(-1)
    assert source.position == first - 1
    assert source.state.same_as(small.states[first - 1]) == []
    small.run(400)
    while source.newest.step < len(small.states) - 1:
        source.poll()
    assert source.position == first - 1, "what is looked at stays"
    assert source.first > first
    source.step(-1)
    assert source.position == source.first - 1
    source.step(1)
    assert source.state.same_as(small.states[source.first]) == []


def test_the_past_that_was_let_go_while_it_played_goes_on_where_history_begins(session) -> None:
    small = Session(most_bytes=24_000)
    small.run(300)
    small.source.poll()
    small.source.seek(-1)
    small.source._past._clock = iter(range(0, 10**15, 10**9)).__next__
    small.source.play()
    small.source.poll()
    small.run(500)
    for _ in range(800):
        small.source.poll()
        if not small.source.looking_back:
            break
    assert small.source.error is None
    assert small.source.state.same_as(small.states[-1]) == []
