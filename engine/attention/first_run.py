"""Whether an attention runs at all, with a model's own heads: found out before anything depends on it.

Kernels for a GPU are compiled where they run. That takes a C compiler, Python's headers and a driver that knows what
was compiled, and a head may be larger than a program's memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from engine.attention.metadata import AttentionMetadata
from engine.kv_cache import KVCache

if TYPE_CHECKING:
    from engine.attention.metadata import PagedAttention


@torch.inference_mode()
def first_run(
    attention: PagedAttention,
    *,
    num_query_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Attend once with a decode and a prefill; raises whatever is wrong.

    Args:
        attention: The implementation.
        num_query_heads: Of one layer, and so are the others.
        num_kv_heads: Likewise.
        head_dim: Likewise.
        block_size: Of the cache.
        dtype: Of queries, keys and values.
        kv_dtype: Of the cache.
        device: Where.
    """
    rows, longest = 4, 3
    width = -(-longest // block_size)
    cache = KVCache(
        num_blocks=2 * width,
        num_layers=1,
        num_kv_heads=num_kv_heads,
        block_size=block_size,
        head_dim=head_dim,
        dtype=kv_dtype,
        device=device,
    )
    metadata = AttentionMetadata.build(
        query_start_loc=np.array([0, 1, rows], np.int32),
        seq_lens=np.array([2, longest], np.int32),
        block_table=np.arange(2 * width, dtype=np.int32).reshape(2, width),
        kv_cache=cache,
    )
    query = torch.zeros((rows, num_query_heads, head_dim), dtype=dtype, device=device)
    key, value = torch.zeros((2, rows, num_kv_heads, head_dim), dtype=dtype, device=device)
    attention(query, key, value, 0, metadata, scale=1.0)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
