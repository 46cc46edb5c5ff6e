"""Paged attention for CPUs: compiled on first use, the default wherever the model runs on a CPU.

This module turns one call into the record that the compiled worker reads (`cpu_kernel.py`), on torch's own threads
(`cpu_threads.py`); what all layers of a step share is in its plan (`cpu_plan.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from engine.attention.cpu_plan import plan_of, warmup

if TYPE_CHECKING:
    from engine.attention.metadata import AttentionMetadata

__all__ = ["HeadNorm", "Rotary", "paged_attention", "rotary_attention", "warmup"]


def paged_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer: int,
    metadata: AttentionMetadata,
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """The compiled attention; see `engine.attention.metadata.PagedAttention` for shapes and meaning.

    Raises:
        ValueError: Shapes, element types or block ids that do not fit the cache.
    """
    shape, dtype = query.shape, query.dtype
    plan = plan_of(metadata, shape[1], dtype)
    strides = query.stride(), key.stride(), value.stride()
    layout = shape, key.shape, value.shape, strides, dtype, key.dtype, value.dtype
    if layout != plan.layout:
        _check_call(query, key, value, metadata)
        plan.layout = layout
    _check_layer(layer, metadata)
    if not strides[0][2] == strides[1][2] == strides[2][2] == 1:
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        strides = query.stride(), key.stride(), value.stride()
    out = torch.empty(shape, dtype=dtype)
    if sinks is not None:
        sinks = sinks.detach().to(torch.float32).contiguous()
    plan.run(
        query.data_ptr(),
        key.data_ptr(),
        value.data_ptr(),
        out.data_ptr(),
        0 if sinks is None else sinks.data_ptr(),
        strides[0][0],
        strides[0][1],
        strides[1][0],
        strides[1][1],
        strides[2][0],
        strides[2][1],
        layer * plan.layer_stride,
        sliding_window or 0,
        0,
        0,
        0,
        0,
        scale,
        softcap or 0.0,
        0.0,
        0.0,
    )
    return out


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """RMS norm of every head.

    Attributes:
        weight: `[D]`, in the dtype of the queries.
        eps: Added to the mean square.
    """

    weight: torch.Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class Rotary:
    """What happens to queries and keys in front of attention.

    Attributes:
        angles: float32 `[positions, D]`, of each position the cosines of its D / 2 angles and then their sines; the
            halves of a head are partners.
        query_norm: Of query heads, before their positions are applied.
        key_norm: Of key heads.
    """

    angles: torch.Tensor
    query_norm: HeadNorm | None = None
    key_norm: HeadNorm | None = None


def rotary_attention(
    rows: torch.Tensor,
    layer: int,
    metadata: AttentionMetadata,
    *,
    rotary: Rotary,
    scale: float,
    sliding_window: int | None = None,
) -> torch.Tensor:
    """Apply rotary positions and attend, in one pass: queries are turned as they are read, keys as they are written.

    Args:
        rows: `[T, (Hq + 2 Hkv) * D]`, of each row its queries, keys and values as the projections gave them.
        layer: Index of the layer in the cache.
        metadata: The batch; rows stand at the positions that it says.
        rotary: The positions.
        scale: See `engine.attention.metadata.PagedAttention`.
        sliding_window: See there.

    Returns:
        `[T, Hq * D]` in the rows' dtype.

    Raises:
        ValueError: Shapes, element types or block ids that do not fit the cache.
    """
    dtype, cache = rows.dtype, metadata.kv_cache
    dim, num_kv_heads = cache.head_dim, cache.num_kv_heads
    (num_rows, width), strides = rows.shape, rows.stride()
    num_heads = width // dim - 2 * num_kv_heads
    plan = plan_of(metadata, num_heads, dtype)
    packed = num_rows, width, strides
    if packed != plan.packed:
        _check_packed(rows, num_heads, metadata)
        plan.packed = packed
    _check_layer(layer, metadata)
    angles, query_norm, key_norm = rotary.angles, rotary.query_norm, rotary.key_norm
    if metadata.max_seq_len > len(angles):
        raise ValueError(f"position {metadata.max_seq_len - 1} is beyond the {len(angles)} that have rotary angles")
    out = torch.empty((num_rows, num_heads * dim), dtype=dtype)
    size, query = rows.element_size(), rows.data_ptr()
    key = query + num_heads * dim * size
    plan.run(
        query,
        key,
        key + num_kv_heads * dim * size,
        out.data_ptr(),
        0,
        strides[0],
        dim,
        strides[0],
        dim,
        strides[0],
        dim,
        layer * plan.layer_stride,
        sliding_window or 0,
        plan.positions(),
        angles.data_ptr(),
        0 if query_norm is None else query_norm.weight.data_ptr(),
        0 if key_norm is None else key_norm.weight.data_ptr(),
        scale,
        0.0,
        0.0 if query_norm is None else query_norm.eps,
        0.0 if key_norm is None else key_norm.eps,
    )
    return out


def _check_call(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, metadata: AttentionMetadata) -> None:
    cache = metadata.kv_cache
    kv_shape = (query.shape[0], cache.num_kv_heads, cache.head_dim)
    if query.shape[0] < metadata.num_tokens or query.shape[2] != cache.head_dim:
        raise ValueError(f"queries {list(query.shape)} do not fit {metadata.num_tokens} rows of {cache.head_dim}")
    if key.shape != kv_shape or value.shape != kv_shape:
        raise ValueError(f"keys {list(key.shape)} and values {list(value.shape)} are to be {list(kv_shape)}")
    if not query.dtype == key.dtype == value.dtype:
        raise ValueError(f"keys {key.dtype} and values {value.dtype} are to be {query.dtype} like the queries")


def _check_packed(rows: torch.Tensor, num_heads: int, metadata: AttentionMetadata) -> None:
    cache = metadata.kv_cache
    heads = num_heads + 2 * cache.num_kv_heads
    if num_heads <= 0 or rows.shape[0] < metadata.num_tokens or rows.shape[1] != heads * cache.head_dim:
        raise ValueError(
            f"rows {list(rows.shape)} do not fit {metadata.num_tokens} tokens with {cache.num_kv_heads} KV heads "
            f"of {cache.head_dim}"
        )
    if rows.stride(1) != 1 or cache.head_dim % 2:
        raise ValueError("rows are to be dense, and heads of even size")


def _check_layer(layer: int, metadata: AttentionMetadata) -> None:
    if not 0 <= layer < metadata.kv_cache.num_layers:
        raise ValueError(f"layer {layer} is outside the cache's {metadata.kv_cache.num_layers} layers")
