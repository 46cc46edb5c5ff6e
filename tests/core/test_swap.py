"""Preemption by swap and offload of evicted blocks: what moves, when, and that outputs stay the same."""

from __future__ import annotations

import pytest
from followed_engine import Followed, alone, config_of

from engine.config import CacheConfig, ConfigError, EngineConfig, SchedulerConfig
from engine.core.block_pool import BlockPool
from engine.core.cpu_pool import CpuPool
from engine.request import FinishReason, SamplingParams
from engine.trace.events import NO_REQUEST, Decision, DecisionKind, Op, Phase, Reason, StepTrace
from engine.trace.explain import long, short


def prompt_of(length: int, first: int = 97) -> list[int]:
    return [first + i % 20 for i in range(length)]


def preemptions(followed: Followed) -> list[Decision]:
    return [d for d in followed.decisions if d.kind == DecisionKind.PREEMPTED]


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("preemption", ["swap", "recompute", "auto"])
@pytest.mark.parametrize("length", range(3, 12))
def test_tokens_equal_the_unpreempted_ones_at_every_length_around_a_boundary(
    length: int, preemption: str, prefix_caching: bool
):
    config = config_of(4, 7, prefix_caching=prefix_caching, num_cpu_blocks=8, preemption=preemption)
    followed = Followed(config)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    requests = [followed.engine.add_request(prompt_of(length, 97 + i), params) for i in range(2)]
    followed.run()

    assert preemptions(followed)
    for i, request in enumerate(requests):
        assert followed.tokens[request] == alone(prompt_of(length, 97 + i), params)
        assert followed.last[request].num_output_tokens == 12
    swapped = any(row[0] == Op.SWAP_OUT and row[3] in requests for row in followed.ops)
    assert swapped == (preemption != "recompute")
    assert (followed.state.used, (followed.state.cpu_owner >= 0).sum()) == (0, 0)


def test_what_was_swapped_out_is_not_computed_again():
    followed = Followed(config_of(4, 7, prefix_caching=False, num_cpu_blocks=8, preemption="swap"))
    phases: list[int] = []
    followed.engine.add_sink(
        lambda m: phases.extend(member.phase for member in m.batch) if isinstance(m, StepTrace) else None
    )
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    for i in range(2):
        followed.engine.add_request(prompt_of(6, 97 + i), params)
    followed.run()

    (gone,) = preemptions(followed)
    (back,) = [d for d in followed.decisions if d.kind == DecisionKind.RESUMED]
    assert gone.reason == Reason.SWAPPED_OUT_ITSELF
    assert (
        gone.numbers["swapped"] == followed.count(Op.SWAP_OUT) == followed.count(Op.SWAP_IN) == back.numbers["swapped"]
    )
    assert "swapped out 3 blocks" in short(gone)
    assert "3 blocks were swapped out to the CPU pool" in long(gone)
    assert "swapped in 3 blocks" in short(back)
    assert Phase.RECOMPUTE not in phases


def test_a_shared_block_is_copied_out_and_stays_for_the_others():
    # Two requests share two blocks of their prompts, and then differ; the younger one gives way.
    followed = Followed(config_of(4, 7, num_cpu_blocks=8, preemption="swap"))
    params = SamplingParams(max_tokens=14, ignore_eos=True)
    old = followed.engine.add_request(prompt_of(9), params)
    followed.step()
    other = [*prompt_of(8), 120]
    young = followed.engine.add_request(other, params)
    while not preemptions(followed):
        followed.step()
    shared = followed.state.table(old)[:2]
    moved = [row[1] for row in followed.ops if row[0] == Op.SWAP_OUT and row[3] == young]
    assert moved[:2] == shared
    assert followed.state.refs[shared].tolist() == [1, 1]
    swapped = followed.state.cpu_owner == young
    assert sorted(followed.state.cpu_logical[swapped].tolist()) == list(range(len(moved)))
    assert followed.state.cpu_used == followed.engine.scheduler.kv.cpu.num_used  # type: ignore[union-attr]
    followed.run()

    assert followed.tokens[old] == alone(prompt_of(9), params)
    assert followed.tokens[young] == alone(other, params)


def test_blocks_that_are_still_cached_are_shared_again_and_not_copied_back():
    followed = Followed(config_of(4, 8, num_cpu_blocks=8, preemption="swap"))
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    old = followed.engine.add_request(prompt_of(13), params)
    young = followed.engine.add_request(prompt_of(13, 98), params)
    while not preemptions(followed):
        followed.step()
    followed.engine.abort(old)
    followed.run()

    dropped = followed.count(Op.DROP)
    assert dropped > 0
    assert followed.count(Op.SWAP_IN) == preemptions(followed)[0].numbers["swapped"] - dropped
    assert followed.tokens[young] == alone(prompt_of(13, 98), params)


