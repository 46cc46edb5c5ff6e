"""What the compiled CPU attention asks memory for ahead of time, because a processor cannot guess it.

Blocks lie anywhere, so that nothing tells a processor what is read after one of them. It is told twice: of the pages of
the tile after next, and of the cache lines of the next one, one line for each that is read of the tile at hand. To find
a page takes as long as to fetch a line; what is asked for from a page that is not found yet is dropped, and so is what
is asked for faster than memory gives it.
"""

# mypy: ignore-errors
# Compiled functions are typed by Numba, from the tag; intrinsics by the signature that each returns.

from __future__ import annotations

from numba import njit, types
from numba.extending import intrinsic

from engine.attention.cpu_compile import OPTIONS
from engine.attention.cpu_emit import SECOND_CACHE, prefetch
from engine.attention.cpu_lines import LINE
from engine.attention.cpu_memory import fetch_add, fill_offsets
from engine.attention.cpu_params import CURSOR
from engine.attention.cpu_tables import first_seen, item_of, table_of

_compiled = njit(**OPTIONS)

_PAGES = 8192
"""Bytes of which the first is asked for, to have their pages found: two of 4 KiB, of which large pages are often made
under a virtual machine. Where the second one is stands beside where the first one is."""


@_compiled
def list_lines(p, size, table, start, count, first_head, num_heads, halves, lines, room):
    """Offsets of the cache lines that hold keys of positions and heads, in the order in which memory has them.

    With two halves, of the values as well, which follow a block's keys. See `cpu_lines` for what becomes of them.

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
                asked = max(0, min((several + LINE - 1) // LINE, room - line))
                fill_offsets(lines, line, asked, at + row * p.block_size * step, LINE)
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
        seq, _, queries, position, head = _next_item(p)
        table, begin, last = table_of(p, seq), first_seen(p, position), position + queries
    list_lines(p, size, table, begin, min(tile, last - begin), head, num_heads, halves, lines, room)


@_compiled
def touch_pages(p, size, table, end, stop, tile, first_head, num_heads, base):
    """Have the pages found of the tile after the next one: see `list_next_lines`; base is what offsets count from."""
    begin, last, head = end + tile, stop, first_head
    if begin >= stop:
        seq, _, queries, position, head = _next_item(p)
        table, last = table_of(p, seq), position + queries
        begin = first_seen(p, position) + (0 if end < stop else tile)
    count = min(tile, last - begin)
    block = begin // p.block_size
    slot = begin - block * p.block_size
    step = p.head_dim * size
    row_bytes = p.block_size * step
    while count > 0:
        n = min(count, p.block_size - slot)
        at = base + table[block] * p.block_stride * size
        if n == p.block_size and num_heads == p.num_kv_heads:
            _touch(at, 2 * num_heads * row_bytes)
        else:
            for row in range(head, head + num_heads):
                _touch(at + row * row_bytes + slot * step, n * step)
                _touch(at + (p.num_kv_heads + row) * row_bytes + slot * step, n * step)
        count -= n
        block += 1
        slot = 0


@_compiled
def _next_item(p):
    return item_of(p, min(fetch_add(p.counters + CURSOR, 0), p.num_tickets - 1))


@_compiled
def _touch(address, num_bytes):
    while num_bytes > 0:
        _ask_for(address)
        n = _PAGES - address % _PAGES
        address += n
        num_bytes -= n


@intrinsic
def _ask_for(typingctx, address):
    """Ask for the cache line at an address, which need not exist."""

    def codegen(context, builder, signature, args):
        prefetch(builder, args[0], SECOND_CACHE)
        return context.get_dummy_value()

    return types.void(types.int64), codegen
