"""Vector arithmetic on one row of floats, for the compiled CPU attention: softmax, norms, positions, codes and back.

Each is an intrinsic that emits explicit vectors (`cpu_lanes.py`), for the reason that `cpu_products.py` gives.
"""

# mypy: ignore-errors
# Intrinsics are typed by Numba: the signature that each returns says how.

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.attention.cpu_lanes import (
    F32,
    I32,
    I64,
    LANES,
    LARGEST_CODE,
    chunks,
    const,
    exp,
    load,
    pointer,
    reduce_add,
    rms_norm,
    span,
    splat,
    store,
    to_codes,
)


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
