"""The compiled product of 16-bit inputs and 8-bit weights; every thread of a call takes work until none is left.

Processors multiply pairs of 16-bit integers into 32-bit sums as fast as bytes (`vpmaddwd` of AVX2), and no sum in
between is cut: so inputs keep 15 bits and a sign, whose rounding is lost in that of the weights. Within a block of the
input a sum is exact; then it is scaled and added up in float32, block after block. Weights are read once for all rows,
as bytes, in the order in which they lie in memory.

Codes may stand over a minimum of their block, as 4-bit codes do: it is multiplied with the sum of the block's inputs.
"""

# mypy: ignore-errors
# Compiled functions are typed by Numba; intrinsics by the signature that each returns.

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.attention.cpu_compile import OPTIONS
from engine.attention.cpu_emit import call, int64
from engine.attention.cpu_features import processor_has
from engine.attention.cpu_lanes import F32, I8, I16, I32, const, fma, pointer, span, splat
from engine.attention.cpu_memory import fetch_add, pointer_to
from engine.model.weight_codes import BLOCK

WIDTH = 8
"""32-bit sums of one register; on a machine with narrower ones LLVM makes several of one."""

HALVES = 2
OUTPUTS = HALVES * WIDTH
"""Outputs of a panel."""

ROWS = 4
"""Rows of a register tile: with two registers of sums each, 8 sums, 2 of weights and 1 of inputs of AVX2's 16."""

CHUNK = 64
"""Rows of one item of work: their codes stay in the second cache while panels of weights go by."""

PAIRS = BLOCK // 2

QUANTISE, MULTIPLY, BOTH = range(3)
"""Phases, what one run of the worker does; `BOTH` is for one thread."""

FIELDS = (
    "phase",
    "cursor",
    "x",
    "x_stride",
    "codes",
    "row_scales",
    "block_sums",
    "y",
    "num_rows",
    "weights",
    "scales",
    "minima",
    "bias",
    "num_inputs",
    "num_blocks",
    "num_panels",
    "item_panels",
)
"""Addresses, counts, and the stride of the input's rows in elements. `minima` is 0 where there are none."""

PARAMS = np.dtype([(name, np.int64) for name in FIELDS])

LARGEST = 32767
"""Input code of the largest element of a row. A block's sum is at most 32 x 127 x 32767, a sixteenth of 32 bits."""

_FLOATS = ir.VectorType(F32, WIDTH)
_SUMS = ir.VectorType(I32, WIDTH)
_SHORTS = ir.VectorType(I16, 2 * WIDTH)
_PAIR_PRODUCTS = processor_has("avx2")


def _add_products(builder, sums, a, b):
    """Give sums[i] + a[2 i] b[2 i] + a[2 i + 1] b[2 i + 1]."""
    if _PAIR_PRODUCTS:
        return builder.add(sums, call(builder, "llvm.x86.avx2.pmadd.wd", _SUMS, a, b))
    wide = ir.VectorType(I32, 2 * WIDTH)
    products = builder.mul(builder.sext(a, wide), builder.sext(b, wide))
    for first in (0, 1):
        every_second = ir.Constant(_SUMS, list(range(first, 2 * WIDTH, 2)))
        sums = builder.add(sums, builder.shuffle_vector(products, products, every_second))
    return sums


def _cells(builder, num_rows, vector):
    """Zeros in registers, `HALVES` for each row; set anew wherever this is emitted, within a loop too."""
    zero = ir.Constant(vector, None)
    cells = [[cgutils.alloca_once(builder, vector) for _ in range(HALVES)] for _ in range(num_rows)]
    for row in cells:
        for cell in row:
            builder.store(zero, cell)
    return cells


def _add_block(builder, num_rows, inputs, weights, block, sums):
    """Add a block's products to integer sums."""
    first = builder.mul(block, int64(PAIRS))
    with span(builder, int64(PAIRS), 1) as (index, _):
        pair = builder.add(first, index)
        shorts = []
        for half in range(HALVES):
            place = builder.add(builder.mul(pair, int64(2 * OUTPUTS)), int64(2 * WIDTH * half))
            raw = builder.load(pointer(builder, weights, place, 1, ir.VectorType(I8, 2 * WIDTH)), align=1)
            shorts.append(builder.sext(raw, _SHORTS))
        for r in range(num_rows):
            both = builder.load(pointer(builder, inputs[r], pair, 4, I32), align=4)
            given = builder.bitcast(splat(builder, both, WIDTH), _SHORTS)
            for half, cell in enumerate(sums[r]):
                builder.store(_add_products(builder, builder.load(cell), shorts[half], given), cell)


