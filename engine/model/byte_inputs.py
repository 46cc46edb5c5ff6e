"""Rows of inputs as bytes, for a product of bytes with 8-bit weights (`byte_kernel.py`).

A block of 32 inputs has a step of its own, its largest magnitude being 127 steps: so a large channel, of which language
models have a few, coarsens its own block alone. Where even that would be felt in the row, because the step would be
more than `LIMIT` of the row's root mean square, the step is taken from what is not so large, and what is beyond 127
steps has a second byte, in units of 256 steps. All of this looks at one row only.
"""

# mypy: ignore-errors
# Compiled functions are typed by Numba; intrinsics by the signature that each returns.

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.attention.cpu_emit import call, int64
from engine.attention.cpu_lanes import F32, I8, I32, I64, LANES, const, fma, load, pointer, reduce_add, span, splat
from engine.model.weight_codes import BLOCK

LIMIT = 0.03
"""Largest step, of a row's root mean square, unless an element were beyond `LARGEST` such steps."""

LARGEST = 127 * 256 + 127
"""Steps that two bytes can say."""

LEAST = 1e-33
"""Blocks without a larger magnitude count as zeros: dividing by their step must not overflow."""

ROW_BYTES = 2 * BLOCK + 3 * 4
"""Of a row, for each block of its inputs. First come the bytes of all blocks, then their second bytes, then for each
block its step (float32, NaN where an element is no finite number), its sum (float32 or int32, see `encode_row`), and a
bit for each element that has a second byte (int32)."""

_VECTORS = BLOCK // LANES
_FLOATS = ir.VectorType(F32, LANES)
_INTS = ir.VectorType(I32, LANES)


def _float(value):
    return ir.Constant(F32, value)


def fields_of_row(builder, row, num_blocks):
    """Addresses of a row's second bytes, steps, sums and bits."""
    width = builder.mul(num_blocks, int64(BLOCK))
    four = builder.mul(num_blocks, int64(4))
    seconds = builder.add(row, width)
    steps = builder.add(seconds, width)
    sums = builder.add(steps, four)
    return seconds, steps, sums, builder.add(sums, four)


def _larger(builder, a, b):
    return builder.select(builder.icmp_signed(">", a, b), a, b)


def _largest_of_four(builder, bits):
    """For each lane the largest magnitude of its group of four lanes, as the bits of a float.

    Without their sign, floats are in the order of their bits as integers, infinity and NaN above all.
    """
    bits = builder.and_(bits, const(0x7FFFFFFF, I32))
    for distance in (1, 2):
        others = ir.Constant(_INTS, [lane ^ distance for lane in range(LANES)])
        bits = _larger(builder, bits, builder.shuffle_vector(bits, bits, others))
    return bits


def _reduce(builder, name, vector):
    return call(builder, f"llvm.vector.reduce.{name}.v{LANES}i32", I32, vector)


