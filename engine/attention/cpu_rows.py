"""The rows of a call on their way into the compiled CPU attention: queries to be used, keys and values to be kept."""

# mypy: ignore-errors
# Compiled functions are typed by Numba, from the tag.

from __future__ import annotations

import numpy as np
from numba import carray, njit

from engine.attention.cpu_compile import OPTIONS
from engine.attention.cpu_memory import element_size, pointer_to
from engine.attention.cpu_vector import convert_row, norm_row, put_row, rotate_row

_compiled = njit(**OPTIONS)
_NEG_INF = np.float32(-np.inf)
_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)


@_compiled
def fetch_query(p, tag, row, position, head, scale, target):
    """Set `width` floats to a row of a query head, normed and turned to its position if it is to be, times a scale."""
    source = row * p.query_token_stride + head * p.query_head_stride
    factor = scale if p.rotary == 0 else _ONE
    convert_row(tag, p.query + source * element_size(tag), target, p.head_dim, p.width, factor)
    if p.rotary != 0:
        if p.query_norm != 0:
            norm_row(tag, target, p.head_dim, p.query_norm, p.query_eps)
        rotate_row(target, p.rotary + position * p.head_dim * 4, p.head_dim, scale)


@_compiled
def first_sums(p, head):
    """Maximum and sum of a row's softmax before anything is seen."""
    if p.sinks == 0:
        return _NEG_INF, _ZERO
    return carray(pointer_to(p.sinks), head + 1, np.float32)[head], _ONE


@_compiled
def write_rows(p, tag, cache_tag, first_row, last_row, first_head, last_head, floats):
    """Put keys and values of rows and KV heads into their slots; the ends are exclusive.

    A row passes through `width` floats of scratch, where a key gets its norm and its position.
    """
    slots = carray(pointer_to(p.slot_mapping), p.num_tokens, np.int64)
    size, cache_size = element_size(tag), element_size(cache_tag)
    for row in range(first_row, last_row):
        slot = slots[row]
        if slot < 0:
            continue
        at = (slot // p.block_size) * p.block_stride + p.layer_offset + (slot % p.block_size) * p.head_dim
        for head in range(first_head, last_head):
            source = p.key + (row * p.key_token_stride + head * p.key_head_stride) * size
            to = at + head * p.block_size * p.head_dim
            for is_value in range(2):
                if is_value:
                    source = p.value + (row * p.value_token_stride + head * p.value_head_stride) * size
                    to += p.num_kv_heads * p.block_size * p.head_dim
                convert_row(tag, source, floats, p.head_dim, p.width, _ONE)
                if p.rotary != 0 and not is_value:
                    if p.key_norm != 0:
                        norm_row(tag, floats, p.head_dim, p.key_norm, p.key_eps)
                    position = carray(pointer_to(p.positions), p.num_tokens, np.int64)[row]
                    rotate_row(floats, p.rotary + position * p.head_dim * 4, p.head_dim, _ONE)
                scale = put_row(cache_tag, floats, p.cache + to * cache_size, p.head_dim)
                if p.scales != 0:
                    carray(pointer_to(p.scales + to // p.head_dim * 4), 1, np.float32)[0] = scale
