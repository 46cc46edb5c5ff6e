"""Paged attention for CPUs: compiled on first use, the default wherever the model runs on a CPU.

This module turns one call into the record that the compiled worker reads (`cpu_kernel.py`), on torch's own threads
(`cpu_threads.py`). What depends on the batch alone is worked out in the first layer of a step and kept for the others.

Compilation takes some seconds for each pair of a model's and a cache's element type, once per machine: the result is
kept in `NUMBA_CACHE_DIR`, or else in `$KVTUI_CACHE/numba`, or else in the user's cache folder.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numba
import numpy as np
import platformdirs
import torch

from engine.attention import cpu_threads
from engine.attention.cpu_pages import advise_large_pages
from engine.attention.cpu_params import (
    ATTEND,
    ATTEND_AND_WRITE,
    CALL,
    MAX_ROWS,
    NUM_COUNTERS,
    PARAMS,
    STEP,
    TILE_ROWS,
    WRITE,
    scratch_floats,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from engine.attention.metadata import AttentionMetadata

logger = logging.getLogger("engine")

_TAGS = {
    torch.bfloat16: np.uint16(0),
    torch.float16: np.int16(0),
    torch.float32: np.float32(0),
    torch.int8: np.int8(0),
    torch.float8_e4m3fn: np.uint8(0),
}
"""The value that stands for an element type in `cpu_vector`."""

_OF_MODELS = (torch.bfloat16, torch.float16, torch.float32)
_OF_CACHES = (torch.bfloat16, torch.int8, torch.float8_e4m3fn)
"""Beside the model's own."""

_SOURCES = ("cpu_kernel.py", "cpu_params.py", "cpu_vector.py")

_SERIAL_WORK = 1 << 15
"""Below about this many multiplications one thread is done before a second one would have started."""


