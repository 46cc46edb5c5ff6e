"""LLVM vectors for compiled functions: loading, converting, rounding, and the few functions of them.

What an address points at is told by a tag, a value whose type says it: uint16 stands for bfloat16 bits, int16 for
float16 bits, float32 for itself, and of the codes of a quantised cache int8 for itself and uint8 for float8 e4m3 bits.
Elements become float32 in registers. Addresses are integers; strides and counts are in elements. No fast-math flag is
set anywhere: infinities mark masked scores and NaN must stay NaN.
"""

# mypy: ignore-errors
# Everything here is a value of LLVM's.

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from engine.attention.cpu_features import processor_has

LANES = 16 if processor_has("avx512f") else 8
"""Floats of one vector. On a machine with narrower registers LLVM makes several of one."""

F32 = ir.FloatType()
I8 = ir.IntType(8)
I16 = ir.IntType(16)
I32 = ir.IntType(32)
I64 = ir.IntType(64)
SIZES = {types.int8: 1, types.uint8: 1, types.uint16: 2, types.int16: 2, types.float32: 4}
"""Bytes of one element."""

_SUMS = 4

LARGEST_CODE = {types.int8: 127.0, types.uint8: 448.0}


def splat(builder: Any, scalar: Any, lanes: int = LANES) -> Any:
    """A vector of one number."""
    vec = ir.VectorType(scalar.type, lanes)
    one = builder.insert_element(ir.Constant(vec, ir.Undefined), scalar, ir.Constant(I32, 0))
    return builder.shuffle_vector(
        one, ir.Constant(vec, ir.Undefined), ir.Constant(ir.VectorType(I32, lanes), [0] * lanes)
    )


def const(value: float | int, element: Any = F32, lanes: int = LANES) -> Any:
    """A vector of a number known now."""
    return ir.Constant(ir.VectorType(element, lanes), [value] * lanes)


def pointer(builder: Any, address: Any, index: Any, size: int, kind: Any) -> Any:
    """Where element number `index` lies, as a pointer to a kind of value."""
    offset = builder.mul(index, ir.Constant(I64, size))
    return builder.inttoptr(builder.add(address, offset), kind.as_pointer())


def fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """The sum a * b + c, rounded once where the processor can."""
    name = f"llvm.fmuladd.v{a.type.count}f32"
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(a.type, [a.type] * 3), name)
    return builder.call(function, [a, b, c])


def load(builder: Any, tag: Any, address: Any, index: Any, lanes: int = LANES) -> Any:
    """Consecutive elements as float32."""
    if tag == types.float32:
        return builder.load(pointer(builder, address, index, 4, ir.VectorType(F32, lanes)), align=4)
    floats, integers = ir.VectorType(F32, lanes), ir.VectorType(I32, lanes)
    size = SIZES[tag]
    raw = builder.load(
        pointer(builder, address, index, size, ir.VectorType(I8 if size == 1 else I16, lanes)), align=size
    )

    def number(n: int) -> Any:
        return const(n, I32, lanes)

    if size == 1:
        signed = builder.sext(raw, integers)
        if tag == types.int8:
            return builder.sitofp(signed, floats)
        # As float16 below, with a bias of 7; the one NaN of float8 is never a code.
        bits = builder.and_(builder.shl(signed, number(20)), number(0x87F00000))
        return builder.fmul(builder.bitcast(bits, floats), const(2.0**120, F32, lanes))
    bits = builder.zext(raw, integers)
    if tag == types.uint16:
        return builder.bitcast(builder.shl(bits, number(16)), floats)
    # float16: move exponent and mantissa into place and correct the exponent's bias by a multiplication, which is
    # exact for subnormals too; an exponent of all ones stays one.
    magnitude = builder.shl(builder.and_(bits, number(0x7FFF)), number(13))
    sign = builder.shl(builder.and_(bits, number(0x8000)), number(16))
    scaled = builder.fmul(builder.bitcast(magnitude, floats), const(2.0**112, F32, lanes))
    special = builder.icmp_unsigned(">=", magnitude, number(0x7C00 << 13))
    ones = builder.select(special, number(0x7F800000), number(0))
    whole = builder.or_(builder.or_(builder.bitcast(scaled, magnitude.type), ones), sign)
    return builder.bitcast(whole, floats)


def store(builder: Any, value: Any, address: Any, index: Any, tag: Any = types.float32) -> None:
    """Consecutive float32 as elements, rounded to nearest even."""
    if tag == types.uint16:
        value = to_bfloat16(builder, value)
    elif tag == types.int16:
        value = to_float16(builder, value)
    size = SIZES[tag]
    builder.store(value, pointer(builder, address, index, size, value.type), align=size)


