"""Paged attention for CPUs: compiled on first use, the default wherever the model runs on a CPU.

This module turns one call into the record that the compiled worker reads (`cpu_kernel.py`), on torch's own threads
(`cpu_threads.py`). What depends on the batch alone is worked out in the first layer of a step and kept for the others.

Compilation takes some seconds for each element type, once per machine: the result is kept in `NUMBA_CACHE_DIR`, or else
in `$KVTUI_CACHE/numba`, or else in the user's cache folder.
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
from engine.attention.cpu_params import (
    ATTEND,
    ATTEND_AND_WRITE,
    CALL,
    MAX_ROWS,
    NUM_COUNTERS,
    PARAMS,
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
}
"""The value that stands for an element type in `cpu_vector`."""

_SOURCES = ("cpu_kernel.py", "cpu_params.py", "cpu_vector.py")

_SERIAL_WORK = 1 << 15
"""Below about this many multiplications one thread is done before a second one would have started."""


class _Compiled:
    """A worker ready to run: its address, its vector length, and what keeps it alive."""

    def __init__(self, dtype: torch.dtype) -> None:
        start = time.perf_counter()
        from engine.attention import cpu_kernel, cpu_vector

        worker = cpu_kernel.make_worker(_TAGS[dtype])
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
def _compiled(dtype: torch.dtype) -> _Compiled:
    with _compile_lock:
        return _Compiled(dtype)


def supports(dtype: torch.dtype) -> bool:
    """Whether there is a worker for an element type."""
    return dtype in _TAGS


def warmup(dtype: torch.dtype) -> float:
    """Compile, or load from the cache folder, what an element type needs; so that no first step waits for it.

    Returns:
        Seconds it took; of the first time where it was ready before.

    Raises:
        ValueError: There is no worker for the type.
    """
    if dtype not in _TAGS:
        known = ", ".join(str(d).removeprefix("torch.") for d in _TAGS)
        raise ValueError(f"the CPU attention does not know {dtype}: use one of {known}, or the reference attention")
    return _compiled(dtype).seconds


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


class _Plan:
    """What every layer of one step shares: the items of work, the threads' scratch, most of the record."""

    def __init__(self, metadata: AttentionMetadata, num_heads: int) -> None:
        cache = metadata.kv_cache
        _check(metadata, num_heads)
        compiled = _compiled(cache.dtype)
        self.metadata = metadata
        self.num_heads = num_heads
        self.layer_stride = cache.data.stride(1)
        group = num_heads // cache.num_kv_heads
        width = -(-cache.head_dim // compiled.lanes) * compiled.lanes
        self._seq, self._start, self._len, costs = _items(metadata, max(1, MAX_ROWS // group))
        num_items = len(self._seq)
        work = int(costs.sum()) * num_heads * cache.head_dim
        num_threads = torch.get_num_threads() if work > _SERIAL_WORK else 1
        # All heads of a block lie side by side, so one thread takes them together unless others would have nothing.
        together = num_items >= 4 * num_threads
        max_rows = -(-group * int(self._len.max(initial=1)) // TILE_ROWS) * TILE_ROWS
        stride = -(-scratch_floats(max_rows, width) // 16) * 16
        self._counters = np.zeros(NUM_COUNTERS + 8, np.int64)
        aligned = -(-self._counters.ctypes.data // 64) * 64
        self._scratch = np.empty(num_threads * stride, np.float32)
        record = np.zeros(1, PARAMS)
        for name, number in {
            "counters": aligned,
            "cache": cache.data.data_ptr(),
            "slot_mapping": metadata.host_slot_mapping.ctypes.data,
            "block_table": metadata.host_block_table.ctypes.data,
            "seq_lens": metadata.host_seq_lens.ctypes.data,
            "query_start_loc": metadata.host_query_start_loc.ctypes.data,
            "item_seq": self._seq.ctypes.data,
            "item_start": self._start.ctypes.data,
            "item_len": self._len.ctypes.data,
            "scratch": self._scratch.ctypes.data,
            "num_tokens": metadata.num_tokens,
            "num_items": num_items,
            "heads_per_item": cache.num_kv_heads if together else 1,
            "block_stride": cache.data.stride(0),
            "block_size": cache.block_size,
            "table_stride": metadata.host_block_table.shape[1],
            "head_dim": cache.head_dim,
            "width": width,
            "group": group,
            "num_kv_heads": cache.num_kv_heads,
            "scratch_stride": stride,
            "max_rows": max_rows,
        }.items():
            record[name] = number
        self._record = record.view(np.uint8).data
        self._address = int(record.ctypes.data)
        first = (aligned - self._counters.ctypes.data) // 8
        self._shared = self._counters[first : first + NUM_COUNTERS]
        self._launch = cpu_threads.launcher(compiled.address, num_threads)
        most = int(np.bincount(self._seq).max(initial=0))
        self._phases = (ATTEND_AND_WRITE,) if most <= 1 else (WRITE, ATTEND)

    def run(self, *call: float) -> None:
        """Do one layer; what is given is `OF_CALL` without the phase, then the floats."""
        for phase in self._phases:
            CALL.pack_into(self._record, 0, phase, *call)
            self._shared.fill(0)
            self._launch(self._address)


class _State(threading.local):
    """The plan of the step that this thread is in: layers of one step share their metadata."""

    plan: _Plan | None = None


_state = _State()


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
    plan = _state.plan
    num_heads = query.shape[1]
    if plan is None or plan.metadata is not metadata or plan.num_heads != num_heads:
        plan = _state.plan = _Plan(metadata, num_heads)
    _check_call(query, key, value, layer, metadata)
    query, key, value = _dense(query), _dense(key), _dense(value)
    # float16 leaves the worker as float32: rounding to it is torch's.
    out_dtype = torch.float32 if query.dtype == torch.float16 else query.dtype
    out = torch.empty(query.shape, dtype=out_dtype)
    if sinks is not None:
        sinks = sinks.detach().to(torch.float32).contiguous()
    plan.run(
        query.data_ptr(),
        key.data_ptr(),
        value.data_ptr(),
        out.data_ptr(),
        0 if sinks is None else sinks.data_ptr(),
        *query.stride()[:2],
        *key.stride()[:2],
        *value.stride()[:2],
        layer * plan.layer_stride,
        sliding_window or 0,
        scale,
        softcap or 0.0,
    )
    return out if out_dtype == query.dtype else out.to(query.dtype)


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.stride(2) == 1 else tensor.contiguous()


def _items(
    metadata: AttentionMetadata, queries: int
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32], NDArray[np.int64]]:
    """Cut the batch into items of at most `queries` rows of one sequence, the most costly first.

    Returns:
        For each item its sequence, its first row in the batch, its number of rows, and its cost in scores per head.
    """
    starts = metadata.host_query_start_loc
    lens = np.diff(starts)
    counts = -(-lens // queries)
    seq = np.repeat(np.arange(len(lens), dtype=np.int32), counts)
    nth = np.arange(len(seq), dtype=np.int32) - np.repeat(np.cumsum(counts, dtype=np.int32) - counts, counts)
    start = starts[seq] + nth * np.int32(queries)
    length = np.minimum(np.int32(queries), starts[seq + 1] - start)
    cost = (metadata.host_seq_lens[seq] - starts[seq + 1] + start + length).astype(np.int64) * length
    order = np.argsort(-cost, kind="stable")
    return (
        seq[order],
        np.ascontiguousarray(start[order], dtype=np.int32),
        np.ascontiguousarray(length[order], dtype=np.int32),
        cost[order],
    )


def _check(metadata: AttentionMetadata, num_heads: int) -> None:
    """Refuse a batch that would make compiled code touch memory outside the cache; once a step."""
    cache = metadata.kv_cache
    if cache.device.type != "cpu":
        raise ValueError(f"the CPU attention cannot reach a cache on {cache.device}: choose another implementation")
    warmup(cache.dtype)
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


def _check_call(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int, metadata: AttentionMetadata
) -> None:
    cache = metadata.kv_cache
    kv_shape = (query.shape[0], cache.num_kv_heads, cache.head_dim)
    if query.shape[0] < metadata.num_tokens or query.shape[2] != cache.head_dim:
        raise ValueError(f"queries {list(query.shape)} do not fit {metadata.num_tokens} rows of {cache.head_dim}")
    if key.shape != kv_shape or value.shape != kv_shape:
        raise ValueError(f"keys {list(key.shape)} and values {list(value.shape)} are to be {list(kv_shape)}")
    if not query.dtype == key.dtype == value.dtype == cache.dtype:
        raise ValueError(f"queries, keys and values are to be {cache.dtype} like the cache, not {query.dtype}")
    if not 0 <= layer < cache.num_layers:
        raise ValueError(f"layer {layer} is outside the cache's {cache.num_layers} layers")
