"""The compiled worker of linear layers whose weights are held in few bytes.

A panel is the weights of `PANEL` outputs, cut along the input into blocks of 32; its layout is in `cpu_linear.py`. A
thread takes a panel, turns `CHUNK` blocks of it into float32 in a scratch that stays in its first cache, multiplies all
rows of the input with them, and goes on to the next blocks. So a weight is fetched once in its few bytes and converted
once, however many rows there are; the products are a plain matrix product's, in register tiles of some rows by one
panel (Goto and van de Geijn 2008, "Anatomy of high-performance matrix multiplication"). For one or two rows, weights
are converted in registers on their way to the product.

Each output is summed in the order of its inputs, alone: a row's result depends on no other row.
"""

# mypy: ignore-errors
# Compiled functions are typed by Numba, from the tag; intrinsics by the signature that each returns.

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.attention.cpu_call import COUNTER_BYTES
from engine.attention.cpu_compile import OPTIONS
from engine.attention.cpu_lanes import F32, I8, I32, I64, LANES, const, fma, load, pointer, span, splat, store
from engine.attention.cpu_memory import fetch_add, pointer_to
from engine.model.weight_codes import BLOCK

VECTORS = 4
PANEL = VECTORS * LANES
"""Outputs of a panel. With four vectors even a single row has four sums under way, so that none waits for another."""

ROWS = 6 if LANES == 16 else 3
"""Rows of a register tile: the sums take 12 of AVX2's 16 registers, or 24 of AVX-512's 32."""

CHUNK = 4
"""Blocks converted at a time: 16 KiB of scratch with vectors of 8, half of a small first cache."""

NEXT, SLOT = 0, COUNTER_BYTES
"""Byte offsets of the counters that threads share, see `cpu_call`: next panel, scratch handed out."""

FIELDS = ("counters", "scratch", "x", "weights", "y", "num_rows", "num_inputs", "num_panels", "x_stride", "block_bytes")
"""Addresses, counts, the stride of the input's rows in elements, and the bytes of a block of a panel."""

PARAMS = np.dtype([(name, np.int64) for name in FIELDS])

BITS = {4: np.uint8(0), 8: np.int8(0), 16: np.uint16(0)}
"""The tag that stands for a form of the weights: 4-bit codes with minima, 8-bit codes without, bfloat16."""

_compiled = njit(**OPTIONS)
_VEC = ir.VectorType(F32, LANES)
_INTS = ir.VectorType(I32, LANES)


def _at(builder, index, row_length, column):
    return builder.add(builder.mul(index, ir.Constant(I64, row_length)), ir.Constant(I64, column))