class _Compiled:
    """A worker ready to run: its address, its vector length, and what keeps it alive."""

    def __init__(self, dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
        start = time.perf_counter()
        from engine.attention import cpu_kernel, cpu_vector

        worker = cpu_kernel.make_worker(_TAGS[dtype], _TAGS[cache_dtype])
        try:
            self._function = _compile(worker, cpu_kernel.OPTIONS, cache=True)
        except Exception:
            # A cache folder that cannot be written, or one with a broken file in it, costs time and nothing else.
            logger.warning("compiling the CPU attention without the cache in %s", cache_dir(), exc_info=True)
            self._function = _compile(worker, cpu_kernel.OPTIONS, cache=False)
        self.address = int(self._function.address)
        self.lanes = int(cpu_vector.LANES)
        self.seconds = time.perf_counter() - start


def _compile(worker: Any, options: dict[str, Any], *, cache: bool) -> Any:
    config: Any = numba.config
    before = config.CACHE_DIR
    config.CACHE_DIR = before or str(cache_dir())
    try:
        signature = numba.types.void(numba.types.int64)
        return numba.cfunc(signature, cache=cache, **options)(worker)
    finally:
        config.CACHE_DIR = before


_compile_lock = threading.Lock()


@functools.cache
def _compiled(dtype: torch.dtype, cache_dtype: torch.dtype) -> _Compiled:
    with _compile_lock:
        return _Compiled(dtype, cache_dtype)


def warmup(dtype: torch.dtype, cache_dtype: torch.dtype | None = None) -> float:
    """Compile, or load from the cache folder, what an element type needs; so that no first step waits for it.

    Args:
        dtype: Of queries, keys and values.
        cache_dtype: Of the KV cache; by default the same.

    Returns:
        Seconds it took; of the first time where it was ready before.

    Raises:
        ValueError: There is no worker for the types.
    """
    cache_dtype = cache_dtype or dtype
    for what, each, known in (("", dtype, _OF_MODELS), ("a cache of ", cache_dtype, (dtype, *_OF_CACHES))):
        if each not in known:
            names = ", ".join(str(d).removeprefix("torch.") for d in known)
            raise ValueError(
                f"the CPU attention does not know {what}{each}: use one of {names}, or the reference attention"
            )
    return _compiled(dtype, cache_dtype).seconds


def cache_dir() -> Path:
    """Where compiled workers are kept, unless `NUMBA_CACHE_DIR` says otherwise.

    Numba looks only at the file of the worker to see whether a compiled one is still good; the digest in the path
    covers the other files that were compiled into it.
    """
    root = os.environ.get("KVTUI_CACHE") or platformdirs.user_cache_dir("kvtui")
    digest = hashlib.sha256()
    for name in _SOURCES:
        digest.update(Path(__file__).with_name(name).read_bytes())
    return Path(root) / "numba" / digest.hexdigest()[:12]


class _Workspace(threading.local):
    """What a thread that calls attention keeps: memory for the workers, and the plan of the step that it is in."""

    def __init__(self) -> None:
        self.plan: _Plan | None = None
        self.scratch = np.empty(0, np.float32)
        self.record = np.zeros(PARAMS.itemsize, np.uint8)
        counters = np.zeros(2 * NUM_COUNTERS, np.int64)
        first = -(counters.ctypes.data // 8) % NUM_COUNTERS
        self.counters = counters[first : first + NUM_COUNTERS]
        self.addresses = self.record.ctypes.data, self.counters.ctypes.data

    def scratch_address(self, num_floats: int) -> int:
        """Address of that much memory, valid until more is asked for."""
        if len(self.scratch) < num_floats:
            self.scratch = np.empty(num_floats, np.float32)
        return int(self.scratch.ctypes.data)


_workspace = _Workspace()


class _Plan:
    """What every layer of one step shares: the items of work and most of the record.

    Attributes:
        metadata: Of the step.
        num_heads: Query heads.
        dtype: Of queries, keys and values.
        layout: Shapes, strides and types that were found to fit.
        layer_stride: Of the cache, in elements.
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
        self.layer_stride = cache.data.stride(1)
        group = num_heads // cache.num_kv_heads
        width = -(-cache.head_dim // compiled.lanes) * compiled.lanes
        queries = min(metadata.max_query_len, max(1, MAX_ROWS // group))
        self._items, cost = _items(metadata, max(1, queries))
        num_items = len(self._items)
        num_threads = torch.get_num_threads() if cost * num_heads * cache.head_dim > _SERIAL_WORK else 1
        # All heads of a block lie side by side, so one thread takes them together unless others would have nothing.
        together = num_items >= 4 * num_threads
        max_rows = -(-group * queries // TILE_ROWS) * TILE_ROWS
        stride = -(-scratch_floats(max_rows, width) // 16) * 16
        self._record = _workspace.record.data
        self._address, counters = _workspace.addresses
        self._counters = _workspace.counters
        STEP.pack_into(
            self._record,
            CALL.size,
            counters,
            _workspace.scratch_address(num_threads * stride),
            cache.data.data_ptr(),
            0 if cache.scales is None else cache.scales.data_ptr(),
            metadata.query_start_loc.data_ptr(),
            metadata.seq_lens.data_ptr(),
            metadata.block_table.data_ptr(),
            metadata.slot_mapping.data_ptr(),
            self._items.ctypes.data,
            metadata.num_tokens,
            num_items,
            cache.num_kv_heads if together else 1,
            cache.data.stride(0),
            cache.block_size,
            metadata.block_table.shape[1],
            cache.head_dim,
            width,
            group,
            cache.num_kv_heads,
            stride,
            max_rows,
        )
        self._launch = cpu_threads.launcher(compiled.address, num_threads)
        alone = metadata.max_query_len <= queries
        self._phases = (ATTEND_AND_WRITE,) if alone else (WRITE, ATTEND)

    def run(self, *call: float) -> None:
        """Do one layer; what is given is `OF_CALL` without the phase, then the floats."""
        for phase in self._phases:
            CALL.pack_into(self._record, 0, phase, *call)
            self._counters.fill(0)
            self._launch(self._address)


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
    plan = _workspace.plan
    if plan is None or plan.metadata is not metadata or plan.num_heads != shape[1] or plan.dtype != dtype:
        plan = _workspace.plan = _Plan(metadata, shape[1], dtype)
    strides = query.stride(), key.stride(), value.stride()
    layout = shape, key.shape, value.shape, strides, dtype, key.dtype, value.dtype
    if layout != plan.layout:
        _check_call(query, key, value, metadata)
        plan.layout = layout
    if not 0 <= layer < metadata.kv_cache.num_layers:
        raise ValueError(f"layer {layer} is outside the cache's {metadata.kv_cache.num_layers} layers")
    if not strides[0][2] == strides[1][2] == strides[2][2] == 1:
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        strides = query.stride(), key.stride(), value.stride()
    # float16 leaves the worker as float32: rounding to it is torch's.
    out = torch.empty(shape, dtype=torch.float32 if dtype == torch.float16 else dtype)
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
        scale,
        softcap or 0.0,
    )
    return out if out.dtype == dtype else out.to(dtype)


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


def _check_step(metadata: AttentionMetadata, num_heads: int) -> None:
    """Refuse a batch that would make compiled code touch memory outside the cache; once a step."""
    cache = metadata.kv_cache
    if cache.device.type != "cpu":
        raise ValueError(f"the CPU attention cannot reach a cache on {cache.device}: choose another implementation")
    if cache.scales is not None and (cache.scales.dtype != torch.float32 or not cache.scales.is_contiguous()):
        raise ValueError("the cache's scales are to be contiguous float32: leave them as they were allocated")
    if num_heads % cache.num_kv_heads:
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


def _check_call(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, metadata: AttentionMetadata) -> None:
    cache = metadata.kv_cache
    kv_shape = (query.shape[0], cache.num_kv_heads, cache.head_dim)
    if query.shape[0] < metadata.num_tokens or query.shape[2] != cache.head_dim:
        raise ValueError(f"queries {list(query.shape)} do not fit {metadata.num_tokens} rows of {cache.head_dim}")
    if key.shape != kv_shape or value.shape != kv_shape:
        raise ValueError(f"keys {list(key.shape)} and values {list(value.shape)} are to be {list(kv_shape)}")
    if not query.dtype == key.dtype == value.dtype:
        raise ValueError(f"keys {key.dtype} and values {value.dtype} are to be {query.dtype} like the queries")
