"""Vector arithmetic for the compiled CPU attention: the few inner loops that its speed depends on, as LLVM vectors.

Numba leaves vectorisation to LLVM's loop optimiser, which cannot know that the pointers here never alias, and keeps
accumulators in memory for it. So each inner loop is an intrinsic that emits explicit vectors: register tiles of
`TILE_ROWS` query rows against several tokens (scores) or several columns (weighted values), as in any matrix product.

Addresses are integers; strides and counts are in elements. What an address points at is told by a tag, a value whose
type says it: uint16 stands for bfloat16 bits, int16 for float16 bits, float32 for itself, and of the codes of a
quantised cache int8 for itself and uint8 for float8 e4m3 bits. Elements become float32 in registers, in the inner loop;
the scales of codes are applied to scores and weights. No fast-math flag is set anywhere: infinities mark masked scores
and NaN must stay NaN.
"""

# mypy: ignore-errors
# Intrinsics are typed by Numba: the signature that each returns says how.

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.attention.cpu_params import TILE_ROWS

LANES = 16 if llvm.get_host_cpu_features().get("avx512f") else 8
"""Floats of one vector. On a machine with narrower registers LLVM makes several of one."""

TILE_TOKENS = 4
TILE_CHUNKS = 4

_F32 = ir.FloatType()
_I8 = ir.IntType(8)
_I16 = ir.IntType(16)
_I32 = ir.IntType(32)
_I64 = ir.IntType(64)
_VEC = ir.VectorType(_F32, LANES)
_SIZES = {types.int8: 1, types.uint8: 1, types.uint16: 2, types.int16: 2, types.float32: 4}
_LARGEST_CODE = {types.int8: 127.0, types.uint8: 448.0}


def _splat(builder: Any, scalar: Any, lanes: int = LANES) -> Any:
    vec = ir.VectorType(scalar.type, lanes)
    one = builder.insert_element(ir.Constant(vec, ir.Undefined), scalar, ir.Constant(_I32, 0))
    return builder.shuffle_vector(
        one, ir.Constant(vec, ir.Undefined), ir.Constant(ir.VectorType(_I32, lanes), [0] * lanes)
    )


def _const(value: float | int, element: Any = _F32, lanes: int = LANES) -> Any:
    return ir.Constant(ir.VectorType(element, lanes), [value] * lanes)


def _pointer(builder: Any, address: Any, index: Any, size: int, kind: Any) -> Any:
    offset = builder.mul(index, ir.Constant(_I64, size))
    return builder.inttoptr(builder.add(address, offset), kind.as_pointer())


def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    name = f"llvm.fmuladd.v{a.type.count}f32"
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(a.type, [a.type] * 3), name)
    return builder.call(function, [a, b, c])


def _load(builder: Any, tag: Any, address: Any, index: Any, lanes: int = LANES) -> Any:
    """Consecutive elements as float32."""
    if tag == types.float32:
        return builder.load(_pointer(builder, address, index, 4, ir.VectorType(_F32, lanes)), align=4)
    floats, integers = ir.VectorType(_F32, lanes), ir.VectorType(_I32, lanes)
    size = _SIZES[tag]
    raw = builder.load(
        _pointer(builder, address, index, size, ir.VectorType(_I8 if size == 1 else _I16, lanes)), align=size
    )

    def number(n: int) -> Any:
        return _const(n, _I32, lanes)

    if size == 1:
        signed = builder.sext(raw, integers)
        if tag == types.int8:
            return builder.sitofp(signed, floats)
        # As float16 below, with a bias of 7; the one NaN of float8 is never a code.
        bits = builder.and_(builder.shl(signed, number(20)), number(0x87F00000))
        return builder.fmul(builder.bitcast(bits, floats), _const(2.0**120, _F32, lanes))
    bits = builder.zext(raw, integers)
    if tag == types.uint16:
        return builder.bitcast(builder.shl(bits, number(16)), floats)
    # float16: move exponent and mantissa into place and correct the exponent's bias by a multiplication, which is
    # exact for subnormals too; an exponent of all ones stays one.
    magnitude = builder.shl(builder.and_(bits, number(0x7FFF)), number(13))
    sign = builder.shl(builder.and_(bits, number(0x8000)), number(16))
    scaled = builder.fmul(builder.bitcast(magnitude, floats), _const(2.0**112, _F32, lanes))
    special = builder.icmp_unsigned(">=", magnitude, number(0x7C00 << 13))
    ones = builder.select(special, number(0x7F800000), number(0))
    whole = builder.or_(builder.or_(builder.bitcast(scaled, magnitude.type), ones), sign)
    return builder.bitcast(whole, floats)


