"""Vector arithmetic for the compiled CPU attention: the few inner loops that its speed depends on, as LLVM vectors.

Numba leaves vectorisation to LLVM's loop optimiser, which cannot know that the pointers here never alias, and keeps
accumulators in memory for it. So each inner loop is an intrinsic that emits explicit vectors (`cpu_lanes.py`): register
tiles of `TILE_ROWS` query rows against several tokens (scores) or several columns (weighted values), as in any matrix
product. The scales of a quantised cache's codes are applied to scores and weights.
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
    I32,
    I64,
    LANES,
    LARGEST_CODE,
    SIZES,
    chunks,
    const,
    exp,
    fma,
    load,
    pointer,
    reduce_add,
    reduce_add_four,
    rms_norm,
    span,
    splat,
    steps,
    store,
    to_codes,
)
from engine.attention.cpu_lines import Lines
from engine.attention.cpu_params import TILE_ROWS

TILE_TOKENS = 4
TILE_CHUNKS = 4


def _at(builder: Any, row: int, stride: Any, index: Any) -> Any:
    return builder.add(builder.mul(ir.Constant(I64, row), stride), index)


def _row(builder, rows, index):
    """Address of row number `index`: `rows` is a base address and the address of int64 offsets from it, in bytes."""
    base, offsets = rows
    return builder.add(base, builder.load(pointer(builder, offsets, index, 8, I64), align=8))


_AHEAD = SECOND_CACHE if LANES == 16 else FIRST_CACHE
"""The next tile does not fit beside this one into a first cache; how that is with 8 lanes was measured before."""


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


@intrinsic
def fill_offsets(typingctx, target, index, count, start, step):
    """Set the int64 target[index:index + count] to start, start + step, ..., and up to 7 behind them to anything."""

    def codegen(context, builder, signature, args):
        target_, index_, count_, start_, step_ = args
        vec, lanes = ir.VectorType(I64, 8), 8
        numbers = builder.mul(splat(builder, step_, lanes), ir.Constant(vec, list(range(lanes))))
        values = cgutils.alloca_once_value(builder, builder.add(splat(builder, start_, lanes), numbers))
        more = splat(builder, builder.mul(step_, ir.Constant(I64, lanes)), lanes)
        with span(builder, count_, lanes) as (i, _):
            value = builder.load(values)
            builder.store(value, pointer(builder, target_, builder.add(index_, i), 8, vec), align=8)
            builder.store(builder.add(value, more), values)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), codegen


@intrinsic
def max_row(typingctx, row, count):
    """The largest of count floats (a multiple of LANES); NaN is passed over."""

    def codegen(context, builder, signature, args):
        row_, count_ = args
        best = cgutils.alloca_once_value(builder, const(float("-inf")))
        with span(builder, count_, LANES) as (i, _):
            value = load(builder, types.float32, row_, i)
            old = builder.load(best)
            builder.store(builder.select(builder.fcmp_ordered(">", value, old), value, old), best)
        vec = builder.load(best)
        result = builder.extract_element(vec, ir.Constant(I32, 0))
        for lane in range(1, LANES):
            value = builder.extract_element(vec, ir.Constant(I32, lane))
            result = builder.select(builder.fcmp_ordered(">", value, result), value, result)
        return result

    return types.float32(types.int64, types.int64), codegen


@intrinsic
def exp_row(typingctx, row, count, shift):
    """Replace count floats (a multiple of LANES) by exp(x - shift) and return their sum."""

    def codegen(context, builder, signature, args):
        row_, count_, shift_ = args
        total = cgutils.alloca_once_value(builder, const(0.0))
        shifts = splat(builder, shift_)
        with span(builder, count_, LANES) as (i, _):
            value = exp(builder, builder.fsub(load(builder, types.float32, row_, i), shifts))
            store(builder, value, row_, i)
            builder.store(builder.fadd(builder.load(total), value), total)
        return reduce_add(builder, builder.load(total))

    return types.float32(types.int64, types.int64, types.float32), codegen


@intrinsic
def softcap_row(typingctx, row, count, cap):
    """Replace count floats (a multiple of LANES) by cap * tanh(x / cap), tanh(y) = 1 - 2 / (exp(2 y) + 1)."""

    def codegen(context, builder, signature, args):
        row_, count_, cap_ = args
        caps = splat(builder, cap_)
        factor = splat(builder, builder.fdiv(ir.Constant(F32, 2.0), cap_))
        with span(builder, count_, LANES) as (i, _):
            doubled = builder.fmul(load(builder, types.float32, row_, i), factor)
            # tanh is 1 in float32 long before 2 y = 60; beyond 88 the exponential would overflow.
            doubled = builder.select(builder.fcmp_ordered(">", doubled, const(60.0)), const(60.0), doubled)
            quotient = builder.fdiv(const(2.0), builder.fadd(exp(builder, doubled), const(1.0)))
            store(builder, builder.fmul(caps, builder.fsub(const(1.0), quotient)), row_, i)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32), codegen


@intrinsic
def scale_row(typingctx, row, count, factor):
    """Multiply count floats (a multiple of LANES) by a factor."""

    def codegen(context, builder, signature, args):
        row_, count_, factor_ = args
        factors = splat(builder, factor_)
        with span(builder, count_, LANES) as (i, _):
            store(builder, builder.fmul(load(builder, types.float32, row_, i), factors), row_, i)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32), codegen


@intrinsic
def convert_row(typingctx, tag, source, target, count, padded, factor):
    """Set target[:count] to source * factor as float32 and target[count:padded] to 0."""

    def codegen(context, builder, signature, args):
        _, source_, target_, count_, padded_, factor_ = args

        def chunk(i, lanes):
            value = builder.fmul(load(builder, tag, source_, i, lanes), splat(builder, factor_, lanes))
            store(builder, value, target_, i)

        chunks(builder, count_, chunk)
        with cgutils.for_range_slice(builder, count_, padded_, ir.Constant(I64, 1), intp=I64) as (i, _):
            store(builder, const(0.0, F32, 1), target_, i)
        return context.get_dummy_value()

    return types.void(tag, types.int64, types.int64, types.int64, types.int64, types.float32), codegen


@intrinsic
def norm_row(typingctx, tag, row, count, weight, eps):
    """Replace count floats by their RMS norm, with weights of a tag."""

    def codegen(context, builder, signature, args):
        _, row_, count_, weight_, eps_ = args

        def read(i, lanes):
            return load(builder, types.float32, row_, i, lanes)

        def write(i, value):
            store(builder, value, row_, i)

        rms_norm(builder, tag, count_, eps_, weight_, read, read, write)
        return context.get_dummy_value()

    return types.void(tag, types.int64, types.int64, types.int64, types.float32), codegen


@intrinsic
def rotate_row(typingctx, row, table, count, factor):
    """Turn count floats to a position and multiply them by a factor.

    Rotary positions (Su et al., 2021) with the halves of a head as partners, as transformers has them; table has the
    cosines of the position's count / 2 angles and then their sines.
    """

    def codegen(context, builder, signature, args):
        row_, table_, count_, factor_ = args
        half = builder.lshr(count_, ir.Constant(I64, 1))

        def chunk(i, lanes):
            j = builder.add(half, i)
            x, y = (load(builder, types.float32, row_, at, lanes) for at in (i, j))
            cos, sin = (load(builder, types.float32, table_, at, lanes) for at in (i, j))
            factors = splat(builder, factor_, lanes)
            first = builder.fsub(builder.fmul(x, cos), builder.fmul(y, sin))
            second = builder.fadd(builder.fmul(y, cos), builder.fmul(x, sin))
            store(builder, builder.fmul(first, factors), row_, i)
            store(builder, builder.fmul(second, factors), row_, j)

        chunks(builder, half, chunk)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.float32), codegen


@intrinsic
def store_row(typingctx, tag, source, target, count, factor):
    """Store source * factor as elements of a tag."""

    def codegen(context, builder, signature, args):
        _, source_, target_, count_, factor_ = args

        def chunk(i, lanes):
            value = builder.fmul(load(builder, types.float32, source_, i, lanes), splat(builder, factor_, lanes))
            store(builder, value, target_, i, tag)

        chunks(builder, count_, chunk)
        return context.get_dummy_value()

    return types.void(tag, types.int64, types.int64, types.int64, types.float32), codegen


@intrinsic
def put_row(typingctx, cache_tag, source, target, count):
    """Store count floats as the cache has them; of a quantised one the result is their scale, else 1.

    See `engine.attention.quantised.quantise`, whose codes and scales these are, bit by bit.
    """

    def codegen(context, builder, signature, args):
        _, source_, target_, count_ = args

        def element(i, lanes):
            return load(builder, types.float32, source_, i, lanes)

        if cache_tag not in LARGEST_CODE:
            chunks(builder, count_, lambda i, lanes: store(builder, element(i, lanes), target_, i, cache_tag))
            return ir.Constant(F32, 1.0)

        # As integers, the magnitudes of floats have the same order, and a NaN is the largest.
        largest = {n: cgutils.alloca_once_value(builder, const(0, I32, n)) for n in (LANES, 1)}

        def compare_chunk(i, lanes):
            bits = builder.bitcast(element(i, lanes), ir.VectorType(I32, lanes))
            bits = builder.and_(bits, const(0x7FFFFFFF, I32, lanes))
            old = builder.load(largest[lanes])
            builder.store(builder.select(builder.icmp_unsigned(">", bits, old), bits, old), largest[lanes])

        chunks(builder, count_, compare_chunk)
        best = builder.extract_element(builder.load(largest[1]), ir.Constant(I32, 0))
        vec = builder.load(largest[LANES])
        for lane in range(LANES):
            bits = builder.extract_element(vec, ir.Constant(I32, lane))
            best = builder.select(builder.icmp_unsigned(">", bits, best), bits, best)
        scale = builder.fdiv(builder.bitcast(best, F32), ir.Constant(F32, LARGEST_CODE[cache_tag]))
        zero = builder.fcmp_ordered("==", scale, ir.Constant(F32, 0.0))
        scale = builder.select(zero, ir.Constant(F32, 1.0), scale)
        infinite = builder.icmp_unsigned(">=", best, ir.Constant(I32, 0x7F800000))
        scale = builder.select(infinite, ir.Constant(F32, float("nan")), scale)

        def code_chunk(i, lanes):
            scaled = builder.fdiv(element(i, lanes), splat(builder, scale, lanes))
            codes = to_codes(builder, cache_tag, scaled)
            builder.store(codes, pointer(builder, target_, i, 1, codes.type), align=1)

        chunks(builder, count_, code_chunk)
        return scale

    return types.float32(cache_tag, types.int64, types.int64, types.int64), codegen


@intrinsic
def multiply_row(typingctx, row, count, factors):
    """Multiply count floats (a multiple of LANES), each by its own factor."""

    def codegen(context, builder, signature, args):
        row_, count_, factors_ = args
        with span(builder, count_, LANES) as (i, _):
            factor = load(builder, types.float32, factors_, i)
            store(builder, builder.fmul(load(builder, types.float32, row_, i), factor), row_, i)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@intrinsic
def fill(typingctx, target, start, stop, value):
    """Set the floats target[start:stop] to a value."""

    def codegen(context, builder, signature, args):
        target_, start_, stop_, value_ = args
        first = builder.inttoptr(target_, F32.as_pointer())
        with cgutils.for_range_slice(builder, start_, stop_, ir.Constant(I64, 1), intp=I64) as (i, _):
            builder.store(value_, builder.gep(first, [i]), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.float32), codegen


@intrinsic
def element_size(typingctx, tag):
    """Bytes of one element of a tag."""
    size = SIZES[tag]

    def codegen(context, builder, signature, args):
        return ir.Constant(I64, size)

    return types.int64(tag), codegen


@intrinsic
def copy_bytes(typingctx, target, source, count):
    """Copy count bytes; the two do not overlap."""

    def codegen(context, builder, signature, args):
        target_, source_, count_ = args
        byte = ir.IntType(8).as_pointer()
        cgutils.raw_memcpy(builder, builder.inttoptr(target_, byte), builder.inttoptr(source_, byte), count_, 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@intrinsic
def fetch_add(typingctx, address, amount):
    """Add to an int64 that other threads add to as well; the value before."""

    def codegen(context, builder, signature, args):
        pointer = builder.inttoptr(args[0], I64.as_pointer())
        return builder.atomic_rmw("add", pointer, args[1], "acq_rel")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def pointer_to(typingctx, address):
    """An address as the pointer that `numba.carray` takes."""

    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), codegen