def to_bfloat16(builder: Any, value: Any) -> Any:
    """Float32 as the bits of bfloat16, rounded to nearest even."""
    lanes = value.type.count

    def number(n: int) -> Any:
        return const(n, I32, lanes)

    bits = builder.bitcast(value, ir.VectorType(I32, lanes))
    odd = builder.and_(builder.lshr(bits, number(16)), number(1))
    rounded = builder.add(builder.add(bits, number(0x7FFF)), odd)
    # Rounding could carry a NaN over into an infinity or zero.
    is_nan = builder.fcmp_unordered("uno", value, value)
    rounded = builder.select(is_nan, number(0x7FC00000), rounded)
    return builder.trunc(builder.lshr(rounded, number(16)), ir.VectorType(I16, lanes))


def to_float16(builder: Any, value: Any) -> Any:
    """Float32 as the bits of float16, rounded to nearest even; not every processor has an instruction for it."""
    lanes = value.type.count
    integers = ir.VectorType(I32, lanes)

    def number(n: int) -> Any:
        return const(n, I32, lanes)

    bits = builder.bitcast(value, integers)
    sign = builder.and_(builder.lshr(bits, number(16)), number(0x8000))
    magnitude = builder.and_(bits, number(0x7FFFFFFF))
    # Below 2^-14 float16 is subnormal with steps of 2^-24, the last bit of a float32 near 2^-1.
    floats = builder.fadd(builder.bitcast(magnitude, value.type), const(0.5, F32, lanes))
    small = builder.sub(builder.bitcast(floats, integers), number(0x3F000000))
    # The exponent's bias goes from 127 to 15, the mantissa from 23 bits to 10; a carry may make an infinity.
    odd = builder.and_(builder.lshr(magnitude, number(13)), number(1))
    large = builder.lshr(builder.add(builder.sub(magnitude, number(0x38000000 - 0xFFF)), odd), number(13))
    large = builder.select(builder.icmp_unsigned(">=", magnitude, number(0x47800000)), number(0x7C00), large)
    large = builder.select(builder.icmp_unsigned(">", magnitude, number(0x7F800000)), number(0x7E00), large)
    is_small = builder.icmp_unsigned("<", magnitude, number(0x38800000))
    half = builder.or_(builder.select(is_small, small, large), sign)
    return builder.trunc(half, ir.VectorType(I16, lanes))


def to_codes(builder: Any, tag: Any, value: Any) -> Any:
    """Scaled float32 as codes, rounded to nearest even; beyond the largest code it is that one."""
    lanes = value.type.count
    codes = ir.VectorType(I8, lanes)

    def number(n: int) -> Any:
        return const(n, I32, lanes)

    def bits_of(floats: Any) -> Any:
        return builder.bitcast(floats, ir.VectorType(I32, lanes))

    for word, bound in ((">", -LARGEST_CODE[tag]), ("<", LARGEST_CODE[tag])):
        limit = const(bound, F32, lanes)
        value = builder.select(builder.fcmp_ordered(word, value, limit), value, limit)
    if tag == types.int8:
        # Adding 1.5 x 2^23 rounds to an integer, whose two's complement then stands in the low bits.
        return builder.trunc(bits_of(builder.fadd(value, const(12582912.0, F32, lanes))), codes)
    bits = bits_of(value)
    sign = builder.and_(builder.lshr(bits, number(24)), number(0x80))
    magnitude = builder.and_(bits, number(0x7FFFFFFF))
    # Below 2^-6 float8 is subnormal with steps of 2^-9, the last bit of a float32 near 2^14.
    floats = builder.bitcast(magnitude, value.type)
    small = builder.sub(bits_of(builder.fadd(floats, const(16384.0, F32, lanes))), number(0x46800000))
    odd = builder.and_(builder.lshr(magnitude, number(20)), number(1))
    # The exponent's bias goes from 127 to 7, the mantissa from 23 bits to 3.
    large = builder.add(builder.sub(magnitude, number(0x3C000000 - 0x7FFFF)), odd)
    large = builder.lshr(large, number(20))
    is_small = builder.icmp_unsigned("<", magnitude, number(0x3C800000))
    return builder.trunc(builder.or_(builder.select(is_small, small, large), sign), codes)


def exp(builder: Any, x: Any) -> Any:
    """Exponential within 2 units in the last place for -87 <= x <= 88, 0 below, NaN for NaN.

    Cephes `expf` (S. Moshier): x = n ln 2 + r, a polynomial in r, the exponent put together from n.
    """
    lanes = x.type.count

    def number(value: float) -> Any:
        return const(value, F32, lanes)

    magic = number(12582912.0)  # 1.5 x 2^23: adding it rounds to an integer, which then stands in the low bits
    low = builder.fcmp_ordered("<", x, number(-87.0))
    clamped = builder.select(low, number(-87.0), x)
    shifted = fma(builder, clamped, number(1.44269504088896341), magic)
    n = builder.fsub(shifted, magic)
    r = fma(builder, n, number(-0.693359375), clamped)
    r = fma(builder, n, number(2.12194440e-4), r)
    poly = number(1.9875691500e-4)
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        poly = fma(builder, poly, r, number(c))
    poly = fma(builder, builder.fmul(poly, r), r, builder.fadd(r, number(1.0)))
    integers = ir.VectorType(I32, lanes)
    exponent = builder.shl(builder.bitcast(shifted, integers), const(23, I32, lanes))
    result = builder.bitcast(builder.add(builder.bitcast(poly, integers), exponent), x.type)
    # Adding to the exponent bits would turn a NaN into a number.
    result = builder.select(builder.fcmp_unordered("uno", x, x), x, result)
    return builder.select(low, number(0.0), result)