def _block(builder, tag, source):
    """A function that emits the `VECTORS` vectors of weights of an input of a block."""
    k_length = PANEL // 2 if tag != types.int8 else PANEL

    def halves(first):
        return [load(builder, types.int16, source, ir.Constant(I64, first + v * LANES)) for v in range(VECTORS)]

    def codes_after(num_halves):
        return builder.add(source, ir.Constant(I64, 2 * num_halves))

    if tag == types.uint8:
        scales, minima, codes = halves(0), halves(PANEL), codes_after(2 * PANEL)

        def value(k, v):
            place = pointer(builder, codes, _at(builder, k, k_length, v // 2 * LANES), 1, ir.VectorType(I8, LANES))
            both = builder.zext(builder.load(place, align=1), _INTS)
            code = builder.lshr(both, const(4, I32)) if v % 2 else builder.and_(both, const(15, I32))
            # Rounded after each operation, as the values were that the codes stand for.
            return builder.fadd(builder.fmul(builder.sitofp(code, _VEC), scales[v]), minima[v])

    elif tag == types.int8:
        scales, codes = halves(0), codes_after(PANEL)

        def value(k, v):
            return builder.fmul(load(builder, tag, codes, _at(builder, k, k_length, v * LANES)), scales[v])

    else:

        def value(k, v):
            both = builder.load(pointer(builder, source, _at(builder, k, k_length, v // 2 * LANES), 4, _INTS), align=4)
            bits = builder.and_(both, const(0xFFFF0000, I32)) if v % 2 else builder.shl(both, const(16, I32))
            return builder.bitcast(bits, _VEC)

    return value


class _Tile:
    """Sums of some rows by one panel, in registers."""

    def __init__(self, builder, height, x, x_stride, y, y_stride):
        self._builder = builder
        rows = [builder.mul(ir.Constant(I64, r), y_stride) for r in range(height)]
        self._y = y
        self._places = [builder.add(row, ir.Constant(I64, v * LANES)) for row in rows for v in range(VECTORS)]
        self._inputs = [
            builder.add(x, builder.mul(builder.mul(ir.Constant(I64, r), x_stride), ir.Constant(I64, 4)))
            for r in range(height)
        ]
        self._sums = [cgutils.alloca_once(builder, _VEC) for _ in self._places]
        for cell in self._sums:
            builder.store(const(0.0), cell)

    def resume(self):
        """Go on from what stands in y."""
        for cell, place in zip(self._sums, self._places, strict=True):
            self._builder.store(load(self._builder, types.float32, self._y, place), cell)

    def add(self, k, weight):
        """Add input k times weight(v), the weights of the panel's vectors."""
        builder = self._builder
        factors = [splat(builder, builder.load(pointer(builder, x, k, 4, F32), align=4)) for x in self._inputs]
        for v in range(VECTORS):
            weights = weight(v)
            for factor, cell in zip(factors, self._sums[v::VECTORS], strict=True):
                builder.store(fma(builder, factor, weights, builder.load(cell)), cell)

    def finish(self):
        """Put the sums into y."""
        for cell, place in zip(self._sums, self._places, strict=True):
            store(self._builder, self._builder.load(cell), self._y, place)


@intrinsic(prefer_literal=True)
def expand(typingctx, tag, source, target):
    """A block of a panel as float32 `[BLOCK, PANEL]`."""

    def codegen(context, builder, signature, args):
        _, source_, target_ = args
        value = _block(builder, tag, source_)
        with span(builder, ir.Constant(I64, BLOCK), 1) as (k, _):
            for v in range(VECTORS):
                store(builder, value(k, v), target_, _at(builder, k, PANEL, v * LANES))
        return context.get_dummy_value()

    return types.void(tag, types.int64, types.int64), codegen


@intrinsic(prefer_literal=True)
def multiply(typingctx, num_rows, first, x, x_stride, weights, count, y, y_stride):
    """Add x[r, :count] . weights[:count] to y[r, :PANEL] for a literal number of rows; the first time, set it."""
    height = num_rows.literal_value

    def codegen(context, builder, signature, args):
        _, first_, x_, x_stride_, weights_, count_, y_, y_stride_ = args
        tile = _Tile(builder, height, x_, x_stride_, y_, y_stride_)
        with builder.if_then(builder.icmp_signed("==", first_, ir.Constant(I64, 0))):
            tile.resume()
        with span(builder, count_, 1) as (k, _):
            tile.add(k, lambda v: load(builder, types.float32, weights_, _at(builder, k, PANEL, v * LANES)))
        tile.finish()
        return context.get_dummy_value()

    return types.void(num_rows, *([types.int64] * 7)), codegen


@intrinsic(prefer_literal=True)
def multiply_codes(typingctx, tag, num_rows, x, x_stride, panel, block_bytes, count, y, y_stride):
    """Set y[r, :PANEL] to x[r, :count] . weights for a literal number of rows, converting weights as they are used."""
    height = num_rows.literal_value

    def codegen(context, builder, signature, args):
        _, _, x_, x_stride_, panel_, block_bytes_, count_, y_, y_stride_ = args
        tile = _Tile(builder, height, x_, x_stride_, y_, y_stride_)
        source = cgutils.alloca_once_value(builder, panel_)
        with span(builder, count_, BLOCK) as (start, _):
            address = builder.load(source)
            value = _block(builder, tag, address)
            left = builder.sub(count_, start)
            whole = builder.icmp_signed(">", left, ir.Constant(I64, BLOCK))
            with span(builder, builder.select(whole, ir.Constant(I64, BLOCK), left), 1) as (k, _):
                tile.add(builder.add(start, k), lambda v: value(k, v))
            builder.store(builder.add(address, block_bytes_), source)
        tile.finish()
        return context.get_dummy_value()

    return types.void(tag, num_rows, *([types.int64] * 7)), codegen


@_compiled
def _run(p, tag, panel, scratch):
    blocks = -(-p.num_inputs // BLOCK)
    y_stride = p.num_panels * PANEL
    source = p.weights + panel * blocks * p.block_bytes
    y = p.y + panel * PANEL * 4
    if p.num_rows == 1:
        multiply_codes(tag, 1, p.x, p.x_stride, source, p.block_bytes, p.num_inputs, y, y_stride)
        return
    if p.num_rows == 2:
        multiply_codes(tag, 2, p.x, p.x_stride, source, p.block_bytes, p.num_inputs, y, y_stride)
        return
    for start in range(0, blocks, CHUNK):
        stop = min(start + CHUNK, blocks)
        for block in range(start, stop):
            expand(tag, source + block * p.block_bytes, scratch + (block - start) * BLOCK * PANEL * 4)
        count = min(stop * BLOCK, p.num_inputs) - start * BLOCK
        first = np.int64(start == 0)
        row = 0
        while row < p.num_rows:
            x = p.x + (row * p.x_stride + start * BLOCK) * 4
            y = p.y + (row * y_stride + panel * PANEL) * 4
            left = p.num_rows - row
            if ROWS == 6 and left >= 6:
                multiply(6, first, x, p.x_stride, scratch, count, y, y_stride)
                row += 6
            elif left >= 3:
                multiply(3, first, x, p.x_stride, scratch, count, y, y_stride)
                row += 3
            elif left == 2:
                multiply(2, first, x, p.x_stride, scratch, count, y, y_stride)
                row += 2
            else:
                multiply(1, first, x, p.x_stride, scratch, count, y, y_stride)
                row += 1


def make_worker(tag: Any) -> Any:
    """The worker of a form of weights, still Python: it works on the call whose `PARAMS` are at an address."""

    # Nothing compiled among what the worker encloses: such a thing is another one in every process, and what Numba has
    # kept of the worker would never be found again.
    def worker(address):
        p = carray(pointer_to(address), 1, PARAMS)[0]
        scratch = p.scratch + fetch_add(p.counters + SLOT, 1) * CHUNK * BLOCK * PANEL * 4
        while True:
            panel = fetch_add(p.counters + NEXT, 1)
            if panel >= p.num_panels:
                return
            _run(p, tag, panel, scratch)

    return worker
