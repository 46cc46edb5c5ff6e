"""Linear layers over weights in few bytes, on a CPU, in float32.

Generating a token reads every weight once, and a processor computes faster than its memory delivers: weights in four
bits instead of thirty-two make a small batch several times as fast. Where the codes are exact (`weight_codes.py`) the
results are those of a float32 layer up to the order of the sum.

Packed, a layer is a sequence of panels, a panel a sequence of blocks of 32 inputs, and a block of a panel: its scales
(float16, one for each output), its minima if it has any, and then for each input the codes of the panel's outputs. Of
4-bit codes and of bfloat16, output j of each two vectors is in the lower half and its neighbour in the next vector in
the upper half of the same byte or word, so that one load, a mask and a shift give two vectors of weights.
"""

from __future__ import annotations

import functools
import struct
from typing import TYPE_CHECKING

import torch

from engine.attention import cpu_threads
from engine.attention.cpu_call import SERIAL_WORK, Workspace
from engine.attention.cpu_compile import Compiled, compiled_once
from engine.attention.cpu_lanes import LANES
from engine.model import cpu_linear_kernel, weight_codes
from engine.model.cpu_linear_kernel import BITS, CHUNK, FIELDS, PANEL, PARAMS, VECTORS
from engine.model.weight_codes import (
    BLOCK,
    BlockCodes,
    block_codes,
    factors_in_panels,
    in_panels,
    is_bfloat16,
    panel_bytes,
)

if TYPE_CHECKING:
    from engine.model.projection import Projection

_CALL = struct.Struct(f"={len(FIELDS)}q")


def exact_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Projection | None:
    """A linear layer with its weights in the fewest bytes that hold them exactly.

    Args:
        weight: float32 `[out, in]` on the CPU; not kept.
        bias: `[out]`.

    Returns:
        `[T, in] -> [T, out]` in float32, or None where the weights need all their bytes.

    Raises:
        CompileError: There is no worker for this processor.
    """
    codes = block_codes(weight)
    if codes is not None:
        return _ExactLinear(codes.bits, pack_codes(codes), weight, bias)
    if is_bfloat16(weight):
        return _ExactLinear(16, pack_bfloat16(weight), weight, bias)
    return None


def bfloat16_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Projection:
    """A linear layer with weights rounded to bfloat16, computed in float32; arguments as above."""
    return exact_linear(weight, bias) or _Linear(16, pack_bfloat16(weight), weight, bias)


def pack_codes(codes: BlockCodes) -> torch.Tensor:
    """Codes in the worker's layout.

    Returns:
        uint8 `[panels, blocks, bytes of a block]`.
    """
    parts = [factors_in_panels(codes.scales, PANEL)]
    if codes.minima is not None:
        parts.append(factors_in_panels(codes.minima, PANEL))
    numbers = _panels(_blocks(codes.codes))
    if codes.bits == 4:
        lower, upper = _halves(numbers)
        numbers = lower | (upper << 4)
    parts.append(panel_bytes(numbers))
    return torch.cat(parts, 2)


def pack_bfloat16(weight: torch.Tensor) -> torch.Tensor:
    """Weights as bfloat16 in the worker's layout: int32 `[panels, blocks, words of a block]`."""
    rest = -weight.shape[1] % BLOCK
    padded = torch.nn.functional.pad(weight.bfloat16(), (0, rest))
    lower, upper = _halves(_panels(_blocks(padded.view(torch.int16))).int())
    return ((lower & 0xFFFF) | (upper << 16)).flatten(2).contiguous()


def rows_of(packed: torch.Tensor, bits: int, index: torch.Tensor) -> torch.Tensor:
    """Rows of the matrix that was packed, float32 `[n, blocks * BLOCK]`.

    Args:
        packed: As above.
        bits: Of a weight: 4, 8, or 16 for bfloat16.
        index: int64 `[n]`.
    """
    panel, lane = index // PANEL, index % PANEL
    vector = lane // LANES
    place, half = vector // 2 * LANES + lane % LANES, (vector % 2)[:, None, None]
    if bits == 16:
        words = packed.view(*packed.shape[:2], BLOCK, PANEL // 2)[panel, :, :, place]
        return (words >> (16 * half).int() << 16).view(torch.float32).flatten(1)
    halves = packed.view(torch.float16)
    scales = halves[panel, :, lane].float()[..., None]
    if bits == 4:
        both = packed[..., 4 * PANEL :].view(*packed.shape[:2], BLOCK, PANEL // 2)[panel, :, :, place]
        codes = both.int() >> (4 * half).int() & 15
        return codes.float().mul_(scales).add_(halves[panel, :, PANEL + lane].float()[..., None]).flatten(1)
    codes = packed[..., 2 * PANEL :].view(torch.int8).view(*packed.shape[:2], BLOCK, PANEL)[panel, :, :, lane]
    return codes.float().mul_(scales).flatten(1)


def _blocks(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(len(tensor), -1, BLOCK)


def _panels(tensor: torch.Tensor) -> torch.Tensor:
    """`[out, blocks, n]` to `[panels, blocks, n, PANEL]`, with zeros for outputs that a last panel lacks."""
    return in_panels(tensor, PANEL).permute(0, 2, 3, 1)


def _halves(panels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each two vectors of a panel the first and the second."""
    lower, upper = panels.reshape(*panels.shape[:-1], VECTORS // 2, 2, LANES).unbind(-2)
    return lower.flatten(-2), upper.flatten(-2)


@compiled_once
def _worker(bits: int) -> Compiled:
    return Compiled(lambda: cpu_linear_kernel.make_worker(BITS[bits]), weight_codes)


_workspace = Workspace(PARAMS.itemsize)


class _Linear:
    def __init__(self, bits: int, packed: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        worker = _worker(bits)
        self._bits, self._packed = bits, packed
        self._num_outputs, self._num_inputs = weight.shape
        self._bias = None if bias is None else bias.float()
        self._block_bytes = packed.shape[2] * packed.element_size()
        self._launch = functools.cache(functools.partial(cpu_threads.launcher, worker.address))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype != torch.float32 or x.shape[1] != self._num_inputs:
            raise ValueError(f"rows of {x.shape[1]} {x.dtype} do not fit a layer of {self._num_inputs} float32 inputs")
        if x.stride(1) != 1:
            x = x.contiguous()
        num_rows, num_panels = len(x), len(self._packed)
        y = torch.empty(num_rows, num_panels * PANEL)
        work = num_rows * self._num_inputs * self._num_outputs
        num_threads = torch.get_num_threads() if work > SERIAL_WORK else 1
        _CALL.pack_into(
            _workspace.record,
            0,
            _workspace.counters_address,
            _workspace.scratch(num_threads * CHUNK * BLOCK * PANEL),
            x.data_ptr(),
            self._packed.data_ptr(),
            y.data_ptr(),
            num_rows,
            self._num_inputs,
            num_panels,
            x.stride(0),
            self._block_bytes,
        )
        _workspace.counters.fill(0)
        self._launch(num_threads)(_workspace.address)
        if y.shape[1] != self._num_outputs:
            y = y[:, : self._num_outputs].contiguous()
        return y if self._bias is None else y.add_(self._bias)


class _ExactLinear(_Linear):
    def rows(self, index: torch.Tensor) -> torch.Tensor:
        """Rows of the weight, float32 `[n, in]`, to the last bit."""
        return rows_of(self._packed, self._bits, index)[:, : self._num_inputs]
