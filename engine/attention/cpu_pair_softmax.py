"""The softmax of the compiled CPU attention where weights go on as bfloat16 (`cpu_pairs.py`): one pass a row."""

# mypy: ignore-errors
# Intrinsics are typed by Numba: the signature that each returns says how.

from __future__ import annotations

import math

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.attention.cpu_lanes import F32, I32, I64, const, fma, load, pointer, reduce_add, span, splat, store
from engine.attention.cpu_pairs import LANES, largest_of, power_of_two, split

_F32 = types.float32


@intrinsic
def pair_softmax(typingctx, row, count, low, high, factor, maximum, total, weights, rest):
    """Turn a row of scores into weights relative to the running maximum, and bring that and the sum along.

    Args are addresses: of count scores (a multiple of 16), to be multiplied by a factor, of which low to high - 1 can
    be seen; of the row's maximum and sum, float32; of its weights, bfloat16, which lie `rest` bytes before what is
    left of them.

    Returns:
        What everything that was weighed before is to be multiplied by.
    """

    def codegen(context, builder, signature, args):
        row_, count_, low_, high_, factor_, maximum_, total_, weights_, rest_ = args
        ints = ir.VectorType(I32, LANES)
        lanes = ir.Constant(ints, list(range(LANES)))
        infinity = const(float("-inf"), F32, LANES)
        factors = splat(builder, factor_, LANES)
        low_, high_ = (splat(builder, builder.trunc(bound, I32), LANES) for bound in (low_, high_))
        best = cgutils.alloca_once_value(builder, infinity)
        with span(builder, count_, LANES) as (i, _):
            position = builder.add(lanes, splat(builder, builder.trunc(i, I32), LANES))
            seen = builder.and_(builder.icmp_signed(">=", position, low_), builder.icmp_signed("<", position, high_))
            score = builder.fmul(load(builder, _F32, row_, i, LANES), factors)
            score = builder.select(seen, score, infinity)
            store(builder, score, row_, i)
            before = builder.load(best)
            builder.store(builder.select(builder.fcmp_ordered(">", score, before), score, before), best)
        largest = largest_of(builder, builder.load(best))
        zero = ir.Constant(I64, 0)
        maximum_, total_ = (pointer(builder, address, zero, 4, F32) for address in (maximum_, total_))
        old = builder.load(maximum_)
        new = builder.select(builder.fcmp_ordered(">", largest, old), largest, old)
        builder.store(new, maximum_)
        # Where nothing is visible yet, exp(-inf - -inf) would be NaN.
        nothing = builder.fcmp_ordered("==", new, ir.Constant(F32, float("-inf")))
        base = builder.select(nothing, ir.Constant(F32, 0.0), new)
        binary = const(math.log2(math.e), F32, LANES)
        shift = builder.fneg(builder.fmul(splat(builder, base, LANES), binary))
        sums = cgutils.alloca_once_value(builder, const(0.0, F32, LANES))
        left_ = builder.add(weights_, rest_)
        with span(builder, count_, LANES) as (i, _):
            score = load(builder, _F32, row_, i, LANES)
            weight = power_of_two(builder, fma(builder, score, binary, shift))
            builder.store(builder.fadd(builder.load(sums), weight), sums)
            for target, part in zip((weights_, left_), split(builder, weight), strict=True):
                builder.store(part, pointer(builder, target, i, 2, part.type), align=32)
        same = builder.fcmp_ordered("==", old, new)
        before = fma(builder, splat(builder, old, LANES), binary, shift)
        shrink = builder.extract_element(power_of_two(builder, before), ir.Constant(I32, 0))
        shrink = builder.select(same, ir.Constant(F32, 1.0), shrink)
        summed = reduce_add(builder, builder.load(sums))
        builder.store(builder.fadd(builder.fmul(builder.load(total_), shrink), summed), total_)
        return shrink

    return types.float32(*[types.int64] * 4, types.float32, *[types.int64] * 4), codegen