def _store(builder: Any, value: Any, address: Any, index: Any) -> None:
    builder.store(value, _pointer(builder, address, index, 4, value.type), align=4)


def _to_bfloat16(builder: Any, value: Any) -> Any:
    """Float32 as the bits of bfloat16, rounded to nearest even."""
    lanes = value.type.count

    def number(n: int) -> Any:
        return _const(n, _I32, lanes)

    bits = builder.bitcast(value, ir.VectorType(_I32, lanes))
    odd = builder.and_(builder.lshr(bits, number(16)), number(1))
    rounded = builder.add(builder.add(bits, number(0x7FFF)), odd)
    # Rounding could carry a NaN over into an infinity or zero.
    is_nan = builder.fcmp_unordered("uno", value, value)
    rounded = builder.select(is_nan, number(0x7FC00000), rounded)
    return builder.trunc(builder.lshr(rounded, number(16)), ir.VectorType(_I16, lanes))


def _to_codes(builder: Any, tag: Any, value: Any) -> Any:
    """Scaled float32 as codes, rounded to nearest even; beyond the largest code it is that one."""
    lanes = value.type.count
    codes = ir.VectorType(_I8, lanes)

    def number(n: int) -> Any:
        return _const(n, _I32, lanes)

    def bits_of(floats: Any) -> Any:
        return builder.bitcast(floats, ir.VectorType(_I32, lanes))

    for word, bound in ((">", -_LARGEST_CODE[tag]), ("<", _LARGEST_CODE[tag])):
        limit = _const(bound, _F32, lanes)
        value = builder.select(builder.fcmp_ordered(word, value, limit), value, limit)
    if tag == types.int8:
        # Adding 1.5 x 2^23 rounds to an integer, whose two's complement then stands in the low bits.
        return builder.trunc(bits_of(builder.fadd(value, _const(12582912.0, _F32, lanes))), codes)
    bits = bits_of(value)
    sign = builder.and_(builder.lshr(bits, number(24)), number(0x80))
    magnitude = builder.and_(bits, number(0x7FFFFFFF))
    # Below 2^-6 float8 is subnormal with steps of 2^-9, the last bit of a float32 near 2^14.
    floats = builder.bitcast(magnitude, value.type)
    small = builder.sub(bits_of(builder.fadd(floats, _const(16384.0, _F32, lanes))), number(0x46800000))
    odd = builder.and_(builder.lshr(magnitude, number(20)), number(1))
    # The exponent's bias goes from 127 to 7, the mantissa from 23 bits to 3.
    large = builder.add(builder.sub(magnitude, number(0x3C000000 - 0x7FFFF)), odd)
    large = builder.lshr(large, number(20))
    is_small = builder.icmp_unsigned("<", magnitude, number(0x3C800000))
    return builder.trunc(builder.or_(builder.select(is_small, small, large), sign), codes)


def _exp(builder: Any, x: Any) -> Any:
    """Exponential within 2 units in the last place for -87 <= x <= 88, 0 below, NaN for NaN.

    Cephes `expf` (S. Moshier): x = n ln 2 + r, a polynomial in r, the exponent put together from n.
    """
    magic = 12582912.0  # 1.5 x 2^23: adding it rounds to an integer, which then stands in the low bits
    low = builder.fcmp_ordered("<", x, _const(-87.0))
    clamped = builder.select(low, _const(-87.0), x)
    shifted = _fma(builder, clamped, _const(1.44269504088896341), _const(magic))
    n = builder.fsub(shifted, _const(magic))
    r = _fma(builder, n, _const(-0.693359375), clamped)
    r = _fma(builder, n, _const(2.12194440e-4), r)
    poly = _const(1.9875691500e-4)
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        poly = _fma(builder, poly, r, _const(c))
    poly = _fma(builder, builder.fmul(poly, r), r, builder.fadd(r, _const(1.0)))
    integers = ir.VectorType(_I32, LANES)
    exponent = builder.shl(builder.bitcast(shifted, integers), _const(23, _I32))
    result = builder.bitcast(builder.add(builder.bitcast(poly, integers), exponent), _VEC)
    # Adding to the exponent bits would turn a NaN into a number.
    result = builder.select(builder.fcmp_unordered("uno", x, x), x, result)
    return builder.select(low, _const(0.0), result)


