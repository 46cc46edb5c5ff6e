"""8-bit weights laid out for the compiled product with 16-bit inputs, and the calls of it (`int8_kernel.py`)."""

from __future__ import annotations

import functools
import struct
from typing import TYPE_CHECKING

import torch

from engine.attention import cpu_threads
from engine.attention.cpu_call import SERIAL_WORK, Workspace
from engine.attention.cpu_compile import Compiled, compiled_once
from engine.model import int8_kernel, weight_codes
from engine.model.int8_kernel import BOTH, FIELDS, MULTIPLY, OUTPUTS, PARAMS, QUANTISE
from engine.model.weight_codes import BLOCK, block_codes, in_panels, round_to_codes

if TYPE_CHECKING:
    from collections.abc import Callable

_SLAB = 4096
"""Output channels whose codes are made at once: a model's head in one piece would take its own size three times."""

_SERIAL_INPUTS = 1 << 15
"""Below about this many elements of the input one thread turns them into codes sooner than two."""

_CALL = struct.Struct(f"={len(FIELDS)}q")


@compiled_once
def _worker() -> Compiled:
    return Compiled(lambda: int8_kernel.worker, weight_codes)


@functools.cache
def _launcher(num_threads: int) -> Callable[[int], None]:
    return cpu_threads.launcher(_worker().address, num_threads)


_workspace = Workspace(PARAMS.itemsize)


class Int8Product:
    """A linear layer of 8-bit weights and 16-bit inputs: float32 `[T, in] -> [T, out]`.

    Weights that were made from codes of at most 8 bits keep those; others are rounded (`round_to_codes`). A row of
    inputs is its codes times one scale. A row's result depends on no other row; one with a NaN or an infinity gives a
    row of NaN.

    Args:
        weight: `[out, in]`, on the CPU; not kept.
        bias: `[out]`, added in float32.

    Raises:
        CompileError: There is no worker for this processor.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        _worker()
        self._num_outputs, self._num_inputs = weight.shape
        self._num_panels, self._num_blocks = -(-self._num_outputs // OUTPUTS), -(-self._num_inputs // BLOCK)
        self._weights = torch.empty(self._num_panels, self._num_blocks * BLOCK // 2, OUTPUTS, 2, dtype=torch.int8)
        self._scales = torch.empty(self._num_panels, self._num_blocks, OUTPUTS)
        codes = block_codes(weight)
        self._minima = None if codes is None or codes.minima is None else torch.empty_like(self._scales)
        self._bias = torch.zeros(self._num_panels * OUTPUTS)
        if bias is not None:
            self._bias[: self._num_outputs] = bias
        for start in range(0, self._num_outputs, _SLAB):
            rows = slice(start, start + _SLAB)
            some = round_to_codes(weight[rows]) if codes is None else codes.of_rows(rows)
            panels = slice(start // OUTPUTS, -(-min(start + _SLAB, self._num_outputs) // OUTPUTS))
            self._weights[panels] = _panels(some.codes.view(len(some.codes), -1, 2))
            self._scales[panels] = _panels(some.scales)
            if self._minima is not None and some.minima is not None:
                self._minima[panels] = _panels(some.minima)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Compute it.

        Raises:
            ValueError: The rows are not float32 or have another number of channels.
        """
        if x.shape[1] != self._num_inputs or x.dtype != torch.float32:
            raise ValueError(f"the layer takes float32 rows of {self._num_inputs}, not {x.dtype} rows of {x.shape[1]}")
        if x.stride(1) != 1:
            x = x.contiguous()
        num_rows, width = len(x), len(self._bias)
        y = torch.empty(num_rows, width)
        if num_rows:
            num_threads = torch.get_num_threads()
            if num_threads == 1 or num_rows * self._num_inputs * width <= SERIAL_WORK:
                self._run(x, y, BOTH, 1, self._num_panels)
            else:
                wide = num_rows * self._num_inputs > _SERIAL_INPUTS
                self._run(x, y, QUANTISE, num_threads if wide else 1, self._num_panels)
                # Pieces small enough for the threads to end together, and not so small that taking them costs much.
                self._run(x, y, MULTIPLY, num_threads, max(1, self._num_panels // (8 * num_threads)))
        return y if width == self._num_outputs else y[:, : self._num_outputs].contiguous()

    def _run(self, x: torch.Tensor, y: torch.Tensor, phase: int, num_threads: int, item_panels: int) -> None:
        # The inputs' codes (int16), the scales of rows and the sums of blocks: both phases find them in one place.
        code_bytes = len(x) * self._num_blocks * BLOCK * 2
        codes = _workspace.scratch(code_bytes // 4 + len(x) * (1 + self._num_blocks))
        scales = codes + code_bytes
        _workspace.counters.fill(0)
        _CALL.pack_into(
            _workspace.record,
            0,
            phase,
            _workspace.counters_address,
            x.data_ptr(),
            x.stride(0),
            codes,
            scales,
            scales + 4 * len(x),
            y.data_ptr(),
            len(x),
            self._weights.data_ptr(),
            self._scales.data_ptr(),
            0 if self._minima is None else self._minima.data_ptr(),
            self._bias.data_ptr(),
            self._num_inputs,
            self._num_blocks,
            self._num_panels,
            item_panels,
        )
        _launcher(num_threads)(_workspace.address)


def _panels(tensor: torch.Tensor) -> torch.Tensor:
    """`[out, n, ...]` to `[panels, n, OUTPUTS, ...]`."""
    return in_panels(tensor, OUTPUTS).transpose(1, 2)
