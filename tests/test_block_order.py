"""The orders of the grid, and that sorting a large pool again is left for when there is time."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from kvtui import block_order
from kvtui.block_order import ADDRESS, ORDERS, OWNER, USE, OrderKeeper, sorted_blocks, sorted_piece_by_piece


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


def test_by_owner_the_address_decides_among_blocks_that_nobody_holds() -> None:
    # Where they stood in a table that is gone says nothing.
    state = state_of([-1, -1, 0, -1, -1], key=[7, 8, 0, 0, 0], logical=[3, 1, 0, 9, 2])
    assert sorted_blocks(state, OWNER).tolist() == [2, 0, 1, 3, 4]


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


@pytest.mark.parametrize("order", [OWNER, USE])
def test_a_large_pool_is_sorted_over_many_frames_and_comes_out_the_same(order, monkeypatch) -> None:
    monkeypatch.setattr(block_order, "_FRAME_SECONDS", 0.0)
    rng = np.random.default_rng(1)
    n = 200_000
    state = state_of(rng.integers(-1, 40, n), rng.integers(-1, 999, n), rng.integers(0, 2, n), rng.integers(0, 90, n))
    now = [0.0]
    keeper = OrderKeeper(clock=lambda: now[0])
    keeper.choose(order, state)
    changed = rng.choice(n, 5000, replace=False)
    state.owner[changed], state.touched[changed] = 41, 1000
    state.refs[changed] = 1
    state.step, now[0] = 1, 60.0
    frames = 1
    while not keeper.keep(state, at_once=False):
        frames += 1
        assert keeper.step == 0, "the old order is shown meanwhile"
    assert frames >= 2 * n // block_order._PIECE
    assert not keeper.stale(state)
    assert np.array_equal(keeper.blocks, sorted_blocks(state, order))
    assert np.array_equal(keeper.blocks[keeper.places], np.arange(n))
    state.step = 2
    assert not keeper.keep(state, at_once=False), "it has just been sorted"


@pytest.mark.parametrize("order", [OWNER, USE])
def test_whatever_steps_do_while_a_large_pool_is_sorted_every_block_has_one_place(order) -> None:
    rng = np.random.default_rng(2)
    n = 150_000
    state = state_of(rng.integers(-1, 40, n), rng.integers(-1, 999, n), rng.integers(0, 2, n), rng.integers(0, 90, n))
    sorting = sorted_piece_by_piece(state, order)
    while True:
        try:
            next(sorting)
        except StopIteration as end:
            blocks, places = end.value
            break
        changed = rng.choice(n, 9000, replace=False)
        state.owner[changed], state.logical[changed] = rng.integers(-1, 2**31 - 1, (2, 9000))
        state.refs[changed], state.key[changed] = rng.integers(0, 2, (2, 9000))
        state.touched[changed] = rng.integers(0, 2**31 - 1, 9000)
    assert np.array_equal(np.sort(blocks), np.arange(n))
    assert np.array_equal(blocks[places], np.arange(n))
