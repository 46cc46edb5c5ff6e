"""The products of the compiled CPU attention: queries with keys, and weights with values.

Numba leaves vectorisation to LLVM's loop optimiser, which cannot know that the pointers here never alias, and keeps
accumulators in memory for it. So each of the two is an intrinsic that emits explicit vectors (`cpu_lanes.py`): register
tiles of `TILE_ROWS` query rows against several tokens (scores) or several columns (weighted values), as in any matrix
product. The codes of a quantised cache are multiplied as numbers; their scales go to scores and weights.
"""

# mypy: ignore-errors
# Intrinsics are typed by Numba: the signature that each returns says how.

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.attention.cpu_emit import FIRST_CACHE, SECOND_CACHE, plus
from engine.attention.cpu_lanes import (
    F32,
    I64,
    LANES,
    SIZES,
    const,
    fma,
    load,
    pointer,
    reduce_add,
    reduce_add_four,
    span,
    splat,
    steps,
    store,
)
from engine.attention.cpu_lines import Lines
from engine.attention.cpu_params import TILE_ROWS

TILE_TOKENS = 4
TILE_CHUNKS = 4
_AHEAD = SECOND_CACHE if LANES == 16 else FIRST_CACHE
"""The next tile does not fit beside this one into a first cache; how that is with 8 lanes was measured before."""


def _at(builder: Any, row: int, stride: Any, index: Any) -> Any:
    return builder.add(builder.mul(ir.Constant(I64, row), stride), index)


def _row(builder, rows, index):
    """Address of row number `index`: `rows` is a base address and the address of int64 offsets from it, in bytes."""
    base, offsets = rows
    return builder.add(base, builder.load(pointer(builder, offsets, index, 8, I64), align=8))


def _dot_tile(builder, tag, num_rows, num_tokens, q, q_stride, keys, width, out, out_stride):
    """out[r, t] = sum over width of q[r] * keys[t], for a literal number of rows and of addresses of keys."""
    zero = const(0.0)
    sums = [[cgutils.alloca_once_value(builder, zero) for _ in range(num_tokens)] for _ in range(num_rows)]
    with span(builder, width, LANES) as (column, _):
        queries = [load(builder, types.float32, q, _at(builder, r, q_stride, column)) for r in range(num_rows)]
        for t in range(num_tokens):
            key = load(builder, tag, keys[t], column)
            for r in range(num_rows):
                builder.store(fma(builder, queries[r], key, builder.load(sums[r][t])), sums[r][t])
    for r in range(num_rows):
        row = [builder.load(cell) for cell in sums[r]]
        total = reduce_add(builder, row[0]) if num_tokens == 1 else reduce_add_four(builder, row)
        store(builder, total, out, builder.mul(ir.Constant(I64, r), out_stride))


