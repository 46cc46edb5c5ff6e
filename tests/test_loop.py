import logging
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from engine.config import EngineConfig
from engine.core.scheduler_output import SchedulerOutput
from engine.engine import PagedEngine
from engine.loop import EngineLoop
from engine.request import FinishReason, RequestOutput, SamplingParams
from engine.simulated import SimulatedCodec, SimulatedRunner

PATIENCE = 30.0
"""Seconds that a test waits for what must come; far more than it takes."""


class GatedRunner(SimulatedRunner):
    """Counts its steps, and stands still in one while the gate is shut."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.num_steps = 0
        self.times: list[float] = []

    def execute(self, output: SchedulerOutput) -> list[int | None]:
        self.times.append(time.monotonic())
        self.entered.set()
        assert self.gate.wait(PATIENCE)
        self.num_steps += 1
        return super().execute(output)


class Session:
    def __init__(self) -> None:
        config = EngineConfig()
        self.runner = GatedRunner(config)
        self.engine = PagedEngine(config, self.runner, SimulatedCodec())
        self.errors: list[BaseException] = []
        self.loop = EngineLoop(self.engine, on_error=self.errors.append)

    def ask(self, max_tokens: int) -> "Answer":
        answer = Answer()
        self.engine.add_request("hello", SamplingParams(max_tokens=max_tokens, ignore_eos=True), on_output=answer)
        return answer


class Answer:
    def __init__(self) -> None:
        self.outputs: list[RequestOutput] = []
        self.ended = threading.Event()

    def __call__(self, output: RequestOutput) -> None:
        self.outputs.append(output)
        if output.finish_reason is not None:
            self.ended.set()


@pytest.fixture
def session() -> Iterator[Session]:
    made = Session()
    yield made
    made.runner.gate.set()
    made.loop.stop(PATIENCE)


def eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True


def test_requests_are_answered_while_it_runs_whenever_they_come(session: Session):
    session.loop.start()
    for tokens in (3, 1, 5):
        answer = session.ask(tokens)
        assert answer.ended.wait(PATIENCE)
        assert answer.outputs[-1].num_output_tokens == tokens
    assert session.runner.num_steps == 9
    assert session.loop.error is None


def test_requests_handed_in_before_the_start_are_answered(session: Session):
    answer = session.ask(2)
    session.loop.start()
    assert answer.ended.wait(PATIENCE)


def test_without_work_it_sleeps_without_waking_up(session: Session, monkeypatch: pytest.MonkeyPatch):
    looks: list[float] = []
    scheduler = session.engine.scheduler
    monkeypatch.setattr(
        type(session.engine),
        "has_work",
        property(lambda self: bool(looks.append(0.0) or self._inbox or scheduler.running)),
    )
    session.loop.start()
    assert eventually(lambda: len(looks) == 1)
    time.sleep(0.1)
    assert len(looks) == 1


def test_a_paused_loop_takes_requests_in_and_answers_them_later(session: Session):
    session.loop.pause()
    session.loop.start()
    answer = session.ask(3)
    time.sleep(0.05)
    assert (session.loop.paused, session.runner.num_steps, answer.outputs) == (True, 0, [])
    session.loop.resume()
    assert answer.ended.wait(PATIENCE)
    assert not session.loop.paused


def test_each_single_step_is_one_step(session: Session):
    session.loop.pause()
    session.loop.start()
    answer = session.ask(4)
    for n in (1, 2, 3):
        session.loop.step_once()
        assert eventually(lambda n=n: len(answer.outputs) == n)
    session.loop.step_once()
    assert answer.ended.wait(PATIENCE)
    assert session.runner.num_steps == 4


def test_single_steps_asked_for_without_work_are_not_saved_up(session: Session):
    session.loop.pause()
    session.loop.start()
    for _ in range(5):
        session.loop.step_once()
    answer = session.ask(3)
    time.sleep(0.05)
    assert answer.outputs == []


def test_single_steps_beyond_the_last_are_not_saved_up(session: Session):
    session.runner.gate.clear()
    session.loop.pause()
    session.loop.start()
    first = session.ask(1)
    session.loop.step_once()
    assert session.runner.entered.wait(PATIENCE)
    session.loop.step_once()
    session.loop.step_once()
    session.runner.gate.set()
    assert first.ended.wait(PATIENCE)
    time.sleep(0.05)
    second = session.ask(3)
    time.sleep(0.05)
    assert second.outputs == []


def test_a_single_step_while_running_is_nothing(session: Session):
    session.runner.gate.clear()
    session.ask(10)
    session.loop.start()
    assert session.runner.entered.wait(PATIENCE)
    session.loop.step_once()
    session.loop.pause()
    session.runner.gate.set()
    assert eventually(lambda: session.runner.num_steps == 1)
    time.sleep(0.05)
    assert session.runner.num_steps == 1


def test_an_abort_during_a_pause_takes_effect_with_the_next_step(session: Session):
    session.loop.pause()
    session.loop.start()
    answer = session.ask(4)
    session.loop.step_once()
    assert eventually(lambda: len(answer.outputs) == 1)
    session.engine.abort(answer.outputs[0].request_id)
    session.loop.step_once()
    assert answer.ended.wait(PATIENCE)
    assert answer.outputs[-1].finish_reason is FinishReason.ABORT
    assert session.runner.num_steps == 1


def test_a_speed_keeps_steps_at_least_so_far_apart(session: Session):
    session.loop.set_speed(50)
    answer = session.ask(4)
    session.loop.start()
    assert answer.ended.wait(PATIENCE)
    # From the beginning of one step to that of the next; a step begins a little before its forward does.
    gaps = [b - a for a, b in zip(session.runner.times, session.runner.times[1:], strict=False)]
    assert sum(gaps) >= 3 * 0.02 * 0.9
    assert session.loop.speed == 50


def test_taking_the_speed_limit_off_wakes_it_up(session: Session):
    session.loop.set_speed(0.001)
    answer = session.ask(3)
    session.loop.start()
    assert eventually(lambda: len(answer.outputs) == 1)
    session.loop.set_speed(None)
    assert answer.ended.wait(PATIENCE)


@pytest.mark.parametrize("speed", [0, -1, float("nan")])
def test_a_speed_that_is_none_is_refused(session: Session, speed: float):
    with pytest.raises(ValueError, match="steps a second is not possible"):
        session.loop.set_speed(speed)


def test_stopping_in_the_middle_of_a_step_does_not_wait_for_it(session: Session):
    session.runner.gate.clear()
    session.ask(5)
    session.loop.start()
    assert session.runner.entered.wait(PATIENCE)
    assert session.loop.stop(timeout=0.01) is False
    assert session.loop.running
    session.runner.gate.set()
    assert session.loop.stop(PATIENCE) is True
    assert session.runner.num_steps == 1


@pytest.mark.parametrize("state", ["idle", "paused", "slow", "never started"])
def test_it_stops_at_once_when_it_is_between_steps(session: Session, state: str):
    if state == "paused":
        session.loop.pause()
    if state == "slow":
        session.loop.set_speed(0.001)
    answer = session.ask(5) if state in ("slow", "paused") else None
    if state != "never started":
        session.loop.start()
    if state == "slow":
        assert answer is not None
        assert eventually(lambda: len(answer.outputs) == 1)
    assert session.loop.stop(PATIENCE) is True
    assert not session.loop.running


def test_what_ends_the_thread_is_kept_and_told(session: Session, monkeypatch: pytest.MonkeyPatch):
    logging.getLogger("engine").setLevel(logging.CRITICAL + 1)
    try:
        boom = ZeroDivisionError("a bug")

        def broken() -> None:
            raise boom

        monkeypatch.setattr(session.engine.scheduler, "schedule", broken)
        session.loop.start()
        session.ask(1)
        assert eventually(lambda: not session.loop.running)
    finally:
        logging.getLogger("engine").setLevel(logging.NOTSET)
    assert session.loop.error is boom
    assert session.errors == [boom]


def test_a_loop_starts_once(session: Session):
    session.loop.start()
    with pytest.raises(RuntimeError, match="started before"):
        session.loop.start()
