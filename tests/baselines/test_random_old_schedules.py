"""Random schedules of the old policies: the trace's invariants, and the outputs of each request alone."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.engine import PagedEngine
from engine.request import FinishReason, RequestOutput, SamplingParams
from engine.simulated import SimulatedCodec, SimulatedRunner
from engine.trace.events import StepTrace
from engine.trace.invariants import check
from engine.trace.state import PoolState

EOS_RATE = 0.03
ARRIVALS = st.lists(
    st.tuples(st.integers(0, 14), st.integers(1, 14), st.sampled_from([0.0, 1.0]), st.integers(0, 4)),
    min_size=1,
    max_size=14,
)
"""Prompt tokens, max_tokens, temperature, and steps before the next one comes."""


def engine_of(config: EngineConfig) -> PagedEngine:
    return PagedEngine(config, SimulatedRunner(config, eos_rate=EOS_RATE), SimulatedCodec())


def prompt_of(request: int, length: int) -> list[int]:
    return [97 + (request + i * i) % 20 for i in range(length)]


def alone(request: int, length: int, params: SamplingParams, max_model_len: int) -> list[int]:
    config = EngineConfig(cache=CacheConfig(64, 4), scheduler=SchedulerConfig(max_model_len=max_model_len))
    engine = engine_of(config)
    engine.add_request(prompt_of(request, length), params)
    tokens: list[int] = []
    while engine.has_work:
        tokens += [token for output in engine.step() for token in output.token_ids]
    return tokens


class Machine:
    """An engine that is checked after every step."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.engine = engine_of(config)
        self.state = PoolState(self.engine.header)
        self.engine.add_sink(self._follow)
        self.batches: list[set[int]] = []
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, RequestOutput] = {}

    def _follow(self, message: Any) -> None:
        if message is not self.engine.header:
            self.state.apply(message)
            if isinstance(message, StepTrace):
                assert sum(m.num_scheduled for m in message.batch) <= self.config.scheduler.max_num_batched_tokens

    def step(self) -> None:
        for output in self.engine.step():
            self.tokens.setdefault(output.request_id, []).extend(output.token_ids)
            if output.finish_reason is not None:
                self.ends[output.request_id] = output
        served = {member.request for member in self.state.last_step.batch} if self.state.last_step else set()
        self.batches.append(served | {*self.engine.scheduler.running})
        self.check()

    def check(self) -> None:
        state, scheduler = self.state, self.engine.scheduler
        kv: Any = scheduler.kv
        assert state.violations == []
        assert check(state) == []
        assert [block.ref_cnt for block in kv.pool.blocks] == state.refs.tolist()
        held = sorted(block for number in scheduler.running for block in kv.block_table(number))
        for number, request in scheduler.running.items():
            table = state.requests[number].table
            assert table == kv.block_table(number) == list(range(table[0], table[0] + kv.reservation(request)))
            assert request.num_preemptions == 0
        # What is in no table is in a hole, and holes do not touch each other.
        free = [place for start, length in kv.pool.holes for place in range(start, start + length)]
        assert sorted(held + free) == list(range(kv.pool.num_blocks))
        assert all(a + n < b for (a, n), (b, _) in pairwise(kv.pool.holes))
        assert [*scheduler.running, *scheduler.waiting] == sorted([*scheduler.running, *scheduler.waiting])
        assert all(state.requests[number].waiting_for is not None for number in scheduler.waiting)


@pytest.mark.parametrize("policy", ["contiguous", "static"])
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    arrivals=ARRIVALS,
    block_size=st.sampled_from([1, 3, 4]),
    num_blocks=st.integers(2, 24),
    max_num_seqs=st.integers(1, 5),
    budget=st.integers(1, 30),
    chunk=st.sampled_from([0, 0, 1, 5]),
    max_model_len=st.integers(8, 40),
    aborted=st.integers(0, 20),
)
def test_every_request_ends_with_the_tokens_it_gets_alone(
    policy: Any,
    arrivals: list[tuple[int, int, float, int]],
    block_size: int,
    num_blocks: int,
    max_num_seqs: int,
    budget: int,
    chunk: int,
    max_model_len: int,
    aborted: int,
):
    limits = SchedulerConfig(max_num_seqs, budget, chunk, max_model_len, policy=policy)
    machine = Machine(EngineConfig(cache=CacheConfig(block_size, num_blocks), scheduler=limits))
    asked: list[SamplingParams] = []
    for number, (length, max_tokens, temperature, pause) in enumerate(arrivals):
        asked.append(SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=1))
        machine.engine.add_request(prompt_of(number, length), asked[-1])
        if number == aborted:
            machine.engine.abort(number // 2)
        for _ in range(pause):
            machine.step()
    for _ in range(3000):
        if not machine.engine.has_work:
            break
        machine.step()
    assert machine.ends.keys() == set(range(len(arrivals)))
    assert machine.engine.scheduler.kv.pool.num_free == num_blocks
    for number, ((length, max_tokens, _, _), params) in enumerate(zip(arrivals, asked, strict=True)):
        end = machine.ends[number].finish_reason
        fits = -(-min(length + max_tokens, max_model_len) // block_size) <= num_blocks
        if end is FinishReason.ABORT:
            continue
        assert (end is FinishReason.REFUSED) == (not 0 < length < max_model_len or not fits)
        if end is not FinishReason.REFUSED:
            assert machine.tokens[number] == alone(number, length, params, max_model_len)
    if policy == "static":
        # A batch that lost a member is joined by nobody before it is gone.
        for before, after in pairwise(machine.batches):
            assert not (before - after and before & after) or after <= before
