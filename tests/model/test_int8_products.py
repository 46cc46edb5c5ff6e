"""The compiled product of 16-bit inputs and 8-bit weights: against float64, at every edge of its tiles."""

from __future__ import annotations

import pytest
import torch

from engine.model.int8_products import Int8Product
from engine.model.weight_codes import BLOCK


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def on_the_grid(num_outputs: int, num_inputs: int) -> torch.Tensor:
    """Weights that 8 bits hold as they are: whole numbers, the largest of each group 127."""
    weight = torch.randint(-127, 128, (num_outputs, num_inputs), generator=torch.Generator().manual_seed(3)).float()
    weight[:, ::BLOCK] = 127
    return weight


def error(y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> float:
    exact = x.double() @ weight.double().T
    return float(((y - exact).norm(dim=1) / exact.norm(dim=1)).max())


@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 7, 65, 130])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(96, 64), (1, 1), (17, 65), (33, 127), (48, 200)])
def test_weights_that_eight_bits_hold_cost_the_inputs_rounding_alone(
    num_rows: int, num_outputs: int, num_inputs: int
) -> None:
    weight = on_the_grid(num_outputs, num_inputs)
    x = normal(num_rows, num_inputs, seed=1)
    assert error(Int8Product(weight)(x), x, weight) < 2e-3


def test_no_sum_is_cut_where_all_codes_are_the_largest() -> None:
    weight = torch.ones(32, 4 * BLOCK)
    y = Int8Product(weight)(torch.full((3, 4 * BLOCK), 5.0))
    assert torch.allclose(y, torch.full((3, 32), 5.0 * 4 * BLOCK), rtol=1e-5)


def test_a_channel_a_thousand_times_the_others_leaves_them_their_part() -> None:
    weight = on_the_grid(64, 128)
    x = normal(5, 128)
    x[:, 70] = 1000
    others = torch.arange(128) != 70
    rest = Int8Product(weight)(x) - 1000 * weight[:, 70]
    assert error(rest, x[:, others], weight[:, others]) < 0.05  # bytes would round the others away: off by 1


def test_a_large_weight_coarsens_its_own_group_alone() -> None:
    weight = normal(16, 2 * BLOCK)
    weight[:, 0] = 50
    x = normal(4, 2 * BLOCK, seed=1)
    x[:, :BLOCK] = 0
    assert error(Int8Product(weight)(x), x, weight) < 0.01


def test_weights_made_from_four_bit_codes_are_multiplied_as_they_are() -> None:
    generator = torch.Generator().manual_seed(4)
    codes = torch.randint(0, 16, (40, 3, BLOCK), generator=generator).float()
    codes[:, :, 0], codes[:, :, 1] = 0, 15
    steps, lowest = ((torch.rand(40, 3, 1, generator=generator) + 0.5).half().float() for _ in range(2))
    weight = (codes * steps - 8 * lowest).flatten(1)
    x = normal(6, 3 * BLOCK)
    assert error(Int8Product(weight)(x), x, weight) < 2e-4
    rounded = (weight * (1 + 1e-3 * normal(*weight.shape))).contiguous()
    assert error(Int8Product(rounded)(x), x, rounded) > 1e-3  # of no codes: eight bits do not hold it


def test_threads_change_nothing() -> None:
    weight, x = normal(100, 96), normal(70, 96, seed=1)
    product = Int8Product(weight, normal(100, seed=2))
    before = torch.get_num_threads()
    results = []
    try:
        for num_threads in (1, 2):
            torch.set_num_threads(num_threads)
            results.append(product(x))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*results)


def test_rows_may_lie_apart_and_elements_too() -> None:
    weight, x = normal(20, 64), normal(6, 130, seed=1)
    product = Int8Product(weight)
    assert torch.equal(product(x[::2, 3:67]), product(x[::2, 3:67].contiguous()))
    assert torch.equal(product(x[:, :128:2]), product(x[:, :128:2].contiguous()))


def test_no_rows_give_no_rows() -> None:
    assert Int8Product(normal(20, 64))(torch.empty(0, 64)).shape == (0, 20)


@pytest.mark.parametrize("bad", [float("nan"), -float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_spoils_its_own_row_alone(bad: float) -> None:
    product = Int8Product(normal(20, 67))
    x = normal(5, 67, seed=1)
    expected = product(x)
    for column in (2, 66):  # within a vector, and in what is left after whole ones
        spoilt = x.clone()
        spoilt[1, column] = bad
        y = product(spoilt)
        assert y[1].isnan().all()
        assert torch.equal(y[[0, 2, 3, 4]], expected[[0, 2, 3, 4]])


def test_rows_of_the_least_and_largest_numbers_are_computed() -> None:
    weight = on_the_grid(16, 64) / 127
    x = normal(2, 64) * torch.tensor([[1e-36], [1e36]])
    assert error(Int8Product(weight)(x), x, weight) < 2e-3


def test_rows_that_do_not_fit_are_refused() -> None:
    product = Int8Product(normal(20, 64))
    with pytest.raises(ValueError, match=r"takes float32 rows of 64, not torch\.float32 rows of 65"):
        product(normal(2, 65))
    with pytest.raises(ValueError, match=r"not torch\.float64"):
        product(normal(2, 64).double())
