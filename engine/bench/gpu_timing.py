"""What the GPU kernels cost on the device at hand: time, bandwidth, and the same beside torch's own attention."""

from __future__ import annotations

import functools
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from engine.attention.metadata import AttentionMetadata
from engine.attention.triton import TritonAttention, write_kv
from engine.bench.gpu_batch import make_cache, make_table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from engine.attention.triton_tiles import Tile
    from engine.bench.gpu_batch import Layout
    from engine.bench.gpu_report import Row

_MAX_CACHE_BYTES = 12 << 30


class Timer(Protocol):
    """How long a function's work takes on the device."""

    def __call__(self, function: Callable[[], None]) -> float:
        """Seconds, the median of several runs."""
        ...


def graph_timer(function: Callable[[], None], *, repeats: int = 15) -> float:
    """Seconds of a function's device work, captured once and replayed, so that the time to launch it stays out."""
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    graph.replay()
    times = []
    for _ in range(repeats):
        start, end = _event(), _event()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(float(start.elapsed_time(end)) / 1000)
    return statistics.median(times)


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class Shape:
    """The attention of a model.

    Attributes:
        name: Of a model that has it.
        kv_heads: Key and value heads.
        group: Query heads of each.
        head_dim: Size of one head.
    """

    name: str
    kv_heads: int
    group: int
    head_dim: int


LLAMA_8B = Shape("8 KV heads of 128, 4 query heads each", 8, 4, 128)
SMOLLM2 = Shape("3 KV heads of 64, 3 query heads each", 3, 3, 64)