def _reduce_add(builder: Any, vec: Any) -> Any:
    """The sum of a vector's lanes, halves onto halves."""
    lanes = vec.type.count
    while lanes > 1:
        lanes //= 2
        parts = [
            builder.shuffle_vector(vec, vec, ir.Constant(ir.VectorType(_I32, lanes), list(range(start, start + lanes))))
            for start in (0, lanes)
        ]
        vec = builder.fadd(*parts)
    return builder.extract_element(vec, ir.Constant(_I32, 0))


def _reduce_add_four(builder: Any, vectors: list[Any]) -> Any:
    """The sums of four vectors as one of four lanes, in fewer steps than four separate ones."""

    def pair(a: Any, b: Any) -> Any:
        # Within groups of four lanes, as the instruction sets shuffle.
        picks = [
            [base + g + first for g in range(0, LANES, 4) for base in (0, LANES) for first in (half, 2 + half)]
            for half in (0, 1)
        ]
        parts = [builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_I32, LANES), pick)) for pick in picks]
        return builder.fadd(*parts)

    vec = pair(pair(vectors[0], vectors[1]), pair(vectors[2], vectors[3]))
    lanes = LANES
    while lanes > 4:
        lanes //= 2
        parts = [
            builder.shuffle_vector(vec, vec, ir.Constant(ir.VectorType(_I32, lanes), list(range(start, start + lanes))))
            for start in (0, lanes)
        ]
        vec = builder.fadd(*parts)
    return vec


def _range(builder: Any, stop: Any, step: int) -> Any:
    return cgutils.for_range_slice(builder, ir.Constant(_I64, 0), stop, ir.Constant(_I64, step), intp=_I64)


def _at(builder: Any, row: int, stride: Any, index: Any) -> Any:
    return builder.add(builder.mul(ir.Constant(_I64, row), stride), index)


def _row(builder, rows, index):
    """Address of row number `index`: `rows` is a base address and the address of int64 offsets from it, in bytes."""
    base, offsets = rows
    return builder.add(base, builder.load(_pointer(builder, offsets, index, 8, _I64), align=8))


def _prefetch(builder, address):
    """Ask for the cache line at an address, which need not exist."""
    byte = ir.IntType(8).as_pointer()
    signature = ir.FunctionType(ir.VoidType(), [byte, _I32, _I32, _I32])
    function = cgutils.get_or_insert_function(builder.module, signature, "llvm.prefetch.p0")
    builder.call(function, [builder.inttoptr(address, byte), *(ir.Constant(_I32, n) for n in (0, 3, 1))])


def _dot_tile(builder, tag, num_rows, num_tokens, q, q_stride, keys, width, out, out_stride):
    """out[r, t] = sum over width of q[r] * keys[t], for a literal number of rows and of addresses of keys."""
    zero = _const(0.0)
    sums = [[cgutils.alloca_once_value(builder, zero) for _ in range(num_tokens)] for _ in range(num_rows)]
    with _range(builder, width, LANES) as (column, _):
        queries = [_load(builder, types.float32, q, _at(builder, r, q_stride, column)) for r in range(num_rows)]
        for t in range(num_tokens):
            key = _load(builder, tag, keys[t], column)
            for r in range(num_rows):
                builder.store(_fma(builder, queries[r], key, builder.load(sums[r][t])), sums[r][t])
    for r in range(num_rows):
        row = [builder.load(cell) for cell in sums[r]]
        total = _reduce_add(builder, row[0]) if num_tokens == 1 else _reduce_add_four(builder, row)
        _store(builder, total, out, builder.mul(ir.Constant(_I64, r), out_stride))


