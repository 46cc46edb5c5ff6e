"""The first-fit pool against a line of places that is searched the slow way."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.baselines.first_fit import FirstFitPool, Holes
from engine.core.block_pool import BlockPoolError


def first_run(line: list[bool], num: int) -> int | None:
    """The first place from which `num` places are free."""
    return next((at for at in range(len(line) - num + 1) if all(line[at : at + num])), None)


@given(size=st.integers(1, 40), actions=st.lists(st.tuples(st.booleans(), st.integers(1, 9)), max_size=60))
def test_every_request_gets_the_first_hole_that_is_large_enough(size: int, actions: list[tuple[bool, int]]):
    holes, line = Holes(size), [True] * size
    taken: list[tuple[int, int]] = []
    for take, num in actions:
        if take:
            expected = first_run(line, num)
            assert holes.take(num) == expected
            if expected is not None:
                line[expected : expected + num] = [False] * num
                taken.append((expected, num))
        elif taken:
            start, length = taken.pop(num % len(taken))
            holes.give(start, length)
            line[start : start + length] = [True] * length
        free = {place for start, length in holes for place in range(start, start + length)}
        assert free == {place for place, is_free in enumerate(line) if is_free}
        # Joined where they touch: between two holes there is always something.
        ends = [start + length for start, length in holes]
        assert all(end < start for end, (start, _) in zip(ends, list(holes)[1:], strict=False))
        assert holes.largest == max((length for _, length in holes), default=0)


def test_a_pool_with_enough_blocks_but_no_hole_says_so_and_changes_nothing():
    pool = FirstFitPool(6)
    first, second, third = (pool.allocate(2, request) for request in range(3))
    pool.release(first, 0)
    pool.release(third[::-1], 2)
    with pytest.raises(BlockPoolError, match="3 blocks in a row and the largest hole has 2 of the 4 free ones"):
        pool.allocate(3, 3)
    assert (pool.num_free, list(pool.holes)) == (4, [(0, 2), (4, 2)])
    pool.release(second, 1)
    assert pool.allocate(5, 4) == [0, 1, 2, 3, 4]


def test_a_wrong_release_leaves_the_holes_as_they_were():
    pool = FirstFitPool(4)
    blocks = pool.allocate(3, 0)
    with pytest.raises(BlockPoolError):
        pool.release([*blocks, 3], 0)
    assert list(pool.holes) == [(3, 1)]
    assert pool.num_used == 3
