"""What a layer of the Llama family does between its linear layers: in torch, or compiled for the CPU in a few passes.

A torch operation on a small tensor takes as long to start as to run, and writes what the next one reads again. The
compiled form makes one call of each group of them: attention with the norms and rotary positions in front of it
(`engine.attention.cpu.rotary_attention`), addition with the norm behind it, and the gate.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it

if TYPE_CHECKING:
    from engine.attention.metadata import AttentionMetadata, PagedAttention

logger = logging.getLogger("engine")

Angles = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines of some positions, each `[T, 1, D]`."""


@dataclass(frozen=True, slots=True)
class Norm:
    """RMS norm: x / sqrt(mean(x^2) + eps) * weight."""

    weight: torch.Tensor
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Of the last axis."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)

    @classmethod
    def of(cls, module: Any) -> Norm:
        """A transformers module's."""
        return cls(module.weight.detach().clone(), float(module.variance_epsilon))


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """A layer's attention, apart from its linear layers.

    Attributes:
        layer: Index in the cache.
        scale: Factor on the scores.
        sliding_window: See `PagedAttention`.
        query_norm: Of each query head before its position is applied.
        key_norm: Of each key head; there is one where there is the other.
    """

    layer: int
    scale: float
    sliding_window: int | None
    query_norm: Norm | None
    key_norm: Norm | None


class LayerOperations(Protocol):
    """One way to do them. H is the size of the residual stream, I that of the gate."""

    def angles(self, positions: torch.Tensor) -> Angles | None:
        """What `attend` needs to know of a step's positions, int64 `[T]`."""
        ...

    def attend(
        self, rows: torch.Tensor, angles: Angles | None, attention: LayerAttention, metadata: AttentionMetadata
    ) -> torch.Tensor:
        """Queries, keys and values `[T, (Hq + 2 Hkv) * D]` as projected to what attention gives, `[T, Hq * D]`."""
        ...

    def norm(self, hidden: torch.Tensor, norm: Norm) -> torch.Tensor:
        """`[T, H]`."""
        ...

    def add_norm(self, hidden: torch.Tensor, update: torch.Tensor, norm: Norm) -> torch.Tensor:
        """Add an update to the residual stream, in place, and give its norm, `[T, H]`."""
        ...

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up, `[T, 2 I]` to `[T, I]`."""
        ...


class TorchOperations:
    """In torch, on any device, with any attention.

    Args:
        attention: The implementation to call.
        cos: `[positions, D]`, cosines of rotary positions.
        sin: `[positions, D]`.
        num_kv_heads: Key and value heads.
    """

    def __init__(self, attention: PagedAttention, cos: torch.Tensor, sin: torch.Tensor, num_kv_heads: int) -> None:
        self._attention = attention
        self._cos, self._sin = cos, sin
        self._num_kv_heads = num_kv_heads
        self._head_dim = cos.shape[1]

    def angles(self, positions: torch.Tensor) -> Angles | None:
        """See `LayerOperations`."""
        return self._cos[positions][:, None], self._sin[positions][:, None]

    def attend(
        self, rows: torch.Tensor, angles: Angles | None, attention: LayerAttention, metadata: AttentionMetadata
    ) -> torch.Tensor:
        """See `LayerOperations`."""
        assert angles is not None
        qkv = rows.view(len(rows), -1, self._head_dim)
        num_kv = self._num_kv_heads
        num_q = qkv.shape[1] - 2 * num_kv
        rotated = qkv[:, : num_q + num_kv]
        if attention.query_norm is not None and attention.key_norm is not None:
            keys = attention.key_norm(rotated[:, num_q:])
            rotated = torch.cat((attention.query_norm(rotated[:, :num_q]), keys), 1)
        rotated = _rotate(rotated, *angles)
        context = self._attention(
            rotated[:, :num_q],
            rotated[:, num_q:],
            qkv[:, num_q + num_kv :],
            attention.layer,
            metadata,
            scale=attention.scale,
            sliding_window=attention.sliding_window,
        )
        return context.reshape(len(rows), -1)

    def norm(self, hidden: torch.Tensor, norm: Norm) -> torch.Tensor:
        """See `LayerOperations`."""
        return norm(hidden)

    def add_norm(self, hidden: torch.Tensor, update: torch.Tensor, norm: Norm) -> torch.Tensor:
        """See `LayerOperations`."""
        return norm(hidden.add_(update))

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See `LayerOperations`."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)


def make_operations(
    attention: PagedAttention, cos: torch.Tensor, sin: torch.Tensor, num_kv_heads: int, dtype: torch.dtype
) -> LayerOperations:
    """The compiled operations where the compiled attention runs, else torch's; see `TorchOperations`.

    Args:
        attention: The implementation to call.
        cos: `[positions, D]`.
        sin: `[positions, D]`.
        num_kv_heads: Key and value heads.
        dtype: Of the residual stream.
    """
    if cos.device.type == "cpu":
        try:
            from engine.attention import cpu
            from engine.model.compiled_operations import CompiledOperations

            if attention is cpu.paged_attention:
                return CompiledOperations(cos, sin, dtype)
        except ImportError:
            pass
        except Exception:
            logger.warning("the operations between linear layers run in torch: compiling failed", exc_info=True)
    return TorchOperations(attention, cos, sin, num_kv_heads)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions (Su et al., 2021) in transformers' half-split form; x `[T, H, D]`, cos and sin `[T, 1, D]`."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return (x * cos).add_(turned.mul_(sin))
