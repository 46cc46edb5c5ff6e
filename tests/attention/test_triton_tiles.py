import pytest

from engine.attention.triton_tiles import (
    Target,
    Work,
    decode_splits,
    decode_tile,
    padded,
    prefill_splits,
    prefill_tile,
    write_constants,
)

TARGETS = [Target("cuda", 80), Target("cuda", 90), Target("hip", "gfx942")]


@pytest.mark.parametrize("max_keys", [1, 255, 256, 257, 8192, 8193, 131072])
def test_splits_cover_a_sequence_and_stay_few(max_keys):
    split_keys, num_splits = decode_splits(max_keys, 256)
    assert (num_splits - 1) * split_keys < max_keys <= num_splits * split_keys
    assert num_splits <= 32


def test_the_length_of_a_split_is_the_same_for_all_usual_lengths():
    assert {decode_splits(n, 256)[0] for n in range(1, 8193, 37)} == {256}


def test_a_prefill_is_split_only_where_it_leaves_the_device_idle():
    idle = prefill_splits(32768, 1024, block_n=64, num_programs=8, num_processors=132)
    assert idle[1] > 1
    assert idle[0] % 64 == 0
    assert idle[0] * (idle[1] - 1) < 32768 <= idle[0] * idle[1]
    assert 8 * idle[1] <= 132
    assert prefill_splits(32768, 1024, block_n=64, num_programs=100, num_processors=132) == (32768, 1)
    assert prefill_splits(900, 1024, block_n=64, num_programs=1, num_processors=132)[1] == 1


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: str(target.arch))
@pytest.mark.parametrize("choose", [decode_tile, prefill_tile])
def test_a_tile_holds_all_heads_of_a_group_and_can_be_a_matrix_operand(target, choose):
    for group in (1, 3, 16, 17, 64, 128):
        for head_dim in (16, 64, 80, 128, 256):
            for itemsize in (2, 4):
                for quantised in (False, True):
                    tile = choose(target, Work(group, head_dim, itemsize, quantised))
                    assert tile.block_m >= group
                    assert tile.block_m >= 16
                    assert tile.block_n >= 16
                    assert tile.block_m == padded(tile.block_m)
                    assert tile.block_n == padded(tile.block_n)


def test_float8_is_the_hardwares_only_where_it_has_it():
    assert [target.has_float8 for target in TARGETS] == [False, True, False]


def test_one_program_writes_few_heads_of_a_wide_model():
    constants = write_constants(head_dim=128, num_kv_heads=32, block_size=16, kind=0)
    assert constants["BLOCK_HEADS"] * 128 <= 2048
    assert write_constants(head_dim=64, num_kv_heads=3, block_size=16, kind=0)["BLOCK_HEADS"] == 4
