"""The inner loops of linear layers in bfloat16: register tiles of some rows by one panel (`cpu_bfloat16_kernel.py`)."""

# mypy: ignore-errors
# Intrinsics are typed by Numba: the signature that each returns says how.

from __future__ import annotations

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.attention.cpu_emit import int64, plus
from engine.attention.cpu_lanes import F32, I32, I64, const, fma, pointer, span, splat
from engine.attention.cpu_pairs import LANES, add_products
from engine.model.cpu_bfloat16_weights import (
    FLOATS,
    PAIRS,
    PANEL,
    VECTORS,
    Codes,
    Converted,
    Converting,
    load_vector,
)

ROWS = 4
"""Rows of a register tile: 12 sums of a block and 12 of what came before it, of 32 registers."""


class _Tile:
    """Sums of some rows by one panel, in registers."""

    def __init__(self, builder, height, x, x_stride, totals):
        self._builder = builder
        self._inputs = [builder.add(x, builder.mul(int64(2 * r), x_stride)) for r in range(height)]
        self._places = [
            plus(builder, totals, (r * PANEL + v * LANES) * 4) for r in range(height) for v in range(VECTORS)
        ]
        self.cells = [cgutils.alloca_once(builder, FLOATS) for _ in self._places]
        self.height = height

    def start(self, first):
        """From zero, or go on from what stands in the totals."""
        builder = self._builder
        for cell in self.cells:
            builder.store(const(0.0, F32, LANES), cell)
        with builder.if_then(builder.icmp_signed("==", first, int64(0))):
            for cell, place in zip(self.cells, self._places, strict=True):
                builder.store(load_vector(builder, place, FLOATS), cell)

    def add(self, cells, pair, weights):
        """Add the products of a pair of inputs to sums."""
        builder = self._builder
        for r, x in enumerate(self._inputs):
            both = builder.load(pointer(builder, x, pair, 4, I32), align=2)
            given = splat(builder, both, LANES)
            for v in range(VECTORS):
                cell = cells[r * VECTORS + v]
                builder.store(add_products(builder, builder.load(cell), given, weights[v]), cell)

    def finish(self):
        for cell, place in zip(self.cells, self._places, strict=True):
            self._builder.store(self._builder.load(cell), self._builder.inttoptr(place, FLOATS.as_pointer()), align=64)


def _multiply_blocks(builder, height, source, first, x, x_stride, blocks, count, sums, sums_stride, totals):
    """Add `count` blocks of a panel, scaled, to the totals of a literal number of rows."""
    tile = _Tile(builder, height, x, x_stride, totals)
    tile.start(first)
    cells = [cgutils.alloca_once(builder, FLOATS) for _ in tile.cells]
    with span(builder, count, 1) as (index, _):
        block = builder.add(blocks, builder.mul(index, int64(source.block_bytes)))
        for cell in cells:
            builder.store(const(0.0, F32, LANES), cell)
        begin = builder.mul(index, int64(PAIRS))
        with span(builder, int64(PAIRS), source.step) as (pair, _):
            for n, weights in enumerate(source.weights(builder, block, pair)):
                tile.add(cells, builder.add(begin, plus(builder, pair, n)), weights)
        scales = [source.scale(builder, block, v) for v in range(VECTORS)]
        minima = [source.minimum(builder, block, v) for v in range(VECTORS)] if source.minima else []
        for r in range(height):
            given = None
            if minima:
                place = builder.add(builder.mul(int64(r), sums_stride), index)
                given = splat(builder, builder.load(pointer(builder, sums, place, 4, F32), align=4), LANES)
            for v in range(VECTORS):
                cell = tile.cells[r * VECTORS + v]
                total = fma(builder, builder.load(cells[r * VECTORS + v]), scales[v], builder.load(cell))
                builder.store(fma(builder, given, minima[v], total) if minima else total, cell)
    tile.finish()


def _multiply_pairs(builder, height, source, first, x, x_stride, weights, count, sums, sums_stride, totals):
    """Add `count` pairs of inputs times bfloat16 weights to the totals of a literal number of rows."""
    tile = _Tile(builder, height, x, x_stride, totals)
    tile.start(first)
    whole = builder.and_(count, int64(-source.step))
    with span(builder, whole, source.step) as (pair, _):
        for n, given in enumerate(source.weights(builder, weights, pair)):
            tile.add(tile.cells, plus(builder, pair, n), given)
    with cgutils.for_range_slice(builder, whole, count, int64(1), intp=I64) as (pair, _):
        tile.add(tile.cells, pair, source.weights(builder, weights, pair)[0])
    tile.finish()


@intrinsic
def multiply(typingctx, tag, num_rows, first, x, x_stride, weights, count, sums, sums_stride, totals, scratch):
    """Add a part of a panel's products to totals[r, :PANEL] for so many rows; the first time, set them.

    Args:
        typingctx: Numba's.
        tag: The form of the weights.
        num_rows: Any number.
        first: Whether to set.
        x: Address of the first row's first input of the part.
        x_stride: In elements.
        weights: Address of the part.
        count: Of its blocks; of bfloat16, of its pairs of inputs.
        sums: Address of the first row's sum of the part's first block of inputs, where there are minima.
        sums_stride: From row to row.
        totals: Address, on a cache line.
        scratch: Address; room for `CHUNK` blocks where there are codes and more than `ROWS` rows.
    """
    coded = tag != types.uint16
    emit = _multiply_blocks if coded else _multiply_pairs

    def codegen(context, builder, signature, args):
        _, num_rows_, first_, x_, x_stride_, weights_, count_, sums_, sums_stride_, totals_, scratch_ = args

        def tile(source, blocks, row, height):
            x_row = builder.add(x_, builder.mul(builder.mul(row, int64(2)), x_stride_))
            sums_row = builder.add(sums_, builder.mul(builder.mul(row, int64(4)), sums_stride_))
            totals_row = builder.add(totals_, builder.mul(row, int64(PANEL * 4)))
            emit(builder, height, source, first_, x_row, x_stride_, blocks, count_, sums_row, sums_stride_, totals_row)

        def tiles(source, blocks, begin):
            """Whole tiles from a row on, and what is left."""
            count = builder.sub(num_rows_, begin)
            whole = builder.mul(builder.udiv(count, int64(ROWS)), int64(ROWS))
            with span(builder, whole, ROWS) as (row, _):
                tile(source, blocks, builder.add(begin, row), ROWS)
            for height in range(1, ROWS):
                with builder.if_then(builder.icmp_signed("==", builder.sub(count, whole), int64(height))):
                    tile(source, blocks, builder.add(begin, whole), height)

        if not coded:
            tiles(Converted(tag), weights_, int64(0))
            return context.get_dummy_value()
        with builder.if_else(builder.icmp_signed("<=", num_rows_, int64(ROWS))) as (few, many):
            with few:
                for height in range(1, ROWS + 1):
                    with builder.if_then(builder.icmp_signed("==", num_rows_, int64(height))):
                        tile(Codes(tag), weights_, int64(0), height)
            with many:
                tile(Converting(tag, weights_, scratch_), weights_, int64(0), ROWS)
                tiles(Converted(tag), scratch_, int64(ROWS))
        return context.get_dummy_value()

    return types.void(tag, *([types.int64] * 10)), codegen
