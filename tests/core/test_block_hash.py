import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.block_hash import block_digest, root_digest, trace_key


def test_kinds_of_extras_are_told_apart_though_their_values_are_equal():
    roots = [root_digest(), root_digest([("salt", "x")]), root_digest([("adapter", "x")]), root_digest([("salt", "")])]
    assert len(set(roots)) == 4


def test_extras_do_not_run_together():
    assert root_digest([("salt", "ab"), ("c", "")]) != root_digest([("salt", "a"), ("bc", "")])
    assert root_digest([("salt", "x"), ("adapter", "y")]) != root_digest([("saltxadapter", "y")])


def test_tokens_do_not_run_together():
    root = root_digest()
    assert block_digest(root, [1, 23]) != block_digest(root, [12, 3])
    assert block_digest(root, [256]) != block_digest(root, [0, 1])


def test_a_block_is_known_by_everything_before_it():
    root = root_digest()
    a, b = block_digest(root, [1, 2]), block_digest(root, [2, 1])
    assert block_digest(a, [3, 4]) != block_digest(b, [3, 4])
    assert block_digest(a, [3, 4]) == block_digest(block_digest(root, [1, 2]), [3, 4])


def test_digests_are_the_same_in_every_process():
    # Python's hash() is salted per process; a recording's keys must mean the same tomorrow.
    digest = block_digest(root_digest([("salt", "tenant")]), [5, 6, 7, 8])
    assert digest.hex() == "14523e0d12b330ca915b0e80a72239ded0464b10bf9af11e56a19f39d71d5fa9"


def test_a_lone_surrogate_in_a_salt_is_no_error():
    assert root_digest([("salt", "\ud800")]) != root_digest([("salt", "?")])


@pytest.mark.parametrize(
    ("digest", "key"),
    [
        (bytes(32), 1),
        (b"\xff" * 32, 2**63 - 1),
        (b"\x00" * 7 + b"\x02" + b"\xff" * 24, 1),
        (b"\x80" + bytes(31), 2**62),
    ],
)
def test_a_trace_key_is_a_positive_63_bit_number(digest: bytes, key: int):
    assert trace_key(digest) == key


@given(st.lists(st.lists(st.integers(0, 3), min_size=2, max_size=2), min_size=1, max_size=4, unique_by=tuple))
def test_different_contents_have_different_digests(contents: list[list[int]]):
    root = root_digest()
    assert len({block_digest(root, tokens) for tokens in contents}) == len(contents)
