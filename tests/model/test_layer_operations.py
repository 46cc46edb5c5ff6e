"""What is done between linear layers, compiled for the CPU, equals its plain definition in every row, alone or not."""

from __future__ import annotations

import pytest
import torch

from engine.attention import cpu, reference
from engine.model import compiled_operations
from engine.model.compiled_operations import CompiledOperations
from engine.model.layer_operations import Norm, TorchOperations, make_operations

ANGLES = torch.rand(9, 8).repeat(1, 2)
WIDTHS = [1, 5, 8, 31, 32, 48, 77, 576, 1000]

# Sums in another order differ by some units in the last place of float32; rounding adds half a unit of the dtype's.
TOLERANCE = {
    torch.float32: {"rtol": 2e-6, "atol": 1e-6},
    torch.bfloat16: {"rtol": 2**-8, "atol": 1e-6},
    torch.float16: {"rtol": 2**-10, "atol": 2**-24},
}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def operations(dtype: torch.dtype) -> CompiledOperations:
    return CompiledOperations(ANGLES, ANGLES, dtype)


def rows(num_rows: int, width: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Rows of all sizes, from a thousandth to a thousand."""
    generator = torch.Generator().manual_seed(seed)
    sizes = 10 ** torch.linspace(-3, 3, num_rows)[:, None]
    return (torch.randn(num_rows, width, generator=generator) * sizes).to(dtype)


def plain_norm(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    exact = x.double()
    return exact / torch.sqrt((exact * exact).mean(-1, keepdim=True) + norm.eps) * norm.weight.double()


def plain_gate(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.double().chunk(2, dim=-1)
    return gate / (1 + torch.exp(-gate)) * up


def norm_of(width: int, dtype: torch.dtype) -> Norm:
    return Norm(rows(1, width, torch.float32, seed=9)[0].mul(1000).add(1).to(dtype), 1e-5)


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got.double(), expected, **TOLERANCE[got.dtype])


@DTYPES
@pytest.mark.parametrize("width", WIDTHS)
def test_norms_are_their_definition(dtype: torch.dtype, width: int) -> None:
    x, norm = rows(7, width, dtype), norm_of(width, dtype)
    got = operations(dtype).norm(x, norm)
    assert got.dtype == dtype
    close(got, plain_norm(x, norm))


@DTYPES
@pytest.mark.parametrize("width", WIDTHS)
def test_an_addition_rounds_as_torch_does_and_the_norm_is_of_what_it_left(dtype: torch.dtype, width: int) -> None:
    hidden, update, norm = rows(7, width, dtype), rows(7, width, dtype, seed=1), norm_of(width, dtype)
    total, before = hidden + update, update.clone()
    got = operations(dtype).add_norm(hidden, update, norm)
    assert torch.equal(hidden, total)
    assert torch.equal(update, before)
    close(got, plain_norm(total, norm))


@DTYPES
@pytest.mark.parametrize("width", WIDTHS)
def test_gates_are_their_definition(dtype: torch.dtype, width: int) -> None:
    gate_up = rows(7, 2 * width, dtype).clamp(-200, 200)
    close(operations(dtype).gate(gate_up), plain_gate(gate_up))


@DTYPES
def test_gates_of_the_largest_and_of_no_numbers_are_torchs(dtype: torch.dtype) -> None:
    gate = torch.tensor([0.0, -0.0, 50, -50, 87, -87, 88, -88, 89, -89, 200, -200, -6e4, 6e4, *[float("nan")] * 2])
    gate = torch.cat((gate, torch.tensor([float("inf"), -float("inf")]))).to(dtype)
    got = operations(dtype).gate(torch.cat((gate, torch.ones_like(gate)))[None])[0]
    expected = torch.nn.functional.silu(gate)
    torch.testing.assert_close(got, expected, rtol=2**-8, atol=1e-36, equal_nan=True)


@DTYPES
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_a_row_is_the_same_alone_and_among_others(dtype: torch.dtype, num_threads: int) -> None:
    width = 80
    most = 2 * max(compiled_operations._SERIAL_ELEMENTS.values()) // width
    hidden, update, norm = rows(most, width, dtype), rows(most, width, dtype, seed=1), norm_of(width, dtype)
    ops = operations(dtype)
    picks = range(0, most, 97)
    alone = [(ops.norm(hidden[i : i + 1], norm), ops.gate(hidden[i : i + 1])) for i in picks]
    alone_sums = [ops.add_norm(hidden[i : i + 1].clone(), update[i : i + 1], norm) for i in picks]
    torch.set_num_threads(num_threads)
    together = ops.norm(hidden, norm), ops.gate(hidden), ops.add_norm(hidden, update, norm)
    for i, (normed, gated), added in zip(picks, alone, alone_sums, strict=True):
        assert torch.equal(together[0][i], normed[0])
        assert torch.equal(together[1][i], gated[0])
        assert torch.equal(together[2][i], added[0])
    close(together[0], plain_norm(rows(most, width, dtype), norm))


@DTYPES
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_no_number_stays_in_its_row_and_shows(dtype: torch.dtype, bad: float) -> None:
    ops, norm = operations(dtype), norm_of(20, dtype)
    clean = rows(5, 20, dtype)
    spoilt = clean.clone()
    spoilt[2, 17] = bad
    zeros = torch.zeros_like(clean)
    others = [0, 1, 3, 4]
    for operation in (
        lambda x: ops.norm(x, norm),
        lambda x: ops.add_norm(x.clone(), zeros, norm),
        lambda x: ops.add_norm(zeros.clone(), x, norm),
        ops.gate,
    ):
        got = operation(spoilt)
        assert torch.equal(got[others], operation(clean)[others])
        assert not got[2].isfinite().all()
    assert ops.norm(spoilt, norm)[2, 17].isnan()


def test_rows_that_do_not_fit_are_refused() -> None:
    ops, norm = operations(torch.float32), norm_of(8, torch.float32)
    hidden = torch.zeros(3, 8)
    with pytest.raises(ValueError, match=r"\[2, 8\] cannot be added to \[3, 8\]"):
        ops.add_norm(hidden, torch.zeros(2, 8), norm)
    with pytest.raises(ValueError, match=r"rows of torch\.float64"):
        ops.norm(hidden.double(), norm)
    with pytest.raises(ValueError, match="contiguous"):
        ops.norm(torch.zeros(8, 3).T, norm)


def test_only_the_compiled_attention_brings_compiled_operations() -> None:
    assert isinstance(make_operations(cpu.paged_attention, ANGLES, ANGLES, 2, torch.float32), CompiledOperations)
    assert isinstance(make_operations(reference.paged_attention, ANGLES, ANGLES, 2, torch.float32), TorchOperations)
    assert isinstance(make_operations(cpu.paged_attention, ANGLES, ANGLES, 2, torch.float64), TorchOperations)


def test_where_compiling_fails_torch_does_it(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def fail(dtype: torch.dtype) -> None:
        raise OSError("no such processor")

    monkeypatch.setattr(compiled_operations, "_compiled", fail)
    assert isinstance(make_operations(cpu.paged_attention, ANGLES, ANGLES, 2, torch.float32), TorchOperations)
    assert "run in torch" in caplog.text


def test_angles_that_differ_between_the_halves_of_a_head_are_left_to_torch() -> None:
    other = torch.rand(9, 16)
    assert isinstance(make_operations(cpu.paged_attention, other, ANGLES, 2, torch.float32), TorchOperations)
