"""The compiled worker of the CPU attention: every thread of a call runs it and takes work until none is left.

One call is one layer. An item of work is a run of consecutive query rows of one sequence (one row when decoding), for
some of the KV heads. Where every sequence is one item, the item writes its own new keys and values first; else all are
written in a run before, so that no thread ever waits for another in here. The query heads that share a KV head are
rows of the same small matrix, so that each key and value is read and converted once for all of them.

Keys are walked in tiles of `TILE_KV` positions. The block table is looked at once per tile, for the offset of every
position; the inner loops take offsets and neither know blocks nor care for their size. Softmax is kept online across
tiles (Milakov and Gimelshein 2018, "Online normalizer calculation for softmax"; Dao et al. 2022, "FlashAttention").
With few rows the inner loops read the cache itself and convert in registers, a small tile of several heads at a time;
with more, or an awkward head size, `GATHER` positions at a time become float32 first, which then all rows use.

The codes of a quantised cache are treated as numbers; the scales of a tile's keys are applied to its scores, those of
its values to its weights: one multiplication for each position instead of one for each element.
"""

# mypy: ignore-errors
# Compiled functions are typed by Numba, from the tag.

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import carray, njit

from engine.attention import cpu_pairs
from engine.attention.cpu_ahead import list_next_lines, touch_pages
from engine.attention.cpu_compile import OPTIONS
from engine.attention.cpu_lanes import LANES
from engine.attention.cpu_lines import LINE
from engine.attention.cpu_memory import element_size, fetch_add, fill, fill_offsets, pointer_to
from engine.attention.cpu_pair_kernel import attend_pairs
from engine.attention.cpu_params import (
    ATTEND_AND_WRITE,
    CURSOR,
    FEW_PAIR_ROWS,
    GATHER,
    PARAMS,
    SLOT,
    TILE_FEW,
    TILE_KV,
    TILE_ROWS,
    WRITE,
    WRITE_ROWS,
)
from engine.attention.cpu_products import scores, weigh
from engine.attention.cpu_rows import fetch_query, first_sums, write_rows
from engine.attention.cpu_tables import (
    copy_scales,
    first_seen,
    item_of,
    locate,
    table_of,
)
from engine.attention.cpu_vector import convert_row, exp_row, max_row, multiply_row, scale_row, softcap_row, store_row

_compiled = njit(**OPTIONS)
_NEG_INF = np.float32(-np.inf)
_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)
_F32 = np.float32(0.0)  # the tag of float32 elements


@_compiled
def _gather(tag, p, base, offsets, n, target):
    """The rows at n offsets as float32 rows of `width`."""
    rows = carray(pointer_to(offsets), n, np.int64)
    for i in range(n):
        convert_row(tag, base + rows[i], target + i * p.width * 4, p.head_dim, p.width, _ONE)


@_compiled
def _mask(rows, first_pos, p, start, n, padded, weights):
    """Set to minus infinity what a row may not see, and the rest of its last vector."""
    for r in range(rows):
        position = first_pos + r // p.group
        row = weights + r * TILE_KV * 4
        low = 0
        if p.window > 0:
            low = min(n, max(0, position - p.window + 1 - start))
        high = max(low, min(n, position + 1 - start))
        fill(row, 0, low, _NEG_INF)
        fill(row, high, padded, _NEG_INF)


@_compiled
def _softmax(rows, p, padded, weights, acc, stats):
    """Turn scores into weights relative to each row's running maximum, and bring its sum and accumulator along."""
    maxima = carray(pointer_to(stats), rows, np.float32)
    sums = carray(pointer_to(stats + p.max_rows * 4), rows, np.float32)
    for r in range(rows):
        row = weights + r * TILE_KV * 4
        old = maxima[r]
        new = max(old, max_row(row, padded))
        if new == _NEG_INF:
            # Nothing visible yet; exp(-inf - -inf) would be NaN.
            fill(row, 0, padded, _ZERO)
            continue
        total = exp_row(row, padded, new)
        if old != _NEG_INF and old != new:
            shrink = np.float32(math.exp(old - new))
            sums[r] = sums[r] * shrink + total
            scale_row(acc + r * p.width * 4, p.width, shrink)
        else:
            sums[r] += total
        maxima[r] = new


