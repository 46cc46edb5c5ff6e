"""The compiled worker of the CPU attention: every thread of a call runs it and takes work until none is left.

One call is one layer. An item of work is a run of consecutive query rows of one sequence (one row when decoding), for
some of the KV heads. Where every sequence is one item, the item writes its own new keys and values first; else all are
written in a run before, so that no thread ever waits for another in here. The query heads that share a KV head are
rows of the same small matrix, so that each key and value is read and converted once for all of them.

Keys are walked in tiles of `TILE_KV` positions straight from the block table, softmax is kept online across tiles
(Milakov and Gimelshein 2018, "Online normalizer calculation for softmax"; Dao et al. 2022, "FlashAttention"). With few
rows the inner loops read the cache itself and convert in registers; with more, or an awkward head size, `GATHER`
positions at a time are converted to float32 first, which then all rows use.
"""

# mypy: ignore-errors
# Compiled functions are typed by Numba, from the tag.

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import carray, njit

from engine.attention.cpu_params import (
    ATTEND_AND_WRITE,
    CURSOR,
    GATHER,
    PARAMS,
    SLOT,
    TILE_KV,
    TILE_ROWS,
    WRITE,
    WRITE_ROWS,
)
from engine.attention.cpu_vector import (
    LANES,
    TILE_TOKENS,
    convert_row,
    copy_bytes,
    element_size,
    exp_row,
    fetch_add,
    fill,
    max_row,
    output_size,
    pointer_to,
    prefetch,
    scale_row,
    scores,
    softcap_row,
    store_row,
    weigh,
)

OPTIONS = {"error_model": "numpy", "boundscheck": False}
"""Nobody could catch an exception of the worker; its arguments are checked before."""

_compiled = njit(**OPTIONS)
_NEG_INF = np.float32(-np.inf)
_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)
_F32 = np.float32(0.0)  # the tag of float32 elements


