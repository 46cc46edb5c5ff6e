"""Long runs of one operation leave the same state as the operations one by one, also where they contradict it."""

from __future__ import annotations

import random

import msgspec
import pytest

from engine.request import SamplingParams
from engine.simulated import simulated_engine
from engine.trace import block_fold, bulk_fold
from engine.trace.events import BlockOp, Counters, Op, RequestArrived, StepTrace
from engine.trace.state import PoolState

NUM_BLOCKS = 300
HEADER = msgspec.structs.replace(simulated_engine().header, num_blocks=NUM_BLOCKS, num_cpu_blocks=4)
SIZE = HEADER.block_size


def step(index: int, ops: list[BlockOp]) -> StepTrace:
    return StepTrace(index, index, 0, 0, 0, 0, [], ops, [], [], [], Counters(0, 0, 0, 0, 0, NUM_BLOCKS, 0, 0, 0, 0))


def arrivals(num: int) -> list[RequestArrived]:
    return [
        RequestArrived(
            request=n,
            name=f"r{n}",
            time_ns=0,
            prompt_token_ids=[1],
            prompt_pieces=["a"],
            max_tokens=10,
            temperature=0.0,
        )
        for n in range(num)
    ]


def folded(messages, one_by_one: bool, monkeypatch) -> PoolState:
    state = PoolState(HEADER)
    with monkeypatch.context() as patch:
        if one_by_one:
            patch.setattr(block_fold, "LEAST", 10**9)
        else:
            patch.setattr(block_fold, "LEAST", 1)
            patch.setattr(bulk_fold, "LEAST", 2)
        for message in messages:
            state.apply(message)
    return state


def honest_steps(rng: random.Random, num: int) -> list[StepTrace]:
    """Requests take, fill, hash and let go of blocks, many in a step."""
    free, tables, hashed = list(range(NUM_BLOCKS)), {n: [] for n in range(6)}, {}
    steps = []
    for index in range(num):
        ops = []
        for request, table in tables.items():
            if table and rng.random() < 0.3:
                for block in reversed(table):
                    ops.append(BlockOp(Op.RELEASE, block, request, 0))
                free.extend(reversed(table))
                table.clear()
                continue
            taken = [free.pop(0) for _ in range(min(len(free), rng.randrange(40)))]
            ops += [BlockOp(Op.EVICT, b, hashed.pop(b), 0) for b in taken if b in hashed]
            for block in taken:
                ops.append(BlockOp(Op.ALLOCATE, block, request, len(table)))
                table.append(block)
            ops += [BlockOp(Op.FILL, b, request, SIZE) for b in taken]
            chosen = [b for b in taken if rng.random() < 0.9]
            for block in chosen:
                hashed[block] = rng.randrange(1, 1 << 60)
            ops += [BlockOp(Op.HASH, b, hashed[b], 0) for b in chosen]
        steps.append(step(index, ops))
    return steps


@pytest.mark.parametrize("seed", range(8))
def test_an_honest_trace_is_folded_alike_and_without_violations(seed, monkeypatch) -> None:
    messages = [*arrivals(6), *honest_steps(random.Random(seed), 12)]
    single, bulk = (folded(messages, one_by_one, monkeypatch) for one_by_one in (True, False))
    assert bulk.used > 0
    assert bulk.held_slots == bulk.filled[bulk.refs > 0].sum() > 0
    assert bulk.num_violations == 0
    assert single.same_as(bulk) == []


@pytest.mark.parametrize("seed", range(20))
def test_a_trace_that_contradicts_itself_is_folded_alike_violation_by_violation(seed, monkeypatch) -> None:
    rng = random.Random(seed)
    messages = [*arrivals(4), *honest_steps(rng, 4)]
    for index in range(4, 10):
        ops = []
        for _ in range(12):
            op = rng.choice(list(Op))
            blocks = [rng.choice((rng.randrange(NUM_BLOCKS), rng.randrange(20), NUM_BLOCKS + 5, -1)) for _ in range(3)]
            for block in blocks if rng.random() < 0.5 else blocks[:1] * 2 + [rng.randrange(NUM_BLOCKS)]:
                b = rng.choice((rng.randrange(7), -1, 2**40, -(2**63), 0))
                ops.append(BlockOp(op, block, b, rng.choice((0, 1, SIZE, SIZE + 1, -1, 2**35))))
        messages.append(step(index, ops))
    single, bulk = (folded(messages, one_by_one, monkeypatch) for one_by_one in (True, False))
    assert single.num_violations > 0
    assert single.same_as(bulk) == []
    assert bulk.held_slots == bulk.filled[bulk.refs > 0].sum()


def test_numbers_beyond_64_bits_are_told_as_violations(monkeypatch) -> None:
    ops = [BlockOp(Op.ALLOCATE, 2**70 + n, 0, n) for n in range(100)]
    state = folded([*arrivals(1), step(0, ops)], False, monkeypatch)
    assert state.num_violations == 100
    assert state.used == 0


def test_a_long_prompt_and_its_end_are_folded_in_bulk(monkeypatch) -> None:
    seen: list[int] = []
    apply = bulk_fold._BULK[int(Op.ALLOCATE)]
    monkeypatch.setitem(
        bulk_fold._BULK, int(Op.ALLOCATE), lambda fold, run: (seen.append(run.shape[1]), apply(fold, run))[1]
    )
    from engine.config import CacheConfig, EngineConfig, SchedulerConfig

    limits = SchedulerConfig(max_num_batched_tokens=4096, max_model_len=4096, max_prefill_chunk=4096)
    engine = simulated_engine(EngineConfig(cache=CacheConfig(num_blocks=400), scheduler=limits))
    state = PoolState(engine.header)
    engine.add_sink(lambda message: state.apply(message) if isinstance(message, RequestArrived | StepTrace) else None)
    engine.add_request([7] * 3000, SamplingParams(max_tokens=2))
    while engine.has_work:
        engine.step()
    assert seen == [-(-3000 // engine.header.block_size)]
    assert state.used == 0
    assert state.num_violations == 0
