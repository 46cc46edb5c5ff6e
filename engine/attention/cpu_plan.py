"""What every layer of one step shares with the compiled attention: the items of work and most of the record.

A worker is compiled for each pair of a model's and a cache's element type (`cpu_compile.py`). What depends on the batch
alone is worked out in the first layer of a step and kept for the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from engine.attention import cpu_pairs, cpu_threads
from engine.attention.cpu_call import SERIAL_WORK, Workspace
from engine.attention.cpu_compile import TAGS, Compiled, compiled_once
from engine.attention.cpu_lanes import LANES
from engine.attention.cpu_pages import advise_large_pages
from engine.attention.cpu_params import (
    ATTEND,
    ATTEND_AND_WRITE,
    CALL,
    FEW_BYTES,
    FEW_PAIR_ROWS,
    MAX_ROWS,
    PAIR_HEIGHT,
    PAIR_ROWS,
    PARAMS,
    STEP,
    TILE_FEW,
    TILE_ROWS,
    WRITE,
    lines_of,
    pair_scratch_floats,
    scratch_floats,
)
from engine.attention.metadata import positions_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from engine.attention.metadata import AttentionMetadata
    from engine.kv_cache import KVCache

_OF_MODELS = (torch.bfloat16, torch.float16, torch.float32)
_OF_CACHES = (torch.bfloat16, torch.int8, torch.float8_e4m3fn)
"""Beside the model's own."""


@compiled_once
def _compiled(dtype: torch.dtype, cache_dtype: torch.dtype) -> Compiled:
    from engine.attention import (
        cpu_ahead,
        cpu_kernel,
        cpu_lines,
        cpu_pair_kernel,
        cpu_pair_products,
        cpu_pair_softmax,
        cpu_params,
        cpu_products,
        cpu_rows,
        cpu_tables,
        cpu_vector,
    )

    rows = cpu_rows, cpu_tables, cpu_ahead, cpu_lines, cpu_params, cpu_products, cpu_vector
    pairs = cpu_pairs, cpu_pair_kernel, cpu_pair_products, cpu_pair_softmax
    return Compiled(lambda: cpu_kernel.make_worker(TAGS[dtype], TAGS[cache_dtype]), cpu_kernel, *rows, *pairs)


def warmup(dtype: torch.dtype, cache_dtype: torch.dtype | None = None) -> float:
    """Compile, or load from the cache folder, what an element type needs; so that no first step waits for it.

    Args:
        dtype: Of queries, keys and values.
        cache_dtype: Of the KV cache; by default the same.

    Returns:
        Seconds it took; of the first time where it was ready before.

    Raises:
        ValueError: There is no worker for the types.
        CompileError: There is none for this processor.
    """
    cache_dtype = cache_dtype or dtype
    for what, each, known in (("", dtype, _OF_MODELS), ("a cache of ", cache_dtype, (dtype, *_OF_CACHES))):
        if each not in known:
            names = ", ".join(str(d).removeprefix("torch.") for d in known)
            raise ValueError(
                f"the CPU attention does not know {what}{each}: use one of {names}, or the reference attention"
            )
    return _compiled(dtype, cache_dtype).seconds


def multiplies_pairs(dtype: torch.dtype, cache: KVCache) -> bool:
    """Whether products are of pairs of bfloat16 (`cpu_pairs.py`): queries are then rounded to it.

    Args:
        dtype: Of queries, keys and values.
        cache: What they go to.
    """
    whole = cache.head_dim % cpu_pairs.WORDS == 0
    return whole and dtype == cache.dtype == torch.bfloat16 and cpu_pairs.supported()


class _Workspace(Workspace):
    """With the plan of the step that the thread is in."""

    plan: Plan | None = None


_workspace = _Workspace(PARAMS.itemsize)


