"""Rows of inputs as bytes, for a product of bytes with 8-bit weights (`byte_kernel.py`).

A block of 32 inputs has a step of its own, its largest magnitude being 127 steps: a large channel, of which language
models have a few, then coarsens its own block alone. Where a block is so much larger than its row that even so its
rounding would be felt, its elements have a second byte, 256ths of a step (`FINE`). Both choices look at one row only.
"""

# mypy: ignore-errors
# Compiled functions are typed by Numba; intrinsics by the signature that each returns.

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.attention.cpu_lanes import F32, I8, I32, I64, LANES, const, fma, load, pointer, reduce_add, span, splat
from engine.model.weight_codes import BLOCK

FINE = 0.03
"""Of a row's root mean square: blocks with larger steps have a second byte."""

LEAST = 1e-33
"""Blocks without a larger magnitude count as zeros: dividing by it must not overflow."""

ROW_BYTES = 2 * BLOCK + 3 * 4
"""Of a row, for each block of its inputs. First come the bytes of all blocks, then their second bytes, then for each
block its step (float32, NaN where an element is no finite number), its sum in the inputs' own unit (float32), and
whether it has second bytes (int32)."""

_VECTORS = BLOCK // LANES
_FLOATS = ir.VectorType(F32, LANES)
_INTS = ir.VectorType(I32, LANES)


def _int(value):
    return ir.Constant(I64, value)


def _float(value):
    return ir.Constant(F32, value)


def fields_of_row(builder, row, num_blocks):
    """Addresses of a row's second bytes, steps, sums and flags."""
    width = builder.mul(num_blocks, _int(BLOCK))
    four = builder.mul(num_blocks, _int(4))
    fine = builder.add(row, width)
    steps = builder.add(fine, width)
    sums = builder.add(steps, four)
    return fine, steps, sums, builder.add(sums, four)


def _reduce(builder, name, vector):
    signature = ir.FunctionType(I32, [_INTS])
    function = cgutils.get_or_insert_function(builder.module, signature, f"llvm.vector.reduce.{name}.v{LANES}i32")
    return builder.call(function, [vector])


@intrinsic(prefer_literal=True)
def encode_row(typingctx, tag, source, num_inputs, num_blocks, target):
    """Bytes of one row: `num_inputs` elements of a tag, at an address, to the `ROW_BYTES * num_blocks` of a target."""

    def codegen(context, builder, signature, args):
        _, source_, num_inputs_, num_blocks_, target_ = args
        fine, steps, sums, flags = fields_of_row(builder, target_, num_blocks_)
        whole = builder.sdiv(num_inputs_, _int(BLOCK))
        # What is left after whole blocks is a block with zeros behind it.
        rest = builder.ptrtoint(cgutils.alloca_once(builder, F32, size=BLOCK), I64)
        for n in range(_VECTORS):
            builder.store(const(0.0), pointer(builder, rest, _int(n * LANES), 4, _FLOATS), align=4)
        first = builder.mul(whole, _int(BLOCK))
        with span(builder, builder.sub(num_inputs_, first), 1) as (index, _):
            one = load(builder, tag, source_, builder.add(first, index), 1)
            value = builder.extract_element(one, ir.Constant(I32, 0))
            builder.store(value, pointer(builder, rest, index, 4, F32), align=4)

        def each(body):
            """Emit body(block, its vectors) for all blocks."""
            with span(builder, whole, 1) as (block, _):
                start = builder.mul(block, _int(BLOCK))
                body(block, [load(builder, tag, source_, builder.add(start, _int(n * LANES))) for n in range(_VECTORS)])
            with builder.if_then(builder.icmp_signed("<", whole, num_blocks_)):
                body(whole, [load(builder, types.float32, rest, _int(n * LANES)) for n in range(_VECTORS)])

        squares = cgutils.alloca_once_value(builder, const(0.0))

        def size(block, vectors):
            # Without their sign, floats are in the order of their bits as integers, infinity and NaN above all.
            top = ir.Constant(_INTS, None)
            for x in vectors:
                bits = builder.and_(builder.bitcast(x, _INTS), const(0x7FFFFFFF, I32))
                top = builder.select(builder.icmp_signed(">", bits, top), bits, top)
                builder.store(fma(builder, x, x, builder.load(squares)), squares)
            builder.store(_reduce(builder, "smax", top), pointer(builder, steps, block, 4, I32), align=4)

        each(size)
        mean = builder.fdiv(reduce_add(builder, builder.load(squares)), builder.sitofp(num_inputs_, F32))
        sqrt = cgutils.get_or_insert_function(builder.module, ir.FunctionType(F32, [F32]), "llvm.sqrt.f32")
        limit = builder.fmul(builder.call(sqrt, [mean]), _float(127 * FINE))

        def encode(block, vectors):
            place = pointer(builder, steps, block, 4, F32)
            largest = builder.load(place, align=4)
            is_number = builder.fcmp_ordered("<", largest, _float(float("inf")))
            is_used = builder.and_(is_number, builder.fcmp_ordered(">", largest, _float(LEAST)))
            is_fine = builder.and_(is_used, builder.fcmp_ordered(">", largest, limit))
            # Adding and subtracting 1.5 x 2^23 rounds to whole numbers, 2^31 to multiples of 256.
            magic = builder.select(is_fine, _float(1.5 * 2**23), _float(1.5 * 2**31))
            factor = builder.fdiv(_float(127 * 256.0), builder.select(is_used, largest, _float(1.0)))
            factor, magic = splat(builder, factor), splat(builder, magic)
            total = ir.Constant(_INTS, None)
            for n, x in enumerate(vectors):
                shifted = builder.fadd(builder.fmul(x, factor), magic)
                number = builder.fptosi(builder.fsub(shifted, magic), _INTS)
                number = builder.select(splat(builder, is_used), number, ir.Constant(_INTS, None))
                total = builder.add(total, number)
                high = builder.ashr(builder.add(number, const(128, I32)), const(8, I32))
                low = builder.sub(number, builder.shl(high, const(8, I32)))
                index = builder.add(builder.mul(block, _int(BLOCK)), _int(n * LANES))
                for part, address in ((high, target_), (low, fine)):
                    part = builder.trunc(part, ir.VectorType(I8, LANES))
                    builder.store(part, pointer(builder, address, index, 1, part.type), align=1)
            step = builder.select(is_used, builder.fdiv(largest, _float(127.0)), _float(0.0))
            step = builder.select(is_number, step, _float(float("nan")))
            builder.store(step, place, align=4)
            small = builder.fmul(builder.sitofp(_reduce(builder, "add", total), F32), _float(1 / 256))
            builder.store(builder.fmul(small, step), pointer(builder, sums, block, 4, F32), align=4)
            builder.store(builder.zext(is_fine, I32), pointer(builder, flags, block, 4, I32), align=4)

        each(encode)
        return context.get_dummy_value()

    return types.void(tag, *[types.int64] * 4), codegen
