"""The orders of the grid, and that sorting a large pool again is left for when there is time."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from kvtui.block_order import ADDRESS, ORDERS, OWNER, USE, OrderKeeper, sorted_blocks


def state_of(owner, touched=None, key=None, logical=None, step=0):
    """A pool by its arrays."""
    owner = np.array(owner, dtype=np.int32)
    n = len(owner)
    return SimpleNamespace(
        header=SimpleNamespace(num_blocks=n),
        step=step,
        owner=owner,
        refs=(owner >= 0).astype(np.int32),
        key=np.array(key if key is not None else [0] * n, dtype=np.int64),
        logical=np.array(logical if logical is not None else [-1] * n, dtype=np.int32),
        touched=np.array(touched if touched is not None else [-1] * n, dtype=np.int32),
    )


def test_by_owner_a_requests_blocks_stand_in_the_order_of_its_table_then_cached_then_free_ones() -> None:
    state = state_of([5, -1, 2, -1, 5, 2], key=[0, 0, 9, 7, 0, 0], logical=[1, -1, 0, 3, 0, 1])
    assert sorted_blocks(state, OWNER).tolist() == [2, 5, 4, 0, 3, 1]


def test_by_last_use_the_latest_touched_stand_first_and_untouched_ones_last() -> None:
    assert sorted_blocks(state_of([-1] * 5, touched=[3, -1, 9, 3, 9]), USE).tolist() == [2, 4, 0, 3, 1]


@pytest.mark.parametrize("num_blocks", [1, 2, 8, 513, 100_000])
@pytest.mark.parametrize("order", ORDERS)
def test_every_block_has_one_place_and_is_found_there(num_blocks, order) -> None:
    rng = np.random.default_rng(num_blocks)
    owner = rng.integers(-1, 40, num_blocks)
    state = state_of(owner, rng.integers(-1, 999, num_blocks), rng.integers(0, 2, num_blocks), owner + 1)
    keeper = OrderKeeper()
    keeper.choose(order, state)
    blocks = np.arange(num_blocks)
    places = keeper.places_of(blocks)
    assert sorted(places.tolist()) == blocks.tolist()
    assert keeper.block(keeper.place(num_blocks - 1)) == num_blocks - 1
    assert np.array_equal(blocks[keeper.at(slice(0, num_blocks))][places], blocks)


def test_an_order_is_brought_up_to_date_when_a_part_of_the_time_allows_it_and_at_once_when_paused() -> None:
    now = [0.0]
    keeper = OrderKeeper(clock=lambda: now[0])
    state = state_of([-1, -1, 0], step=1)
    keeper.choose(OWNER, state)
    assert not keeper.stale(state)
    state.step = 2
    assert keeper.stale(state)
    assert not keeper.keep(state, at_once=False), "it has just been sorted"
    assert keeper.keep(state, at_once=True)
    assert not keeper.keep(state, at_once=True), "it is up to date"
    state.step = 3
    now[0] += 60
    assert keeper.keep(state, at_once=False)
    assert keeper.keep(state, at_once=False, jumped=True)
    keeper.choose(ADDRESS, state)
    assert not keeper.stale(state)
    assert not keeper.keep(state, at_once=True, jumped=True)
