"""Made-up batches over a paged cache on any device, for checks and timings without a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from engine.attention import reference
from engine.attention.metadata import AttentionMetadata
from engine.attention.quantised import dequantise
from engine.kv_cache import KVCache

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

Layout = Literal["shuffled", "identity"]


@dataclass(frozen=True, slots=True)
class Batch:
    """A step's batch and the rows that it brings.

    Attributes:
        metadata: Over a cache that holds every position before the rows.
        query: `[T, kv_heads * group, head_dim]`.
        key: `[T, kv_heads, head_dim]`.
        value: `[T, kv_heads, head_dim]`.
    """

    metadata: AttentionMetadata
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


def make_cache(
    *,
    num_blocks: int,
    num_layers: int,
    kv_heads: int,
    block_size: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    quantised: torch.dtype | None = None,
) -> KVCache:
    """A cache that is NaN everywhere; a quantised one has NaN scales, float32 for each token and head."""
    return KVCache(
        num_blocks=num_blocks,
        num_layers=num_layers,
        num_kv_heads=kv_heads,
        block_size=block_size,
        head_dim=head_dim,
        dtype=quantised or dtype,
        device=device,
        poison=True,
    )


def make_table(lengths: Sequence[int], block_size: int, layout: Layout, seed: int) -> tuple[NDArray[np.int32], int]:
    """A block table for sequences of these lengths, -1 past their blocks, and the blocks that it needs."""
    needed = [-(-n // block_size) for n in lengths]
    total = sum(needed)
    ids = np.arange(total, dtype=np.int32)
    if layout == "shuffled":
        np.random.default_rng(seed).shuffle(ids)
    table = np.full((len(lengths), max(1, *needed)), -1, np.int32)
    first = 0
    for row, count in zip(table, needed, strict=True):
        row[:count] = ids[first : first + count]
        first += count
    return table, total


def make_batch(
    lengths: Sequence[tuple[int, int]],
    *,
    kv_heads: int,
    group: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    quantised: torch.dtype | None = None,
    layer: int = 0,
    num_layers: int = 1,
    seed: int = 0,
) -> Batch:
    """A batch of sequences, (query rows, positions) each, with every earlier position of one layer in the cache."""
    query_lens, seq_lens = (np.array(column, np.int32) for column in zip(*lengths, strict=True))
    table, num_blocks = make_table([n for _, n in lengths], block_size, "shuffled", seed)
    cache = make_cache(
        num_blocks=num_blocks + 2,
        num_layers=num_layers,
        kv_heads=kv_heads,
        block_size=block_size,
        head_dim=head_dim,
        dtype=dtype,
        device=device,
        quantised=quantised,
    )
    generator = torch.Generator(device).manual_seed(seed)

    def rows(count: int, heads: int) -> torch.Tensor:
        return torch.randn((count, heads, head_dim), generator=generator, device=device).to(dtype)

    history = AttentionMetadata.build(
        query_start_loc=_starts(seq_lens - query_lens),
        seq_lens=seq_lens - query_lens,
        block_table=table,
        kv_cache=cache,
    )
    earlier = int((seq_lens - query_lens).sum())
    # Without the kernels that are to be judged.
    reference.write_kv(rows(earlier, kv_heads), rows(earlier, kv_heads), layer, history)
    starts = _starts(query_lens)
    metadata = AttentionMetadata.build(query_start_loc=starts, seq_lens=seq_lens, block_table=table, kv_cache=cache)
    tokens = int(starts[-1])
    # One tensor for all three, as a fused projection gives them: the kernels see strides.
    fused = rows(tokens, kv_heads * (group + 2))
    query, key, value = torch.tensor_split(fused, (kv_heads * group, kv_heads * (group + 1)), dim=1)
    return Batch(metadata, query, key, value)


def in_float32(batch: Batch, layer: int) -> Batch:
    """The same batch for the reference: a float32 cache, with what a quantised one holds multiplied out.

    Called after the kernels have written the batch's own rows, which a quantised cache gives back rounded.
    """
    cache = batch.metadata.kv_cache
    twin = KVCache(
        num_blocks=cache.num_blocks,
        num_layers=cache.num_layers,
        num_kv_heads=cache.num_kv_heads,
        block_size=cache.block_size,
        head_dim=cache.head_dim,
        dtype=torch.float32,
        device=cache.device,
    )
    key, value = batch.key.float(), batch.value.float()
    if cache.scales is None:
        twin.data.copy_(cache.data)
    else:
        twin.data.copy_(dequantise(cache.data, cache.scales))
        slots = batch.metadata.slot_mapping
        block, offset = slots // cache.block_size, slots % cache.block_size
        key, value = (twin.data[block, layer, i, :, offset] for i in range(2))
    metadata = AttentionMetadata.build(
        query_start_loc=batch.metadata.host_query_start_loc,
        seq_lens=batch.metadata.host_seq_lens,
        block_table=batch.metadata.host_block_table,
        slot_mapping=batch.metadata.host_slot_mapping,
        kv_cache=twin,
    )
    return Batch(metadata, batch.query.float(), key, value)


def _starts(lengths: NDArray[np.int32]) -> NDArray[np.int32]:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