def _weighted_tile(builder, tag, num_rows, num_chunks, w, w_stride, values, tokens, acc, acc_stride, ahead):
    """acc[r, :num_chunks * LANES] += sum over tokens of w[r, t] * values[t], for literal numbers of rows and chunks."""
    columns = [ir.Constant(_I64, c * LANES) for c in range(num_chunks)]
    places = [[_at(builder, r, acc_stride, column) for column in columns] for r in range(num_rows)]
    sums = [
        [cgutils.alloca_once_value(builder, _load(builder, types.float32, acc, place)) for place in row]
        for row in places
    ]
    with _range(builder, tokens, 1) as (token, _):
        if ahead:
            later = _row(builder, values, builder.add(token, ir.Constant(_I64, ahead)))
            for line in range(0, num_chunks * LANES * _SIZES[tag], 64):
                _prefetch(builder, builder.add(later, ir.Constant(_I64, line)))
        row_address = _row(builder, values, token)
        weights = []
        for r in range(num_rows):
            cell = _pointer(builder, w, _at(builder, r, w_stride, token), 4, _F32)
            weights.append(_splat(builder, builder.load(cell, align=4)))
        for c, column in enumerate(columns):
            value = _load(builder, tag, row_address, column)
            for r in range(num_rows):
                builder.store(_fma(builder, weights[r], value, builder.load(sums[r][c])), sums[r][c])
    for r in range(num_rows):
        for c in range(num_chunks):
            _store(builder, builder.load(sums[r][c]), acc, places[r][c])


@contextmanager
def _row_tiles(builder, rows):
    """Walk rows in register tiles; yields the first row and a way to emit the body for a tile of literal height.

    Two rows that are left take a tile of three, so that less has to be compiled: scratch has room for the third.
    """
    with _range(builder, rows, TILE_ROWS) as (row, _):

        def each(body):
            several = builder.icmp_signed(">", builder.sub(rows, row), ir.Constant(_I64, 1))
            with builder.if_else(several) as (then, otherwise):
                with then:
                    body(TILE_ROWS)
                with otherwise:
                    body(1)

        yield row, each


def _steps(builder, stop, tile, body):
    """Call body(start, size) to emit a loop of whole tiles up to stop, and one of single steps for the rest."""
    whole = builder.and_(stop, ir.Constant(_I64, -tile))
    with _range(builder, whole, tile) as (start, _):
        body(start, tile)
    with cgutils.for_range_slice(builder, whole, stop, ir.Constant(_I64, 1), intp=_I64) as (start, _):
        body(start, 1)


def _plus(builder, index, n):
    return builder.add(index, ir.Constant(_I64, n)) if n else index


def _offset(builder, address, index, stride, size):
    """Address of element index * stride."""
    return builder.add(address, builder.mul(builder.mul(index, stride), ir.Constant(_I64, size)))


@intrinsic(prefer_literal=True)
def scores(typingctx, tag, ahead, rows, q, base, offsets, tokens, width, out, out_stride):
    """out[r, t] = q[r] . key[t]: q float32 [rows, width], width a multiple of LANES, key t at base + offsets[t].

    offsets are int64 bytes. ahead is a literal: so many more offsets follow, of rows to prefetch that far in advance.
    """
    distance = ahead.literal_value

    def codegen(context, builder, signature, args):
        _, _, rows_, q_, base_, offsets_, tokens_, width_, out_, os_ = args
        one = ir.Constant(_I64, 1)
        with _row_tiles(builder, rows_) as (row, each):
            q_row = _offset(builder, q_, row, width_, 4)
            out_row = _offset(builder, out_, row, os_, 4)

            def tile(num_rows):
                def body(t, num_tokens):
                    keys = [_row(builder, (base_, offsets_), _plus(builder, t, n)) for n in range(num_tokens)]
                    if distance:
                        later = [
                            _row(builder, (base_, offsets_), _plus(builder, t, distance + n)) for n in range(num_tokens)
                        ]
                        size = builder.mul(width_, ir.Constant(_I64, _SIZES[tag]))
                        with _range(builder, size, 64) as (line, _):
                            for address in later:
                                _prefetch(builder, builder.add(address, line))
                    target = _offset(builder, out_row, t, one, 4)
                    _dot_tile(builder, tag, num_rows, num_tokens, q_row, width_, keys, width_, target, os_)

                _steps(builder, tokens_, TILE_TOKENS, body)

            each(tile)
        return context.get_dummy_value()

    return types.void(tag, ahead, *[types.int64] * 8), codegen


