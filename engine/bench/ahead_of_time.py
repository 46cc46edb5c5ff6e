"""Compile every GPU kernel configuration for every target, on any machine, and read what each takes.

    python -m engine.bench.ahead_of_time [--target sm_90] [--only decode] [--json report.json]

One line a configuration: registers, bytes spilled to memory, shared memory. Exits with 1 where one spills, wants more
shared memory than the target has, or does not compile.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import subprocess
import sys
import tempfile
import warnings
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engine.attention import triton_cache, triton_kernels
from engine.attention.triton_tiles import (
    Target,
    Tile,
    Work,
    attention_constants,
    combine_constants,
    decode_tile,
    precision,
    prefill_tile,
    write_constants,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

TARGETS = {"sm_80": Target("cuda", 80), "sm_90": Target("cuda", 90), "gfx942": Target("hip", "gfx942")}
_SHARED_LIMIT = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "gfx942": 64 * 1024}
_TYPE = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


@dataclass(frozen=True, slots=True)
class Configuration:
    """A model's attention as the kernels see it.

    Attributes:
        name: What it stands for.
        head_dim: Size of one head.
        group: Query heads of one KV head.
        dtype: Of queries, and of the cache where `cache` is not given.
        cache: `int8` or `float8` for a quantised cache.
        window: Sliding window, 0 for none.
        softcap: Whether scores are capped.
        sinks: Whether heads have sinks.
        paged: False for one block per sequence, the contiguous layout.
        block_size: Tokens of one block.
    """

    name: str
    head_dim: int
    group: int
    dtype: str = "bfloat16"
    cache: str | None = None
    window: int = 0
    softcap: bool = False
    sinks: bool = False
    paged: bool = True
    block_size: int = 16


CONFIGURATIONS = [
    Configuration("small llama", 64, 3),
    Configuration("llama", 128, 4),
    Configuration("one query head per KV head", 128, 1),
    Configuration("one KV head for many", 64, 64),
    Configuration("padded heads", 80, 1),
    Configuration("float16", 128, 4, dtype="float16"),
    Configuration("float32", 64, 3, dtype="float32"),
    Configuration("float32, wide", 128, 4, dtype="float32"),
    Configuration("float32, widest", 256, 2, dtype="float32"),
    Configuration("window", 128, 4, window=4096),
    Configuration("window and cap, wide heads", 256, 2, window=4096, softcap=True),
    Configuration("window and sinks", 64, 8, window=128, sinks=True),
    Configuration("int8 cache", 64, 3, cache="int8"),
    Configuration("int8 cache, wide", 128, 4, cache="int8"),
    Configuration("float8 cache", 64, 3, cache="float8"),
    Configuration("float8 cache, wide", 128, 4, cache="float8"),
    Configuration("float8 cache, widest, window and cap", 256, 2, cache="float8", window=4096, softcap=True),
    Configuration("contiguous", 128, 4, paged=False, block_size=4096),
]
"""Every feature of the family, each at the shapes of models that have it."""

KERNELS = ("write", "decode", "decode combine", "prefill", "prefill combine")


@dataclass(frozen=True, slots=True)
class Compiled:
    """What one kernel takes on one target.

    Attributes:
        target: Name of the target.
        kernel: One of `KERNELS`.
        configuration: Name of the configuration.
        tile: Rows by keys, warps and pipeline stages; empty where there is no choice.
        registers: Of one thread (vector registers on AMD).
        spilled: Bytes of memory per thread that stand in for registers, scalar spills on AMD included.
        shared: Bytes of shared memory of one program.
        error: Why it did not compile.
    """

    target: str
    kernel: str
    configuration: str
    tile: str = ""
    registers: int = 0
    spilled: int = 0
    shared: int = 0
    error: str = ""

    @property
    def ok(self) -> bool:
        """Whether it compiled, keeps everything in registers and fits the target."""
        return not self.error and not self.spilled and self.shared <= _SHARED_LIMIT[self.target]


def compile_one(target_name: str, kernel: str, configuration: Configuration) -> Compiled:
    """Compile one kernel for one target and read what it takes."""
    target = TARGETS[target_name]
    function, signature, constants, tile = _source(target, kernel, configuration)
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    label = f"{tile.block_m}x{tile.block_n} w{tile.num_warps} s{tile.num_stages}" if tile.block_m else ""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a notice about defaults of a later Triton
            compiled = triton.compile(
                _ast_source(function, signature, constants),
                target=GPUTarget(target.backend, target.arch, 64 if target.backend == "hip" else 32),
                options=options,
            )
        registers, spilled = _resources(compiled, target)
    except Exception as error:  # a compiler may fail in any way; the report says how
        return Compiled(target_name, kernel, configuration.name, label, error=_reason(error))
    return Compiled(target_name, kernel, configuration.name, label, registers, spilled, int(compiled.metadata.shared))


def _reason(error: BaseException) -> str:
    """One line: the last one of the error at the root, which Triton wraps once for every function it was in."""
    root = error
    while root.__cause__ is not None:
        root = root.__cause__
    lines = str(root).strip().splitlines() or [""]
    return f"{type(root).__name__}: {lines[-1].strip()}"[:200]


def compile_all(targets: list[str], only: str = "", jobs: int = 2) -> Iterator[Compiled]:
    """Compile every kernel and configuration whose `kernel: configuration` contains `only`, in order."""
    work, seen = [], set()
    for target, configuration, kernel in itertools.product(targets, CONFIGURATIONS, KERNELS):
        # Many configurations differ in one kernel alone: what is the same program is compiled once.
        same = (target, str(_source(TARGETS[target], kernel, configuration)))
        if only in f"{kernel}: {configuration.name}" and same not in seen:
            seen.add(same)
            work.append((target, kernel, configuration))
    if jobs <= 1 or len(work) <= 1:
        yield from (compile_one(*item) for item in work)
        return
    with ProcessPoolExecutor(jobs) as pool:
        yield from pool.map(compile_one, *zip(*work, strict=True))


def _source(
    target: Target, kernel: str, configuration: Configuration
) -> tuple[Any, dict[str, str], dict[str, Any], Tile]:
    """The kernel's function, the types of its arguments, its constants and its cut."""
    c = configuration
    kind = _kind(target, c.cache)
    element = _TYPE[c.dtype]
    itemsize = 4 if c.dtype == "float32" else 2
    stored = {None: element, "int8": "i8", "float8": "u8"}[c.cache]
    scales = "*fp32" if c.cache else "constexpr"
    decode = kernel.startswith("decode")
    choose = decode_tile if decode else prefill_tile
    work = Work(
        group=c.group,
        head_dim=c.head_dim,
        itemsize=itemsize,
        quantised=c.cache is not None,
        paged=c.paged,
        window=c.window > 0,
    )
    tile = choose(target, work)
    if kernel == "write":
        signature = dict.fromkeys(("key", "value"), f"*{element}") | {
            "cache": f"*{stored}",
            "scales": scales,
            "slot_mapping": "*i64",
        }
        constants = write_constants(head_dim=c.head_dim, num_kv_heads=8, block_size=c.block_size, kind=kind)
        return triton_cache.write_kv_kernel, signature, constants, Tile(0, 0, 2, 1)
    signature = {
        "out": f"*{element}",
        "partial_out": "*fp32",
        "partial_lse": "*fp32",
        "query_start_loc": "*i32",
        "seq_lens": "*i32",
    }
    if kernel.endswith("combine"):
        constants = combine_constants(head_dim=c.head_dim, group=c.group, tile=tile, window=c.window, decode=decode)
        return triton_kernels.combine_kernel, signature, constants, Tile(0, 0, 4, 1)
    signature |= {
        "query": f"*{element}",
        "cache": f"*{stored}",
        "scales": scales,
        "sinks": f"*{element}" if c.sinks else "constexpr",
        "block_table": "*i32",
        "qk_scale": "fp32",
        "softcap": "fp32",
    }
    if not decode:
        signature |= dict.fromkeys(("partial_out", "partial_lse"), "constexpr")
    constants = attention_constants(
        head_dim=c.head_dim,
        group=c.group,
        block_size=c.block_size,
        tile=tile,
        window=c.window,
        softcap=c.softcap,
        sinks=c.sinks,
        kind=kind,
        paged=c.paged,
        decode=decode,
        split=decode,
        precision=precision(target, itemsize),
    )
    return triton_kernels.attention_kernel, signature, constants, tile