@_compiled
def _begin(p, tag, rows, first_row, first_pos, head, q, acc, stats):
    """Fetch the queries of one KV head as float32, ready for scores; nothing is summed yet."""
    maxima = carray(pointer_to(stats), rows, np.float32)
    sums = carray(pointer_to(stats + p.max_rows * 4), rows, np.float32)
    spare = (rows + TILE_ROWS - 1) // TILE_ROWS * TILE_ROWS
    fill(acc, 0, spare * p.width, _ZERO)
    fill(q, rows * p.width, spare * p.width, _ZERO)
    for r in range(rows):
        query_head = head * p.group + r % p.group
        query = r // p.group
        fetch_query(p, tag, first_row + query, first_pos + query, query_head, p.scale, q + r * p.width * 4)
        maxima[r], sums[r] = first_sums(p, query_head)


@_compiled
def _attend(p, tag, cache_tag, table, first_row, first_pos, num_queries, first_head, last_head, scratch):
    """Attend with num_queries rows of one sequence, for the query heads of some KV heads: of one where rows are many.

    A tile is read for all of the heads before the next one is: they lie side by side in a block. Meanwhile the next
    tile is fetched, in the order in which it lies in memory, as a processor does by itself where there are no blocks.
    """
    size = element_size(cache_tag)
    rows = num_queries * p.group
    offsets = scratch
    lines = offsets + TILE_KV * 8
    in_scratch = lines + p.max_lines * 8
    all_q = in_scratch + GATHER * 8
    all_acc = all_q + p.max_rows * p.width * 4
    all_weights = all_acc + p.max_rows * p.width * 4
    stats = all_weights + p.max_rows * TILE_KV * 4
    key_scales = stats + p.max_rows * 2 * 4
    value_scales = key_scales + TILE_KV * 4
    gathered = value_scales + TILE_KV * 4
    sums = carray(pointer_to(stats + p.max_rows * 4), p.max_rows, np.float32)
    for head in range(first_head, last_head):
        i = (head - first_head) * TILE_ROWS
        q, acc = all_q + i * p.width * 4, all_acc + i * p.width * 4
        _begin(p, tag, rows, first_row, first_pos, head, q, acc, stats + i * 4)

    head_bytes = p.block_size * p.head_dim * size
    all_keys = p.cache + p.layer_offset * size
    all_values = all_keys + p.num_kv_heads * head_bytes
    direct = rows <= TILE_ROWS and p.width == p.head_dim
    tile = TILE_FEW if direct else TILE_KV
    if not direct:
        fill_offsets(in_scratch, 0, GATHER, 0, p.width * 4)
    stop = first_pos + num_queries
    start = first_seen(p, first_pos)
    while start < stop:
        end = min(start + tile, stop)
        n = end - start
        padded = (n + LANES - 1) // LANES * LANES
        locate(p, size, table, start, n, 0, offsets, 0)
        head_lines = n * p.head_dim * size // LINE
        if direct:
            room = min((last_head - first_head) * head_lines + 2, p.max_lines)
            list_next_lines(p, size, table, end, stop, tile, first_head, last_head - first_head, 1, lines, room)
            touch_pages(p, size, table, end, stop, tile, first_head, last_head - first_head, all_keys)
        for head in range(first_head, last_head):
            i = (head - first_head) * TILE_ROWS
            q, acc = all_q + i * p.width * 4, all_acc + i * p.width * 4
            weights = all_weights + i * TILE_KV * 4
            keys = all_keys + head * head_bytes
            if p.scales != 0:
                first_scale = p.layer_offset // p.head_dim + head * p.block_size
                copy_scales(p, table, start, n, first_scale, key_scales)
                copy_scales(p, table, start, n, first_scale + p.num_kv_heads * p.block_size, value_scales)
            if direct:
                soon = lines + (head - first_head) * head_lines * 8
                scores(cache_tag, 1, rows, q, keys, offsets, n, p.width, weights, TILE_KV, all_keys, soon)
            else:
                for t in range(0, n, GATHER):
                    m = min(n - t, GATHER)
                    _gather(cache_tag, p, keys, offsets + t * 8, m, gathered)
                    scores(_F32, 0, rows, q, gathered, in_scratch, m, p.width, weights + t * 4, TILE_KV, 0, 0)
            if p.scales != 0:
                for r in range(rows):
                    multiply_row(weights + r * TILE_KV * 4, padded, key_scales)
            if p.softcap != _ZERO:
                for r in range(rows):
                    softcap_row(weights + r * TILE_KV * 4, padded, p.softcap)
            _mask(rows, first_pos, p, start, n, padded, weights)
            _softmax(rows, p, padded, weights, acc, stats + i * 4)
            if p.scales != 0:
                for r in range(rows):
                    multiply_row(weights + r * TILE_KV * 4, padded, value_scales)
        for head in range(first_head, last_head):
            i = (head - first_head) * TILE_ROWS
            weights, acc = all_weights + i * TILE_KV * 4, all_acc + i * p.width * 4
            values = all_values + head * head_bytes
            if direct:
                soon = lines + (head - first_head) * head_lines * 8
                weigh(cache_tag, 1, rows, weights, TILE_KV, values, offsets, n, p.width, acc, all_values, soon)
            else:
                for t in range(0, n, GATHER):
                    m = min(n - t, GATHER)
                    _gather(cache_tag, p, values, offsets + t * 8, m, gathered)
                    weigh(_F32, 0, rows, weights + t * 4, TILE_KV, gathered, in_scratch, m, p.width, acc, 0, 0)
        start = end

    out_size = element_size(tag)
    for head in range(first_head, last_head):
        i = (head - first_head) * TILE_ROWS
        for r in range(rows):
            target = (first_row + r // p.group) * p.num_kv_heads * p.group + head * p.group + r % p.group
            acc = all_acc + (i + r) * p.width * 4
            store_row(tag, acc, p.out + target * p.head_dim * out_size, p.head_dim, _ONE / sums[i + r])


def make_worker(tag: Any, cache_tag: Any) -> Any:
    """The worker of an element type and a cache's, still Python: it works on the call whose `PARAMS` are at an address.

    Numba generates machine code for each function once more in every function above it: what is long is called from one
    place.
    """
    # A constant for Numba, which then leaves the other branch out.
    pairs = cpu_pairs.supported() and tag.dtype == cache_tag.dtype == np.uint16

    def worker(address):
        p = carray(pointer_to(address), 1, PARAMS)[0]
        scratch = p.scratch + fetch_add(p.counters + SLOT, 1) * p.scratch_stride * 4
        if p.phase == WRITE:
            while True:
                first_row = fetch_add(p.counters + CURSOR, 1) * WRITE_ROWS
                if first_row >= p.num_tokens:
                    return
                last_row = min(first_row + WRITE_ROWS, p.num_tokens)
                write_rows(p, tag, cache_tag, first_row, last_row, 0, p.num_kv_heads, scratch)

        while True:
            ticket = fetch_add(p.counters + CURSOR, 1)
            if ticket >= p.num_tickets:
                return
            seq, first_row, num_queries, first_pos, first_head = item_of(p, ticket)
            last_head = first_head + p.heads_per_item
            if p.phase == ATTEND_AND_WRITE:
                write_rows(p, tag, cache_tag, first_row, first_row + num_queries, first_head, last_head, scratch)
            rows, table = num_queries * p.group, table_of(p, seq)
            if pairs and p.pairs != 0:
                together = p.heads_per_item if rows <= FEW_PAIR_ROWS else 1
                for head in range(first_head, last_head, together):
                    attend_pairs(p, tag, table, first_row, first_pos, num_queries, head, head + together, scratch)
                continue
            together = p.heads_per_item if rows <= TILE_ROWS and p.width == p.head_dim else 1
            for head in range(first_head, last_head, together):
                _attend(p, tag, cache_tag, table, first_row, first_pos, num_queries, head, head + together, scratch)

    return worker
