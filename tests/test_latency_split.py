"""A latency's parts in cells and words."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.trace.latency import Latency
from kvtui.latency_split import cells_of_parts, duration, shown_parts


def latency(*parts):
    return Latency(parts, sum(parts), -1, -1, True)


@given(st.tuples(*[st.integers(0, 10**12)] * 5), st.integers(0, 80))
def test_a_bar_is_filled_and_no_part_of_it_vanishes_where_there_is_room(parts, cells):
    given_cells = cells_of_parts(latency(*parts), cells)
    assert sum(given_cells) == (cells if any(parts) else 0)
    assert min(given_cells) >= 0
    if cells >= 5:
        assert [count > 0 for count in given_cells] == [ns > 0 for ns in parts]
    for at, count in enumerate(given_cells):
        if any(parts) and cells >= 5:
            assert abs(count - parts[at] * cells / sum(parts)) <= 5


def test_where_there_are_fewer_cells_than_parts_the_largest_parts_have_them():
    assert cells_of_parts(latency(5, 100, 1, 70, 20), 3) == [0, 1, 0, 1, 1]
    assert cells_of_parts(latency(5, 100, 1, 70, 20), 1) == [0, 1, 0, 0, 0]


def test_parts_that_cost_nothing_are_named_only_where_every_request_has_them():
    assert [name for _, name, _ in shown_parts(latency(0, 0, 0, 0, 0))] == ["queued", "prefill", "decode"]
    assert [name for _, name, _ in shown_parts(latency(1, 2, 3, 0, 5))] == ["queued", "prefill", "decode", "recompute"]


@pytest.mark.parametrize(
    ("ns", "says"),
    [
        (0, "0 us"),
        (999_499, "999 us"),
        (1_000_000, "1.0 ms"),
        (99_940_000, "99.9 ms"),
        (99_960_000, "100 ms"),
        (999_400_000, "999 ms"),
        (999_600_000, "1.00 s"),
        (99_990_000_000, "99.99 s"),
        (1_234_000_000_000, "1,234 s"),
    ],
)
def test_durations_are_short_at_every_size(ns, says):
    assert duration(ns) == says
