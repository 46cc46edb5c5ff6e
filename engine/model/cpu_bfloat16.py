"""Linear layers of a bfloat16 model, on a CPU that multiplies pairs of bfloat16 (AVX512_BF16).

The inputs are taken as they are, and everything is summed in float32. Where the weights were made of codes
(`weight_codes.py`), those are multiplied, and the sum of a block scaled: fewer bytes to fetch, and closer to the
weights than they are once rounded to bfloat16. Other weights are rounded.

Packed, a layer is a sequence of panels of `PANEL` outputs, a panel a sequence of blocks of 32 inputs, and a block of a
panel: its scales (float16, one for each output), its minima if it has any, and then for each few inputs the weights of
vectors of 16 outputs, 64 bytes of

- 4-bit codes of 8 inputs: a word for each output and each second input has those of four pairs of inputs, from its low
  end on;
- 8-bit codes of 4 inputs: within 16 bytes those of 4 outputs' first pairs, then of their second pairs, each a sign
  and 7 bits of magnitude;
- bfloat16 of 2 inputs, a pair for each output.
"""

from __future__ import annotations

import functools
import struct
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it

from engine.attention import cpu_pairs, cpu_threads
from engine.attention.cpu_call import SERIAL_WORK, Workspace
from engine.attention.cpu_compile import Compiled, compiled_once
from engine.attention.cpu_pairs import LANES
from engine.model import cpu_bfloat16_kernel, cpu_bfloat16_tiles, cpu_bfloat16_weights, weight_codes
from engine.model.cpu_bfloat16_kernel import FIELDS, PARAMS, PART_ROWS, scratch_bytes
from engine.model.cpu_bfloat16_tiles import ROWS
from engine.model.cpu_bfloat16_weights import PANEL, VECTORS
from engine.model.weight_codes import BLOCK, BlockCodes, block_codes, factors_in_panels, in_panels, panel_bytes

if TYPE_CHECKING:
    from engine.model.projection import Projection

_CALL = struct.Struct(f"={len(FIELDS)}q")

_SHIFTS = torch.arange(0, 16, 4, dtype=torch.int16)[:, None]
"""To the four pairs of codes that a word holds."""


def linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Projection:
    """A linear layer of bfloat16 rows.

    Args:
        weight: `[out, in]` on the CPU, float32 or bfloat16; not kept. Float32 that was made of codes is held in those,
            all other weights in bfloat16.
        bias: `[out]`, added in float32.

    Returns:
        `[T, in] -> [T, out]`, bfloat16. A row's result depends on no other row.

    Raises:
        CompileError: There is no worker for this processor.
    """
    codes = block_codes(weight)
    if codes is None:
        return _Linear(16, pack_pairs(weight), weight, bias)
    return _Linear(codes.bits, pack_codes(codes), weight, bias)


