"""Columns: exact, narrow, and refusing what is none."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.trace.columns import column, differences, pack, sums, surprise, undo_surprise, unpack

NUMBERS = st.integers(-(2**63), 2**63 - 1)


@given(st.lists(NUMBERS, max_size=50))
def test_a_column_comes_back_as_it_was(numbers):
    values = column(numbers)
    assert unpack(pack(values), len(values)).tolist() == numbers
    assert sums(differences(values)).tolist() == numbers


@given(st.lists(st.tuples(st.integers(0, 3), NUMBERS, NUMBERS), max_size=40))
def test_what_surprises_is_enough_to_know_the_values(rows):
    group, values, advance = (column(row[at] for row in rows) for at in range(3))
    residuals = surprise(group, values, advance)
    assert undo_surprise(group, residuals, advance).tolist() == values.tolist()


def test_what_is_as_expected_surprises_only_at_first():
    group = column([7, 9, 7, 9, 7])
    values = column([10, 100, 11, 102, 12])
    advance = column([1, 2, 1, 2, 1])
    assert surprise(group, values, advance).tolist() == [10, 100, 0, 0, 0]


@pytest.mark.parametrize(
    ("numbers", "size"),
    [([], 1), ([0, 0, 0], 1), ([1, -128, 127], 4), ([128], 3), ([-32769], 5), ([2**31], 9)],
)
def test_a_column_takes_the_narrowest_width_that_holds_it(numbers, size):
    assert len(pack(column(numbers))) == size


def test_byte_planes_stand_one_after_the_other():
    assert pack(column([0x0102, 0x0304])) == b"\x02\x02\x04\x01\x03"


@pytest.mark.parametrize("data", [b"", b"\1", b"\1ab", b"\3abc", b"\0\0", b"\xff", b"\2a"])
def test_bytes_that_are_no_column_of_that_length_are_refused(data):
    with pytest.raises(ValueError, match="a column of 1 numbers"):
        unpack(data, 1)


def test_a_number_beyond_64_bits_is_refused():
    with pytest.raises(OverflowError):
        column([2**63])


def test_an_empty_column_is_empty():
    empty = np.zeros(0, np.int64)
    assert undo_surprise(empty, empty, empty).tolist() == []
