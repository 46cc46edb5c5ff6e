"""Linear layers with 8-bit weights and activations on a CPU, through torch's own operators.

A weight is its code times its output channel's scale; a row of the input is its codes times the row's own largest
element. Scales of rows and not of the whole batch: so what a request computes does not depend on who else is in its
batch, and one that was preempted and computed again gets the same numbers (dynamic quantisation per token, as in
LLM.int8(), Dettmers et al. 2022).

Two operators: oneDNN's where the processor multiplies bytes into 32-bit sums (VNNI, AMX), FBGEMM's elsewhere, which is
several times as fast there. Without such an instruction the sum of two products must fit into 16 bits, which takes one
bit of each input code.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from engine.model.projection import Projection

_WHOLE, _HALF = 127, 63
"""Largest input code, as a distance from zero's code: of eight bits, and of seven."""


def has_byte_products() -> bool:
    """Whether this processor multiplies bytes without a 16-bit sum in between."""
    return bool(torch.cpu._is_vnni_supported())


def make_int8_projection(
    weight: torch.Tensor, bias: torch.Tensor | None = None, *, byte_products: bool | None = None
) -> Projection:
    """A linear layer in 8 bits.

    Args:
        weight: `[out, in]`, any float dtype, on the CPU; not kept.
        bias: `[out]`, added in floating point.
        byte_products: Which operator; by default the one for this processor.

    Returns:
        `[T, in] -> [T, out]` in the input's dtype. A row that holds a NaN gives a row of NaN and harms no other.
    """
    weight = weight.float()
    largest = weight.abs().amax(dim=1)
    scales = torch.where(largest > 0, largest / 127, torch.ones_like(largest))
    codes = (weight / scales[:, None]).round().clamp(-127, 127).to(torch.int8)
    added = None if bias is None else bias.float()
    if has_byte_products() if byte_products is None else byte_products:
        product = _onednn(codes, scales, _WHOLE)
    else:
        product = _fbgemm(codes, scales)

    def project(x: torch.Tensor) -> torch.Tensor:
        rows = x.float()
        size = torch.linalg.vector_norm(rows, ord=float("inf"), dim=1, keepdim=True)
        # A row of zeros becomes 0 / 0, and NaN would be taken for the smallest code: both are 0 here, and the row's
        # size, 0 or NaN, says it again in the result.
        y = product(torch.nan_to_num_(rows / size)).mul_(size)
        if added is not None:
            y.add_(added)
        return y.to(x.dtype)

    return project


def _onednn(codes: torch.Tensor, scales: torch.Tensor, largest: int) -> Projection:
    operators = torch.ops.onednn
    packed = operators.qlinear_prepack(codes, None)
    zero_points = torch.zeros(len(codes), dtype=torch.int32)

    def product(x: torch.Tensor) -> torch.Tensor:
        inputs = x.mul(largest).add_(largest + 1).round_().to(torch.uint8)
        y: torch.Tensor = operators.qlinear_pointwise(
            inputs, 1 / largest, largest + 1, packed, scales, zero_points, None, 1.0, 0, torch.float32, "none", [], ""
        )
        return y

    return product


def _fbgemm(codes: torch.Tensor, scales: torch.Tensor) -> Projection:
    zero_points = torch.zeros(len(codes), dtype=torch.int64)
    before = torch.backends.quantized.engine
    try:
        torch.backends.quantized.engine = "fbgemm"  # decides how weights are packed
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch means to give up this kind of tensor: see below
            quantised = torch._make_per_channel_quantized_tensor(codes, scales.double(), zero_points, 0)
        packed = torch.ops.quantized.linear_prepack(quantised, None)
        operator = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32
    except (AttributeError, RuntimeError):
        # A torch without FBGEMM, or of a time when it is gone.
        return _onednn(codes, scales, _HALF)
    finally:
        torch.backends.quantized.engine = before

    def product(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = operator(x, 1 / _HALF, _HALF + 1, packed)
        return y

    return product
