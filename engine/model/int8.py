"""Linear layers with 8-bit weights on a CPU.

Two ways. Where the processor multiplies bytes into 32-bit sums (AVX-512 VNNI), inputs are bytes as well, with a second
byte where one is too coarse (`byte_products.py`). Elsewhere the sum of two products of bytes must fit into 16 bits,
which would leave the inputs 7 bits and change one greedy token in five; so there inputs have 16 bits, which are
multiplied as fast (`int8_products.py`).

Either way a row's result does not depend on what else is in its batch, and the same row computed again gives the same
numbers: inputs are scaled row by row (as per token in LLM.int8(), Dettmers et al. 2022) or finer.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING

from engine.attention.cpu_compile import CompileError
from engine.model.byte_kernel import HAS_BYTE_PRODUCTS
from engine.model.byte_products import ByteProduct
from engine.model.int8_products import Int8Product

if TYPE_CHECKING:
    import torch

    from engine.model.projection import Projection

logger = logging.getLogger("engine")


def make_int8_projection(
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
    byte_products: bool = HAS_BYTE_PRODUCTS,
) -> Projection:
    """A linear layer in 8 bits.

    Args:
        weight: `[out, in]`, any float dtype, on the CPU; not kept.
        bias: `[out]`, added in floating point.
        dtype: Of the rows that will come, by default the weight's.
        byte_products: Whether to multiply bytes with bytes; by default where this processor can.

    Returns:
        `[T, in] -> [T, out]` in the input's dtype. A row that holds a NaN gives a row of NaN and harms no other.

    Raises:
        CompileError: Neither way can be compiled for this processor.
    """
    if byte_products:
        try:
            return ByteProduct(weight, bias, dtype=dtype)
        except CompileError as error:
            _say_once(str(error))
    product = Int8Product(weight, bias)

    def project(x: torch.Tensor) -> torch.Tensor:
        return product(x.float()).to(x.dtype)

    return project


@functools.cache
def _say_once(reason: str) -> None:
    """Not for every layer."""
    logger.warning("8-bit layers take inputs of 16 bits: the product of bytes cannot be compiled (%s)", reason)
