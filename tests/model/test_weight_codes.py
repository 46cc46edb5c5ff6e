"""Codes are found where they give back every weight, and nowhere else."""

from __future__ import annotations

import math

import pytest
import torch
from coded_weights import eight_bits, four_bits, of_bfloat16

from engine.model.embedding import Embedding
from engine.model.weight_codes import BlockCodes, block_codes, is_bfloat16


@pytest.mark.parametrize(("make", "bits"), [(four_bits, 4), (eight_bits, 8)])
def test_codes_give_back_every_weight_to_the_last_bit(make, bits) -> None:
    weight = make(1100, 96)
    codes = block_codes(weight)
    assert codes is not None
    assert codes.bits == bits
    assert torch.equal(codes.rows(torch.arange(1100)), weight)
    some = torch.tensor([7, 0, 1099, 7])
    assert torch.equal(codes.rows(some), weight[some])


def test_a_matrix_that_was_rounded_by_nothing_has_no_codes() -> None:
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    assert block_codes(weight) is None
    assert not is_bfloat16(weight)
    assert is_bfloat16(weight.bfloat16().float())


@pytest.mark.parametrize("make", [four_bits, eight_bits])
@pytest.mark.parametrize("row", [0, 1050])
def test_one_weight_beside_its_place_and_there_are_no_codes(make, row) -> None:
    weight = make(1100, 64)
    weight[row, 40] = torch.nextafter(weight[row, 40], torch.tensor(10.0))
    assert block_codes(weight) is None


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e30])
def test_what_is_not_a_number_or_too_large_for_a_scale_is_never_taken_for_a_code(bad) -> None:
    for make in (four_bits, eight_bits):
        weight = make(32, 64)
        weight[3, 5] = bad
        assert block_codes(weight) is None


@pytest.mark.parametrize("make", [four_bits, eight_bits])
def test_scales_too_small_for_all_their_digits_are_found(make) -> None:
    weight = make(1100, 64)
    for row, factor in ((5, 2e-5), (900, 1e-6)):
        weight[row] = make(1, 64, scale=factor)
    codes = block_codes(weight)
    assert codes is not None
    assert torch.equal(codes.rows(torch.arange(1100)), weight)


def test_equal_weights_zeros_and_single_rows_have_codes() -> None:
    for weight in (torch.zeros(3, 64), torch.full((3, 64), 0.25), four_bits(1, 32)):
        codes = block_codes(weight)
        assert codes is not None
        assert torch.equal(codes.rows(torch.arange(len(weight))), weight)


def test_inputs_that_make_no_whole_blocks_have_no_codes() -> None:
    assert block_codes(torch.zeros(4, 33)) is None
    assert block_codes(torch.zeros(0, 32)) is None


@pytest.mark.parametrize(
    ("weight", "kind"), [(eight_bits(50, 64), BlockCodes), (of_bfloat16(50, 64), torch.bfloat16)], ids=["codes", "bf16"]
)
def test_an_embedding_in_fewer_bytes_has_the_same_rows(weight, kind) -> None:
    embedding = Embedding(weight, copied=True)
    table = embedding.table
    assert kind in (type(table), getattr(table, "dtype", None))
    ids = torch.tensor([3, 3, 49])
    assert torch.equal(embedding(ids), weight[ids])
    assert embedding(ids).dtype == torch.float32


def test_an_embedding_that_refers_to_the_weight_is_the_weight() -> None:
    weight = eight_bits(50, 64)
    assert Embedding(weight, copied=False).table is weight