def _halved(builder: Any, vec: Any, lanes: int) -> Any:
    """A vector's halves added onto each other until so many lanes are left."""
    left = vec.type.count
    while left > lanes:
        left //= 2
        parts = [
            builder.shuffle_vector(vec, vec, ir.Constant(ir.VectorType(I32, left), list(range(start, start + left))))
            for start in (0, left)
        ]
        vec = builder.fadd(*parts)
    return vec


def reduce_add(builder: Any, vec: Any) -> Any:
    """The sum of a vector's lanes, halves onto halves."""
    return builder.extract_element(_halved(builder, vec, 1), ir.Constant(I32, 0))


def reduce_add_four(builder: Any, vectors: list[Any]) -> Any:
    """The sums of four vectors as one of four lanes, in fewer steps than four separate ones."""

    def pair(a: Any, b: Any) -> Any:
        # Within groups of four lanes, as the instruction sets shuffle.
        picks = [
            [base + g + first for g in range(0, LANES, 4) for base in (0, LANES) for first in (half, 2 + half)]
            for half in (0, 1)
        ]
        parts = [builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, LANES), pick)) for pick in picks]
        return builder.fadd(*parts)

    return _halved(builder, pair(pair(vectors[0], vectors[1]), pair(vectors[2], vectors[3])), 4)


def span(builder: Any, stop: Any, step: int) -> Any:
    """A loop over range(0, stop, step)."""
    return cgutils.for_range_slice(builder, ir.Constant(I64, 0), stop, ir.Constant(I64, step), intp=I64)


def steps(builder: Any, count: Any, size: int, body: Any) -> None:
    """Emit body(index, size) for whole steps of a power of two and then body(index, 1) for what is left of count."""
    whole = builder.and_(count, ir.Constant(I64, -size))
    with span(builder, whole, size) as (i, _):
        body(i, size)
    with cgutils.for_range_slice(builder, whole, count, ir.Constant(I64, 1), intp=I64) as (i, _):
        body(i, 1)


def chunks(builder: Any, count: Any, body: Any) -> None:
    """Emit body(index, lanes) for whole vectors and then, one by one, for the elements that are left."""
    steps(builder, count, LANES, body)


def rms_norm(builder: Any, tag: Any, count: Any, eps: Any, weight: Any, read: Any, read_again: Any, write: Any) -> None:
    """Emit write(i, x / sqrt(mean(x^2) + eps) * weight[i]) for all x = read(i, lanes) of a row.

    RMS norm (Zhang and Sennrich, 2019), in float32; the weights are elements of a tag. Several sums at once: an
    addition waits for the one before it.
    """
    one, tile = ir.Constant(I64, 1), _SUMS * LANES
    sums = [cgutils.alloca_once_value(builder, const(0.0)) for _ in range(_SUMS)]
    rest = cgutils.alloca_once_value(builder, const(0.0, F32, 1))

    def add(i: Any, cell: Any, lanes: int) -> None:
        x = read(i, lanes)
        builder.store(fma(builder, x, x, builder.load(cell)), cell)

    tiled = builder.and_(count, ir.Constant(I64, -tile))
    whole = builder.and_(count, ir.Constant(I64, -LANES))
    with span(builder, tiled, tile) as (i, _):
        for n, cell in enumerate(sums):
            add(builder.add(i, ir.Constant(I64, n * LANES)), cell, LANES)
    with cgutils.for_range_slice(builder, tiled, whole, ir.Constant(I64, LANES), intp=I64) as (i, _):
        add(i, sums[0], LANES)
    with cgutils.for_range_slice(builder, whole, count, one, intp=I64) as (i, _):
        add(i, rest, 1)
    total = builder.load(sums[0])
    for cell in sums[1:]:
        total = builder.fadd(total, builder.load(cell))
    left = builder.extract_element(builder.load(rest), ir.Constant(I32, 0))
    mean = builder.fdiv(builder.fadd(reduce_add(builder, total), left), builder.sitofp(count, F32))
    sqrt = cgutils.get_or_insert_function(builder.module, ir.FunctionType(F32, [F32]), "llvm.sqrt.f32")
    factor = builder.fdiv(ir.Constant(F32, 1.0), builder.call(sqrt, [builder.fadd(mean, eps)]))

    def scale(i: Any, lanes: int) -> None:
        x = builder.fmul(read_again(i, lanes), splat(builder, factor, lanes))
        write(i, builder.fmul(x, load(builder, tag, weight, i, lanes)))

    chunks(builder, count, scale)