def _factors(builder, address, index):
    """The floats of a panel's outputs, number `index` at an address, as `HALVES` vectors."""
    first = builder.mul(index, int64(OUTPUTS))
    places = [builder.add(first, int64(half * WIDTH)) for half in range(HALVES)]
    return [builder.load(pointer(builder, address, place, 4, _FLOATS), align=4) for place in places]


def _multiply_tile(builder, num_rows, row, args):
    """A panel of outputs for a literal number of rows, from `row` on."""
    codes, row_scales, block_sums, num_blocks, weights, scales, minima, bias, y, y_stride = args
    rows = [builder.add(row, int64(r)) for r in range(num_rows)]
    row_bytes = builder.mul(num_blocks, int64(2 * BLOCK))
    inputs = [builder.add(codes, builder.mul(r, row_bytes)) for r in rows]
    totals = _cells(builder, num_rows, _FLOATS)
    with span(builder, num_blocks, 1) as (block, _):
        sums = _cells(builder, num_rows, _SUMS)
        _add_block(builder, num_rows, inputs, weights, block, sums)
        factors = _factors(builder, scales, block)
        for r in range(num_rows):
            for half, cell in enumerate(totals[r]):
                exact = builder.sitofp(builder.load(sums[r][half]), _FLOATS)
                builder.store(fma(builder, exact, factors[half], builder.load(cell)), cell)
        with builder.if_then(builder.icmp_signed("!=", minima, int64(0))):
            lowest = _factors(builder, minima, block)
            for r in range(num_rows):
                index = builder.add(builder.mul(rows[r], num_blocks), block)
                given = splat(builder, builder.load(pointer(builder, block_sums, index, 4, F32), align=4), WIDTH)
                for half, cell in enumerate(totals[r]):
                    builder.store(fma(builder, given, lowest[half], builder.load(cell)), cell)
    added = _factors(builder, bias, int64(0))
    for r in range(num_rows):
        size = splat(builder, builder.load(pointer(builder, row_scales, rows[r], 4, F32), align=4), WIDTH)
        for half, cell in enumerate(totals[r]):
            value = builder.fadd(builder.fmul(builder.load(cell), size), added[half])
            index = builder.add(builder.mul(rows[r], y_stride), int64(half * WIDTH))
            builder.store(value, pointer(builder, y, index, 4, _FLOATS), align=4)


@intrinsic
def multiply(
    typingctx, first, stop, codes, row_scales, block_sums, num_blocks, weights, scales, minima, bias, y, y_stride
):
    """A panel of outputs for rows first to stop - 1: whole register tiles, then two rows, then one."""

    def codegen(context, builder, signature, args):
        first_, stop_, *rest = args
        count = builder.sub(stop_, first_)
        whole = builder.and_(count, int64(-ROWS))
        with span(builder, whole, ROWS) as (index, _):
            _multiply_tile(builder, ROWS, builder.add(first_, index), rest)
        row = builder.add(first_, whole)
        for height in (2, 1):
            some = builder.and_(count, int64(height))
            with builder.if_then(builder.icmp_signed("!=", some, int64(0))):
                _multiply_tile(builder, height, row, rest)
            row = builder.add(row, some)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 12), codegen


@intrinsic
def size_of_row(typingctx, row, count):
    """The largest distance from 0 in whole vectors of floats; NaN or infinite where one of them is."""

    def codegen(context, builder, signature, args):
        row_, count_ = args

        def larger(a, b):
            # Without their sign, floats are in the order of their bits as integers, NaN above all.
            return builder.select(builder.icmp_signed(">", a, b), a, b)

        best = cgutils.alloca_once(builder, _SUMS)
        builder.store(ir.Constant(_SUMS, None), best)
        with span(builder, count_, WIDTH) as (index, _):
            bits = builder.load(pointer(builder, row_, index, 4, _SUMS), align=4)
            builder.store(larger(builder.and_(bits, const(0x7FFFFFFF, I32, WIDTH)), builder.load(best)), best)
        lanes = [builder.extract_element(builder.load(best), ir.Constant(I32, lane)) for lane in range(WIDTH)]
        top = lanes[0]
        for lane in lanes[1:]:
            top = larger(lane, top)
        return builder.bitcast(top, F32)

    return types.float32(types.int64, types.int64), codegen


