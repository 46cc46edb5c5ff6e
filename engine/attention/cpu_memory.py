"""Memory as compiled workers see it: addresses, runs of numbers that are written, and counters that threads share."""

# mypy: ignore-errors
# Intrinsics are typed by Numba: the signature that each returns says how.

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.attention.cpu_lanes import F32, I64, SIZES, pointer, span, splat


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