@intrinsic(prefer_literal=True)
def weigh(typingctx, tag, ahead, rows, w, w_stride, base, offsets, tokens, width, acc):
    """acc[r] += sum over t of w[r, t] * value[t]: acc float32 [rows, width], value t at base + offsets[t]."""
    distance = ahead.literal_value

    def codegen(context, builder, signature, args):
        _, _, rows_, w_, ws_, base_, offsets_, tokens_, width_, acc_ = args
        chunks = builder.sdiv(width_, ir.Constant(_I64, LANES))
        lanes = ir.Constant(_I64, LANES)
        with _row_tiles(builder, rows_) as (row, each):
            w_row = _offset(builder, w_, row, ws_, 4)
            acc_row = _offset(builder, acc_, row, width_, 4)

            def tile(num_rows):
                def body(c, num_chunks):
                    values = (_offset(builder, base_, c, lanes, _SIZES[tag]), offsets_)
                    target = _offset(builder, acc_row, c, lanes, 4)
                    early = distance if num_chunks == TILE_CHUNKS else 0
                    _weighted_tile(
                        builder, tag, num_rows, num_chunks, w_row, ws_, values, tokens_, target, width_, early
                    )

                _steps(builder, chunks, TILE_CHUNKS, body)

            each(tile)
        return context.get_dummy_value()

    return types.void(tag, ahead, *[types.int64] * 8), codegen


@intrinsic
def fill_offsets(typingctx, target, index, count, start, step):
    """Set the int64 target[index:index + count] to start, start + step, ..."""

    def codegen(context, builder, signature, args):
        target_, index_, count_, start_, step_ = args
        with _range(builder, count_, 1) as (i, _):
            value = builder.add(start_, builder.mul(i, step_))
            builder.store(value, _pointer(builder, target_, builder.add(index_, i), 8, _I64), align=8)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), codegen


@intrinsic
def max_row(typingctx, row, count):
    """The largest of count floats (a multiple of LANES); NaN is passed over."""

    def codegen(context, builder, signature, args):
        row_, count_ = args
        best = cgutils.alloca_once_value(builder, _const(float("-inf")))
        with _range(builder, count_, LANES) as (i, _):
            value = _load(builder, types.float32, row_, i)
            old = builder.load(best)
            builder.store(builder.select(builder.fcmp_ordered(">", value, old), value, old), best)
        vec = builder.load(best)
        result = builder.extract_element(vec, ir.Constant(_I32, 0))
        for lane in range(1, LANES):
            value = builder.extract_element(vec, ir.Constant(_I32, lane))
            result = builder.select(builder.fcmp_ordered(">", value, result), value, result)
        return result

    return types.float32(types.int64, types.int64), codegen


@intrinsic
def exp_row(typingctx, row, count, shift):
    """Replace count floats (a multiple of LANES) by exp(x - shift) and return their sum."""

    def codegen(context, builder, signature, args):
        row_, count_, shift_ = args
        total = cgutils.alloca_once_value(builder, _const(0.0))
        shifts = _splat(builder, shift_)
        with _range(builder, count_, LANES) as (i, _):
            value = _exp(builder, builder.fsub(_load(builder, types.float32, row_, i), shifts))
            _store(builder, value, row_, i)
            builder.store(builder.fadd(builder.load(total), value), total)
        return _reduce_add(builder, builder.load(total))

    return types.float32(types.int64, types.int64, types.float32), codegen


