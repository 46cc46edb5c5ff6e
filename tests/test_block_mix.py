"""Counts of cells that stand for many blocks stay what a new count would give, whatever steps change."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from engine.simulated import simulated_engine
from engine.trace.state import PoolState
from kvtui.block_codes import NUM_LEVELS, level_of_mix
from kvtui.block_mix import CACHED, FREE, BlockMix, CellLights
from kvtui.block_order import ADDRESS, ORDERS, OrderKeeper


def random_state(num_blocks: int, rng) -> PoolState:
    state = PoolState(msgspec.structs.replace(simulated_engine().header, num_blocks=num_blocks))
    change(state, np.arange(num_blocks), rng)
    return state


def change(state: PoolState, blocks, rng) -> None:
    owner = rng.integers(-3, 30, len(blocks))
    state.owner[blocks] = np.maximum(owner, -1)
    state.refs[blocks] = owner >= 0
    state.key[blocks] = rng.integers(0, 2, len(blocks))


@pytest.mark.parametrize("num_blocks", [1, 2, 8, 513, 100_000])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("blocks", [2, 64])
def test_kept_up_counts_equal_a_new_count(num_blocks, order, blocks) -> None:
    rng = np.random.default_rng(num_blocks + blocks)
    state, keeper = random_state(num_blocks, rng), OrderKeeper()
    keeper.choose(order, state)
    num_cells = -(-num_blocks // blocks)
    mix = BlockMix(state, keeper, 7, blocks, 0, num_cells)
    for _ in range(4):
        changed = rng.choice(num_blocks, min(num_blocks, 50), replace=False)
        change(state, changed, rng)
        mix.update(state, changed)
    assert np.array_equal(mix.counts, BlockMix(state, keeper, 7, blocks, 0, num_cells).counts)
    assert mix.sizes.sum() == num_blocks
    used, cached = int((state.refs > 0).sum()), int(((state.refs == 0) & (state.key != 0)).sum())
    assert mix.counts[:, FREE].sum() == num_blocks - used - cached
    assert mix.counts[:, CACHED].sum() == cached


def test_of_a_part_of_the_cells_only_their_blocks_are_counted() -> None:
    rng = np.random.default_rng(5)
    state, keeper = random_state(1000, rng), OrderKeeper()
    assert keeper.order == ADDRESS
    whole, part = BlockMix(state, keeper, 7, 8, 0, 125), BlockMix(state, keeper, 7, 8, 100, 25)
    assert np.array_equal(whole.counts[100:], part.counts)
    assert part.covers(100, 125)
    assert not part.covers(99, 110)
    change(state, np.arange(1000), rng)
    part.update(state, np.arange(1000))
    assert np.array_equal(part.counts, BlockMix(state, keeper, 7, 8, 0, 125).counts[100:])


def test_only_a_cell_whose_blocks_are_all_in_use_is_full() -> None:
    for size in (1, 2, 3, 64, 1024):
        used = np.arange(1, size + 1, dtype=np.int32)
        levels = level_of_mix(used, np.full(size, size, dtype=np.int32))
        assert (levels == NUM_LEVELS - 1).tolist() == [u == size for u in used.tolist()]
        assert (np.diff(levels) >= 0).all()
        assert levels.min() >= 0


@pytest.mark.parametrize("blocks", [1, 3, 64])
def test_a_cell_is_lit_as_the_block_in_it_that_matters_most_whatever_lights_up_and_goes_out(blocks) -> None:
    rng = np.random.default_rng(blocks)
    kinds = rng.choice([0, 0, 0, 1, 2, 3], 500).astype(np.uint8)
    lights = CellLights(kinds.copy(), blocks)
    for _ in range(40):
        at = rng.choice(500, 60, replace=False)
        now = rng.choice([0, 0, 0, 0, 1, 2, 3], 60).astype(np.uint8)
        lights.update(at, now)
        kinds[at] = now
        most = [int(kinds[start : start + blocks].max()) for start in range(0, 500, blocks)]
        assert lights.of(slice(None)).tolist() == most
        assert lights.of(np.array([2, 0])).tolist() == [most[2], most[0]]
