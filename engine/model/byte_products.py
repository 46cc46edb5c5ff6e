"""Weights of 8 or 4 bits laid out for the compiled product of bytes, and the calls of it (`byte_kernel.py`)."""

from __future__ import annotations

import functools
import struct
from typing import TYPE_CHECKING

import torch

from engine.attention import cpu_threads
from engine.attention.cpu_call import SERIAL_WORK, Workspace
from engine.attention.cpu_compile import TAGS, Compiled, compiled_once
from engine.model import byte_inputs, byte_kernel, weight_codes
from engine.model.byte_inputs import ROW_BYTES
from engine.model.byte_kernel import BITS, BLOCK_BYTES, FIELDS, GROUP, GROUPS, LANES, PANEL, PARAMS, VECTORS
from engine.model.weight_codes import (
    BLOCK,
    BlockCodes,
    block_codes,
    factors_in_panels,
    in_panels,
    panel_bytes,
    round_to_codes,
)

if TYPE_CHECKING:
    from collections.abc import Callable

_SLAB = 64 * PANEL
"""Output channels laid out at once: a model's head in one piece would take its own size several times."""

_ITEMS_PER_THREAD, _MOST_PANELS = 2, 16
"""Panels that a thread takes at a time: many, since memory is fetched ahead while it reads on from one into the next
(taken one by one they cost a quarter more), and not so many that one thread waits long for the other."""

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_CALL = struct.Struct(f"={len(FIELDS)}q")


@compiled_once
def _worker(bits: int, dtype: torch.dtype) -> Compiled:
    return Compiled(lambda: byte_kernel.make_worker(BITS[bits], TAGS[dtype]), byte_inputs, weight_codes)


@functools.cache
def _launcher(bits: int, dtype: torch.dtype, num_threads: int) -> Callable[[int], None]:
    return cpu_threads.launcher(_worker(bits, dtype).address, num_threads)


_workspace = Workspace(PARAMS.itemsize)


class ByteProduct:
    """A linear layer of inputs in bytes and weights of 4 or 8 bits: `[T, in] -> [T, out]`.

    Weights that were made from codes of at most 8 bits keep those; others are rounded (`round_to_codes`). A row's
    result depends on no other row; one with a NaN or an infinity gives a row of NaN.

    Args:
        weight: `[out, in]`, any float type, on the CPU; not kept.
        bias: `[out]`, added in float32.
        dtype: Of the rows that will come, by default the weight's: its worker is compiled at once.

    Attributes:
        rows: Gives rows of the weight to the last bit, int64 `[n]` to float32 `[n, in]`; None where it was rounded.

    Raises:
        CompileError: There is no worker for this processor.
    """

    rows: Callable[[torch.Tensor], torch.Tensor] | None

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, dtype: torch.dtype | None = None
    ) -> None:
        self._num_outputs, self._num_inputs = weight.shape
        self._num_panels, self._num_blocks = -(-self._num_outputs // PANEL), -(-self._num_inputs // BLOCK)
        codes = block_codes(weight)
        bits = 8 if codes is None else codes.bits
        _worker(bits, dtype or weight.dtype)
        self._weights = torch.empty(self._num_panels, self._num_blocks, BLOCK_BYTES[bits], dtype=torch.uint8)
        for start in range(0, self._num_outputs, _SLAB):
            rows = slice(start, start + _SLAB)
            some = round_to_codes(weight[rows]) if codes is None else codes.of_rows(rows)
            first = start // PANEL
            packed = _pack(some)
            self._weights[first : first + len(packed)] = packed
        self._bias = torch.zeros(self._num_panels * PANEL)
        if bias is not None:
            self._bias[: self._num_outputs] = bias
        self._bits = bits
        self.rows = None if codes is None else self._rows

    def _rows(self, index: torch.Tensor) -> torch.Tensor:
        return rows_of(self._weights, self._bits, index)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Compute it, in the type of the rows: float32, bfloat16 or float16.

        Raises:
            ValueError: The rows are of another type or have another number of channels.
        """
        if x.shape[1] != self._num_inputs or x.dtype not in _DTYPES:
            raise ValueError(f"the layer takes rows of {self._num_inputs} floats, not {x.dtype} rows of {x.shape[1]}")
        if x.stride(1) != 1:
            x = x.contiguous()
        num_rows, width = len(x), len(self._bias)
        y = torch.empty(num_rows, width, dtype=x.dtype)
        row_bytes = self._num_blocks * ROW_BYTES
        num_threads = torch.get_num_threads() if num_rows * self._num_inputs * width > SERIAL_WORK else 1
        _CALL.pack_into(
            _workspace.record,
            0,
            _workspace.counters_address,
            x.data_ptr(),
            x.stride(0) * x.element_size(),
            _workspace.scratch(-(-num_rows * row_bytes // 4)),
            y.data_ptr(),
            num_rows,
            self._weights.data_ptr(),
            self._bias.data_ptr(),
            self._num_inputs,
            self._num_blocks,
            self._num_panels,
            max(1, min(self._num_panels // (_ITEMS_PER_THREAD * num_threads), _MOST_PANELS)),
        )
        _workspace.counters.fill(0)
        _launcher(self._bits, x.dtype, num_threads)(_workspace.address)
        return y if width == self._num_outputs else y[:, : self._num_outputs].contiguous()


def _pack(codes: BlockCodes) -> torch.Tensor:
    """Codes in the worker's layout, uint8 `[panels, blocks, bytes of a block]`."""
    scales = codes.scales.half() if codes.bits == 4 else codes.scales.float()
    parts = [factors_in_panels(scales, PANEL)]
    if codes.minima is not None:
        parts.append(factors_in_panels(codes.minima, PANEL))
    numbers = codes.codes if codes.bits == 4 else codes.codes.view(torch.uint8) ^ 128
    groups = in_panels(numbers, PANEL).view(-1, VECTORS, LANES, numbers.shape[1] // BLOCK, GROUPS, GROUP)
    groups = groups.permute(0, 3, 4, 1, 2, 5)
    if codes.bits == 4:
        groups = groups[:, :, : GROUPS // 2] | (groups[:, :, GROUPS // 2 :] << 4)
    parts.append(panel_bytes(groups))
    return torch.cat(parts, 2)


def rows_of(packed: torch.Tensor, bits: int, index: torch.Tensor) -> torch.Tensor:
    """Rows of the matrix that was packed, float32 `[n, blocks * BLOCK]`; `bits` of its codes, int64 index `[n]`."""
    panel, lane = index // PANEL, index % PANEL
    numbers = packed[..., 4 * PANEL :].view(*packed.shape[:2], -1, PANEL, GROUP)[panel, :, :, lane]
    factors = packed.view(torch.float16 if bits == 4 else torch.float32)
    scales = factors[panel, :, lane].float()[..., None]
    if bits == 4:
        codes = torch.cat((numbers & 15, numbers >> 4), 2).flatten(2).float()
        return codes.mul_(scales).add_(factors[panel, :, PANEL + lane].float()[..., None]).flatten(1)
    return (numbers ^ 128).view(torch.int8).flatten(2).float().mul_(scales).flatten(1)
