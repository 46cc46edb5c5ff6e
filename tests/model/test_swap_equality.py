"""Swapping and offloading over the real cache change no token, and moves keep their order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from test_greedy_equality import GREEDY, expected_all, prompt_of
from tiny_models import engine_over, engine_without_room, run, shared_model

from engine.core.scheduler_output import BlockCopy
from engine.kv_cache import KVCache
from engine.trace.events import Op, StepTrace

if TYPE_CHECKING:
    from engine.config import Preemption


@pytest.mark.parametrize("preemption", ["swap", "recompute", "auto"])
@pytest.mark.parametrize("length", [13, 14, 15, 16, 17, 18])
def test_preempted_outputs_equal_the_unpreempted_around_a_block_boundary(length: int, preemption: Preemption) -> None:
    prompts = [prompt_of(length, seed) for seed in range(3)]
    engine = engine_without_room(length, preemption=preemption)
    assert run(engine, prompts, GREEDY) == expected_all("llama", prompts)
    assert engine.scheduler.num_preemptions > 0


def test_offloaded_prefixes_give_the_same_tokens() -> None:
    engine = engine_over(shared_model("llama"), block_size=4, num_blocks=16, num_cpu_blocks=16)
    kinds: set[int] = set()
    engine.add_sink(lambda m: kinds.update(op[0] for op in m.ops) if isinstance(m, StepTrace) else None)
    prompts = [prompt_of(48, seed) for seed in range(3)]
    for _ in range(2):
        for prompt in prompts:
            assert run(engine, [prompt], GREEDY) == expected_all("llama", [prompt])
    assert {Op.SWAP_OUT, Op.SWAP_IN, Op.DROP} <= kinds


def test_auto_measures_what_the_two_ways_cost() -> None:
    engine = engine_over(shared_model("llama"), num_cpu_blocks=4, preemption="auto")
    ns_per_block, ns_per_token = engine.scheduler.preemption_costs
    assert 0 < ns_per_block < 1e9
    assert 0 < ns_per_token < 1e9


def test_moves_have_the_effect_of_one_after_the_other() -> None:
    generator = torch.Generator().manual_seed(1)
    shape = {"num_layers": 2, "num_kv_heads": 1, "block_size": 2, "head_dim": 4, "dtype": torch.float32}
    for _ in range(50):
        cache = KVCache(num_blocks=5, num_cpu_blocks=3, poison=True, **shape)  # type: ignore[arg-type]
        assert cache.host is not None
        cache.data.copy_(torch.rand(cache.data.shape, generator=generator))
        cache.host.copy_(torch.rand(cache.host.shape, generator=generator))
        data, host = cache.data.clone(), cache.host.clone()
        moves: list[BlockCopy] = []
        for _ in range(12):
            op = (Op.COPY, Op.SWAP_OUT, Op.SWAP_IN)[int(torch.randint(3, (), generator=generator))]
            read, written = {Op.COPY: (data, data), Op.SWAP_OUT: (data, host), Op.SWAP_IN: (host, data)}[op]
            a = int(torch.randint(len(read), (), generator=generator))
            b = int(torch.randint(len(written), (), generator=generator))
            written[b] = read[a].clone()
            moves.append(BlockCopy(op, a, b))
        cache.move(moves)
        assert torch.equal(cache.data, data)
        assert torch.equal(cache.host, host)
