"""Amounts as people read them."""

import pytest

from engine.sizes import counted, in_bytes


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536 * 1024, "1.5 MiB"),
        (112 << 20, "112 MiB"),
        (5 << 30, "5.0 GiB"),
        (3 << 50, "3,072.0 TiB"),
    ],
)
def test_bytes_are_told_in_the_largest_unit_that_they_fill(count, words):
    assert in_bytes(count) == words


def test_a_noun_is_plural_unless_there_is_one_and_thousands_are_set_apart():
    assert [counted(n, "block") for n in (0, 1, 2, 1040)] == ["0 blocks", "1 block", "2 blocks", "1,040 blocks"]