class Plan:
    """One step, as the worker is told of it.

    Attributes:
        metadata: Of the step.
        num_heads: Query heads.
        dtype: Of queries, keys and values.
        layout: Shapes, strides and types that were found to fit.
        layer_stride: Of the cache, in elements.
        packed: Shape, strides and type of joined rows that were found to fit.
    """

    def __init__(self, metadata: AttentionMetadata, num_heads: int, dtype: torch.dtype) -> None:
        cache = metadata.kv_cache
        _check_step(metadata, num_heads)
        warmup(dtype, cache.dtype)
        advise_large_pages(cache)
        compiled = _compiled(dtype, cache.dtype)
        self.metadata = metadata
        self.num_heads = num_heads
        self.dtype = dtype
        self.layout: tuple[object, ...] = ()
        self.packed: tuple[object, ...] = ()
        self._positions: NDArray[np.int64] | None = None
        self.layer_stride = cache.data.stride(1)
        group = num_heads // cache.num_kv_heads
        width = -(-cache.head_dim // LANES) * LANES
        pairs = multiplies_pairs(dtype, cache)
        queries = min(metadata.max_query_len, max(1, (PAIR_ROWS if pairs else MAX_ROWS) // group))
        self._items, cost = _items(metadata, max(1, queries))
        num_items = len(self._items)
        num_threads = torch.get_num_threads() if cost * num_heads * cache.head_dim > SERIAL_WORK else 1
        # All heads of a block lie side by side, so one thread takes them together unless others would have nothing.
        together = num_items >= 4 * num_threads
        heads = _heads_together(cache) if together else 1
        max_lines = lines_of(heads, width)
        if pairs:
            most = min(group * queries, FEW_PAIR_ROWS)
            max_rows = max(_tiled(group * queries, PAIR_HEIGHT), heads * _tiled(most, PAIR_HEIGHT))
            needed = pair_scratch_floats(max_rows, width, max_lines)
        else:
            max_rows = max(_tiled(group * queries, TILE_ROWS), heads * TILE_ROWS)
            needed = scratch_floats(max_rows, width, max_lines)
        stride = -(-needed // 16) * 16
        self._record, self._address = _workspace.record, _workspace.address
        self._counters = _workspace.counters
        STEP.pack_into(
            self._record,
            CALL.size,
            _workspace.counters_address,
            _workspace.scratch(num_threads * stride),
            cache.data.data_ptr(),
            0 if cache.scales is None else cache.scales.data_ptr(),
            metadata.query_start_loc.data_ptr(),
            metadata.seq_lens.data_ptr(),
            metadata.block_table.data_ptr(),
            metadata.slot_mapping.data_ptr(),
            self._items.ctypes.data,
            metadata.num_tokens,
            num_items,
            num_items * (cache.num_kv_heads // heads),
            heads,
            cache.data.stride(0),
            cache.block_size,
            metadata.block_table.shape[1],
            cache.head_dim,
            width,
            group,
            cache.num_kv_heads,
            stride,
            max_rows,
            max_lines,
            int(pairs),
        )
        self._launch = cpu_threads.launcher(compiled.address, num_threads)
        alone = metadata.max_query_len <= queries
        self._phases = (ATTEND_AND_WRITE,) if alone else (WRITE, ATTEND)

    def positions(self) -> int:
        """Address of every row's position, int64 `[T]`."""
        if self._positions is None:
            self._positions = positions_of(self.metadata.host_query_start_loc, self.metadata.host_seq_lens)
        return int(self._positions.ctypes.data)

    def run(self, *call: float) -> None:
        """Do one layer; what is given is `OF_CALL` without the phase, then the floats."""
        for phase in self._phases:
            CALL.pack_into(self._record, 0, phase, *call)
            self._counters.fill(0)
            self._launch(self._address)


def plan_of(metadata: AttentionMetadata, num_heads: int, dtype: torch.dtype) -> Plan:
    """The plan of the step that this thread is in."""
    plan = _workspace.plan
    if plan is None or plan.metadata is not metadata or plan.num_heads != num_heads or plan.dtype != dtype:
        plan = _workspace.plan = Plan(metadata, num_heads, dtype)
    return plan


def _tiled(rows: int, height: int) -> int:
    """Rows of whole tiles that have room for so many."""
    return -(-rows // height) * height


def _items(metadata: AttentionMetadata, queries: int) -> tuple[NDArray[np.int32], int]:
    """Cut the batch into items of at most `queries` rows of one sequence, the most costly first.

    Returns:
        int32 `[n, 3]`, of each item its sequence, its first row in the batch and its number of rows; and the cost of
        all in scores per head.
    """
    starts = metadata.host_query_start_loc
    lens = np.diff(starts)
    counts = -(-lens // queries)
    seq = np.repeat(np.arange(len(lens)), counts)
    nth = np.arange(len(seq)) - np.repeat(np.cumsum(counts) - counts, counts)
    start = starts[seq] + nth * queries
    ends = starts[seq + 1]
    length = np.minimum(queries, ends - start)
    cost = (metadata.host_seq_lens[seq] - ends + start + length) * length
    order = np.argsort(-cost, kind="stable")
    return np.stack((seq, start, length), axis=1)[order].astype(np.int32), int(cost.sum())


def _heads_together(cache: KVCache) -> int:
    """KV heads that one thread takes at once, of which all have as many as others."""
    most = FEW_BYTES // (TILE_FEW * cache.head_dim * cache.data.element_size())
    return max(n for n in range(1, cache.num_kv_heads + 1) if cache.num_kv_heads % n == 0 and n <= max(1, most))


def _check_step(metadata: AttentionMetadata, num_heads: int) -> None:
    """Refuse a batch that would make compiled code touch memory outside the cache; once a step."""
    cache = metadata.kv_cache
    if cache.device.type != "cpu":
        raise ValueError(f"the CPU attention cannot reach a cache on {cache.device}: choose another implementation")
    if cache.scales is not None and (cache.scales.dtype != torch.float32 or not cache.scales.is_contiguous()):
        raise ValueError("the cache's scales are to be contiguous float32: leave them as they were allocated")
    if num_heads < 1 or num_heads % cache.num_kv_heads:
        raise ValueError(f"{num_heads} query heads cannot share {cache.num_kv_heads} KV heads evenly")
    lens = np.diff(metadata.host_query_start_loc)
    seq_lens = metadata.host_seq_lens
    if (lens < 0).any() or (lens > seq_lens).any():
        seq = int(np.flatnonzero((lens < 0) | (lens > seq_lens))[0])
        raise ValueError(f"sequence {seq} has {lens[seq]} query rows and {seq_lens[seq]} positions: build it anew")
    table = metadata.host_block_table
    blocks = -(-seq_lens // cache.block_size)
    if table.shape[1] < int(blocks.max(initial=0)):
        raise ValueError(f"a block table of {table.shape[1]} columns is too short for {metadata.max_seq_len} positions")
    used = np.arange(table.shape[1]) < np.where(lens > 0, blocks, 0)[:, None]
    wrong = used & ((table < 0) | (table >= cache.num_blocks))
    if wrong.any():
        seq, column = (int(n) for n in np.argwhere(wrong)[0])
        raise ValueError(
            f"block {table[seq, column]} in the table of sequence {seq} is outside the pool of {cache.num_blocks}"
        )
    slots = metadata.host_slot_mapping
    if len(slots) != metadata.num_tokens or int(slots.max(initial=-1)) >= cache.num_blocks * cache.block_size:
        raise ValueError(f"the slot mapping does not fit {metadata.num_tokens} rows and {cache.num_blocks} blocks")