def pack_codes(codes: BlockCodes) -> torch.Tensor:
    """Codes in the worker's layout: uint8 `[panels, blocks, bytes of a block]`."""
    parts = [factors_in_panels(codes.scales, PANEL)]
    if codes.minima is not None:
        parts.append(factors_in_panels(codes.minima, PANEL))
    if codes.bits == 4:
        pairs = _grouped(codes.codes, 4).short().unbind(3)
        words = functools.reduce(torch.bitwise_or, (pair << 4 * n for n, pair in enumerate(pairs)))
        parts.append(panel_bytes(words.permute(0, 1, 2, 4, 5, 3)))
    else:
        magnitudes = codes.codes.abs().view(torch.uint8) | (codes.codes < 0).to(torch.uint8) << 7
        fours = _grouped(magnitudes, 2)
        fours = fours.view(*fours.shape[:-1], LANES // 4, 4)
        parts.append(panel_bytes(fours.permute(0, 1, 2, 5, 6, 3, 7, 4)))
    return torch.cat(parts, 2)


def pack_pairs(weight: torch.Tensor) -> torch.Tensor:
    """Weights rounded to bfloat16 in the worker's layout; type and shape as above."""
    padded = F.pad(weight.bfloat16(), (0, -weight.shape[1] % BLOCK)).view(torch.int16)
    return panel_bytes(_grouped(padded, 1).squeeze(3).permute(0, 1, 2, 4, 5, 3))


def rows_of(packed: torch.Tensor, bits: int, index: torch.Tensor) -> torch.Tensor:
    """Rows of the matrix that was packed, float32 `[n, blocks * BLOCK]`.

    Args:
        packed: As above.
        bits: Of a weight: 4, 8, or 16 for bfloat16.
        index: int64 `[n]`.
    """
    panel, lane = index // PANEL, index % PANEL
    if bits == 16:
        pairs = packed.view(torch.bfloat16).view(*packed.shape[:2], BLOCK // 2, PANEL, 2)
        return pairs[panel, :, :, lane].flatten(1).float()
    # One gather of scales and minima, one of codes: a step for a single token waits for them.
    halves = packed.view(torch.float16)
    if bits == 4:
        both = halves[..., : 2 * PANEL].view(*packed.shape[:2], 2, PANEL)[panel, :, :, lane].float()
        words = packed.view(torch.int16)[..., 2 * PANEL :].view(*packed.shape[:2], BLOCK // 8, PANEL, 2)
        codes = words[panel, :, :, lane][..., None, :] >> _SHIFTS & 15
        return codes.flatten(2).float().mul_(both[..., :1]).add_(both[..., 1:]).flatten(1)
    scales = halves[panel, :, lane].float()[..., None]
    signs = packed[..., 2 * PANEL :].view(*packed.shape[:2], BLOCK // 4, PANEL // 4, 2, 4, 2)
    signed = signs[panel, :, :, lane // 4, :, lane % 4]
    magnitudes = (signed & 127).float()
    return torch.where(signed > 127, -magnitudes, magnitudes).flatten(2).mul_(scales).flatten(1)


def _grouped(tensor: torch.Tensor, pairs: int) -> torch.Tensor:
    """`[out, in]` to `[panels, blocks, groups of so many pairs, pairs, 2, VECTORS, LANES]`."""
    panels = in_panels(tensor, PANEL)
    panels = panels.view(len(panels), VECTORS, LANES, -1, BLOCK // (2 * pairs), pairs, 2)
    return panels.permute(0, 3, 4, 5, 6, 1, 2)


@compiled_once
def _worker(bits: int) -> Compiled:
    modules = cpu_pairs, cpu_bfloat16_tiles, cpu_bfloat16_weights, weight_codes
    return Compiled(lambda: cpu_bfloat16_kernel.make_worker(bits), *modules)


_workspace = Workspace(PARAMS.itemsize)


class _Linear:
    def __init__(self, bits: int, packed: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        worker = _worker(bits)
        self._bits, self._packed = bits, packed
        self._num_outputs, self._num_inputs = weight.shape
        self._bias = torch.zeros(len(packed) * PANEL)
        if bias is not None:
            self._bias[: self._num_outputs] = bias
        self._addresses = packed.data_ptr(), self._bias.data_ptr()
        self._launch = functools.cache(functools.partial(cpu_threads.launcher, worker.address))

    def rows(self, index: torch.Tensor) -> torch.Tensor:
        """Rows of the weight, `[n, in]`, as exact as bfloat16 is."""
        return rows_of(self._packed, self._bits, index)[:, : self._num_inputs]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype != torch.bfloat16 or x.shape[1] != self._num_inputs:
            raise ValueError(f"rows of {x.shape[1]} {x.dtype} do not fit a layer of {self._num_inputs} bfloat16 inputs")
        if self._num_inputs % 2:
            x = F.pad(x, (0, 1))  # weights that are not there are zeros
        elif x.stride(1) != 1:
            x = x.contiguous()
        num_rows, num_inputs = x.shape
        y = torch.empty((num_rows, self._num_outputs), dtype=torch.bfloat16)
        if not num_rows:
            return y
        # Pieces of equal size, of whole register tiles.
        part_rows = -(-num_rows // (-(-num_rows // PART_ROWS) * ROWS)) * ROWS
        work = num_rows * num_inputs * self._num_outputs
        num_threads = torch.get_num_threads() if work > SERIAL_WORK else 1
        per_thread = scratch_bytes(part_rows, num_inputs)
        _CALL.pack_into(
            _workspace.record,
            0,
            _workspace.counters_address,
            _workspace.scratch(num_threads * per_thread // 4),
            per_thread,
            x.data_ptr(),
            x.stride(0),
            *self._addresses,
            y.data_ptr(),
            num_rows,
            part_rows,
            num_inputs,
            self._num_outputs,
            num_threads,
        )
        _workspace.counters.fill(0)
        self._launch(num_threads)(_workspace.address)
        return y
