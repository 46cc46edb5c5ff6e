"""Where the compiled CPU attention finds things: a ticket's item, a position's place, the lines that come next."""

# mypy: ignore-errors
# Compiled functions are typed by Numba, from the tag.

from __future__ import annotations

import numpy as np
from numba import carray, njit

from engine.attention.cpu_compile import OPTIONS
from engine.attention.cpu_params import CURSOR
from engine.attention.cpu_vector import copy_bytes, fetch_add, fill_offsets, pointer_to

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


@_compiled
def list_lines(p, size, table, start, count, first_head, num_heads, halves, lines, room):
    """Offsets of the cache lines that hold keys of positions and heads, in the order in which memory has them.

    With two halves, of the values as well, which follow a block's keys.

    At most `room` of them; the rest of the list is offset 0.
    """
    line = 0
    block = start // p.block_size
    slot = start - block * p.block_size
    step = p.head_dim * size
    while count > 0 and line < room:
        n = min(count, p.block_size - slot)
        at = table[block] * p.block_stride * size + slot * step
        rows, several, height = num_heads, n * step, halves
        if n == p.block_size and halves == 2 and num_heads == p.num_kv_heads:
            # Of a whole block nothing is left out: in one go, for of small blocks there are many.
            rows, several, height = 1, 2 * num_heads * n * step, 1
        for half in range(height):
            first = half * p.num_kv_heads + first_head
            for row in range(first, first + rows):
                asked = max(0, min((several + 63) // 64, room - line))
                fill_offsets(lines, line, asked, at + row * p.block_size * step, 64)
                line += asked
        count -= n
        block += 1
        slot = 0
    fill_offsets(lines, line, room - line, 0, 0)


@_compiled
def list_next_lines(p, size, table, end, stop, tile, first_head, num_heads, halves, lines, room):
    """List the lines of the tile after the one that ends at a position; after a sequence's last, of another item."""
    begin, last, head = end, stop, first_head
    if end == stop:
        # Nobody knows who will do which item: the next one that is free is most likely this thread's next.
        ticket = min(fetch_add(p.counters + CURSOR, 0), p.num_tickets - 1)
        seq, _, queries, position, head = item_of(p, ticket)
        table, begin, last = table_of(p, seq), first_seen(p, position), position + queries
    list_lines(p, size, table, begin, min(tile, last - begin), head, num_heads, halves, lines, room)
