"""What one call of the compiled worker is given: one record, filled from Python, read by every thread."""

from __future__ import annotations

import struct

import numpy as np

from engine.attention.cpu_call import COUNTER_BYTES

TILE_KV = 256
"""Positions whose scores are held at once: softmax is rescaled once per tile, and a tile's scores stay in cache."""

GATHER = 64
"""Positions converted to float32 at a time when rows are many: 64 x 64 floats are half of a 32 KiB cache."""

MAX_ROWS = 48
"""Rows (queries x heads of a group) of one item, unless one query alone has more."""

TILE_ROWS = 3
"""Query rows of one register tile: with 4 tokens or 4 vectors of columns they fill 12 of the 16 registers of AVX2."""

TILE_FEW = 64
"""The same for few rows: what the next tile needs is fetched meanwhile, and stays in a processor's second cache."""

FEW_BYTES = 64 << 10
"""Of a tile's keys, of the heads that are taken together: with its values and the next tile they fit there."""

PAIR_HEIGHT = 6
"""Rows of a register tile of products of pairs (`cpu_pairs`): 6 with 4 vectors of columns fill 24 of 32 registers."""

PAIR_ROWS = 96
"""Rows of one item with products of pairs: for all of them keys and values are laid out once."""

FEW_PAIR_ROWS = 12
"""Up to so many rows the heads of a tile are taken together, as it lies in memory."""

WRITE_ROWS = 16
"""Rows whose keys and values are written as one piece."""

WRITE, ATTEND, ATTEND_AND_WRITE = range(3)
"""Phases, what one run of the worker does."""

SLOT, CURSOR = 0, COUNTER_BYTES
"""Byte offsets of the counters that threads share, see `cpu_call`: scratch handed out, next item."""

OF_CALL = (
    "phase",
    "query",
    "key",
    "value",
    "out",
    "sinks",
    "query_token_stride",
    "query_head_stride",
    "key_token_stride",
    "key_head_stride",
    "value_token_stride",
    "value_head_stride",
    "layer_offset",
    "window",
    "positions",
    "rotary",
    "query_norm",
    "key_norm",
)
"""What each layer's call sets, at the front of the record and in this order."""

OF_STEP = (
    "counters",
    "scratch",
    "cache",
    "scales",
    "query_start_loc",
    "seq_lens",
    "block_table",
    "slot_mapping",
    "items",
    "num_tokens",
    "num_items",
    "num_tickets",
    "heads_per_item",
    "block_stride",
    "block_size",
    "table_stride",
    "head_dim",
    "width",
    "group",
    "num_kv_heads",
    "scratch_stride",
    "max_rows",
    "max_lines",
    "pairs",
)
"""What all layers of a step share."""

_FLOATS = ("scale", "softcap", "query_eps", "key_eps")

PARAMS = np.dtype(
    [(name, np.int64) for name in OF_CALL]
    + [(name, np.float32) for name in _FLOATS]
    + [(name, np.int64) for name in OF_STEP]
)
"""The record. Strides and offsets are in elements; `width` is head_dim rounded up to whole vectors; 0 stands for no
scales, no sinks, no window, no soft cap, no rotary positions and no norms before them, and no products of pairs of
bfloat16; `rotary` is float32 `[positions, head_dim]`, of each position the cosines of its angles and then the sines;
`positions` is int64 `[num_tokens]`; norms' weights are of the queries' type; `items` is int32 `[num_items, 3]`:
sequence, first row, number of rows."""

CALL = struct.Struct(f"={len(OF_CALL)}q{len(_FLOATS)}f")
"""How the front of the record is packed, in one go: setting fields one by one would take longer than a small batch."""

STEP = struct.Struct(f"={len(OF_STEP)}q")
"""How the rest is."""


def lines_of(heads: int, width: int) -> int:
    """Cache lines of a tile that are fetched in advance, at most: of its keys, or of keys and values of 2 bytes."""
    return heads * TILE_FEW * width * 4 // 64 + 64


def scratch_floats(max_rows: int, width: int, max_lines: int) -> int:
    """Floats of one thread's scratch, in this order.

    Offsets of a tile's positions, of lines to fetch and of gathered positions (int64), queries, accumulators, scores,
    running maxima and sums, scales of a tile's keys and values, gathered positions.
    """
    return 2 * (TILE_KV + max_lines + GATHER) + max_rows * (2 * width + TILE_KV + 2) + 2 * TILE_KV + GATHER * width


def pair_scratch_floats(max_rows: int, width: int, max_lines: int) -> int:
    """The same with products of pairs.

    Offsets of a tile's positions and of lines to fetch (int64), queries (bfloat16), accumulators, weights and what is
    left of them (bfloat16), scores, keys or values laid out anew (bfloat16), running maxima and sums.
    """
    return 2 * (TILE_FEW + max_lines) + max_rows * (width // 2 + width + 2 * TILE_FEW + 2) + TILE_FEW * width // 2
