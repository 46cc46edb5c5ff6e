"""Weights in the fewest bytes that lose nothing.

Many checkpoints were made from fewer bits than their tensors have: a quantised GGUF file (blocks of 32 along the input,
each with a scale and perhaps a minimum: the forms Q4_1 and Q8_0 of ggml), or one trained in bfloat16. Here the codes
are found again from the values alone, and taken only where they give back every value to the last bit. So whatever
reads the codes computes with the same weights as before, only with fewer bytes to fetch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it

BLOCK = 32
"""Weights of one output, along the input, that share a scale."""

_SMALL = 2.0**-13
"""Of scales: below, float16 is subnormal or nearly so."""

_ROWS_AT_ONCE = 1024
"""So that looking takes little memory besides."""


@dataclass(frozen=True, slots=True)
class BlockCodes:
    """A matrix as whole numbers: weight = scale * code + minimum, rounded to float32 after each operation.

    Attributes:
        bits: 4 (codes 0 to 15, with minima) or 8 (codes -127 to 127, without).
        codes: `[out, in]`, uint8 or int8.
        scales: float16 `[out, in / BLOCK]`.
        minima: As the scales, or None.
    """

    bits: int
    codes: torch.Tensor
    scales: torch.Tensor
    minima: torch.Tensor | None

    def rows(self, index: torch.Tensor) -> torch.Tensor:
        """Rows of the matrix, float32 `[*index.shape, in]`."""
        codes = self.codes[index].reshape(*index.shape, -1, BLOCK).float()
        values = codes.mul_(self.scales[index].float()[..., None])
        if self.minima is not None:
            values.add_(self.minima[index].float()[..., None])
        return values.flatten(-2)

    def of_rows(self, rows: slice) -> BlockCodes:
        """The codes of some rows."""
        minima = None if self.minima is None else self.minima[rows]
        return BlockCodes(self.bits, self.codes[rows], self.scales[rows], minima)


def block_codes(weight: torch.Tensor) -> BlockCodes | None:
    """The codes that a matrix was made of, or None where there are none that give it back exactly.

    Args:
        weight: float32 `[out, in]`.
    """
    if weight.dtype != torch.float32 or weight.shape[1] % BLOCK or not len(weight):
        return None
    for find in (_four_bits, _eight_bits):
        # The first rows say almost always whether looking at the rest is worth while.
        if find(weight[:8]) is None:
            continue
        parts = []
        for rows in torch.split(weight, _ROWS_AT_ONCE):
            part = find(rows)
            if part is None:
                break
            parts.append(part)
        else:
            codes, scales, minima = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
            four = find is _four_bits
            return BlockCodes(4 if four else 8, codes, scales, minima if four else None)
    return None


def round_to_codes(weight: torch.Tensor) -> BlockCodes:
    """A matrix rounded to 8-bit codes, the largest of each block 127; blocks that are left over are filled with zeros.

    Args:
        weight: `[out, in]`.

    Returns:
        Codes with float32 scales and without minima.
    """
    blocks = F.pad(weight.float(), (0, -weight.shape[1] % BLOCK)).reshape(len(weight), -1, BLOCK)
    scales = blocks.abs().amax(dim=2) / 127
    codes = (blocks / scales[:, :, None]).nan_to_num_(0, 0, 0).round_().clamp_(-127, 127).to(torch.int8)
    return BlockCodes(8, codes.flatten(1), scales, None)


def is_bfloat16(weight: torch.Tensor) -> bool:
    """Whether bfloat16 holds every element exactly."""
    return all(bool((rows.bfloat16().float() == rows).all()) for rows in torch.split(weight, _ROWS_AT_ONCE))


def in_panels(tensor: torch.Tensor, outputs: int) -> torch.Tensor:
    """`[out, ...]` to `[panels, outputs, ...]`, with zeros for outputs that a last panel lacks."""
    rest = -len(tensor) % outputs
    if rest:
        tensor = torch.cat((tensor, tensor.new_zeros(rest, *tensor.shape[1:])))
    return tensor.reshape(-1, outputs, *tensor.shape[1:])


def panel_bytes(panels: torch.Tensor) -> torch.Tensor:
    """`[panels, blocks, ...]` as the bytes of each block of a panel, uint8 `[panels, blocks, n]`."""
    return panels.contiguous().view(torch.uint8).flatten(2)


def factors_in_panels(factors: torch.Tensor, outputs: int) -> torch.Tensor:
    """Scales or minima `[out, blocks]` as such bytes: of each block those of the panel's outputs."""
    return panel_bytes(in_panels(factors, outputs).transpose(1, 2))


_Codes = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _four_bits(weight: torch.Tensor) -> _Codes | None:
    """As ggml's Q4_1 has them: the smallest value of a block is its minimum, the largest has the code 15."""
    blocks = weight.reshape(len(weight), -1, BLOCK)
    lowest, highest = blocks.amin(2), blocks.amax(2)
    minima = lowest.half()
    found = _fit(blocks.flatten(0, 1), minima.float().flatten(), (highest - lowest).flatten(), 15, 0)
    if found is None:
        return None
    codes, scales = found
    return codes.to(torch.uint8).view(weight.shape), scales.view(minima.shape), minima


def _eight_bits(weight: torch.Tensor) -> _Codes | None:
    """As ggml's Q8_0 has them: the largest magnitude of a block has the code 127."""
    blocks = weight.reshape(len(weight), -1, BLOCK)
    largest = blocks.abs().amax(2)
    found = _fit(blocks.flatten(0, 1), torch.zeros(largest.numel()), largest.flatten(), 127, -127)
    if found is None:
        return None
    codes, scales = found
    return codes.to(torch.int8).view(weight.shape), scales.view(largest.shape), scales.view(largest.shape)


def _fit(
    blocks: torch.Tensor, base: torch.Tensor, extent: torch.Tensor, top: int, bottom: int
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Codes `[n, BLOCK]` and scales `[n]` that give blocks back over a base; their extent is that of the top code.

    Where a scale is so small that float16 has few digits left for it, rounding it up has lowered the largest code:
    the few blocks that have such a scale are tried with smaller ones.
    """
    scales = (extent / top).half()
    codes, exact = _codes(blocks, base, scales, top, bottom)
    left = (~exact).nonzero().squeeze(1)
    if len(left) > len(blocks) // 16 or bool((scales[left] >= _SMALL).any()):
        return None
    for code in range(top - 1, 0, -1):
        if not len(left):
            break
        tried = (extent[left] / code).half()
        again, exact = _codes(blocks[left], base[left], tried, top, bottom)
        codes[left[exact]], scales[left[exact]] = again[exact], tried[exact]
        left = left[~exact]
    return None if len(left) else (codes, scales)


def _codes(
    blocks: torch.Tensor, base: torch.Tensor, scales: torch.Tensor, top: int, bottom: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The nearest codes of blocks, and of which blocks they give back every value."""
    step, start = scales.float()[:, None], base[:, None]
    codes = ((blocks - start) / step).nan_to_num_(0, 0, 0).round_().clamp_(bottom, top)
    return codes, (codes * step + start == blocks).all(1)
