"""Random schedules against the invariants of the trace and against a run of each request alone.

The simulated runner makes tokens a pure function of the tokens before, found through the paged memory. So whatever the
pool, the chunks, the sharing, the preemptions and the failures were, each output must equal the one that the same
request gets alone in a large pool, token by token and character by character.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.engine import PagedEngine
from engine.overlap import engine_for
from engine.request import FinishReason, RequestOutput, RequestStatus, SamplingParams
from engine.runner import RunnerError
from engine.simulated import SimulatedCodec, SimulatedRunner
from engine.trace.events import Header, RequestArrived, StepTrace, TraceMessage
from engine.trace.invariants import check
from engine.trace.state import PoolState

if TYPE_CHECKING:
    from engine.config import Preemption
    from engine.core.scheduler_output import SchedulerOutput

EOS_RATE = 0.03
LONGEST = 48
BAD_ENDS = (FinishReason.ABORT, FinishReason.REFUSED, FinishReason.ERROR)

# Three documents that many prompts begin with; bytes and words, so that blocks cut characters.
DOCUMENTS = [
    SimulatedCodec().encode(text) for text in (" the cache of the engine", "字é🙂", " a a a a a a a a a a a a")
]
# One draw each, of many ready-made values: drawing them piece by piece costs more than running them.
PROMPTS = st.builds(
    lambda document, tail: (*document, *(97 + byte % 3 for byte in tail)),
    st.sampled_from([tuple(document[:cut]) for document in DOCUMENTS for cut in (0, 1, 3, 4, 8, 9, 12)]),
    st.binary(max_size=9),
)
PARAMS = st.sampled_from(
    [
        SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            seed=max_tokens % 2,
            stop=stop,
            ignore_eos=max_tokens % 3 == 0,
            cache_salt=salt,
        )
        for max_tokens in (1, 2, 5, 9, 14)
        for temperature in (0.0, 1.0)
        for stop in ((), (), ("e",), ("block", " of", "→"), (" the ",))
        for salt in (None, None, "x")
    ]
)


INJECTED = {
    f"the step failed: {why}" for why in ("the device is gone", "one of them cannot go on", "somebody cannot go on")
}


class FlakyRunner(SimulatedRunner):
    """Fails the next step on demand, before or after it wrote its memory."""

    failure: str = ""

    def execute(self, output: SchedulerOutput) -> list[int | None]:
        failure, self.failure = self.failure, ""
        if failure == "early":
            raise RuntimeError("the device is gone")
        tokens = super().execute(output)
        if failure == "late":
            raise RunnerError("one of them cannot go on", [output.scheduled[-1].request.request_id])
        if failure == "unknown":
            raise RunnerError("somebody cannot go on", [10**6])
        return tokens


@cache
def alone(
    prompt: tuple[int, ...], params: SamplingParams, max_model_len: int, window: int
) -> tuple[tuple[int, ...], str, str]:
    """Tokens, text and finish reason of a request that has a large pool to itself."""
    config = EngineConfig(
        cache=CacheConfig(block_size=64, num_blocks=4, prefix_caching=False),
        scheduler=SchedulerConfig(max_num_batched_tokens=1024, max_model_len=max_model_len),
    )
    runner = SimulatedRunner(config, eos_rate=EOS_RATE, sliding_window=window)
    engine = PagedEngine(config, runner, SimulatedCodec())
    engine.add_request(list(prompt), params)
    tokens: list[int] = []
    text = ""
    while True:
        for output in engine.step():
            tokens += output.token_ids
            text += output.text
            if output.finish_reason is not None:
                return tuple(tokens), text, output.finish_reason


class Machine(RuleBasedStateMachine):
    """What may happen to an engine, and what must hold then; `begin` makes the engine."""

    def begin(
        self,
        block_size: int,
        num_blocks: int,
        prefix_caching: bool,
        max_num_seqs: int,
        budget: int,
        chunk: int,
        max_model_len: int,
        num_cpu_blocks: int,
        preemption: Preemption,
        window: int,
        async_scheduling: bool,
    ) -> None:
        self.config = EngineConfig(
            cache=CacheConfig(block_size, num_blocks, prefix_caching, num_cpu_blocks),
            scheduler=SchedulerConfig(
                max_num_seqs,
                budget,
                chunk,
                max_model_len,
                preemption if num_cpu_blocks else "recompute",
                async_scheduling=async_scheduling,
            ),
        )
        self.window = window
        self.runner = FlakyRunner(self.config, eos_rate=EOS_RATE, sliding_window=window)
        self.engine = engine_for(self.config, self.runner, SimulatedCodec())
        self.state: PoolState | None = None
        self.engine.add_sink(self.follow)
        self.asked: dict[int, tuple[tuple[int, ...], SamplingParams]] = {}
        self.tokens: dict[int, tuple[int, ...]] = {}
        self.text: dict[int, str] = {}
        self.ends: dict[int, FinishReason] = {}
        self.told: list[RequestOutput] = []
        self.forked: set[int] = set()
        self.choices: set[int] = set()
        self.unborn: dict[int, int] = {}

    # ------------------------------------------------------------ what may happen

    @rule(prompt=PROMPTS, params=PARAMS)
    def arrive(self, prompt: tuple[int, ...], params: SamplingParams) -> None:
        request = self.engine.add_request(list(prompt), params, on_output=self.told.append)
        for index in range(params.n):
            self.ask(request + index, prompt, replace(params, n=1, seed=(params.seed or 0) + index))

    def ask(self, request: int, prompt: tuple[int, ...], params: SamplingParams) -> None:
        self.asked[request] = (prompt, params)
        self.tokens[request] = ()
        self.text[request] = ""

    @rule(prompt=PROMPTS, params=PARAMS, n=st.integers(2, 4))
    def arrive_with_choices(self, prompt: tuple[int, ...], params: SamplingParams, n: int) -> None:
        self.choices |= {len(self.asked) + index for index in range(n)}
        self.forked |= self.choices
        self.arrive(prompt, replace(params, n=n))

    @precondition(lambda self: self.asked)
    @rule(number=st.integers(0, 30), params=st.one_of(st.none(), PARAMS), times=st.integers(1, 3))
    def fork(self, number: int, params: SamplingParams | None, times: int) -> None:
        live = [n for n in self.asked if n not in self.ends] or list(self.asked)
        for _ in range(times):
            parent = live[number % len(live)]
            request = self.engine.fork(parent, params, on_output=self.told.append)
            # What it goes on from is known once the next step has begun.
            self.ask(request, (), params or self.asked[parent][1])
            self.forked.add(request)
            self.unborn[request] = parent if params is None else -1

    @rule(prompt=PROMPTS, params=PARAMS, times=st.integers(2, 5))
    def arrive_together(self, prompt: tuple[int, ...], params: SamplingParams, times: int) -> None:
        for _ in range(times):
            self.arrive(prompt, params)

    @rule(number=st.integers(0, 30))
    def abort(self, number: int) -> None:
        self.engine.abort(number % (len(self.asked) + 1))

    @precondition(lambda self: self.engine.has_work)
    @rule(times=st.integers(1, 8))
    def run(self, times: int) -> None:
        for _ in range(times):
            self.one_step()

    @precondition(lambda self: self.engine.scheduler.running)
    @rule(failure=st.sampled_from(["early", "late", "unknown"]))
    def fail(self, failure: str) -> None:
        self.runner.failure = failure
        self.one_step()

    # ------------------------------------------------------------ what must hold

    def follow(self, message: TraceMessage) -> None:
        if isinstance(message, Header):
            self.state = PoolState(message)
            return
        assert self.state is not None
        if isinstance(message, RequestArrived):
            self.state.apply(message)
            self.born(message)
            return
        assert isinstance(message, StepTrace)
        limits = self.config.scheduler
        assert sum(member.num_scheduled for member in message.batch) <= limits.max_num_batched_tokens
        assert len(message.batch) <= limits.max_num_seqs
        assert all(m.num_scheduled <= (limits.max_prefill_chunk or 10**9) for m in message.batch)
        members = [m.request for m in message.batch]
        assert len(set(members)) == len(members)
        assert self.in_order(members)
        self.state.apply(message)

    def in_order(self, requests: list[int]) -> bool:
        """Whether they came in this order; forks take part from when they are made."""
        own = [request for request in requests if request not in self.forked]
        return own == sorted(own)

    def born(self, message: RequestArrived) -> None:
        parent = self.unborn.pop(message.request, None)
        if parent is None:
            return
        prompt = tuple(message.prompt_token_ids)
        params = self.asked[message.request][1]
        if parent >= 0 and prompt:
            their_prompt, params = self.asked[parent]
            params = replace(
                params,
                max_tokens=params.max_tokens - (len(prompt) - len(their_prompt)),
                seed=(params.seed or 0) + message.request - parent,
            )
        self.asked[message.request] = (prompt, params)

    def one_step(self) -> None:
        self.told.clear()
        outputs = self.engine.step()
        assert outputs == self.told, "step() and on_output tell different things"
        for output in outputs:
            request = output.request_id + output.index
            assert request not in self.ends, f"request {request} went on after its end"
            self.tokens[request] += output.token_ids
            self.text[request] += output.text
            assert output.num_output_tokens == len(self.tokens[request])
            if output.finish_reason is not None:
                self.ends[request] = output.finish_reason
                self.check_end(request, output)
        self.check_accounts()

    def check_end(self, request: int, output: RequestOutput) -> None:
        assert (output.error is None) == (
            output.finish_reason in (FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT)
        )
        prompt, params = self.asked[request]
        slots = self.config.cache.num_blocks * self.config.cache.block_size
        if output.error is not None and "only a live request can be forked" in output.error:
            assert (prompt, self.tokens[request]) == ((), ())
            return
        longest = self.config.scheduler.max_model_len
        # What is behind the window takes no room.
        slides = self.engine.scheduler.kv.window > 0
        room = longest if slides else min(longest, slots)
        never_fits = not 0 < len(prompt) < room
        refused = output.finish_reason is FinishReason.REFUSED
        # A fork goes on from where its parent is, which may be the end of the pool: one that shares the parent's step
        # is born there and ends there.
        born_at_the_end = never_fits and not refused and request in self.forked - self.choices
        assert born_at_the_end or refused == (never_fits and output.finish_reason != FinishReason.ABORT)
        if never_fits and not born_at_the_end:
            assert self.tokens[request] == ()
            return
        if output.finish_reason is FinishReason.ERROR and output.error not in INJECTED:
            assert "needs" in (output.error or ""), f"request {request} failed of itself: {output.error}"
            assert len(prompt) + len(self.tokens[request]) == slots + 1
            assert not slides
        tokens, text, reason = alone(prompt, params, longest, self.window)
        if output.finish_reason in BAD_ENDS:
            assert tokens[: len(self.tokens[request])] == self.tokens[request]
            # What was held back is shown once nothing can complete it: a stop string's beginning as it is, half a
            # character as U+FFFD.
            _, text, _ = alone(prompt, replace(params, stop=()), longest, self.window)
            assert text.startswith(self.text[request].removesuffix("\N{REPLACEMENT CHARACTER}"))
        else:
            assert (self.tokens[request], self.text[request], output.finish_reason) == (tokens, text, reason)

    def check_accounts(self) -> None:
        engine, state = self.engine, self.state
        assert state is not None
        scheduler, pool = engine.scheduler, engine.scheduler.kv.pool
        assert state.violations == []
        assert check(state) == []
        # The picture folded from the trace is the engine's own.
        assert [block.ref_cnt for block in pool.blocks] == state.refs.tolist()
        assert [block.block_hash is not None for block in pool.blocks] == (state.key != 0).tolist()
        idle = [block for block in range(pool.num_blocks) if state.refs[block] == 0]
        assert [block.block_id for block in pool.free_queue] == sorted(idle, key=lambda b: int(state.free_order[b]))
        if scheduler.kv.cpu is not None:
            assert state.cpu_used == scheduler.kv.cpu.num_used
        for number, request in scheduler.running.items():
            behind = 0
            if scheduler.kv.window:
                behind = max(0, request.num_computed_tokens - scheduler.kv.window + 1) // self.config.cache.block_size
            # Exactly what is behind the window is gone, whoever the request is and wherever its tokens came from.
            assert [block >= 0 for block in state.requests[number].table].index(True) == behind
            assert state.requests[number].table == scheduler.kv.block_table(number)
            assert state.requests[number].num_computed == request.num_computed_tokens < request.num_tokens
            assert request.status is RequestStatus.RUNNING
        # First come, first served: whoever runs came before whoever waits.
        order = [*scheduler.running, *scheduler.waiting]
        assert self.in_order(order)
        for number, request in scheduler.waiting.items():
            assert state.requests[number].waiting_for is not None, f"request {number} waits without a reason"
            assert state.requests[number].status is request.status
            assert request.num_computed_tokens == 0
            swapped = scheduler.kv.cpu.swapped(number) if scheduler.kv.cpu is not None else None
            places = sorted(state.cpu_logical[state.cpu_owner == number].tolist())
            there = range(swapped.num_behind, scheduler.kv.num_blocks_for(swapped.num_tokens)) if swapped else ()
            assert places == list(there)
        assert state.counters.preempted == sum(r.status is RequestStatus.PREEMPTED for r in scheduler.waiting.values())

    @invariant()
    def one_of_running_waiting_ended(self) -> None:
        if not hasattr(self, "engine"):
            return
        live = {*self.engine.scheduler.running, *self.engine.scheduler.waiting}
        assert live.isdisjoint(self.ends)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for _ in range(5000):
            if not self.engine.has_work:
                break
            self.one_step()
        assert self.ends.keys() == self.asked.keys(), "some request never ended"
        pool = self.engine.scheduler.kv.pool
        assert (pool.num_used, pool.num_free) == (0, pool.num_blocks)
        if self.state is not None:
            assert not (self.state.cpu_owner >= 0).any(), "somebody who has ended is still swapped out"
        # Nothing is kept for requests that are gone.
        scheduler = self.engine.scheduler
        for keeper in (self.engine, scheduler, scheduler.kv, scheduler._wait_reasons):
            kept = {name: held for name, held in vars(keeper).items() if isinstance(held, dict | list | set) and held}
            assert kept == {}, f"{type(keeper).__name__} keeps {kept}"


class Schedules(Machine):
    """Any engine."""

    @initialize(
        block_size=st.sampled_from([1, 2, 3, 4, 16]),
        num_blocks=st.integers(1, 24),
        prefix_caching=st.booleans(),
        max_num_seqs=st.integers(1, 6),
        budget=st.integers(1, 40),
        chunk=st.sampled_from([0, 0, 1, 3, 7]),
        max_model_len=st.integers(8, LONGEST),
        num_cpu_blocks=st.sampled_from([0, 0, 1, 3, 8, 24]),
        preemption=st.sampled_from(["swap", "swap", "recompute", "auto"]),
        window=st.sampled_from([0, 0, 0, 2, 5, 16]),
        async_scheduling=st.booleans(),
    )
    def start(self, **chosen: Any) -> None:
        self.begin(**chosen)


class Windows(Machine):
    """Long requests with short windows, too many for the pool, and a CPU pool: contents come and go in all ways."""

    @initialize(
        block_size=st.sampled_from([1, 2, 3]),
        num_blocks=st.integers(7, 16),
        prefix_caching=st.sampled_from([True, True, False]),
        max_num_seqs=st.integers(3, 6),
        budget=st.integers(16, 40),
        chunk=st.sampled_from([0, 3, 7]),
        num_cpu_blocks=st.integers(4, 24),
        preemption=st.sampled_from(["swap", "swap", "recompute"]),
        window=st.sampled_from([2, 4, 5, 7, 0]),
        async_scheduling=st.booleans(),
    )
    def start(self, **chosen: Any) -> None:
        self.begin(max_model_len=LONGEST, **chosen)


@pytest.fixture(autouse=True)
def _quiet():
    # Failures are part of the game here, and each would print a traceback.
    logging.getLogger("engine").setLevel(logging.CRITICAL)
    yield
    logging.getLogger("engine").setLevel(logging.NOTSET)


Schedules.TestCase.settings = settings(
    max_examples=1000,
    stateful_step_count=15,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
Windows.TestCase.settings = settings(Schedules.TestCase.settings, max_examples=300, stateful_step_count=25)
# A thousand schedules are one test: half a minute on a machine of its own, several on a busy one.
TestRandomSchedules = pytest.mark.timeout(1200)(pytest.mark.usefixtures("_quiet")(Schedules.TestCase))
TestRandomWindows = pytest.mark.timeout(1200)(pytest.mark.usefixtures("_quiet")(Windows.TestCase))
