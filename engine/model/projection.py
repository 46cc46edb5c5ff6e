"""Linear layers laid out once for the processor that runs them.

On a CPU in float32, torch hands `F.linear` to a BLAS that repacks the weights at every call and, on some processors,
picks a slow kernel for them. oneDNN keeps the weights packed in its own blocked layout; its float32 results differ
from the BLAS's by rounding only. Everywhere else `F.linear` is the best there is.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it

logger = logging.getLogger("engine")

Projection = Callable[[torch.Tensor], torch.Tensor]
"""`[T, in] -> [T, out]`."""

_PACK_FOR_ROWS = 32
"""Rows that the packed layout is chosen for; it serves any number (measured: within 5% of the best from 4 rows up)."""


def packs(weight: torch.Tensor) -> bool:
    """Whether `make_projection` copies a weight into a layout of its own."""
    return weight.device.type == "cpu" and weight.dtype == torch.float32 and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]


def borrow(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Projection:
    """A linear layer over the weight as it lies: nothing is copied nor laid out.

    Args:
        weight: `[out, in]`, kept by reference.
        bias: `[out]`.
    """

    def project(x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, weight, bias)

    return project


def make_projection(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Projection:
    """A linear layer with its weights in the fastest layout.

    Args:
        weight: `[out, in]`. Kept by reference where it cannot be packed, else copied.
        bias: `[out]`.
    """
    if packs(weight):
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACK_FOR_ROWS)

        def project_packed(x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
            return y

        return project_packed
    return borrow(weight, bias)


def make_exact_projection(
    weight: torch.Tensor, bias: torch.Tensor | None = None, *, dtype: torch.dtype | None = None
) -> Projection:
    """A linear layer with its weights in the fewest bytes that hold them exactly.

    Args:
        weight: As above.
        bias: As above.
        dtype: Of the rows, by default the weight's. Float32 weights of bfloat16 rows are rounded, unless they were made
            of codes.
    """
    dtype = dtype or weight.dtype
    return _compact(weight, bias, dtype, rounded=False) or make_projection(weight.to(dtype), bias)


def make_bfloat16_projection(
    weight: torch.Tensor, bias: torch.Tensor | None = None, *, dtype: torch.dtype | None = None
) -> Projection:
    """A linear layer with its weights rounded to bfloat16, unless fewer bytes hold them exactly; arguments as above."""
    dtype = dtype or weight.dtype
    return _compact(weight, bias, dtype, rounded=True) or make_projection(weight.bfloat16().to(dtype), bias)


def multiplies_bfloat16() -> bool:
    """Whether the engine's own linear layers of bfloat16 rows run on this processor."""
    try:
        from engine.model.cpu_bfloat16_kernel import supported
    except ImportError:
        return False
    return supported()


def _compact(
    weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype, *, rounded: bool
) -> Projection | None:
    if weight.device.type != "cpu":
        return None
    try:
        if dtype == torch.bfloat16 and multiplies_bfloat16():
            from engine.model import cpu_bfloat16

            return cpu_bfloat16.linear(weight, bias)
        if dtype != torch.float32 or weight.dtype != torch.float32:
            return None
        from engine.model.cpu_linear import bfloat16_linear, exact_linear

        return bfloat16_linear(weight, bias) if rounded else exact_linear(weight, bias)
    except Exception as error:  # a processor that the compiler does not know, or no compiler: torch can do it too
        _say_once(f"{type(error).__name__}: {error}")
        return None


@functools.cache
def _say_once(reason: str) -> None:
    """Not for every layer."""
    logger.warning("weights keep all their bytes: their worker cannot be compiled (%s)", reason)


MakeProjection = Callable[[torch.Tensor, torch.Tensor | None], Projection]
"""Weight and bias to a linear layer."""

Original = Callable[[torch.Tensor], torch.Tensor]
"""A model's weight to what it was rounded from, or to itself."""


def as_it_is(weight: torch.Tensor) -> torch.Tensor:
    """The weight itself."""
    return weight.detach()


def join(
    layers: Sequence[torch.nn.Linear],
    make: MakeProjection = make_projection,
    original: Original = as_it_is,
) -> Projection:
    """One projection that gives the layers' outputs side by side, in one pass over the input where weights are copied.

    Args:
        layers: With equal inputs.
        make: How the joined weights are laid out.
        original: What a weight is to be taken from.

    Raises:
        ValueError: Some of the layers have a bias and some have not.
    """
    biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
    if biases and len(biases) != len(layers):
        raise ValueError("layers with and without a bias cannot be joined")
    weights = [original(layer.weight) for layer in layers]
    if make is borrow:
        parts = [borrow(*part) for part in (zip(weights, biases, strict=True) if biases else zip(weights))]
        return lambda x: torch.cat([part(x) for part in parts], dim=1)
    return make(torch.cat(weights), torch.cat(biases) if biases else None)
