"""What the block pool and the scheduler cost: `python -m engine.bench.pool`. No model is needed.

The pool's figures are CPU time per block of one bulk operation. A scheduler step is deciding (`schedule`) and taking in
the tokens (`update`) with every request decoding; every figure is a median over pools or steps, taken in turns.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from typing import TYPE_CHECKING

from engine.bench.report import Figure, show
from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.core.block_hash import block_digest, root_digest
from engine.core.block_pool import BlockPool
from engine.core.scheduler import Scheduler
from engine.request import Request, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

BLOCK_SIZE = 16
_STEPS = 48


def pool_figures(num_blocks: int, rounds: int) -> list[Figure]:
    """Nanoseconds per block of each operation, with nobody following the trace and with it being noted."""
    taken: dict[tuple[str, bool], list[float]] = {}
    tokens = list(range(BLOCK_SIZE))
    for number in range(rounds + 1):
        for traced in (False, True):
            pool = BlockPool(num_blocks)
            gc.collect()
            times = _pool_round(pool, num_blocks, tokens, traced=traced)
            if number:
                for name, nanoseconds in times.items():
                    taken.setdefault((name, traced), []).append(nanoseconds / num_blocks)
    medians = {key: statistics.median(values) for key, values in taken.items()}
    figures = [
        Figure(f"{name} a block, traced over not", medians[name, True] / medians[name, False], "x")
        for name in ("allocate", "share", "publish", "free")
    ]
    for (name, traced), value in sorted(medians.items()):
        if name != "hash" or not traced:
            figures.append(Figure(f"{name} a block{', traced' if traced else ''}", value, "ns"))
    return figures


def _pool_round(pool: BlockPool, num_blocks: int, tokens: list[int], *, traced: bool) -> dict[str, int]:
    """CPU nanoseconds of each operation on all blocks of a new pool."""
    times: dict[str, int] = {}
    clock = time.thread_time_ns

    def note(name: str, began: int) -> None:
        times[name] = clock() - began
        pool.ops = [] if traced else None

    pool.ops = [] if traced else None
    began = clock()
    blocks = pool.allocate(num_blocks, 1)
    note("allocate", began)
    blocks.reverse()
    began = clock()
    pool.release(blocks, 1)
    note("free", began)
    blocks = pool.allocate(num_blocks, 1)
    began = clock()
    parent = root_digest(())
    digests = [parent := block_digest(parent, tokens) for _ in range(num_blocks)]
    note("hash", began)
    began = clock()
    for block_id, digest in zip(blocks, digests, strict=True):
        pool.publish(block_id, digest)
    note("publish", began)
    began = clock()
    pool.touch(blocks, 2)
    note("share", began)
    pool.release(blocks, 2)
    blocks.reverse()
    pool.ops = [] if traced else None
    began = clock()
    pool.release(blocks, 1)
    note("free what can be found again,", began)
    return times


def step_microseconds(num_blocks: int, running: int, *, traced: bool = False) -> float:
    """Median CPU microseconds of a scheduler step in which so many requests decode."""
    config = EngineConfig(
        cache=CacheConfig(BLOCK_SIZE, num_blocks),
        scheduler=SchedulerConfig(max_num_seqs=running, max_num_batched_tokens=running * 32, max_model_len=4096),
    )
    scheduler = Scheduler(config)
    # 20 known tokens: a third of the table's blocks are begun anew within the steps that are timed.
    for n in range(running):
        scheduler.add_request(Request(n, "", list(range(n, n + 20)), SamplingParams(max_tokens=4000)))
    sampled: list[int | None] = [5] * running
    taken = []
    for number in range(_STEPS + 1):
        scheduler.kv.pool.ops = [] if traced else None
        began = time.thread_time_ns()
        scheduler.update(scheduler.schedule(), sampled)
        if number:
            taken.append(time.thread_time_ns() - began)
    return statistics.median(taken) / 1e3


def step_figures(pools: Sequence[int], running: Sequence[int]) -> list[Figure]:
    """Microseconds of a step for every size of pool that holds so many requests."""
    figures = []
    for num_blocks in pools:
        for count in running:
            if count * (20 + _STEPS) <= num_blocks * BLOCK_SIZE:
                name = f"a step, {count} running, {num_blocks:,} blocks"
                figures.append(Figure(name, step_microseconds(num_blocks, count), "µs"))
        gc.collect()
    return figures


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m engine.bench.pool", description=__doc__)
    parser.add_argument("--blocks", type=int, default=100_000, help="of the pool whose operations are timed")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--pools", type=int, nargs="+", default=[1_000, 10_000, 100_000, 1_000_000])
    parser.add_argument("--running", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(argv)
    figures = pool_figures(options.blocks, options.rounds)
    figures += step_figures(options.pools, options.running)
    show("pool", figures, as_json=options.json, about=f"{options.blocks:,} blocks in bulk, CPU time")


if __name__ == "__main__":
    main()