def test_a_full_cpu_pool_leaves_recomputing():
    followed = Followed(config_of(4, 7, num_cpu_blocks=1, preemption="swap", prefix_caching=False))
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    requests = [followed.engine.add_request(prompt_of(6, 97 + i), params) for i in range(2)]
    followed.run()
    assert {d.reason for d in preemptions(followed)} == {Reason.GAVE_WAY_TO_ITSELF}
    assert followed.count(Op.SWAP_OUT) == 0
    assert followed.tokens[requests[1]] == alone(prompt_of(6, 98), params)


def test_aborting_a_swapped_request_empties_its_cpu_blocks():
    followed = Followed(config_of(4, 7, num_cpu_blocks=8, preemption="swap", prefix_caching=False))
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    followed.engine.add_request(prompt_of(6), params)
    young = followed.engine.add_request(prompt_of(6, 98), params)
    while not preemptions(followed):
        followed.step()
    assert followed.state.cpu_used == 3
    followed.engine.abort(young)
    followed.step()
    assert followed.state.cpu_used == 0
    assert followed.last[young].finish_reason is FinishReason.ABORT


@pytest.mark.parametrize(
    ("ns_per_block", "ns_per_token", "reason"),
    [
        (10.0, 100.0, Reason.SWAPPED_OUT_ITSELF),
        (1000.0, 1.0, Reason.GAVE_WAY_TO_ITSELF),
        # Copied out and back, a block of four tokens costs twice what it costs one way.
        (1.9, 1.0, Reason.SWAPPED_OUT_ITSELF),
        (2.1, 1.0, Reason.GAVE_WAY_TO_ITSELF),
    ],
)
def test_auto_takes_what_costs_less(ns_per_block: float, ns_per_token: float, reason: Reason):
    followed = Followed(config_of(4, 7, num_cpu_blocks=8, preemption="auto", prefix_caching=False))
    followed.engine.scheduler.preemption_costs = (ns_per_block, ns_per_token)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    for i in range(2):
        followed.engine.add_request(prompt_of(6, 97 + i), params)
    followed.run()
    assert {d.reason for d in preemptions(followed)} == {reason}


def test_an_evicted_prefix_is_found_in_the_cpu_pool_and_brought_back():
    followed = Followed(config_of(4, 6, num_cpu_blocks=4))
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    first = followed.engine.add_request(prompt_of(17), params)
    followed.run()
    followed.engine.add_request(prompt_of(21, 98), params)  # takes all six blocks
    followed.run()
    evicted = [row for row in followed.ops if row[0] == Op.EVICT]
    offloaded = [row for row in followed.ops if row[0] == Op.SWAP_OUT]
    assert [(row[1], row[3]) for row in offloaded] == [(row[1], NO_REQUEST) for row in evicted]
    assert set(followed.state.cpu_key.tolist()) == {row[2] for row in evicted}
    again = followed.engine.add_request(prompt_of(17), params)
    followed.run()

    assert followed.last[again].num_cached_tokens == 16
    assert followed.count(Op.SWAP_IN) == 4
    assert followed.tokens[again] == followed.tokens[first]
    admitted = next(d for d in followed.decisions if d.kind == DecisionKind.ADMITTED and d.request == again)
    assert long(admitted).endswith("16 tokens of it came from the prefix cache, 4 blocks of it from the CPU pool.")


def test_the_content_that_was_offloaded_longest_ago_goes_first():
    followed = Followed(config_of(4, 3, num_cpu_blocks=2))
    params = SamplingParams(max_tokens=1)
    for i in range(4):
        followed.engine.add_request(prompt_of(9, 97 + i), params)
        followed.run()
    # Each request evicts the two blocks of the one before: the last but one's are left.
    assert followed.count(Op.DROP) == 4
    followed.engine.add_request(prompt_of(9, 99), params)
    followed.run()
    assert followed.last[4].num_cached_tokens == 8
    followed.engine.add_request(prompt_of(9, 97), params)
    followed.run()
    assert followed.last[5].num_cached_tokens == 0


def test_a_content_that_is_evicted_again_counts_as_offloaded_then():
    pool = BlockPool(4)
    cpu = CpuPool(2, pool)
    first, second, third = (bytes([n] * 32) for n in range(3))
    for block, digest in enumerate((first, second, first, third)):
        cpu.offload(block, digest)
    assert [cpu.find(digest) for digest in (first, second, third)] == [True, False, True]
    assert [copy.source for copy in pool.copies] == [0, 1, 3], "what is there already is not copied again"


def test_without_a_cpu_pool_nothing_moves():
    followed = Followed(config_of(4, 6))
    for i in range(3):
        followed.engine.add_request(prompt_of(17, 97 + i), SamplingParams(max_tokens=2))
        followed.run()
    assert {Op.SWAP_OUT, Op.SWAP_IN, Op.DROP, Op.COPY}.isdisjoint({row[0] for row in followed.ops})


def test_swap_without_a_cpu_pool_is_refused():
    with pytest.raises(ConfigError, match="needs a CPU pool to swap to: give it blocks"):
        EngineConfig(scheduler=SchedulerConfig(preemption="swap"))
    with pytest.raises(ConfigError, match="a CPU pool of -1 blocks is not possible"):
        CacheConfig(num_cpu_blocks=-1)
