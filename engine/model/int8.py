"""Linear layers with 8-bit weights on a CPU.

Two ways. Where the processor multiplies bytes into 32-bit sums (VNNI, AMX), oneDNN's operator, with inputs of 8 bits: a
weight is its code times its output channel's scale, a row of the input its codes times the row's own largest element.
Elsewhere the sum of two products of bytes must fit into 16 bits, which would leave the inputs 7 bits and change one
greedy token in five; so there inputs have 16 bits, and weights a scale for each block (`int8_products.py`).

Scales of rows and not of the whole batch: so what a request computes does not depend on who else is in its batch, and
one that was preempted and computed again gets the same numbers (dynamic quantisation per token, as in LLM.int8(),
Dettmers et al. 2022).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from engine.model.int8_products import Int8Product

if TYPE_CHECKING:
    from engine.model.projection import Projection

_LARGEST = 127
"""Largest input code of 8 bits, as a distance from zero's code."""


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
        byte_products: Whether to multiply bytes with bytes; by default where this processor can.

    Returns:
        `[T, in] -> [T, out]` in the input's dtype. A row that holds a NaN gives a row of NaN and harms no other.
    """
    if has_byte_products() if byte_products is None else byte_products:
        return _onednn(weight.float(), bias)
    product = Int8Product(weight, bias)

    def project(x: torch.Tensor) -> torch.Tensor:
        return product(x.float()).to(x.dtype)

    return project


def _onednn(weight: torch.Tensor, bias: torch.Tensor | None) -> Projection:
    operators = torch.ops.onednn
    largest = weight.abs().amax(dim=1)
    scales = torch.where(largest > 0, largest / 127, torch.ones_like(largest))
    codes = (weight / scales[:, None]).round().clamp(-127, 127).to(torch.int8)
    packed = operators.qlinear_prepack(codes, None)
    zero_points = torch.zeros(len(codes), dtype=torch.int32)
    added = None if bias is None else bias.float()

    def project(x: torch.Tensor) -> torch.Tensor:
        rows = x.float()
        size = torch.linalg.vector_norm(rows, ord=float("inf"), dim=1, keepdim=True)
        # A row of zeros becomes 0 / 0, and NaN would be taken for the smallest code: both are 0 here, and the row's
        # size, 0 or NaN, says it again in the result.
        whole = torch.nan_to_num_(rows / size)
        inputs = whole.mul_(_LARGEST).add_(_LARGEST + 1).round_().to(torch.uint8)
        y: torch.Tensor = operators.qlinear_pointwise(
            inputs, 1 / _LARGEST, _LARGEST + 1, packed, scales, zero_points, None, 1.0, 0, torch.float32, "none", [], ""
        )
        y = y.mul_(size)
        if added is not None:
            y.add_(added)
        return y.to(x.dtype)

    return project
