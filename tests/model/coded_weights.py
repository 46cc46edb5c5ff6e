"""Matrices as quantised files and narrow checkpoints hold them, as float32."""

from __future__ import annotations

import torch


def four_bits(outputs: int, inputs: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    """Blocks of 32 from 16 evenly spaced values, as ggml's Q4_1 rounds them."""
    blocks = (_random(outputs, inputs, seed) * scale).unflatten(1, (-1, 32))
    lowest, highest = blocks.amin(2, keepdim=True), blocks.amax(2, keepdim=True)
    step = ((highest - lowest) / 15).half().float()
    codes = ((blocks - lowest) / step).nan_to_num(0, 0, 0).round().clamp(0, 15)
    return (codes * step + lowest.half().float()).flatten(1)


def eight_bits(outputs: int, inputs: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    """Blocks of 32 whose largest magnitude is 127 steps, as ggml's Q8_0 rounds them."""
    blocks = (_random(outputs, inputs, seed) * scale).unflatten(1, (-1, 32))
    step = (blocks.abs().amax(2, keepdim=True) / 127).half().float()
    return ((blocks / step).nan_to_num(0, 0, 0).round().clamp(-127, 127) * step).flatten(1)


def of_bfloat16(outputs: int, inputs: int, seed: int = 0) -> torch.Tensor:
    """Rounded to bfloat16."""
    return _random(outputs, inputs, seed).bfloat16().float()


def _random(outputs: int, inputs: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(outputs, inputs, generator=generator) * (0.1 + torch.rand(outputs, 1, generator=generator))
