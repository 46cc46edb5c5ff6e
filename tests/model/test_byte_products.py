"""The compiled product of bytes: against float64 that rounds the inputs in the same way, at every edge of its tiles."""

from __future__ import annotations

import pytest
import torch
from coded_weights import eight_bits, four_bits

from engine.model.byte_inputs import LARGEST, LIMIT
from engine.model.byte_kernel import HAS_BYTE_PRODUCTS, PANEL
from engine.model.weight_codes import BLOCK, block_codes, round_to_codes

pytestmark = pytest.mark.skipif(not HAS_BYTE_PRODUCTS, reason="this processor has no AVX-512 VNNI")

if HAS_BYTE_PRODUCTS:
    from engine.model.byte_products import ByteProduct

SHAPES = [(96, 64), (1, 1), (17, 65), (PANEL, BLOCK), (PANEL + 1, BLOCK - 1), (2 * PANEL - 1, 7 * BLOCK)]


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def blocks_of(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(x.double(), (0, -x.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """Rows rounded as the product rounds them, float64."""
    blocks = blocks_of(x)
    limit = 127 * LIMIT * x.double().square().mean(1).sqrt()[:, None, None]
    sizes = blocks.abs().unflatten(2, (-1, 4)).amax(3)
    usual = torch.where(sizes <= limit, sizes, 0).amax(2, keepdim=True)
    usual = torch.where(usual > 0, usual, limit)
    step = torch.maximum(usual / 127, sizes.amax(2, keepdim=True) / LARGEST)
    rounded = (blocks / step).nan_to_num(0, 0, 0).round() * step
    return rounded.flatten(1)[:, : x.shape[1]]


def rounded(weight: torch.Tensor) -> torch.Tensor:
    """Weights as the product rounds those without codes, float64."""
    codes = round_to_codes(weight)
    steps = codes.scales.double()[..., None]
    return (codes.codes.double().unflatten(1, (-1, BLOCK)) * steps).flatten(1)[:, : weight.shape[1]]


def error(y: torch.Tensor, expected: torch.Tensor) -> float:
    """Of the worst row, relative to its length."""
    return float(((y.double() - expected).norm(dim=1) / expected.norm(dim=1)).max())


@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 6, 7, 8, 33, 70])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), SHAPES)
def test_rounded_inputs_times_rounded_weights_at_every_edge(num_rows: int, num_outputs: int, num_inputs: int) -> None:
    weight, x = normal(num_outputs, num_inputs), normal(num_rows, num_inputs, seed=1)
    x[0, num_inputs // 2] *= 30
    bias = normal(num_outputs, seed=2)
    expected = as_bytes(x) @ rounded(weight).T + bias
    assert error(ByteProduct(weight, bias)(x), expected) < 2e-5


@pytest.mark.parametrize("make", [four_bits, eight_bits])
@pytest.mark.parametrize("num_rows", [1, 3, 4, 6, 19])
def test_weights_made_from_codes_are_multiplied_as_they_are(make: type, num_rows: int) -> None:
    weight = make(PANEL + 7, 5 * BLOCK, seed=3)
    assert block_codes(weight) is not None
    x = normal(num_rows, 5 * BLOCK, seed=1)
    x[:, 40] = 50  # one block with second bytes, in all rows
    x[-1, 100] = 70  # and one in a single row
    assert error(ByteProduct(weight)(x), as_bytes(x) @ weight.double().T) < 2e-5


@pytest.mark.parametrize("make", [four_bits, eight_bits])
def test_what_bytes_hold_is_exact(make: type) -> None:
    weight = make(64, 3 * BLOCK, seed=4)
    x = torch.randint(-127, 128, (9, 3 * BLOCK), generator=torch.Generator().manual_seed(5)).float()
    x[:, ::BLOCK] = 127
    assert error(ByteProduct(weight)(x), x.double() @ weight.double().T) < 1e-6


def test_no_sum_is_cut_where_all_codes_are_the_largest() -> None:
    for sign in (1.0, -1.0):
        x = torch.full((5, 4 * BLOCK), 5.0)
        x[2] = torch.linspace(1e-6, 1, 4 * BLOCK) * 5  # second bytes in its first block
        x[2, -BLOCK:] = 5e6
        weight = sign * torch.ones(PANEL, 4 * BLOCK)
        assert error(ByteProduct(weight)(x), as_bytes(x) @ weight.double().T) < 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_inputs", [96, 71])
def test_narrow_rows_give_the_float32_result_rounded(dtype: torch.dtype, num_inputs: int) -> None:
    weight, x = normal(50, num_inputs), normal(7, num_inputs, seed=1).to(dtype)
    product = ByteProduct(weight, normal(50, seed=2))
    y = product(x)
    assert y.dtype == dtype
    assert torch.equal(y, product(x.float()).to(dtype))


def test_a_channel_a_thousand_times_the_others_leaves_them_their_part() -> None:
    weight, x = eight_bits(64, 128), normal(5, 128)
    x[:, 70] = 1000
    others = torch.arange(128) != 70
    rest = ByteProduct(weight)(x).double() - 1000 * weight[:, 70].double()
    assert error(rest, x[:, others].double() @ weight[:, others].double().T) < 0.01


def test_a_row_depends_on_no_other_row_nor_on_the_number_of_threads() -> None:
    weight, x = four_bits(100, 96), normal(39, 96, seed=1)
    x[::3, 50] *= 40
    product = ByteProduct(weight, normal(100, seed=2))
    expected = torch.cat([product(row) for row in x.split(1)])
    before = torch.get_num_threads()
    try:
        for num_threads in (1, 2):
            torch.set_num_threads(num_threads)
            assert torch.equal(product(x), expected)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("bad", [float("nan"), -float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", [four_bits, eight_bits])
def test_what_is_no_number_spoils_its_own_row_alone(bad: float, dtype: torch.dtype, make: type) -> None:
    product = ByteProduct(make(20, 96))
    x = normal(5, 96, seed=1).to(dtype)
    expected = product(x)
    for column in (2, 95):
        spoilt = x.clone()
        spoilt[1, column] = bad
        y = product(spoilt)
        assert y[1].isnan().all()
        assert torch.equal(y[[0, 2, 3, 4]], expected[[0, 2, 3, 4]])


def test_what_is_no_number_is_noticed_behind_whole_blocks() -> None:
    x = normal(2, BLOCK + 3)
    x[1, -1] = float("nan")
    y = ByteProduct(normal(20, BLOCK + 3))(x)
    assert y[1].isnan().all()
    assert not y[0].isnan().any()


def test_rows_of_zeros_give_the_bias() -> None:
    bias = normal(20)
    x = normal(3, 64)
    x[1] = 0
    assert torch.equal(ByteProduct(normal(20, 64), bias)(x)[1], bias)


def test_rows_of_the_least_and_largest_numbers_are_computed() -> None:
    weight = eight_bits(16, 64)
    x = normal(2, 64) * torch.tensor([[1e-30], [1e32]])
    assert error(ByteProduct(weight)(x), x.double() @ weight.double().T) < 0.02
    assert ByteProduct(weight)(torch.full((1, 64), 1e-40)).abs().max() < 1e-37


@pytest.mark.parametrize("make", [four_bits, eight_bits])
@pytest.mark.parametrize("size", [1e30, 1e36, 3e36])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_so_large_that_only_their_products_fit_into_float32_are_computed(
    make: type, size: float, dtype: torch.dtype
) -> None:
    weight, x = make(60, 96), normal(6, 96, seed=1)
    x[4, 70] = 40  # second bytes, in the row beside the large one
    product = ByteProduct(weight)
    expected = product(x.to(dtype))
    x[3] *= size
    assert (x[3].double() @ weight.double().T).abs().max() < 3e38
    y = product(x.to(dtype))
    assert error(y[3:4], x[3:4].double() @ weight.double().T) < 0.02
    others = [0, 1, 2, 4, 5]
    assert torch.equal(y[others], expected[others])


def test_rows_may_lie_apart_and_elements_too() -> None:
    weight, x = normal(20, 64), normal(6, 130, seed=1)
    product = ByteProduct(weight)
    for dtype in (torch.float32, torch.bfloat16):
        some = x.to(dtype)
        assert torch.equal(product(some[::2, 3:67]), product(some[::2, 3:67].contiguous()))
        assert torch.equal(product(some[:, :128:2]), product(some[:, :128:2].contiguous()))


def test_no_rows_give_no_rows() -> None:
    assert ByteProduct(normal(20, 64))(torch.empty(0, 64)).shape == (0, 20)


def test_rows_that_do_not_fit_are_refused() -> None:
    product = ByteProduct(normal(20, 64))
    with pytest.raises(ValueError, match=r"takes rows of 64 floats, not torch\.float32 rows of 65"):
        product(normal(2, 65))
    with pytest.raises(ValueError, match=r"not torch\.float64"):
        product(normal(2, 64).double())