@intrinsic
def softcap_row(typingctx, row, count, cap):
    """Replace count floats (a multiple of LANES) by cap * tanh(x / cap), tanh(y) = 1 - 2 / (exp(2 y) + 1)."""

    def codegen(context, builder, signature, args):
        row_, count_, cap_ = args
        caps = _splat(builder, cap_)
        factor = _splat(builder, builder.fdiv(ir.Constant(_F32, 2.0), cap_))
        with _range(builder, count_, LANES) as (i, _):
            doubled = builder.fmul(_load(builder, types.float32, row_, i), factor)
            # tanh is 1 in float32 long before 2 y = 60; beyond 88 the exponential would overflow.
            doubled = builder.select(builder.fcmp_ordered(">", doubled, _const(60.0)), _const(60.0), doubled)
            quotient = builder.fdiv(_const(2.0), builder.fadd(_exp(builder, doubled), _const(1.0)))
            _store(builder, builder.fmul(caps, builder.fsub(_const(1.0), quotient)), row_, i)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32), codegen


@intrinsic
def scale_row(typingctx, row, count, factor):
    """Multiply count floats (a multiple of LANES) by a factor."""

    def codegen(context, builder, signature, args):
        row_, count_, factor_ = args
        factors = _splat(builder, factor_)
        with _range(builder, count_, LANES) as (i, _):
            _store(builder, builder.fmul(_load(builder, types.float32, row_, i), factors), row_, i)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32), codegen


@intrinsic
def convert_row(typingctx, tag, source, target, count, padded, factor):
    """Set target[:count] to source * factor as float32 and target[count:padded] to 0."""

    def codegen(context, builder, signature, args):
        _, source_, target_, count_, padded_, factor_ = args
        factors = _splat(builder, factor_)
        whole = builder.and_(count_, ir.Constant(_I64, -LANES))
        with _range(builder, whole, LANES) as (i, _):
            _store(builder, builder.fmul(_load(builder, tag, source_, i), factors), target_, i)
        one = ir.Constant(_I64, 1)
        with cgutils.for_range_slice(builder, whole, count_, one, intp=_I64) as (i, _):
            value = builder.fmul(_load(builder, tag, source_, i, 1), _splat(builder, factor_, 1))
            _store(builder, value, target_, i)
        with cgutils.for_range_slice(builder, count_, padded_, one, intp=_I64) as (i, _):
            _store(builder, ir.Constant(_F32, 0.0), target_, i)
        return context.get_dummy_value()

    return types.void(tag, types.int64, types.int64, types.int64, types.int64, types.float32), codegen


@intrinsic
def store_row(typingctx, tag, source, target, count, factor):
    """Store source * factor, rounded to nearest even bfloat16 bits where the tag is uint16, else as float32."""

    def codegen(context, builder, signature, args):
        _, source_, target_, count_, factor_ = args

        def chunk(i: Any, lanes: int) -> None:
            value = builder.fmul(_load(builder, types.float32, source_, i, lanes), _splat(builder, factor_, lanes))
            if tag != types.uint16:
                _store(builder, value, target_, i)
                return
            half = _to_bfloat16(builder, value)
            builder.store(half, _pointer(builder, target_, i, 2, half.type), align=2)

        whole = builder.and_(count_, ir.Constant(_I64, -LANES))
        with _range(builder, whole, LANES) as (i, _):
            chunk(i, LANES)
        with cgutils.for_range_slice(builder, whole, count_, ir.Constant(_I64, 1), intp=_I64) as (i, _):
            chunk(i, 1)
        return context.get_dummy_value()

    return types.void(tag, types.int64, types.int64, types.int64, types.float32), codegen


