"""The 8-bit forms of a cache: a code for each element, and one scale for each token and head of keys and of values.

A row of a head is scaled so that its largest element takes the largest code (symmetric quantisation of each row by its
absolute maximum, as in Dettmers et al. 2022, "LLM.int8()"). This is the definition; every kernel keeps to it.
"""

from __future__ import annotations

import torch

LIMIT = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""Largest code of each form."""


def quantise(rows: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of rows, so that code times scale is close to the element.

    Rows of zeros, or of numbers too small for a scale, become zeros. A row with a NaN or an infinity gets a scale of
    NaN, so that it shows wherever the row is read, although int8 has no such code.

    Args:
        rows: `[..., head_dim]`, any float type.
        dtype: One of `LIMIT`.

    Returns:
        Codes `[..., head_dim]`, and float32 scales `[...]`.
    """
    limit = LIMIT[dtype]
    rows = rows.float()
    scales = rows.abs().amax(-1) / limit
    scales = torch.where(scales == 0, 1.0, scales).masked_fill(~scales.isfinite(), torch.nan)
    scaled = (rows / scales[..., None]).clamp(-limit, limit).nan_to_num(nan=0.0)
    return (scaled.round() if dtype == torch.int8 else scaled).to(dtype), scales


def dequantise(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Codes `[..., head_dim]` times their scales `[...]`, in float32."""
    return codes.float() * scales.float()[..., None]
