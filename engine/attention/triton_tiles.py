"""How the Triton kernels are cut for a machine: tiles, warps, pipeline depth and splits.

The values are chosen so that the compiled kernels keep everything in registers on every target
(`python -m engine.bench.ahead_of_time` compiles them all and shows what they take); they need no GPU to be known, so
that what is compiled ahead of time is what runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

MAX_HEAD_DIM = 256
_MAX_SPLITS = 32


@dataclass(frozen=True, slots=True)
class Target:
    """A GPU family to compile for.

    Attributes:
        backend: `cuda` or `hip`.
        arch: Compute capability times ten (80, 90), or the AMD name (`gfx942`).
        num_processors: Streaming multiprocessors or compute units, for how far to split.
    """

    backend: Literal["cuda", "hip"]
    arch: int | str
    num_processors: int = 1

    @property
    def has_float8(self) -> bool:
        """Whether the hardware converts float8 e4m3 (the OCP form; gfx942 has another)."""
        return isinstance(self.arch, int) and self.arch >= 89


@dataclass(frozen=True, slots=True)
class Tile:
    """The cut of one launch.

    Attributes:
        block_m: Query rows of a program, tokens times query heads of one KV head; a power of two, at least 16.
        block_n: Key positions taken at once, a power of two, at least 16.
        num_warps: Warps of a program.
        num_stages: Depth of the software pipeline over key tiles.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def padded(n: int, least: int = 16) -> int:
    """The next power of two, at least `least`: what a tile axis must be."""
    return max(least, 1 << (n - 1).bit_length())


@dataclass(frozen=True, slots=True)
class Work:
    """What an attention does, as far as the cut depends on it.

    Attributes:
        group: Query heads of one KV head.
        head_dim: Size of one head.
        itemsize: Bytes of one query element.
        quantised: Whether the cache's codes are converted in the kernel, in registers.
        paged: Whether keys are found through a block table. The pipeline then spends a stage on the table, so that
            one stage less without it keeps as many keys in flight.
        window: Whether a sliding window cuts the keys, which takes a loop more.
    """

    group: int
    head_dim: int
    itemsize: int
    quantised: bool
    paged: bool = True
    window: bool = False

    @property
    def width(self) -> int:
        """Bytes of one key as it is multiplied."""
        return padded(self.head_dim) * self.itemsize


def decode_tile(target: Target, work: Work) -> Tile:
    """The cut for one query row per sequence."""
    block_m, width = padded(work.group), work.width
    if block_m > 16:
        # Many heads share one KV head: the work is a prefill's.
        tile = prefill_tile(target, work)
        return Tile(block_m, min(tile.block_n, 32), tile.num_warps, tile.num_stages)
    if width > 512:
        return Tile(block_m, 16, 8, 2)
    if width > 256 or target.backend == "hip":
        # Converting wide codes by their bits takes scalar registers on AMD.
        return Tile(block_m, 16 if work.quantised and width > 256 and target.backend == "hip" else 32, 4, 2)
    return Tile(block_m, 64, 4, 3 if work.paged else 2)


def prefill_tile(target: Target, work: Work) -> Tile:
    """The cut for many query rows per sequence."""
    width = work.width
    if width > 512:
        tile = Tile(16, 16, 8, 2)
    elif work.itemsize == 4:
        # Each float32 product is three: their operands take the registers. Of 64 rows by 16 keys with eight warps,
        # Triton 3.6 reads shared memory out of bounds on Hopper.
        tile = Tile(32, 32, 4, 2) if width <= 256 else Tile(32, 16, 8, 2)
    elif width > 256:
        tile = Tile(64, 32, 8, 2)
    elif work.quantised and width > 128:
        tile = Tile(64, 64, 8, 3)
    else:
        tile = Tile(128, 64, 8, 3)
    block_m = max(tile.block_m, padded(work.group))
    if target.backend == "hip":
        # There the masks of a tile are scalar registers, of which a program has about a hundred.
        block_n = 16 if work.window or width > 256 else min(tile.block_n, 32)
        return Tile(block_m, block_n, tile.num_warps, 1 if work.quantised and not work.window else 2)
    if not work.paged:
        return Tile(block_m, min(tile.block_n, 32), tile.num_warps, 2)
    return Tile(block_m, tile.block_n, tile.num_warps, tile.num_stages)