@_compiled
def _gather(tag, p, table, base, start, n, target):
    """Positions start to start + n - 1 of one head as float32 rows of `width`, out of the blocks that hold them."""
    size = element_size(tag)
    for i in range(n):
        block = table[(start + i) // p.block_size]
        row = base + (block * p.block_stride + ((start + i) % p.block_size) * p.head_dim) * size
        convert_row(tag, row, target + i * p.width * 4, p.head_dim, p.width, _ONE)


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
def _softmax(rows, p, padded, weights, acc, maxima, sums):
    """Turn scores into weights relative to each row's running maximum, and bring its sum and accumulator along."""
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
def _attend(p, tag, table, first_row, first_pos, num_queries, head, scratch):
    """Attend with num_queries rows of one sequence, for the query heads of one KV head."""
    size = element_size(tag)
    rows = num_queries * p.group
    q = scratch
    acc = q + p.max_rows * p.width * 4
    weights = acc + p.max_rows * p.width * 4
    stats = weights + p.max_rows * TILE_KV * 4
    gathered = stats + p.max_rows * 2 * 4
    maxima = carray(pointer_to(stats), rows, np.float32)
    sums = carray(pointer_to(stats + p.max_rows * 4), rows, np.float32)
    spare = (rows + TILE_ROWS - 1) // TILE_ROWS * TILE_ROWS
    fill(acc, 0, spare * p.width, _ZERO)
    fill(q, rows * p.width, spare * p.width, _ZERO)
    for r in range(rows):
        query_head = head * p.group + r % p.group
        source = (first_row + r // p.group) * p.query_token_stride + query_head * p.query_head_stride
        convert_row(tag, p.query + source * size, q + r * p.width * 4, p.head_dim, p.width, p.scale)
        maxima[r] = _NEG_INF
        sums[r] = _ZERO
        if p.sinks != 0:
            maxima[r] = carray(pointer_to(p.sinks), query_head + 1, np.float32)[query_head]
            sums[r] = _ONE

    keys = p.cache + (p.layer_offset + head * p.block_size * p.head_dim) * size
    values = keys + p.num_kv_heads * p.block_size * p.head_dim * size
    direct = rows <= TILE_ROWS and p.width == p.head_dim and p.block_size >= TILE_TOKENS
    stop = first_pos + num_queries
    start = max(0, first_pos - p.window + 1) if p.window > 0 else 0
    while start < stop:
        end = min(start + TILE_KV, stop)
        n = end - start
        padded = (n + LANES - 1) // LANES * LANES
        t = start
        while t < end:
            if direct:
                at = (table[t // p.block_size] * p.block_stride + (t % p.block_size) * p.head_dim) * size
                m = min(end - t, p.block_size - t % p.block_size)
                if t + m < end:
                    ahead = keys + table[(t + m) // p.block_size] * p.block_stride * size
                    prefetch(ahead, min(end - t - m, p.block_size) * p.head_dim * size)
                scores(tag, rows, q, keys + at, p.head_dim, m, p.width, weights + (t - start) * 4, TILE_KV)
            else:
                m = min(end - t, GATHER)
                _gather(tag, p, table, keys, t, m, gathered)
                scores(_F32, rows, q, gathered, p.width, m, p.width, weights + (t - start) * 4, TILE_KV)
            t += m
        if p.softcap != _ZERO:
            for r in range(rows):
                softcap_row(weights + r * TILE_KV * 4, padded, p.softcap)
        _mask(rows, first_pos, p, start, n, padded, weights)
        _softmax(rows, p, padded, weights, acc, maxima, sums)
        t = start
        while t < end:
            if direct:
                at = (table[t // p.block_size] * p.block_stride + (t % p.block_size) * p.head_dim) * size
                m = min(end - t, p.block_size - t % p.block_size)
                if t + m < end:
                    ahead = values + table[(t + m) // p.block_size] * p.block_stride * size
                    prefetch(ahead, min(end - t - m, p.block_size) * p.head_dim * size)
                weigh(tag, rows, weights + (t - start) * 4, TILE_KV, values + at, p.head_dim, m, p.width, acc)
            else:
                m = min(end - t, GATHER)
                _gather(tag, p, table, values, t, m, gathered)
                weigh(_F32, rows, weights + (t - start) * 4, TILE_KV, gathered, p.width, m, p.width, acc)
            t += m
        start = end

    out_size = output_size(tag)
    for r in range(rows):
        target = (first_row + r // p.group) * p.num_kv_heads * p.group + head * p.group + r % p.group
        store_row(tag, acc + r * p.width * 4, p.out + target * p.head_dim * out_size, p.head_dim, _ONE / sums[r])


@_compiled
def _write(p, size, first_row, last_row, first_head, last_head):
    """Put keys and values of rows and KV heads into their slots; the ends are exclusive."""
    slots = carray(pointer_to(p.slot_mapping), p.num_tokens, np.int64)
    count = p.head_dim * size
    for row in range(first_row, last_row):
        slot = slots[row]
        if slot < 0:
            continue
        at = (slot // p.block_size) * p.block_stride + p.layer_offset + (slot % p.block_size) * p.head_dim
        for head in range(first_head, last_head):
            key = row * p.key_token_stride + head * p.key_head_stride
            value = row * p.value_token_stride + head * p.value_head_stride
            to = at + head * p.block_size * p.head_dim
            copy_bytes(p.cache + to * size, p.key + key * size, count)
            to += p.num_kv_heads * p.block_size * p.head_dim
            copy_bytes(p.cache + to * size, p.value + value * size, count)


def make_worker(tag: Any) -> Any:
    """The worker of an element type, still Python: it works on the call whose `PARAMS` record is at an address.

    Nothing but `_attend` is a function of its own below it: Numba generates machine code for each function once more in
    every function that calls it.
    """

    def worker(address):
        p = carray(pointer_to(address), 1, PARAMS)[0]
        size = element_size(tag)
        if p.phase == WRITE:
            while True:
                first_row = fetch_add(p.counters + CURSOR, 1) * WRITE_ROWS
                if first_row >= p.num_tokens:
                    return
                _write(p, size, first_row, min(first_row + WRITE_ROWS, p.num_tokens), 0, p.num_kv_heads)

        scratch = p.scratch + fetch_add(p.counters + SLOT, 1) * p.scratch_stride * 4
        item_seq = carray(pointer_to(p.item_seq), p.num_items, np.int32)
        item_start = carray(pointer_to(p.item_start), p.num_items, np.int32)
        item_len = carray(pointer_to(p.item_len), p.num_items, np.int32)
        head_groups = p.num_kv_heads // p.heads_per_item
        while True:
            ticket = fetch_add(p.counters + CURSOR, 1)
            if ticket >= p.num_items * head_groups:
                return
            item = ticket // head_groups
            seq = np.int64(item_seq[item])
            starts = carray(pointer_to(p.query_start_loc), seq + 2, np.int32)
            seq_len = np.int64(carray(pointer_to(p.seq_lens), seq + 1, np.int32)[seq])
            table = carray(pointer_to(p.block_table + seq * p.table_stride * 4), p.table_stride, np.int32)
            first_row = np.int64(item_start[item])
            num_queries = np.int64(item_len[item])
            first_pos = seq_len - starts[seq + 1] + first_row
            first_head = (ticket % head_groups) * p.heads_per_item
            last_head = first_head + p.heads_per_item
            if p.phase == ATTEND_AND_WRITE:
                _write(p, size, first_row, first_row + num_queries, first_head, last_head)
            for head in range(first_head, last_head):
                _attend(p, tag, table, first_row, first_pos, num_queries, head, scratch)

    return worker