def _weighted_tile(builder, tag, num_rows, num_chunks, w, w_stride, values, tokens, acc, acc_stride, ahead=None):
    """acc[r, :num_chunks * LANES] += sum over tokens of w[r, t] * values[t], for literal numbers of rows and chunks."""
    columns = [ir.Constant(I64, c * LANES) for c in range(num_chunks)]
    places = [[_at(builder, r, acc_stride, column) for column in columns] for r in range(num_rows)]
    sums = [
        [cgutils.alloca_once_value(builder, load(builder, types.float32, acc, place)) for place in row]
        for row in places
    ]
    with span(builder, tokens, 1) as (token, _):
        if ahead is not None:
            lines, first_byte = ahead
            num_bytes = num_chunks * LANES * SIZES[tag]
            at = builder.add(first_byte, builder.mul(token, ir.Constant(I64, num_bytes)))
            line = builder.lshr(at, ir.Constant(I64, 6))
            for n in range(max(1, num_bytes // 64)):
                lines.ask(plus(builder, line, n))
        row_address = _row(builder, values, token)
        weights = []
        for r in range(num_rows):
            cell = pointer(builder, w, _at(builder, r, w_stride, token), 4, F32)
            weights.append(splat(builder, builder.load(cell, align=4)))
        for c, column in enumerate(columns):
            value = load(builder, tag, row_address, column)
            for r in range(num_rows):
                builder.store(fma(builder, weights[r], value, builder.load(sums[r][c])), sums[r][c])
    for r in range(num_rows):
        for c in range(num_chunks):
            store(builder, builder.load(sums[r][c]), acc, places[r][c])


@contextmanager
def _row_tiles(builder, rows):
    """Walk rows in register tiles; yields the first row and a way to emit the body for a tile of literal height.

    Two rows that are left take a tile of three, so that less has to be compiled: scratch has room for the third.
    """
    with span(builder, rows, TILE_ROWS) as (row, _):

        def each(body):
            several = builder.icmp_signed(">", builder.sub(rows, row), ir.Constant(I64, 1))
            with builder.if_else(several) as (then, otherwise):
                with then:
                    body(TILE_ROWS)
                with otherwise:
                    body(1)

        yield row, each


def _offset(builder, address, index, stride, size):
    """Address of element index * stride."""
    return builder.add(address, builder.mul(builder.mul(index, stride), ir.Constant(I64, size)))


@intrinsic(prefer_literal=True)
def scores(typingctx, tag, ahead, rows, q, base, offsets, tokens, width, out, out_stride, soon, lines):
    """out[r, t] = q[r] . key[t]: q float32 [rows, width], width a multiple of LANES, key t at base + offsets[t].

    offsets are int64 bytes. ahead is a literal: whether to ask, meanwhile, for as many bytes as are read, see `Lines`:
    soon is their base address, lines the address of their offsets.
    """

    def codegen(context, builder, signature, args):
        _, _, rows_, q_, base_, offsets_, tokens_, width_, out_, os_, soon_, lines_ = args
        one = ir.Constant(I64, 1)
        early = Lines(builder, soon_, lines_, _AHEAD)
        with _row_tiles(builder, rows_) as (row, each):
            q_row = _offset(builder, q_, row, width_, 4)
            out_row = _offset(builder, out_, row, os_, 4)

            def tile(num_rows):
                def body(t, num_tokens):
                    keys = [_row(builder, (base_, offsets_), plus(builder, t, n)) for n in range(num_tokens)]
                    if ahead.literal_value:
                        size = builder.mul(width_, ir.Constant(I64, SIZES[tag]))
                        first, stop = (
                            builder.lshr(builder.mul(size, plus(builder, t, n)), ir.Constant(I64, 6))
                            for n in (0, num_tokens)
                        )
                        with cgutils.for_range_slice(builder, first, stop, one, intp=I64) as (line, _):
                            early.ask(line)
                    target = _offset(builder, out_row, t, one, 4)
                    _dot_tile(builder, tag, num_rows, num_tokens, q_row, width_, keys, width_, target, os_)

                steps(builder, tokens_, TILE_TOKENS, body)

            each(tile)
        return context.get_dummy_value()

    return types.void(tag, ahead, *[types.int64] * 10), codegen


@intrinsic(prefer_literal=True)
def weigh(typingctx, tag, ahead, rows, w, w_stride, base, offsets, tokens, width, acc, soon, lines):
    """acc[r] += sum over t of w[r, t] * value[t]: acc float32 [rows, width], value t at base + offsets[t].

    See `scores` for ahead, soon and lines.
    """

    def codegen(context, builder, signature, args):
        _, _, rows_, w_, ws_, base_, offsets_, tokens_, width_, acc_, soon_, lines_ = args
        chunks = builder.sdiv(width_, ir.Constant(I64, LANES))
        lanes = ir.Constant(I64, LANES)
        with _row_tiles(builder, rows_) as (row, each):
            w_row = _offset(builder, w_, row, ws_, 4)
            acc_row = _offset(builder, acc_, row, width_, 4)

            def tile(num_rows):
                def body(c, num_chunks):
                    values = (_offset(builder, base_, c, lanes, SIZES[tag]), offsets_)
                    target = _offset(builder, acc_row, c, lanes, 4)
                    early = None
                    if ahead.literal_value and num_chunks == TILE_CHUNKS:
                        # The rows' bytes, column by column: the lines are those of as many bytes, in their own order.
                        first_byte = builder.mul(builder.mul(c, tokens_), ir.Constant(I64, LANES * SIZES[tag]))
                        early = Lines(builder, soon_, lines_, _AHEAD), first_byte
                    _weighted_tile(
                        builder, tag, num_rows, num_chunks, w_row, ws_, values, tokens_, target, width_, early
                    )

                steps(builder, chunks, TILE_CHUNKS, body)

            each(tile)
        return context.get_dummy_value()

    return types.void(tag, ahead, *[types.int64] * 10), codegen