def decode_splits(max_keys: int, split_keys: int) -> tuple[int, int]:
    """How long a split is and how many a grid must have, for decodes of at most max_keys positions.

    The length does not follow from the batch, so that a sequence's result does not either; only where it would give
    more than 32 splits is it doubled until it does not.

    Returns:
        Positions of one split, splits.
    """
    while -(-max_keys // split_keys) > _MAX_SPLITS:
        split_keys *= 2
    return split_keys, max(1, -(-max_keys // split_keys))


def prefill_splits(
    max_keys: int, split_keys: int, *, block_n: int, num_programs: int, num_processors: int
) -> tuple[int, int]:
    """The same for prefills: split only where the tiles alone leave at least half of the processors idle.

    Args:
        max_keys: Positions of the longest sequence.
        split_keys: Positions of the shortest split worth its cost.
        block_n: Positions taken at once; a split is a multiple of it.
        num_programs: Programs of the launch without splits.
        num_processors: What they run on.
    """
    wanted = min(num_processors // max(1, num_programs), _MAX_SPLITS)
    if wanted < 2:
        return max(max_keys, 1), 1
    split_keys = max(split_keys, -(-max_keys // wanted))
    split_keys = -(-split_keys // block_n) * block_n
    return split_keys, max(1, -(-max_keys // split_keys))


def attention_constants(
    *,
    head_dim: int,
    group: int,
    block_size: int,
    tile: Tile,
    window: int,
    softcap: bool,
    sinks: bool,
    kind: int,
    paged: bool,
    decode: bool,
    split: bool,
    precision: str,
    widen: bool = False,
) -> dict[str, Any]:
    """The compile-time arguments of `attention_kernel`, in one place for the launch and the ahead-of-time build."""
    return {
        "HEAD_DIM": head_dim,
        "PADDED_DIM": padded(head_dim),
        "GROUP": group,
        "BLOCK_SIZE": block_size,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "WINDOW": window,
        "SOFTCAP": softcap,
        "SINKS": sinks,
        "KIND": kind,
        "PAGED": paged,
        "DECODE": decode,
        "SPLIT": split,
        "PRECISION": precision,
        "WIDEN": widen,
    }


def combine_constants(
    *, head_dim: int, group: int, tile: Tile, window: int, decode: bool, rows: int = 16
) -> dict[str, Any]:
    """The compile-time arguments of `combine_kernel`, which walks the same tiles `rows` rows at a time."""
    return {
        "HEAD_DIM": head_dim,
        "PADDED_DIM": padded(head_dim),
        "GROUP": group,
        "BLOCK_M": tile.block_m,
        "BLOCK_ROWS": rows,
        "WINDOW": window,
        "DECODE": decode,
    }


def write_constants(
    *, head_dim: int, num_kv_heads: int, block_size: int, kind: int, elements: int = 2048
) -> dict[str, Any]:
    """The compile-time arguments of `write_kv_kernel`; a program takes at most `elements` of a token's keys."""
    dims = padded(head_dim)
    return {
        "HEAD_DIM": head_dim,
        "PADDED_DIM": dims,
        "BLOCK_SIZE": block_size,
        "BLOCK_HEADS": min(padded(num_kv_heads, 1), max(1, elements // dims)),
        "KIND": kind,
    }


def precision(target: Target, itemsize: int) -> str:
    """How products of float32 are made: on NVIDIA three tf32 products, as exact as float32 to a few units."""
    return "tf32x3" if itemsize == 4 and target.backend == "cuda" else "ieee"
