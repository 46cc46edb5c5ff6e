"""Where the compiled CPU attention finds things: a ticket's item, a position's place."""

# mypy: ignore-errors
# Compiled functions are typed by Numba, from the tag.

from __future__ import annotations

import numpy as np
from numba import carray, njit

from engine.attention.cpu_compile import OPTIONS
from engine.attention.cpu_memory import copy_bytes, fill_offsets, pointer_to

_compiled = njit(**OPTIONS)


@_compiled
def locate(p, size, table, start, count, shift, target, index):
    """Offsets, in bytes, of positions start to start + count - 1 from position 0 of block 0, plus a shift."""
    block = start // p.block_size
    slot = start - block * p.block_size
    step = p.head_dim * size
    while count > 0:
        n = min(count, p.block_size - slot)
        fill_offsets(target, index, n, table[block] * p.block_stride * size + slot * step + shift, step)
        index += n
        count -= n
        block += 1
        slot = 0


@_compiled
def copy_scales(p, table, start, count, first, target):
    """Scales of positions start to start + count - 1 of a head, whose first one in block 0 is number `first`."""
    block = start // p.block_size
    slot = start - block * p.block_size
    stride = p.block_stride // p.head_dim
    while count > 0:
        n = min(count, p.block_size - slot)
        copy_bytes(target, p.scales + (table[block] * stride + first + slot) * 4, n * 4)
        target += n * 4
        count -= n
        block += 1
        slot = 0


@_compiled
def item_of(p, ticket):
    """What a ticket stands for: sequence, first row, rows, position of the first, first KV head."""
    head_groups = p.num_kv_heads // p.heads_per_item
    item = carray(pointer_to(p.items), (p.num_items, 3), np.int32)[ticket // head_groups]
    seq, first_row, num_queries = np.int64(item[0]), np.int64(item[1]), np.int64(item[2])
    starts = carray(pointer_to(p.query_start_loc), seq + 2, np.int32)
    seq_len = np.int64(carray(pointer_to(p.seq_lens), seq + 1, np.int32)[seq])
    first_pos = seq_len - starts[seq + 1] + first_row
    return seq, first_row, num_queries, first_pos, (ticket % head_groups) * p.heads_per_item


@_compiled
def table_of(p, seq):
    """The block table of a sequence."""
    return carray(pointer_to(p.block_table + seq * p.table_stride * 4), p.table_stride, np.int32)


@_compiled
def first_seen(p, position):
    """The first position that a row at a position sees."""
    return max(0, position - p.window + 1) if p.window > 0 else 0
