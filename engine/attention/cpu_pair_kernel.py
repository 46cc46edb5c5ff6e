"""Attention of one item over a cache of bfloat16, where the processor multiplies pairs of it.

See `cpu_kernel.py` for what an item is, and for tiles and the softmax that goes on across them. Queries are rounded to
bfloat16, as keys were when they were written; weights are split in two, so that hardly anything of them is lost.
Scores, sums and accumulators are float32.
"""

# mypy: ignore-errors
# Compiled functions are typed by Numba, from the tag.

from __future__ import annotations

import numpy as np
from numba import carray, njit

from engine.attention.cpu_ahead import list_next_lines, touch_pages
from engine.attention.cpu_compile import OPTIONS
from engine.attention.cpu_memory import fill, fill_offsets, pointer_to
from engine.attention.cpu_pair_products import (
    pack_keys,
    pack_values,
    pair_product,
    pair_scores,
    pair_weigh,
)
from engine.attention.cpu_pair_softmax import pair_softmax
from engine.attention.cpu_pairs import LANES
from engine.attention.cpu_params import PAIR_HEIGHT, TILE_FEW, TILE_ROWS
from engine.attention.cpu_rows import fetch_query, first_sums
from engine.attention.cpu_tables import first_seen, locate
from engine.attention.cpu_vector import scale_row, softcap_row, store_row

_compiled = njit(**OPTIONS)
_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)
_TILE = TILE_FEW


@_compiled
def attend_pairs(p, tag, table, first_row, first_pos, num_queries, first_head, last_head, scratch):
    """Attend with num_queries rows of one sequence, for the query heads of some KV heads.

    A tile is read for all of the heads before the next one is, which is fetched meanwhile. With more rows than
    `TILE_ROWS` keys and values are laid out anew, once for all of them.
    """
    rows = num_queries * p.group
    room = (rows + PAIR_HEIGHT - 1) // PAIR_HEIGHT * PAIR_HEIGHT
    few = rows <= TILE_ROWS
    offsets = scratch
    lines = offsets + _TILE * 8
    all_q = lines + p.max_lines * 8
    all_acc = all_q + p.max_rows * p.width * 2
    all_weights = all_acc + p.max_rows * p.width * 4
    rest = p.max_rows * _TILE * 2
    scores = all_weights + 2 * rest
    packed = scores + p.max_rows * _TILE * 4
    stats = packed + p.width * _TILE * 2
    maxima = carray(pointer_to(stats), p.max_rows, np.float32)
    sums = carray(pointer_to(stats + p.max_rows * 4), p.max_rows, np.float32)
    num_heads = last_head - first_head
    for i in range(num_heads):
        for r in range(rows):
            query, head = r // p.group, (first_head + i) * p.group + r % p.group
            n = i * room + r
            fetch_query(p, tag, first_row + query, first_pos + query, head, _ONE, packed)
            store_row(tag, packed, all_q + n * p.width * 2, p.width, _ONE)
            maxima[n], sums[n] = first_sums(p, head)
    fill(all_acc, 0, num_heads * room * p.width, _ZERO)

    head_bytes = p.block_size * p.head_dim * 2
    all_keys = p.cache + p.layer_offset * 2
    all_values = all_keys + p.num_kv_heads * head_bytes
    stop = first_pos + num_queries
    start = first_seen(p, first_pos)
    while start < stop:
        end = min(start + _TILE, stop)
        n = end - start
        padded = (n + LANES - 1) // LANES * LANES
        locate(p, 2, table, start, n, 0, offsets, 0)
        # Positions come by sixteen: the last one stands for those that are not there, unseen.
        fill_offsets(offsets, n, padded - n, carray(pointer_to(offsets), n, np.int64)[n - 1], 0)
        head_lines = padded * p.width // 32
        list_next_lines(p, 2, table, end, stop, _TILE, first_head, num_heads, 2, lines, 2 * num_heads * head_lines)
        touch_pages(p, 2, table, end, stop, _TILE, first_head, num_heads, all_keys)
        for i in range(num_heads):
            keys = all_keys + (first_head + i) * head_bytes
            soon = lines + i * head_lines * 8
            q = all_q + i * room * p.width * 2
            if few:
                pair_scores(rows, q, keys, offsets, padded, p.width, scores, _TILE, all_keys, soon)
            else:
                pack_keys(keys, offsets, padded, p.width, packed, _TILE, all_keys, soon)
                pair_product(0, rows, q, p.width, 0, packed, _TILE, p.width // 2, padded // LANES, scores, _TILE)
            for r in range(rows):
                row = scores + r * _TILE * 4
                factor = p.scale
                if p.softcap != _ZERO:
                    scale_row(row, padded, p.scale)
                    softcap_row(row, padded, p.softcap)
                    factor = _ONE
                position = first_pos + r // p.group
                low = max(0, position - p.window + 1 - start) if p.window > 0 else 0
                high = min(n, position + 1 - start)
                at = i * room + r
                weights = all_weights + at * _TILE * 2
                maximum = stats + at * 4
                shrink = pair_softmax(row, padded, low, high, factor, maximum, maximum + p.max_rows * 4, weights, rest)
                if shrink != _ONE:
                    scale_row(all_acc + at * p.width * 4, p.width, shrink)
        for i in range(num_heads):
            values = all_values + (first_head + i) * head_bytes
            soon = lines + (num_heads + i) * head_lines * 8
            weights, acc = all_weights + i * room * _TILE * 2, all_acc + i * room * p.width * 4
            if few:
                pair_weigh(rows, weights, _TILE, rest, values, offsets, padded, p.width, acc, all_keys, soon)
            else:
                pack_values(values, offsets, padded, p.width, packed, all_keys, soon)
                pair_product(
                    1, rows, weights, _TILE, rest, packed, p.width, padded // 2, p.width // LANES, acc, p.width
                )
        start = end

    for i in range(num_heads):
        for r in range(rows):
            n = i * room + r
            target = (first_row + r // p.group) * p.num_kv_heads * p.group + (first_head + i) * p.group + r % p.group
            store_row(tag, all_acc + n * p.width * 4, p.out + target * p.head_dim * 2, p.head_dim, _ONE / sums[n])