@intrinsic(prefer_literal=True)
def encode_row(typingctx, weights, tag, source, num_inputs, num_blocks, target):
    """Bytes of one row: `num_inputs` elements of a tag, at an address, to the `ROW_BYTES * num_blocks` of a target.

    `weights` is the tag of a form of weights. Over 4-bit codes, which have minima, a block's sum is in the inputs' own
    unit, float32. Over 8-bit codes, which are stored with 128 added, it is in steps and times -128, a whole number.
    """

    def codegen(context, builder, signature, args):
        _, _, source_, num_inputs_, num_blocks_, target_ = args
        seconds, steps, sums, masks = fields_of_row(builder, target_, num_blocks_)
        whole = builder.sdiv(num_inputs_, int64(BLOCK))
        # What is left after whole blocks is a block with zeros behind it.
        rest = builder.ptrtoint(cgutils.alloca_once(builder, F32, size=BLOCK), I64)
        for n in range(_VECTORS):
            builder.store(const(0.0), pointer(builder, rest, int64(n * LANES), 4, _FLOATS), align=4)
        first = builder.mul(whole, int64(BLOCK))
        with span(builder, builder.sub(num_inputs_, first), 1) as (index, _):
            one = load(builder, tag, source_, builder.add(first, index), 1)
            value = builder.extract_element(one, ir.Constant(I32, 0))
            builder.store(value, pointer(builder, rest, index, 4, F32), align=4)

        def each(body):
            """Emit body(block, its vectors) for all blocks."""
            with span(builder, whole, 1) as (block, _):
                start = builder.mul(block, int64(BLOCK))
                body(
                    block, [load(builder, tag, source_, builder.add(start, int64(n * LANES))) for n in range(_VECTORS)]
                )
            with builder.if_then(builder.icmp_signed("<", whole, num_blocks_)):
                body(whole, [load(builder, types.float32, rest, int64(n * LANES)) for n in range(_VECTORS)])

        squares = cgutils.alloca_once_value(builder, const(0.0))

        def add_squares(block, vectors):
            for x in vectors:
                builder.store(fma(builder, x, x, builder.load(squares)), squares)

        each(add_squares)
        mean = builder.fdiv(reduce_add(builder, builder.load(squares)), builder.sitofp(num_inputs_, F32))
        limit = builder.fmul(call(builder, "llvm.sqrt.f32", F32, mean), _float(127 * LIMIT))

        def encode(block, vectors):
            sizes = [_largest_of_four(builder, builder.bitcast(x, _INTS)) for x in vectors]
            largest = builder.bitcast(_reduce(builder, "smax", _larger(builder, *sizes)), F32)
            kept = []
            for size in sizes:
                inside = builder.fcmp_ordered("<=", builder.bitcast(size, _FLOATS), splat(builder, limit))
                kept.append(builder.select(inside, size, ir.Constant(_INTS, None)))
            usual = builder.bitcast(_reduce(builder, "smax", _larger(builder, *kept)), F32)
            usual = builder.select(builder.fcmp_ordered(">", usual, _float(0.0)), usual, limit)
            is_number = builder.fcmp_ordered("<", largest, _float(float("inf")))
            is_used = builder.and_(is_number, builder.fcmp_ordered(">", largest, _float(LEAST)))
            step = builder.fdiv(usual, _float(127.0))
            least = builder.fdiv(largest, _float(float(LARGEST)))
            step = builder.select(builder.fcmp_ordered(">", step, least), step, least)
            factor = builder.select(is_used, builder.fdiv(_float(1.0), step), _float(0.0))
            factor, magic = splat(builder, factor), const(1.5 * 2**23)
            total = ir.Constant(_INTS, None)
            bits = ir.Constant(I32, 0)
            for n, x in enumerate(vectors):
                # Adding 1.5 x 2^23 rounds to a whole number, which then stands in the low bits.
                shifted = builder.bitcast(builder.fadd(builder.fmul(x, factor), magic), _INTS)
                number = builder.sub(shifted, const(0x4B400000, I32))
                number = builder.select(splat(builder, is_used), number, ir.Constant(_INTS, None))
                total = builder.add(total, number)
                second = builder.ashr(builder.add(number, const(128, I32)), const(8, I32))
                first = builder.sub(number, builder.shl(second, const(8, I32)))
                index = builder.add(builder.mul(block, int64(BLOCK)), int64(n * LANES))
                for part, address in ((first, target_), (second, seconds)):
                    part = builder.trunc(part, ir.VectorType(I8, LANES))
                    builder.store(part, pointer(builder, address, index, 1, part.type), align=1)
                some = builder.bitcast(builder.icmp_signed("!=", second, ir.Constant(_INTS, None)), ir.IntType(LANES))
                bits = builder.or_(bits, builder.shl(builder.zext(some, I32), ir.Constant(I32, n * LANES)))
            step = builder.select(is_used, step, _float(0.0))
            step = builder.select(is_number, step, _float(float("nan")))
            builder.store(step, pointer(builder, steps, block, 4, F32), align=4)
            sum_ = _reduce(builder, "add", total)
            if weights == types.int8:
                sum_ = builder.mul(sum_, ir.Constant(I32, -128))
            else:
                sum_ = builder.fmul(builder.sitofp(sum_, F32), step)
            builder.store(sum_, pointer(builder, sums, block, 4, sum_.type), align=4)
            builder.store(bits, pointer(builder, masks, block, 4, I32), align=4)

        each(encode)
        return context.get_dummy_value()

    return types.void(weights, tag, *[types.int64] * 4), codegen