def _ast_source(function: Any, types: dict[str, str], constants: dict[str, Any]) -> Any:
    """Triton's input: each argument's type, with the alignments that a launch finds on its tensors and strides."""
    names: list[str] = function.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    values = constants | {name: None for name, kind in signature.items() if kind == "constexpr" and name in types}
    # The table's width changes from step to step, so the launch leaves it alone.
    aligned = [
        name
        for name, kind in signature.items()
        if kind.startswith("*") or (name.endswith("_stride") and name != "table_stride")
    ]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    return ASTSource(function, signature, values, attributes)


def _kind(target: Target, cache: str | None) -> int:
    if cache is None:
        return int(triton_cache.PLAIN.value)
    if cache == "int8":
        return int(triton_cache.INT8.value)
    return int((triton_cache.FP8 if target.has_float8 else triton_cache.FP8_BITS).value)


def _resources(compiled: Any, target: Target) -> tuple[int, int]:
    """Registers of a thread, and bytes that it keeps in memory for want of them."""
    if target.backend == "hip":
        notes = compiled.asm["amdgcn"]
        count = {name: int(number) for name, number in re.findall(r"\.(\w+):\s+(\d+)$", notes, re.MULTILINE)}
        scalar = 4 * (count["sgpr_spill_count"] + count["vgpr_spill_count"])
        return count["vgpr_count"], max(count["private_segment_fixed_size"], scalar)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        tool = Path(triton.knobs.nvidia.cuobjdump.path)
        usage = subprocess.run([tool, "-res-usage", file.name], check=True, capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    if found is None:
        raise RuntimeError(f"cuobjdump printed no resource usage: {usage[-200:]}")
    return int(found[1]), int(found[2])


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m engine.bench.ahead_of_time", description=__doc__.splitlines()[0])
    parser.add_argument("--target", action="append", choices=sorted(TARGETS), help="only this target (repeatable)")
    parser.add_argument("--only", default="", help="only where this stands in 'kernel: configuration'")
    parser.add_argument("--json", type=Path, help="also write the report to this file")
    parser.add_argument("--jobs", type=int, default=2, help="compilations at once")
    options = parser.parse_args(arguments)
    results = []
    for r in compile_all(options.target or list(TARGETS), options.only, options.jobs):
        results.append(r)
        verdict = r.error or f"{r.registers:3d} registers, {r.spilled} bytes spilled, {r.shared / 1024:5.1f} KiB shared"
        print(
            f"{'ok  ' if r.ok else 'FAIL'} {r.target:6} {r.kernel:15} {r.configuration:36} {r.tile:15} {verdict}",
            flush=True,
        )
    if options.json:
        options.json.write_text(json.dumps([asdict(r) for r in results], indent=1) + "\n", encoding="utf-8")
    failed = sum(not r.ok for r in results)
    print(f"{len(results) - failed} of {len(results)} compiled without spills (triton {triton.__version__})")
    return 1 if failed or not results else 0


if __name__ == "__main__":
    sys.exit(main())
