"""The operations between a layer's linear layers, compiled for the CPU: see `engine.model.layer_operations`."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from engine.attention import cpu, cpu_threads
from engine.attention.cpu_call import Workspace
from engine.attention.cpu_compile import TAGS, Compiled, compiled_once
from engine.model.row_kernel import ADD_NORM, CALL, GATE, NORM, PARAMS, make_worker

if TYPE_CHECKING:
    from engine.attention.metadata import AttentionMetadata
    from engine.model.layer_operations import Angles, LayerAttention, Norm

_SERIAL_ELEMENTS = {NORM: 1 << 16, ADD_NORM: 1 << 16, GATE: 1 << 15}
"""Below so many elements one thread is done before a second one would have started."""

_ITEMS_PER_THREAD = 4


_workspace = Workspace(PARAMS.itemsize)


@compiled_once
def _compiled(dtype: torch.dtype) -> Compiled:
    return Compiled(lambda: make_worker(TAGS[dtype]))


class CompiledOperations:
    """Compiled for one element type.

    Args:
        cos: `[positions, D]`, cosines of rotary positions.
        sin: `[positions, D]`.
        dtype: Of all rows: bfloat16, float16 or float32.

    Raises:
        ValueError: The two halves of a head do not have the same angles.
    """

    def __init__(self, cos: torch.Tensor, sin: torch.Tensor, dtype: torch.dtype) -> None:
        half = cos.shape[1] // 2
        if not (torch.equal(cos[:, :half], cos[:, half:]) and torch.equal(sin[:, :half], sin[:, half:])):
            raise ValueError("the halves of a head turn by different angles")
        self._angles = torch.cat((cos[:, :half], sin[:, :half]), dim=1).float()
        self._rotary: dict[int, cpu.Rotary] = {}
        self._dtype = dtype
        worker = _compiled(dtype).address
        self._serial = cpu_threads.brief(worker)
        self._parallel = functools.cache(functools.partial(cpu_threads.launcher, worker))

    def angles(self, positions: torch.Tensor) -> Angles | None:
        """None: attention looks up the angles of the positions that the batch's metadata says."""
        return None

    def attend(
        self, rows: torch.Tensor, angles: Angles | None, attention: LayerAttention, metadata: AttentionMetadata
    ) -> torch.Tensor:
        """See `LayerOperations`."""
        rotary = self._rotary.get(attention.layer)
        if rotary is None:
            norms = _head_norm(attention.query_norm), _head_norm(attention.key_norm)
            rotary = self._rotary[attention.layer] = cpu.Rotary(self._angles, *norms)
        return cpu.rotary_attention(
            rows,
            attention.layer,
            metadata,
            rotary=rotary,
            scale=attention.scale,
            sliding_window=attention.sliding_window,
        )

    def norm(self, hidden: torch.Tensor, norm: Norm) -> torch.Tensor:
        """See `LayerOperations`."""
        return self._run(NORM, hidden, hidden.shape[1], 0, norm)

    def add_norm(self, hidden: torch.Tensor, update: torch.Tensor, norm: Norm) -> torch.Tensor:
        """See `LayerOperations`."""
        if update.shape != hidden.shape or update.dtype != hidden.dtype:
            raise ValueError(f"{update.dtype} {list(update.shape)} cannot be added to {list(hidden.shape)}")
        update = update.contiguous()
        return self._run(ADD_NORM, hidden, hidden.shape[1], update.data_ptr(), norm)

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See `LayerOperations`."""
        return self._run(GATE, gate_up.contiguous(), gate_up.shape[1] // 2, 0, None)

    def _run(self, operation: int, source: torch.Tensor, width: int, update: int, norm: Norm | None) -> torch.Tensor:
        if source.dtype != self._dtype or not source.is_contiguous():
            raise ValueError(f"rows of {source.dtype} are to be contiguous {self._dtype}")
        num_rows = len(source)
        out = torch.empty((num_rows, width), dtype=source.dtype)
        weight, eps = (0, 0.0) if norm is None else (norm.weight.data_ptr(), norm.eps)
        num_threads = 1 if out.numel() < _SERIAL_ELEMENTS[operation] else torch.get_num_threads()
        run = self._serial
        per_item = num_rows
        if num_threads > 1:
            run = self._parallel(num_threads)
            per_item = -(-num_rows // (_ITEMS_PER_THREAD * num_threads))
        pointers = source.data_ptr(), update, weight, out.data_ptr()
        CALL.pack_into(_workspace.record, 0, 0, operation, num_rows, per_item, width, *pointers, eps)
        run(_workspace.address)
        return out


def _head_norm(norm: Norm | None) -> cpu.HeadNorm | None:
    return None if norm is None else cpu.HeadNorm(norm.weight, norm.eps)
