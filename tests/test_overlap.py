"""The next step is scheduled before a step's tokens are known, and nothing that a caller sees changes by that."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from engine.config import CacheConfig, ConfigError, EngineConfig, SchedulerConfig
from engine.engine import PagedEngine
from engine.loop import EngineLoop
from engine.overlap import OverlappedEngine, engine_for
from engine.request import FinishReason, RequestOutput, SamplingParams
from engine.runner import RunnerError
from engine.simulated import EOS_TOKEN_ID, SimulatedCodec, SimulatedRunner, simulated_engine
from engine.trace.events import DecisionKind, Header, Op, Phase, StepTrace, TraceMessage
from engine.trace.invariants import check
from engine.trace.state import PoolState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.core.scheduler_output import SchedulerOutput
    from engine.deferred import DeferredStep


class Watched(SimulatedRunner):
    """Notes when each step is launched and when its tokens are made; ends what it is told to after so many tokens."""

    def __init__(self, config: EngineConfig, **options: Any) -> None:
        super().__init__(config, **options)
        self.events: list[str] = []
        self.ends: dict[int, int] = {}
        self.failures: dict[int, Exception] = {}
        self._launches = 0
        self._executions = 0

    def launch(self, output: SchedulerOutput) -> DeferredStep:
        self.events.append(f"launch {self._launches}")
        self._launches += 1
        return super().launch(output)

    def execute(self, output: SchedulerOutput) -> list[int | None]:
        number = self._executions
        self._executions += 1
        self.events.append(f"tokens {number}")
        tokens = super().execute(output)
        if number in self.failures:
            raise self.failures.pop(number)
        for at, share in enumerate(output.scheduled):
            request = share.request
            if tokens[at] is not None and self.ends.get(request.request_id) == len(request.output_token_ids) + 1:
                tokens[at] = EOS_TOKEN_ID
        return tokens


class Session:
    """An overlapped engine whose trace is folded and compared with its books after every step."""

    def __init__(self, *, sync: bool = False, num_blocks: int = 64, block_size: int = 4, **limits: Any) -> None:
        cache = {name: limits.pop(name) for name in ("num_cpu_blocks", "prefix_caching") if name in limits}
        config = EngineConfig(
            cache=CacheConfig(block_size, num_blocks, **cache),
            scheduler=SchedulerConfig(**limits, async_scheduling=not sync),
        )
        self.runner = Watched(config)
        self.engine = engine_for(config, self.runner, SimulatedCodec())
        self.steps: list[StepTrace] = []
        self.outputs: dict[int, list[RequestOutput]] = {}
        self.state: PoolState
        self.engine.add_sink(self._follow)

    def _follow(self, message: TraceMessage) -> None:
        if isinstance(message, Header):
            self.state = PoolState(message)
            return
        self.state.apply(message)
        if isinstance(message, StepTrace):
            self.steps.append(message)

    def ask(self, prompt: str = "hello", max_tokens: int = 6, **params: Any) -> int:
        params.setdefault("ignore_eos", False)
        return self.engine.add_request(prompt, SamplingParams(max_tokens=max_tokens, **params))

    def step(self) -> list[RequestOutput]:
        outputs = self.engine.step()
        for output in outputs:
            self.outputs.setdefault(output.request_id + output.index, []).append(output)
        assert self.state.violations == []
        assert check(self.state) == []
        pool = self.engine.scheduler.kv.pool
        assert [block.ref_cnt for block in pool.blocks] == self.state.refs.tolist()
        return outputs

    def run(self) -> None:
        for _ in range(2000):
            if not self.engine.has_work:
                assert self.engine.scheduler.kv.pool.num_used == 0
                return
            self.step()
        raise AssertionError("no end in sight")

    def tokens(self, request: int) -> list[int]:
        return [token for output in self.outputs[request] for token in output.token_ids]

    def phases(self, request: int) -> list[int]:
        return [member.phase for step in self.steps for member in step.batch if member.request == request]


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL + 1, logger="engine")


# ---------------------------------------------------------------------- what overlaps


def test_a_step_is_scheduled_and_launched_before_the_tokens_of_the_one_before_are_known():
    session = Session()
    session.ask(max_tokens=4)
    session.run()
    assert session.runner.events == [
        *("launch 0", "launch 1", "tokens 0"),
        *("launch 2", "tokens 1"),
        *("launch 3", "tokens 2"),
        "tokens 3",  # the length is reached by count, and nothing is launched in vain
    ]
    assert [step.index for step in session.steps] == [0, 1, 2, 3]
    assert [len(step.tokens) for step in session.steps] == [1, 1, 1, 1]
    assert Phase.OVERRUN not in session.phases(0)


def test_off_is_the_default_and_the_trace_says_which_it_is():
    plain, overlapped = simulated_engine(), simulated_engine(_config(async_scheduling=True))
    assert (type(plain), type(overlapped)) == (PagedEngine, OverlappedEngine)
    assert (plain.header.async_scheduling, overlapped.header.async_scheduling) == (False, True)


def _config(**limits: Any) -> EngineConfig:
    return EngineConfig(scheduler=SchedulerConfig(**limits))


def test_a_runner_that_must_be_waited_for_is_refused_with_advice():
    class Waits:
        pass

    with pytest.raises(ConfigError, match="use --no-async-scheduling"):
        engine_for(_config(async_scheduling=True), Waits(), SimulatedCodec())  # type: ignore[arg-type]


@pytest.mark.parametrize("limit", ["max_tokens", "max_model_len"])
def test_a_length_that_is_known_beforehand_costs_no_overrun(limit: str):
    session = Session(max_model_len=11 if limit == "max_model_len" else 100)
    request = session.ask("hello", max_tokens=6 if limit == "max_tokens" else 50, ignore_eos=True)
    session.run()
    assert len(session.tokens(request)) == 6
    assert session.outputs[request][-1].finish_reason is FinishReason.LENGTH
    assert session.phases(request) == [Phase.PREFILL, *[Phase.DECODE] * 5]


# ---------------------------------------------------------------------- overruns


def test_who_ends_by_its_token_is_an_overrun_of_the_next_step_and_its_token_is_thrown_away():
    session = Session()
    request, other = session.ask(max_tokens=50), session.ask("other", max_tokens=8, ignore_eos=True)
    session.runner.ends[request] = 3
    session.run()
    assert session.tokens(request)[-1] == EOS_TOKEN_ID
    assert len(session.tokens(request)) == 3
    assert session.phases(request) == [Phase.PREFILL, Phase.DECODE, Phase.DECODE, Phase.OVERRUN]
    assert session.steps[2].finished == [(request, "stop", "")]
    assert [token.request for token in session.steps[3].tokens] == [other]
    assert session.outputs[request][-1].num_output_tokens == 3


def test_a_step_of_overruns_alone_is_traced_and_brings_nothing():
    session = Session()
    request = session.ask(max_tokens=50)
    session.runner.ends[request] = 1
    assert [output.finish_reason for output in session.step()] == [FinishReason.STOP]
    assert session.engine.has_work
    assert session.step() == []
    assert not session.engine.has_work
    assert [(m.request, m.phase) for m in session.steps[-1].batch] == [(request, Phase.OVERRUN)]
    assert (session.steps[-1].tokens, session.steps[-1].ops) == ([], [])


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("at", range(1, 10))
def test_the_block_of_an_overrun_goes_to_the_next_one_without_harm(at: int, swap: bool):
    """A pool so small that whoever waits is given the very blocks that the overrun still writes to."""
    moved: dict[str, Any] = {"num_cpu_blocks": 9, "preemption": "swap", "prefix_caching": False} if swap else {}
    sessions = [Session(sync=sync, num_blocks=5, max_num_seqs=3 if swap else 2, **moved) for sync in (True, False)]
    for session in sessions:
        for prompt in ("abcde", "fghij", "klmno"):
            session.ask(prompt, max_tokens=10, ignore_eos=False)
        session.runner.ends = {0: at}
        session.run()
    for request in range(3):
        assert sessions[0].tokens(request) == sessions[1].tokens(request)


def test_a_stop_string_is_found_a_step_later_and_the_text_is_the_same():
    sides = []
    for sync in (True, False):
        session = Session(sync=sync)
        request = session.ask("hello", max_tokens=40, stop=("e",), ignore_eos=True)
        session.run()
        sides.append([(o.text, o.token_ids, o.finish_reason, o.num_output_tokens) for o in session.outputs[request]])
    assert sides[0] == sides[1]
    assert sides[0][-1][2] is FinishReason.STOP


def test_an_abort_in_flight_takes_effect_at_once_and_its_token_is_thrown_away():
    session = Session()
    request, other = session.ask(max_tokens=50, ignore_eos=True), session.ask("xyz", max_tokens=5, ignore_eos=True)
    session.step()
    session.engine.abort(request)
    outputs = session.step()
    assert [(o.request_id, o.finish_reason) for o in outputs] == [(other, None), (request, FinishReason.ABORT)]
    assert len(session.tokens(request)) == 1
    assert session.phases(request) == [Phase.PREFILL, Phase.OVERRUN]
    session.run()
    assert len(session.tokens(other)) == 5


# ---------------------------------------------------------------------- what waits for the tokens


def test_nobody_gives_way_while_its_token_is_in_flight():
    session = Session(num_blocks=6, num_cpu_blocks=8, preemption="swap", max_num_seqs=4)
    for prompt in ("abcde", "fghij", "klmno"):
        session.ask(prompt, max_tokens=12, ignore_eos=True)
    session.run()
    preempted = [step for step in session.steps if any(d.kind == DecisionKind.PREEMPTED for d in step.decisions)]
    assert preempted
    for step in preempted:
        gone = {d.request for d in step.decisions if d.kind == DecisionKind.PREEMPTED}
        assert gone.isdisjoint(member.request for member in step.batch)
    assert any(op.op == Op.SWAP_IN for step in session.steps for op in step.ops)


def test_choices_begin_with_the_tokens_of_their_step_before_anybody_goes_on():
    session = Session()
    first = session.ask("a common beginning", max_tokens=5, n=3, temperature=1.0, seed=3, ignore_eos=True)
    session.run()
    assert session.runner.events[:3] == ["launch 0", "tokens 0", "launch 1"]
    alone = Session(sync=True)
    alone.ask("a common beginning", max_tokens=5, n=3, temperature=1.0, seed=3, ignore_eos=True)
    alone.run()
    assert [session.tokens(first + i) for i in range(3)] == [alone.tokens(i) for i in range(3)]


def test_a_fork_goes_on_from_tokens_that_are_known():
    session = Session()
    parent = session.ask("hello", max_tokens=9, ignore_eos=True)
    session.step()
    fork = session.engine.fork(parent)
    session.step()
    assert fork not in session.outputs
    session.run()
    assert session.tokens(fork) == session.tokens(parent)[2:]


def test_nothing_is_published_before_its_tokens_are_known():
    session = Session(block_size=2)
    request = session.ask("abc", max_tokens=6, ignore_eos=True)
    known = 3
    while session.engine.has_work:
        session.step()
        known += len(session.steps[-1].tokens)
        hashed = sum(op.op == Op.HASH for step in session.steps for op in step.ops)
        assert hashed <= known // 2
    again = session.engine.add_request(
        [*SimulatedCodec().encode("abc"), *session.tokens(request)], SamplingParams(max_tokens=1, ignore_eos=True)
    )
    session.run()
    assert session.outputs[again][-1].num_cached_tokens == 8


# ---------------------------------------------------------------------- failures


def test_a_failed_step_throws_the_one_behind_it_away_and_the_engine_goes_on():
    session = Session(max_num_seqs=2)
    one, two, three = (session.ask("abc", max_tokens=3, ignore_eos=True) for _ in range(3))
    session.runner.failures = {1: RuntimeError("the device is gone")}
    session.run()
    for request in (one, two):
        assert session.outputs[request][-1].error == "the step failed: the device is gone"
        assert len(session.tokens(request)) == 1
    assert len(session.tokens(three)) == 3
    assert [(m.request, m.num_scheduled) for m in session.steps[1].batch] == [(one, 0), (two, 0)]
    assert [(m.request, m.phase, m.num_scheduled) for m in session.steps[2].batch] == [
        (one, Phase.OVERRUN, 0),
        (two, Phase.OVERRUN, 0),
    ]


def test_an_error_that_names_its_request_leaves_the_others_their_tokens():
    session = Session()
    one, two = session.ask("abc", ignore_eos=True), session.ask("xyz", ignore_eos=True)
    session.runner.failures = {2: RunnerError("its logits are not finite", [one])}
    session.run()
    alone = Session(sync=True)
    assert session.outputs[one][-1].finish_reason is FinishReason.ERROR
    alone.ask("abc", ignore_eos=True)
    alone.ask("xyz", ignore_eos=True)
    alone.run()
    assert session.tokens(two) == alone.tokens(two)
    assert len(session.tokens(one)) == 2


def test_a_step_that_cannot_even_be_launched_fails_when_its_turn_comes():
    session = Session()
    request = session.ask(max_tokens=9, ignore_eos=True)
    session.step()

    def refuse(output: SchedulerOutput) -> DeferredStep:
        raise RuntimeError("no memory for it")

    session.runner.launch = refuse  # type: ignore[method-assign]
    (output,) = session.step()
    assert output.finish_reason is None
    (output,) = session.step()
    assert output.error == "the step failed: no memory for it"
    assert len(session.tokens(request)) == 2
    session.run()


# ---------------------------------------------------------------------- in a loop


def test_a_paused_loop_leaves_a_step_in_flight_and_a_single_step_brings_one_step():
    session = Session()
    session.ask(max_tokens=4)
    loop = EngineLoop(session.engine)
    loop.pause()
    loop.start()
    try:
        for number in (1, 2, 3, 4):
            loop.step_once()
            deadline = time.monotonic() + 30
            while len(session.steps) < number and time.monotonic() < deadline:
                time.sleep(0.001)
            assert len(session.steps) == number
        assert loop.error is None
        assert session.runner.events[2:5] == ["tokens 0", "launch 2", "tokens 1"]
    finally:
        loop.stop(30)


# ---------------------------------------------------------------------- the same to callers


@pytest.mark.parametrize(
    ("policy", "preemption"), [("paged", "recompute"), ("paged", "swap"), ("contiguous", "recompute")]
)
def test_each_request_is_told_the_same_in_the_same_order(policy: str, preemption: str):
    sides: list[list[list[tuple[Any, ...]]]] = []
    for sync in (True, False):
        session = Session(
            sync=sync,
            num_blocks=14,
            max_num_seqs=4,
            max_num_batched_tokens=16,
            max_prefill_chunk=5,
            policy=policy,
            preemption=preemption,
            num_cpu_blocks=10 if preemption == "swap" else 0,
        )
        session.runner._eos_below = int(0.1 * 2**32)
        asked: Sequence[int] = [
            session.ask("the same beginning " * (i % 3) + str(i), 5 + i % 9, seed=i, temperature=float(i % 2))
            for i in range(16)
        ]
        session.run()
        sides.append([[_said(output) for output in session.outputs[request]] for request in asked])
    assert sides[0] == sides[1]


def _said(output: RequestOutput) -> tuple[Any, ...]:
    # What was found in the prefix cache depends on when somebody was admitted.
    return tuple(vars_of(replace(output, num_cached_tokens=0)))


def vars_of(output: RequestOutput) -> list[Any]:
    return [getattr(output, name) for name in type(output).__dataclass_fields__]