class Bench:
    """Kernels over caches of several layers, taken in turn, so that no layer is found in a processor's cache.

    Args:
        device: Where.
        timer: How a function is timed.
        least_bytes: Keys and values that a timed run reads at least, several times the device's last-level cache.
    """

    def __init__(self, device: torch.device, timer: Timer, least_bytes: int = 1 << 29) -> None:
        self.device = device
        self.timer = timer
        self.least_bytes = least_bytes

    def decode(self, shape: Shape, batch: int, context: int, *, peer: bool = True) -> Row:
        """One decode of `batch` requests of `context` positions, and torch's attention on contiguous copies."""
        seconds, num_bytes = self.attend(shape, [(1, context)] * batch)
        row: Row = {
            "shape": shape.name,
            "requests": batch,
            "context": context,
            "us": seconds * 1e6,
            "GB/s": num_bytes / seconds / 1e9,
        }
        if peer:
            dense = self._dense(shape, batch, 1, context)
            row |= {"torch us": dense * 1e6, "torch / ours": dense / seconds}
        return row

    def prefill(self, shape: Shape, batch: int, query_len: int, context: int) -> Row:
        """A prefill of `query_len` rows that end at `context`, for each of `batch` requests."""
        seconds, _ = self.attend(shape, [(query_len, context)] * batch)
        # Two products of 2 * head_dim operations for each pair of row and visible key.
        pairs = query_len * (context - query_len) + query_len * (query_len + 1) // 2
        operations = 4 * shape.head_dim * shape.kv_heads * shape.group * pairs * batch
        row: Row = {
            "shape": shape.name,
            "requests": batch,
            "rows": query_len,
            "context": context,
            "us": seconds * 1e6,
            "TFLOP/s": operations / seconds / 1e12,
        }
        if query_len == context:
            dense = self._dense(shape, batch, context, context)
            row |= {"torch us": dense * 1e6, "torch / ours": dense / seconds}
        return row

    def paging(self, shape: Shape, batch: int, context: int, block_sizes: list[int]) -> Iterator[Row]:
        """The same decode on one block per request, and on identity and shuffled tables of smaller blocks."""
        lengths = [(1, context)] * batch
        contiguous, _ = self.attend(shape, lengths, block_size=context)
        yield {"block size": "contiguous", "table": "one block each", "us": contiguous * 1e6, "cost": 0.0}
        for block_size in block_sizes:
            layouts: tuple[Layout, Layout] = ("identity", "shuffled")
            for layout in layouts:
                seconds, _ = self.attend(shape, lengths, block_size=block_size, layout=layout)
                cost = seconds / contiguous - 1
                yield {"block size": block_size, "table": layout, "us": seconds * 1e6, "cost": cost}

    def quantised(self, shape: Shape, batch: int, context: int) -> Iterator[Row]:
        """The same decode on a bfloat16, an int8 and a float8 cache."""
        plain = 0.0
        for name, dtype in (("bfloat16", None), ("int8", torch.int8), ("float8", torch.float8_e4m3fn)):
            seconds, num_bytes = self.attend(shape, [(1, context)] * batch, quantised=dtype)
            plain = plain or seconds
            yield {
                "cache": name,
                "us": seconds * 1e6,
                "GB/s": num_bytes / seconds / 1e9,
                "bfloat16 / this": plain / seconds,
            }

    def tune(self, shape: Shape, lengths: list[tuple[int, int]], tiles: list[Tile]) -> Iterator[Row]:
        """The same work with other cuts; one that does not compile or fit says so."""
        decode = lengths[0][0] == 1
        for tile in tiles:
            row: Row = {"work": "decode" if decode else "prefill", "tile": f"{tile.block_m}x{tile.block_n}"}
            row |= {"warps": tile.num_warps, "stages": tile.num_stages}
            attention = TritonAttention(decode=tile) if decode else TritonAttention(prefill=tile)
            try:
                seconds, _ = self.attend(shape, lengths, attention=attention)
                yield row | {"us": seconds * 1e6, "note": ""}
            except Exception as error:  # a cut that the device refuses is a result
                yield row | {"us": float("nan"), "note": type(error).__name__}

    def attend(
        self,
        shape: Shape,
        lengths: list[tuple[int, int]],
        *,
        block_size: int = 16,
        layout: Layout = "shuffled",
        quantised: torch.dtype | None = None,
        attention: TritonAttention | None = None,
    ) -> tuple[float, int]:
        """Seconds of one layer's attention, without the cache write, and the bytes of keys and values it needs."""
        attention = attention or TritonAttention()
        table, num_blocks = make_table([n for _, n in lengths], block_size, layout, seed=0)
        positions = sum(n for _, n in lengths)
        element = 1 if quantised else 2
        per_position = 2 * shape.kv_heads * (shape.head_dim * element + (4 if quantised else 0))
        layers = self._layers(positions * per_position)
        cache = make_cache(
            num_blocks=num_blocks, num_layers=layers, kv_heads=shape.kv_heads, block_size=block_size,
            head_dim=shape.head_dim, dtype=torch.bfloat16, device=self.device, quantised=quantised,
        )  # fmt: skip
        _randomise(cache)
        query_lens = np.array([n for n, _ in lengths])
        metadata = AttentionMetadata.build(
            query_start_loc=np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32),
            seq_lens=np.array([n for _, n in lengths], np.int32),
            block_table=table,
            kv_cache=cache,
        )
        query = torch.randn(
            (metadata.num_tokens, shape.kv_heads * shape.group, shape.head_dim),
            dtype=torch.bfloat16,
            device=self.device,
        )

        def work() -> None:
            for layer in range(layers):
                attention.attend(query, layer, metadata, scale=shape.head_dim**-0.5)

        return self.timer(work) / layers, positions * per_position

    def write(self, shape: Shape, tokens: int) -> Row:
        """Writing the keys and values of `tokens` rows into one layer."""
        table, num_blocks = make_table([tokens], 16, "shuffled", seed=0)
        layers = self._layers(tokens * 4 * shape.kv_heads * shape.head_dim)
        cache = make_cache(
            num_blocks=num_blocks, num_layers=layers, kv_heads=shape.kv_heads, block_size=16,
            head_dim=shape.head_dim, dtype=torch.bfloat16, device=self.device,
        )  # fmt: skip
        metadata = AttentionMetadata.build(
            query_start_loc=np.array([0, tokens], np.int32),
            seq_lens=np.array([tokens], np.int32),
            block_table=table,
            kv_cache=cache,
        )
        size = (2, tokens, shape.kv_heads, shape.head_dim)
        key, value = torch.randn(size, dtype=torch.bfloat16, device=self.device)

        def work() -> None:
            for layer in range(layers):
                write_kv(key, value, layer, metadata)

        seconds = self.timer(work) / layers
        moved = 2 * 2 * key.numel() * key.element_size()  # read and written, keys and values
        return {"shape": shape.name, "rows": tokens, "us": seconds * 1e6, "GB/s": moved / seconds / 1e9}

    def copy_bandwidth(self, num_bytes: int = 1 << 30) -> float:
        """Bytes per second that a plain copy on the device reads and writes: what the rest is held against."""
        source = torch.ones(num_bytes, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)

        def work() -> None:
            target.copy_(source)

        return 2 * num_bytes / self.timer(work)

    def _layers(self, num_bytes: int) -> int:
        return max(1, min(64, -(-self.least_bytes // num_bytes), _MAX_CACHE_BYTES // num_bytes))

    def _dense(self, shape: Shape, batch: int, rows: int, context: int) -> float:
        """Torch's scaled dot product attention on contiguous keys and values of equal lengths."""
        layers = self._layers(4 * batch * context * shape.kv_heads * shape.head_dim)
        make = functools.partial(torch.randn, dtype=torch.bfloat16, device=self.device)
        query = make((batch, shape.kv_heads * shape.group, rows, shape.head_dim))
        both = make((layers, 2, batch, shape.kv_heads, context, shape.head_dim))

        def work() -> None:
            for layer in range(layers):
                torch.nn.functional.scaled_dot_product_attention(
                    query, both[layer, 0], both[layer, 1], is_causal=rows > 1, enable_gqa=shape.group > 1
                )

        return self.timer(work) / layers


def _randomise(cache: Any) -> None:
    """Numbers in every slot: timings on zeros or NaN can differ from those on data."""
    if cache.data.element_size() > 1:
        cache.data.normal_()
        return
    cache.data.view(torch.uint8).random_(0, 0x7E)  # codes of either type, float8's NaN left out
    cache.scales.uniform_(0.001, 0.01)
