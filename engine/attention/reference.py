"""Paged attention in plain torch: slow, obvious, and the judge of the others.

Each sequence's keys and values are gathered by its block table and attended to in one softmax in float32
(Vaswani et al. 2017, "Attention Is All You Need"; paging after Kwon et al. 2023, "Efficient Memory Management for
Large Language Model Serving with PagedAttention").
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from engine.attention.quantised import dequantise, quantise

if TYPE_CHECKING:
    from engine.attention.metadata import AttentionMetadata
    from engine.kv_cache import KVCache


def write_kv(key: torch.Tensor, value: torch.Tensor, layer: int, metadata: AttentionMetadata) -> None:
    """Put the rows' keys and values, `[T, Hkv, D]`, into their slots; rows with a negative slot are left out.

    They are rounded, or quantised, to what the cache holds.
    """
    slots = metadata.slot_mapping
    if bool((metadata.host_slot_mapping < 0).any()):
        rows = slots >= 0
        key, value, slots = key[rows], value[rows], slots[rows]
    blocks = slots // metadata.block_size
    offsets = slots % metadata.block_size
    cache = metadata.kv_cache
    for index, rows in enumerate((key, value)):
        target = cache.data[:, layer, index]
        if cache.scales is None:
            target[blocks, :, offsets] = rows.to(cache.dtype)
            continue
        codes, scales = quantise(rows, cache.dtype)
        # As bytes: torch does not index float8 everywhere.
        target.view(torch.uint8)[blocks, :, offsets] = codes.view(torch.uint8)
        cache.scales[:, layer, index][blocks, :, offsets] = scales


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
    """The reference; see `engine.attention.metadata.PagedAttention` for shapes and meaning."""
    write_kv(key, value, layer, metadata)
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    for i in range(metadata.num_seqs):
        start, end = (int(n) for n in metadata.host_query_start_loc[i : i + 2])
        if start == end:
            continue
        seq_len = int(metadata.host_seq_lens[i])
        # Blocks behind the window of the first row may be others' by now.
        behind = max(0, seq_len - (end - start) - sliding_window + 1) if sliding_window is not None else 0
        first = behind // metadata.block_size
        blocks = metadata.block_table[i, first : -(-seq_len // metadata.block_size)].long()
        skipped = first * metadata.block_size
        keys, values = gather_kv(metadata.kv_cache, layer, blocks, seq_len - skipped)
        out[start:end] = _attend(query[start:end], keys, values, scale, sliding_window, softcap, sinks).to(query.dtype)
    return out


def gather_kv(kv_cache: KVCache, layer: int, blocks: torch.Tensor, seq_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a sequence's first seq_len positions, in order, each `[seq_len, Hkv, D]`.

    Of a quantised cache they are the numbers that its codes stand for, in float32.

    Slots past seq_len are cut off here, before any arithmetic: masking their scores would not be enough, since a
    weight of 0 times a NaN value is NaN.
    """
    gathered = kv_cache.data[:, layer]
    if kv_cache.scales is None:
        gathered = gathered[blocks]  # [n, 2, Hkv, block_size, D]
    else:
        codes = gathered.view(torch.uint8)[blocks].view(kv_cache.dtype)
        gathered = dequantise(codes, kv_cache.scales[:, layer][blocks])
    both = gathered.permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :seq_len]
    return both[0], both[1]


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    query_len, num_heads, _ = query.shape
    seq_len, num_kv_heads, _ = keys.shape
    group = num_heads // num_kv_heads
    q = query.float().transpose(0, 1)  # [Hq, query_len, D]
    k = keys.float().transpose(0, 1).repeat_interleave(group, dim=0)
    v = values.float().transpose(0, 1).repeat_interleave(group, dim=0)

    scores = q @ k.transpose(1, 2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    query_pos = torch.arange(seq_len - query_len, seq_len, device=query.device)[:, None]
    key_pos = torch.arange(seq_len, device=query.device)[None, :]
    visible = key_pos <= query_pos
    if sliding_window is not None:
        visible &= key_pos > query_pos - sliding_window
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        column = sinks.float().view(num_heads, 1, 1).expand(num_heads, query_len, 1)
        weights = torch.cat([scores, column], dim=-1).softmax(dim=-1)[..., :-1]
    else:
        weights = scores.softmax(dim=-1)
    return (weights @ v).transpose(0, 1)
