"""What paging costs attention, and how fast it is: `python -m engine.bench.attention`.

The same compiled kernel runs over the same numbers in three layouts: blocks in random places (`shuffled`), blocks in
order (`identity`), and one block per sequence that holds all of it (`contiguous`: no paging). Rounds alternate between
the layouts, so that noise of the machine meets all of them; ratios are medians over rounds. All layers have keys and
values of their own, together larger than the processor's caches, as in a model. Beside them, in the same way, the
forms of the cache: bfloat16, and 8 bits with scales, against the model's own type.

With one thread, times are CPU times of that thread, which other programs disturb less; with more, elapsed times.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from engine.attention import cpu, cpu_threads
from engine.attention.cpu_pages import advise_large_pages
from engine.attention.metadata import AttentionMetadata
from engine.bench.report import Figure, show
from engine.kv_cache import KVCache

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
CACHE_DTYPES = {"bfloat16": torch.bfloat16, "int8": torch.int8, "float8": torch.float8_e4m3fn}


@dataclass(frozen=True)
class Shape:
    """One attention layer's heads; the default is SmolLM2-135M's."""

    num_heads: int = 9
    num_kv_heads: int = 3
    head_dim: int = 64
    dtype: torch.dtype = torch.bfloat16


class Workload:
    """A batch over a cache in some layout: (positions, query rows) of each sequence."""

    def __init__(
        self,
        seqs: Sequence[tuple[int, int]],
        shape: Shape,
        *,
        block_size: int,
        num_layers: int,
        shuffled: bool,
        cache_dtype: torch.dtype | None = None,
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        needed = [-(-length // block_size) for length, _ in seqs]
        cache = KVCache(
            num_blocks=sum(needed),
            num_layers=num_layers,
            num_kv_heads=shape.num_kv_heads,
            block_size=block_size,
            head_dim=shape.head_dim,
            dtype=cache_dtype or shape.dtype,
        )
        # As in an engine, where the attention asks for them before anything is written.
        advise_large_pages(cache)
        if cache.scales is None:
            cache.data.normal_(generator=generator)
        else:
            cache.data.view(torch.uint8).random_(0, 0x7F, generator=generator)  # codes of either form
            cache.scales.uniform_(0.001, 0.01, generator=generator)
        order = np.arange(cache.num_blocks, dtype=np.int32)
        if shuffled:
            np.random.default_rng(0).shuffle(order)
        table = np.full((len(seqs), max(needed)), -1, np.int32)
        for row, count, end in zip(table, needed, np.cumsum(needed), strict=True):
            row[:count] = order[end - count : end]
        self._query_start_loc = np.cumsum([0, *(queries for _, queries in seqs)]).astype(np.int32)
        self._seq_lens = np.array([length for length, _ in seqs], np.int32)
        self._block_table = table
        self._cache = cache
        tokens = sum(queries for _, queries in seqs)
        sizes = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
        rows = torch.randn((tokens, sum(sizes), shape.head_dim), generator=generator).to(shape.dtype)
        self._query, self._key, self._value = torch.split(rows, list(sizes), dim=1)
        self.kv_bytes = sum(length for length, _ in seqs) * cache.block_bytes // block_size

    def step(self) -> None:
        """All layers once, with new metadata as in a new step."""
        metadata = AttentionMetadata.build(
            query_start_loc=self._query_start_loc,
            seq_lens=self._seq_lens,
            block_table=self._block_table,
            kv_cache=self._cache,
        )
        for layer in range(self._cache.num_layers):
            cpu.paged_attention(self._query, self._key, self._value, layer, metadata, scale=0.125)


def rounds(functions: Mapping[str, Callable[[], object]], count: int) -> dict[str, list[float]]:
    """Seconds of each function in each round, after one round to warm up."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for number in range(count + 1):
        for name, function in functions.items():
            began = clock()
            function()
            if number:
                seconds[name].append(clock() - began)
    return seconds


def ratio(seconds: dict[str, list[float]], name: str, base: str) -> float:
    """Median over rounds of one function's time by another's."""
    return statistics.median(a / b for a, b in zip(seconds[name], seconds[base], strict=True))


def paging(
    shape: Shape, *, seqs: int, context: int, block_sizes: Sequence[int], layers: int, count: int
) -> list[dict[str, float]]:
    """For each block size, decode time by the contiguous layout's."""
    batch = [(context, 1)] * seqs
    contiguous = Workload(batch, shape, block_size=context, num_layers=layers, shuffled=False)
    results = []
    for block_size in block_sizes:
        functions = {"contiguous": contiguous.step}
        for name in ("identity", "shuffled"):
            workload = Workload(batch, shape, block_size=block_size, num_layers=layers, shuffled=name == "shuffled")
            functions[name] = workload.step
        seconds = rounds(functions, count)
        results.append(
            {
                "block_size": block_size,
                "shuffled_by_contiguous": ratio(seconds, "shuffled", "contiguous"),
                "identity_by_contiguous": ratio(seconds, "identity", "contiguous"),
                **{f"{name}_us_per_layer": statistics.median(s) / layers * 1e6 for name, s in seconds.items()},
                "shuffled_gb_per_s": contiguous.kv_bytes / statistics.median(seconds["shuffled"]) / 1e9,
            }
        )
    return results