@intrinsic
def put_row(typingctx, tag, cache_tag, source, target, count):
    """Store count elements of one type as the cache has them; of a quantised one the result is their scale, else 1.

    See `engine.attention.quantised.quantise`, whose codes and scales these are, bit by bit.
    """

    def codegen(context, builder, signature, args):
        _, _, source_, target_, count_ = args
        if tag == cache_tag:
            size = builder.mul(count_, ir.Constant(_I64, _SIZES[tag]))
            byte = _I8.as_pointer()
            cgutils.raw_memcpy(builder, builder.inttoptr(target_, byte), builder.inttoptr(source_, byte), size, 1)
            return ir.Constant(_F32, 1.0)

        def chunks(body):
            whole = builder.and_(count_, ir.Constant(_I64, -LANES))
            with _range(builder, whole, LANES) as (i, _):
                body(i, LANES)
            with cgutils.for_range_slice(builder, whole, count_, ir.Constant(_I64, 1), intp=_I64) as (i, _):
                body(i, 1)

        if cache_tag == types.uint16:

            def round_chunk(i, lanes):
                half = _to_bfloat16(builder, _load(builder, tag, source_, i, lanes))
                builder.store(half, _pointer(builder, target_, i, 2, half.type), align=2)

            chunks(round_chunk)
            return ir.Constant(_F32, 1.0)

        # As integers, the magnitudes of floats have the same order, and a NaN is the largest.
        largest = {n: cgutils.alloca_once_value(builder, _const(0, _I32, n)) for n in (LANES, 1)}

        def compare_chunk(i, lanes):
            bits = builder.bitcast(_load(builder, tag, source_, i, lanes), ir.VectorType(_I32, lanes))
            bits = builder.and_(bits, _const(0x7FFFFFFF, _I32, lanes))
            old = builder.load(largest[lanes])
            builder.store(builder.select(builder.icmp_unsigned(">", bits, old), bits, old), largest[lanes])

        chunks(compare_chunk)
        best = builder.extract_element(builder.load(largest[1]), ir.Constant(_I32, 0))
        vec = builder.load(largest[LANES])
        for lane in range(LANES):
            bits = builder.extract_element(vec, ir.Constant(_I32, lane))
            best = builder.select(builder.icmp_unsigned(">", bits, best), bits, best)
        scale = builder.fdiv(builder.bitcast(best, _F32), ir.Constant(_F32, _LARGEST_CODE[cache_tag]))
        zero = builder.fcmp_ordered("==", scale, ir.Constant(_F32, 0.0))
        scale = builder.select(zero, ir.Constant(_F32, 1.0), scale)
        infinite = builder.icmp_unsigned(">=", best, ir.Constant(_I32, 0x7F800000))
        scale = builder.select(infinite, ir.Constant(_F32, float("nan")), scale)

        def code_chunk(i, lanes):
            scaled = builder.fdiv(_load(builder, tag, source_, i, lanes), _splat(builder, scale, lanes))
            codes = _to_codes(builder, cache_tag, scaled)
            builder.store(codes, _pointer(builder, target_, i, 1, codes.type), align=1)

        chunks(code_chunk)
        return scale

    return types.float32(tag, cache_tag, types.int64, types.int64, types.int64), codegen


@intrinsic
def multiply_row(typingctx, row, count, factors):
    """Multiply count floats (a multiple of LANES), each by its own factor."""

    def codegen(context, builder, signature, args):
        row_, count_, factors_ = args
        with _range(builder, count_, LANES) as (i, _):
            factor = _load(builder, types.float32, factors_, i)
            _store(builder, builder.fmul(_load(builder, types.float32, row_, i), factor), row_, i)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@intrinsic
def fill(typingctx, target, start, stop, value):
    """Set the floats target[start:stop] to a value."""

    def codegen(context, builder, signature, args):
        target_, start_, stop_, value_ = args
        with cgutils.for_range_slice(builder, start_, stop_, ir.Constant(_I64, 1), intp=_I64) as (i, _):
            _store(builder, value_, target_, i)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.float32), codegen


@intrinsic
def element_size(typingctx, tag):
    """Bytes of one element of a tag."""
    size = _SIZES[tag]

    def codegen(context, builder, signature, args):
        return ir.Constant(_I64, size)

    return types.int64(tag), codegen


@intrinsic
def output_size(typingctx, tag):
    """Bytes of one element that `store_row` writes."""
    size = 2 if tag == types.uint16 else 4

    def codegen(context, builder, signature, args):
        return ir.Constant(_I64, size)

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
        pointer = builder.inttoptr(args[0], _I64.as_pointer())
        return builder.atomic_rmw("add", pointer, args[1], "acq_rel")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def pointer_to(typingctx, address):
    """An address as the pointer that `numba.carray` takes."""

    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), codegen
