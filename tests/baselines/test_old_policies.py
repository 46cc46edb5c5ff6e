"""Reserved memory and static batches: who runs when, why the others wait, and that outputs are those of the engine."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest

from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.request import FinishReason, RequestOutput, SamplingParams
from engine.simulated import simulated_engine
from engine.trace.events import DecisionKind, Reason, StepTrace
from engine.trace.invariants import check
from engine.trace.state import PoolState

if TYPE_CHECKING:
    from engine.engine import PagedEngine

POLICIES = ("paged", "contiguous", "static")


class Followed:
    """An engine, its steps, and the state that its trace leads to."""

    def __init__(self, policy: str, *, num_blocks: int = 12, block_size: int = 4, **limits: int) -> None:
        self.engine: PagedEngine = simulated_engine(
            EngineConfig(
                cache=CacheConfig(block_size, num_blocks),
                scheduler=SchedulerConfig(policy=policy, **limits),  # type: ignore[arg-type]
            )
        )
        self.state = PoolState(self.engine.header)
        self.steps: list[StepTrace] = []
        self.outputs: dict[int, list[int]] = {}
        self.ends: dict[int, RequestOutput] = {}
        self.engine.add_sink(self._follow)

    def _follow(self, message) -> None:
        if message is self.engine.header:
            return
        self.state.apply(message)
        if isinstance(message, StepTrace):
            self.steps.append(message)

    def ask(self, prompt: int, max_tokens: int) -> int:
        """A request of so many prompt tokens, distinct from all others."""
        request = len(self.outputs)
        self.outputs[request] = []
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        return self.engine.add_request([97 + (request * 7 + i) % 26 for i in range(prompt)], params)

    def step(self) -> StepTrace:
        for output in self.engine.step():
            self.outputs[output.request_id] += output.token_ids
            if output.finish_reason is not None:
                self.ends[output.request_id] = output
        assert self.state.violations == []
        assert check(self.state) == []
        return self.steps[-1]

    def drain(self) -> None:
        while self.engine.has_work:
            self.step()

    def decision(self, request: int):
        return next(d for d in reversed(self.steps[-1].decisions) if d.request == request)


def members(step: StepTrace) -> list[int]:
    return [member.request for member in step.batch]


def test_a_request_reserves_a_run_for_all_tokens_it_may_generate():
    run = Followed("contiguous")
    run.ask(5, 14)
    run.step()
    assert run.state.table(0) == [0, 1, 2, 3, 4]
    assert run.state.filled[:5].tolist() == [4, 1, 0, 0, 0]
    run.drain()
    assert run.state.used == 0
    assert len(run.outputs[0]) == 14


def test_enough_free_blocks_that_are_no_neighbours_are_not_enough():
    run = Followed("contiguous", num_blocks=10)
    run.ask(4, 4)  # 2 blocks, ends first
    run.ask(4, 12)  # 4 blocks
    run.ask(4, 4)  # 2 blocks, ends first
    run.ask(4, 12)  # 4 blocks: the 2 at the end are too few, and later 2 + 4 free ones in two holes
    run.step()
    assert members(run.steps[-1]) == [0, 1, 2]
    assert run.decision(3).numbers == {"needs": 4, "largest_hole": 2, "free": 2}
    while not {0, 2} <= run.ends.keys():
        run.step()
    run.step()
    assert run.decision(3)[2] == Reason.FITS  # 2 + 2 at the end are joined by now
    assert run.state.table(3) == [6, 7, 8, 9]


def test_external_fragmentation_is_told_with_its_numbers():
    run = Followed("contiguous", num_blocks=8)
    run.ask(4, 4)
    run.ask(4, 12)
    run.ask(4, 4)
    run.ask(4, 12)
    while not {0, 2} <= run.ends.keys():
        run.step()
    run.step()
    assert run.state.requests[3].waiting_for == (
        DecisionKind.WAITS,
        3,
        Reason.NO_HOLE,
        {"needs": 4, "largest_hole": 2, "free": 4},
    )
    run.drain()
    assert len(run.outputs[3]) == 12


def test_what_can_never_be_reserved_is_refused_at_once():
    run = Followed("contiguous", num_blocks=4)
    request = run.ask(4, 13)
    run.step()
    assert run.ends[request].finish_reason is FinishReason.REFUSED
    assert "reserve 5 blocks and the pool has 4" in (run.ends[request].error or "")
    assert run.decision(request).numbers == {"needs": 5, "pool": 4}


def test_an_output_is_reserved_up_to_the_longest_request_only():
    run = Followed("contiguous", num_blocks=4, max_model_len=16)
    run.ask(4, 1000)
    run.step()
    assert len(run.state.table(0)) == 4


def test_a_static_batch_lets_nobody_in_until_its_last_member_is_done():
    run = Followed("static", num_blocks=64, max_num_seqs=2)
    for max_tokens in (2, 6, 3):
        run.ask(4, max_tokens)
    run.step()
    run.step()
    assert set(run.ends) == {0}
    assert members(run.step()) == [1]
    assert run.decision(2)[2:] == (Reason.BATCH_RUNNING, {"running": 1, "batch": 2})
    while 1 not in run.ends:
        assert members(run.step()) == [1]
    assert members(run.step()) == [2]


def test_whoever_comes_after_a_static_batch_began_waits_for_the_next():
    run = Followed("static", num_blocks=64)
    run.ask(4, 5)
    run.step()
    late = run.ask(4, 2)
    assert members(run.step()) == [0]
    assert run.decision(late)[2:] == (Reason.BATCH_RUNNING, {"running": 1, "batch": 1})
    run.drain()
    assert len(run.outputs[late]) == 2


def test_a_static_batch_is_filled_over_several_steps_where_its_prompts_exceed_the_budget():
    run = Followed("static", num_blocks=64, max_num_batched_tokens=10)
    for _ in range(3):
        run.ask(8, 20)
    for _ in range(3):
        run.step()
    assert members(run.step()) == [0, 1, 2]


def test_a_continuous_batch_is_refilled_where_a_static_one_runs_empty():
    sizes = {}
    for policy in POLICIES:
        run = Followed(policy, num_blocks=64, max_num_seqs=4)
        for n in range(12):
            run.ask(4, 2 + 5 * (n % 4))
        run.drain()
        sizes[policy] = sum(len(step.batch) for step in run.steps) / len(run.steps)
    assert sizes["static"] < sizes["contiguous"] == sizes["paged"]


def test_paging_runs_more_at_once_in_the_same_memory():
    sizes = {}
    for policy in POLICIES:
        run = Followed(policy, num_blocks=24, max_num_seqs=16)
        for _ in range(16):
            run.ask(4, 28)
        run.drain()
        sizes[policy] = sum(len(step.batch) for step in run.steps) / len(run.steps)
    assert sizes["static"] <= sizes["contiguous"] < sizes["paged"]


@pytest.mark.parametrize("policy", ["contiguous", "static"])
def test_old_policies_share_nothing_and_say_so_in_the_header(policy: str):
    run = Followed(policy, num_blocks=64)
    header = run.engine.header
    assert (header.policy, header.prefix_caching, header.preemption) == (policy, False, "none")
    prompt = [97] * 40
    for _ in range(2):
        run.engine.add_request(prompt, SamplingParams(max_tokens=2))
    run.engine.step()
    assert run.steps[-1].counters.prefix_hit_tokens == 0
    assert set(run.state.table(0)).isdisjoint(run.state.table(1))


@pytest.mark.parametrize("policy", ["contiguous", "static"])
def test_switching_policies_leaves_the_order_of_arrival(policy: str):
    run = Followed(policy, num_blocks=10, max_num_seqs=3)
    for n in range(9):
        run.ask(3 + n % 3, 4 + n % 5)
    started: list[int] = []
    while run.engine.has_work:
        started += [m for m in members(run.step()) if m not in started]
    assert started == list(range(9))


def test_steps_in_which_there_was_no_hole_are_counted_in_the_log(
    caplog: pytest.LogCaptureFixture,
):
    caplog.set_level(logging.INFO, logger="engine")
    run = Followed("contiguous", num_blocks=8)
    for max_tokens in (4, 12, 4, 12):
        run.ask(4, max_tokens)
    run.drain()
    waited = sum(step.counters.waiting for step in run.steps)
    assert [record.getMessage() for record in caplog.records] == [
        f"request 3 waited for blocks: not enough were free in {waited} steps"
    ]