def forms(shape: Shape, *, seqs: int, context: int, layers: int, count: int) -> dict[str, dict[str, float]]:
    """For each form of the cache, decode time by that of a cache in the model's own type; blocks of 16, shuffled."""
    workloads = {
        name: Workload(
            [(context, 1)] * seqs, shape, block_size=16, num_layers=layers, shuffled=True, cache_dtype=cache_dtype
        )
        for name, cache_dtype in {"own": shape.dtype, **CACHE_DTYPES}.items()
        if name == "own" or cache_dtype != shape.dtype
    }
    seconds = rounds({name: workload.step for name, workload in workloads.items()}, count)
    return {
        name: {
            "by_own": ratio(seconds, name, "own"),
            "bytes_by_own": workload.kv_bytes / workloads["own"].kv_bytes,
            "us_per_layer": statistics.median(seconds[name]) / layers * 1e6,
        }
        for name, workload in workloads.items()
        if name != "own"
    }


def steps(shape: Shape, *, layers: int, count: int) -> dict[str, float]:
    """Milliseconds that attention takes of whole steps of a model with so many layers, block size 16."""
    batches = {
        "decode_32_of_150": [(150, 1)] * 32,
        "decode_8_of_150": [(150, 1)] * 8,
        "decode_1_of_150": [(150, 1)],
        "prefill_512": [(512, 512)],
        "mixed_31_decodes_and_a_chunk_of_256": [(150, 1)] * 31 + [(512, 256)],
    }
    functions = {
        name: Workload(batch, shape, block_size=16, num_layers=layers, shuffled=True).step
        for name, batch in batches.items()
    }
    return {f"{name}_ms": statistics.median(s) * 1e3 for name, s in rounds(functions, count).items()}


def read_bandwidth(count: int) -> float:
    """GB/s at which torch adds up a tensor that is in no cache: what any attention over a large cache is bound by."""
    data = torch.ones(64 << 20)
    seconds = rounds({"read": data.sum}, count)["read"]
    return data.nbytes / statistics.median(seconds) / 1e9


def compile_seconds(dtype: str) -> dict[str, float]:
    """Seconds until the kernel is ready in a new process: with an empty cache folder, and with what that left."""
    code = f"import torch; from engine.attention import cpu; print(cpu.warmup(torch.{dtype}))"
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "KVTUI_CACHE": folder}
        environment.pop("NUMBA_CACHE_DIR", None)
        runs = [
            subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True)
            for _ in range(2)
        ]
    cold, warm = (float(run.stdout) for run in runs)
    return {"cold": cold, "warm": warm}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m engine.bench.attention", description=__doc__)
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seqs", type=int, default=32, help="decoding requests for the paging cost")
    parser.add_argument("--context", type=int, default=512, help="tokens of each")
    parser.add_argument("--block-sizes", type=int, nargs="+", default=[8, 16, 32, 64, 128])
    parser.add_argument("--layers", type=int, default=8, help="layers for the paging cost")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    shape = Shape(dtype=DTYPES[options.dtype])
    result: dict[str, Any] = {
        "paging": paging(
            shape,
            seqs=options.seqs,
            context=options.context,
            block_sizes=options.block_sizes,
            layers=options.layers,
            count=options.rounds,
        ),
        "forms": forms(shape, seqs=options.seqs, context=options.context, layers=options.layers, count=options.rounds),
        "steps_of_30_layers": steps(shape, layers=30, count=options.rounds),
        "read_gb_per_s": read_bandwidth(options.rounds),
        "compile_seconds": compile_seconds(options.dtype),
        "dtype": options.dtype,
        "threads": f"{options.threads} ({cpu_threads.description()})",
        "time": "CPU time of the thread" if options.threads == 1 else "elapsed",
    }
    show("attention", _figures(result), as_json=options.json, about=f"{options.dtype}, {result['threads']} threads")


def _figures(result: dict[str, Any]) -> list[Figure]:
    """What was measured, one by one."""
    figures = []
    for row in result["paging"]:
        size = f"block size {row['block_size']}"
        for layout in ("shuffled", "identity"):
            figures.append(Figure(f"{layout} over contiguous, {size}", row[f"{layout}_by_contiguous"], "x"))
        for layout in ("contiguous", "identity", "shuffled"):
            figures.append(Figure(f"{layout}, a layer, {size}", row[f"{layout}_us_per_layer"], "µs"))
        figures.append(Figure(f"read by the kernel, shuffled, {size}", row["shuffled_gb_per_s"], "GB/s"))
    for name, row in result["forms"].items():
        figures.append(Figure(f"{name} cache over {result['dtype']}, time", row["by_own"], "x"))
        figures.append(Figure(f"{name} cache over {result['dtype']}, bytes", row["bytes_by_own"], "x"))
        figures.append(Figure(f"{name} cache, a layer", row["us_per_layer"], "µs"))
    for name, value in result["steps_of_30_layers"].items():
        figures.append(Figure(f"30 layers, {name.removesuffix('_ms').replace('_', ' ')}", value, "ms"))
    figures.append(Figure("read by a sum over a large tensor", result["read_gb_per_s"], "GB/s", result["time"]))
    figures += [Figure(f"compile, {how} cache", value, "s") for how, value in result["compile_seconds"].items()]
    return figures


if __name__ == "__main__":
    main()