@intrinsic
def codes_of_row(typingctx, row, count, size, target):
    """target[i] = row[i] / size * LARGEST as int16, rounded to nearest even, of whole vectors."""

    def codegen(context, builder, signature, args):
        row_, count_, size_, target_ = args
        size_ = splat(builder, size_, WIDTH)
        shorts = ir.VectorType(I16, WIDTH)
        with span(builder, count_, WIDTH) as (index, _):
            x = builder.load(pointer(builder, row_, index, 4, _FLOATS), align=4)
            x = builder.fmul(builder.fdiv(x, size_), const(float(LARGEST), F32, WIDTH))
            # Adding 1.5 x 2^23 rounds to an integer, whose two's complement then stands in the low bits.
            bits = builder.bitcast(builder.fadd(x, const(12582912.0, F32, WIDTH)), _SUMS)
            builder.store(builder.trunc(bits, shorts), pointer(builder, target_, index, 2, shorts), align=2)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32, types.int64), codegen


@njit(**OPTIONS)
def _quantise(p, row):
    """Codes of one row, what they are to be multiplied by, and the sum of each block's."""
    width = p.num_blocks * BLOCK
    source = p.x + row * p.x_stride * 4
    target = p.codes + row * width * 2
    codes = carray(pointer_to(target), width, np.int16)
    scales = carray(pointer_to(p.row_scales), p.num_rows, np.float32)
    sums = carray(pointer_to(p.block_sums), (p.num_rows, p.num_blocks), np.float32)
    rest = carray(pointer_to(source), p.num_inputs, np.float32)
    whole = p.num_inputs // WIDTH * WIDTH
    size = size_of_row(source, whole)
    for i in range(whole, p.num_inputs):
        if not abs(rest[i]) <= size:
            size = abs(rest[i]) if size == size else size
    if not (size > 0 and size < np.inf):
        # Zeros stay zeros. NaN and infinities say so through the row's scale, and their codes are harmless.
        codes[:] = 0
        sums[row, :] = 0
        scales[row] = size
        return
    codes_of_row(source, whole, size, target)
    for i in range(whole, p.num_inputs):
        codes[i] = np.int16(np.rint(rest[i] / size * np.float32(LARGEST)))
    for i in range(p.num_inputs, width):
        codes[i] = 0
    for block in range(p.num_blocks):
        total = np.int32(0)
        for i in range(BLOCK):
            total += np.int32(codes[block * BLOCK + i])
        sums[row, block] = total
    scales[row] = size / np.float32(LARGEST)


def worker(address):
    """Work on the call whose `PARAMS` are at an address."""
    p = carray(pointer_to(address), 1, PARAMS)[0]
    if p.phase != MULTIPLY:
        while True:
            row = fetch_add(p.cursor, 1)
            if row >= p.num_rows:
                break
            _quantise(p, row)
        if p.phase == QUANTISE:
            return
        carray(pointer_to(p.cursor), 1, np.int64)[0] = 0
    items = (p.num_panels + p.item_panels - 1) // p.item_panels
    while True:
        ticket = fetch_add(p.cursor, 1)
        first = ticket // items * CHUNK
        if first >= p.num_rows:
            return
        stop = min(first + CHUNK, p.num_rows)
        first_panel = ticket % items * p.item_panels
        for panel in range(first_panel, min(first_panel + p.item_panels, p.num_panels)):
            start = panel * p.num_blocks * OUTPUTS
            multiply(
                first,
                stop,
                p.codes,
                p.row_scales,
                p.block_sums,
                p.num_blocks,
                p.weights + start * BLOCK,
                p.scales + start * 4,
                p.minima + start * 4 if p.minima else 0,
                p.bias + panel * OUTPUTS * 4,
                p.y + panel * OUTPUTS * 4,
                p.num_panels * OUTPUTS,
            )
