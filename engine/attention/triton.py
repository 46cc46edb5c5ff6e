"""Paged attention on a GPU: chooses the cut, launches the kernels of `triton_kernels`.

Decodes stand first in a batch, so a mixed batch is two launches: the decodes, each cut into splits, and the prefills
in tiles of query rows. Nothing here waits for the device, and everything a launch needs from the host is a count.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from triton.runtime.jit import JITFunction

from engine.attention import triton_cache, triton_kernels
from engine.attention.triton_tiles import (
    MAX_HEAD_DIM,
    Target,
    Tile,
    Work,
    attention_constants,
    combine_constants,
    decode_splits,
    decode_tile,
    precision,
    prefill_splits,
    prefill_tile,
    write_constants,
)

if TYPE_CHECKING:
    import contextlib

    from engine.attention.metadata import AttentionMetadata
    from engine.kv_cache import KVCache

INTERPRETED = not isinstance(triton_kernels.attention_kernel, JITFunction)
"""Whether Triton's interpreter runs the kernels on the CPU (TRITON_INTERPRET=1 when triton was imported)."""

_LARGEST_PAGE = 128
"""Blocks up to this size are pages: a batch whose sequences all fit into one compiles nothing of its own."""


@dataclass(frozen=True, slots=True)
class TritonAttention:
    """A `PagedAttention` on CUDA and ROCm devices; see there for shapes and meaning.

    A quantised cache may have float16 `scales` here.

    Attributes:
        decode: The cut for decodes instead of the one chosen for the device.
        prefill: The same for prefills.
        decode_split_keys: Positions that one program of a decode walks.
        prefill_split_keys: The least positions for one program of a prefill that is too small to fill the device.
        num_processors: Of the device, instead of what it says.
    """

    decode: Tile | None = None
    prefill: Tile | None = None
    decode_split_keys: int = 256
    prefill_split_keys: int = 1024
    num_processors: int | None = None

    def __call__(
        self,
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
        """Write the rows' keys and values into the cache, then attend causally over each row's sequence."""
        write_kv(key, value, layer, metadata)
        return self.attend(
            query, layer, metadata, scale=scale, sliding_window=sliding_window, softcap=softcap, sinks=sinks
        )

    def attend(
        self,
        query: torch.Tensor,
        layer: int,
        metadata: AttentionMetadata,
        *,
        scale: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention alone, over what the cache holds; the arguments are those of a call."""
        num_tokens, num_heads, head_dim = query.shape
        cache = metadata.kv_cache
        if num_heads % cache.num_kv_heads:
            raise ValueError(f"{num_heads} query heads do not divide among {cache.num_kv_heads} KV heads")
        out = query.new_empty((num_tokens, num_heads, head_dim))
        if num_tokens == 0:
            return out
        target = _target(query.device, self.num_processors)
        group = num_heads // cache.num_kv_heads
        options = _Options(
            target=target,
            scale=scale,
            window=sliding_window or 0,
            softcap=softcap,
            sinks=sinks,
            kind=_kind(cache, target),
        )
        work = Work(
            group=group,
            head_dim=head_dim,
            itemsize=query.element_size(),
            quantised=options.kind != triton_cache.PLAIN.value,
            paged=_paged(metadata),
            window=options.window > 0,
        )
        num_decodes = min(metadata.num_decodes, metadata.num_seqs)
        num_prefills = metadata.num_seqs - num_decodes
        max_keys = metadata.max_seq_len
        with _on(query):
            if num_decodes:
                tile = self.decode or decode_tile(target, work)
                reach = min(max_keys, options.window) if options.window else max_keys
                split_keys, num_splits = decode_splits(reach, _multiple(self.decode_split_keys, tile.block_n))
                _launch(
                    out, query, layer, metadata, options, tile,
                    first_seq=0, num_seqs=num_decodes, num_tiles=num_decodes, decode=True,
                    split_keys=split_keys, num_splits=num_splits,
                )  # fmt: skip
            if num_prefills:
                tile = self.prefill or prefill_tile(target, work)
                # A bound that needs no lengths: each sequence wastes less than one tile.
                block_q = tile.block_m // group
                num_tiles = (num_tokens - num_decodes) // block_q + num_prefills
                split_keys, num_splits = prefill_splits(
                    max_keys,
                    _multiple(self.prefill_split_keys, tile.block_n),
                    block_n=tile.block_n,
                    num_programs=num_tiles * cache.num_kv_heads,
                    num_processors=target.num_processors,
                )
                _launch(
                    out, query, layer, metadata, options, tile,
                    first_seq=num_decodes, num_seqs=num_prefills, num_tiles=num_tiles, decode=False,
                    split_keys=split_keys, num_splits=num_splits,
                )  # fmt: skip
        return out


paged_attention = TritonAttention()
"""The implementation with the cut chosen for the device."""


@dataclass(frozen=True, slots=True)
class _Options:
    """What a call asks for beside the batch."""

    target: Target
    scale: float
    window: int
    softcap: float | None
    sinks: torch.Tensor | None
    kind: int


def write_kv(key: torch.Tensor, value: torch.Tensor, layer: int, metadata: AttentionMetadata) -> None:
    """Put the rows' keys and values, `[T, Hkv, D]`, into their slots; rows with a negative slot are left out.

    Raises:
        ValueError: The cache cannot be used by these kernels; the text says why.
    """
    cache = metadata.kv_cache
    target = _target(key.device, None)
    kind = _kind(cache, target)
    num_tokens, num_kv_heads, head_dim = key.shape
    if num_tokens == 0:
        return
    if key.stride(-1) != 1 or value.stride(-1) != 1:
        raise ValueError("keys and values need a dense last axis: call .contiguous() on them")
    constants = write_constants(head_dim=head_dim, num_kv_heads=num_kv_heads, block_size=cache.block_size, kind=kind)
    grid = (num_tokens, -(-num_kv_heads // constants["BLOCK_HEADS"]))
    scales = cache.scales
    with _on(key):
        triton_cache.write_kv_kernel[grid](
            key,
            value,
            _codes(cache, kind),
            scales,
            metadata.slot_mapping,
            layer,
            num_kv_heads,
            cache.data.stride(0),
            0 if scales is None else scales.stride(0),
            key.stride(0),
            key.stride(1),
            value.stride(0),
            value.stride(1),
            **constants,
            num_warps=2,
        )


def _launch(
    out: torch.Tensor,
    query: torch.Tensor,
    layer: int,
    metadata: AttentionMetadata,
    options: _Options,
    tile: Tile,
    *,
    first_seq: int,
    num_seqs: int,
    num_tiles: int,
    decode: bool,
    split_keys: int,
    num_splits: int,
) -> None:
    cache = metadata.kv_cache
    num_tokens, num_heads, head_dim = query.shape
    if query.stride(-1) != 1:
        raise ValueError("queries need a dense last axis: call .contiguous() on them")
    group = num_heads // cache.num_kv_heads
    if group > tile.block_m:
        raise ValueError(f"{group} query heads of one KV head do not fit into a tile of {tile.block_m} rows")
    split = num_splits > 1
    partial_out = partial_lse = None
    if split:
        # Decodes are the first rows of the batch, one each.
        shape = (num_seqs if decode else num_tokens, num_heads, num_splits)
        partial_out = torch.empty((*shape, head_dim), dtype=torch.float32, device=query.device)
        partial_lse = torch.empty(shape, dtype=torch.float32, device=query.device)
    scales = cache.scales
    grid = (num_tiles, cache.num_kv_heads, num_splits)
    triton_kernels.attention_kernel[grid](
        out,
        partial_out,
        partial_lse,
        query,
        _codes(cache, options.kind),
        scales,
        options.sinks,
        metadata.block_table,
        metadata.query_start_loc,
        metadata.seq_lens,
        layer,
        first_seq,
        num_seqs,
        metadata.block_table.stride(0),
        split_keys,
        cache.data.stride(0),
        0 if scales is None else scales.stride(0),
        query.stride(0),
        query.stride(1),
        options.scale if options.softcap is None else options.scale / options.softcap,
        options.softcap or 0.0,
        **attention_constants(
            head_dim=head_dim,
            group=group,
            block_size=cache.block_size,
            tile=tile,
            window=options.window,
            softcap=options.softcap is not None,
            sinks=options.sinks is not None,
            kind=options.kind,
            paged=_paged(metadata),
            decode=decode,
            split=split,
            precision="ieee" if INTERPRETED else precision(options.target, query.element_size()),
            widen=INTERPRETED,
        ),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    if split:
        constants = combine_constants(head_dim=head_dim, group=group, tile=tile, window=options.window, decode=decode)
        used_rows = tile.block_m // group * group if not decode else group
        grid = (num_tiles, cache.num_kv_heads, -(-used_rows // constants["BLOCK_ROWS"]))
        triton_kernels.combine_kernel[grid](
            out,
            partial_out,
            partial_lse,
            metadata.query_start_loc,
            metadata.seq_lens,
            first_seq,
            num_seqs,
            split_keys,
            num_splits,
            **constants,
            num_warps=4,
        )


def _on(tensor: torch.Tensor) -> contextlib.AbstractContextManager[None]:
    """Triton launches on the current device, which need not be the tensor's."""
    guard: contextlib.AbstractContextManager[None] = torch.cuda.device_of(tensor)  # type: ignore[no-untyped-call]
    return guard


def _multiple(n: int, of: int) -> int:
    return -(-n // of) * of


def _paged(metadata: AttentionMetadata) -> bool:
    """Whether the table is looked up per key; not where one large block holds a whole sequence."""
    return metadata.block_table.shape[1] > 1 or metadata.block_size <= _LARGEST_PAGE


@functools.lru_cache(maxsize=64)
def _target(device: torch.device, num_processors: int | None) -> Target:
    """The device as a compilation target; under the interpreter, one that takes the common paths."""
    if INTERPRETED:
        return Target("cuda", 90, num_processors or 1)
    if device.type != "cuda":
        raise ValueError(
            f"the triton attention runs on CUDA and ROCm devices, not on {device}: use --attention cpu or reference"
        )
    properties = torch.cuda.get_device_properties(device)
    processors = num_processors or properties.multi_processor_count
    if torch.version.hip:
        return Target("hip", properties.gcnArchName.split(":")[0], processors)
    return Target("cuda", properties.major * 10 + properties.minor, processors)


def _kind(cache: KVCache, target: Target) -> int:
    """How the cache's elements are read, after a check that these kernels can."""
    if cache.head_dim > MAX_HEAD_DIM:
        raise ValueError(
            f"heads of {cache.head_dim} are too wide for the triton attention (at most {MAX_HEAD_DIM}): "
            "use --attention reference"
        )
    if not cache.data.is_contiguous():
        raise ValueError("the KV cache must be contiguous: pass the cache itself, not a view of it")
    if cache.data.dtype.is_floating_point and cache.data.element_size() > 1:
        return int(triton_cache.PLAIN.value)
    if cache.scales is None:
        raise ValueError(f"a cache of {cache.data.dtype} needs scales: set the cache's scales")
    if cache.data.dtype == torch.int8:
        return int(triton_cache.INT8.value)
    if cache.data.dtype == torch.float8_e4m3fn:
        return int(triton_cache.FP8.value) if target.has_float8 else int(triton_cache.FP8_BITS.value)
    raise ValueError(f"a cache of {cache.data.dtype} is not read here: use bfloat16, float8_e4m3fn or int8")


def _codes(cache: KVCache, kind: int) -> torch.Tensor:
    """The cache as the kernels take it: float8 as bytes, since not every target has the type."""
    if kind in (triton_cache.FP8.value, triton_cache.FP8_BITS.value):
        return cache.data.view(torch.uint8)
    return cache.data
