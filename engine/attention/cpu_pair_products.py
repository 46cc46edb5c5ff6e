"""Inner loops of the compiled CPU attention over a cache of bfloat16, by products of pairs (`cpu_pairs.py`).

With few rows a key is multiplied where it lies, and the 16 sums of each product are added up; values of two positions
are interleaved in registers. With many rows, keys and values are first laid out as pairs of rows in scratch, once for
all rows, and both products are the same register tile, 6 rows by 4 vectors.
"""

# mypy: ignore-errors
# Intrinsics are typed by Numba: the signature that each returns says how.

from __future__ import annotations

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.attention.cpu_emit import FIRST_CACHE, int64, plus, prefetch
from engine.attention.cpu_lanes import F32, I64, const, load, pointer, steps, store
from engine.attention.cpu_lines import Lines
from engine.attention.cpu_pairs import (
    LANES,
    WORDS,
    add_products,
    interleave,
    load_pair,
    load_pairs,
    sums_of_four,
    sums_of_sixteen,
    transpose,
)
from engine.attention.cpu_params import PAIR_HEIGHT

_HEIGHTS = (PAIR_HEIGHT, 3)

_F32 = types.float32


def _at(builder, row, stride, index):
    return builder.add(builder.mul(row, stride), index)


def _loop(builder, start, stop, step):
    return cgutils.for_range_slice(builder, start, stop, int64(step), intp=I64)


def _by_height(builder, rows, heights, body):
    """Call body(row, height) to emit code for register tiles of the first height, and of the second where it will do.

    Rows that are left over are computed with whatever stands there: scratch has room for them.
    """
    tall, low = heights
    with _loop(builder, int64(0), rows, tall) as (row, _):
        several = builder.icmp_signed(">", builder.sub(rows, row), int64(low))
        with builder.if_else(several) as (then, otherwise):
            with then:
                body(row, tall)
            with otherwise:
                body(row, low)


class _Positions:
    """Rows of the cache: an address, and offsets of each position's row from it."""

    def __init__(self, builder, base, offsets):
        self._builder, self._base, self._offsets = builder, base, offsets

    def row(self, position):
        offset = self._builder.load(pointer(self._builder, self._offsets, position, 8, I64), align=8)
        return self._builder.add(self._base, offset)


def _cells(builder, height, width, initial):
    return [[cgutils.alloca_once_value(builder, initial(r, c)) for c in range(width)] for r in range(height)]


def _add(builder, cell, a, b):
    builder.store(add_products(builder, builder.load(cell), a, b), cell)


@intrinsic
def pair_scores(typingctx, rows, q, base, offsets, positions, width, out, out_stride, soon, lines):
    """out[r, t] = q[r] . key[t] for few rows: q bfloat16 [rows, width], key t at base + offsets[t].

    Offsets are int64 bytes; positions come in multiples of 16, and width in multiples of 32. For each 64 bytes that are
    read, a line is asked for, see `Lines`: soon is their base address, lines the address of their offsets.
    """

    def codegen(context, builder, signature, args):
        rows_, q_, base_, offsets_, positions_, width_, out_, os_, soon_, lines_ = args
        keys, ahead = _Positions(builder, base_, offsets_), Lines(builder, soon_, lines_)
        vectors = builder.lshr(width_, int64(5))

        def by_vectors(position, cells, addresses, queries):
            """For heads of 64 elements, whose queries stay in registers."""
            for t, address in enumerate(addresses):
                for n, row in enumerate(queries):
                    key = load_pairs(builder, address, int64(n * WORDS))
                    ahead.ask(plus(builder, builder.shl(position, int64(1)), 2 * t + n))
                    for r, query in enumerate(row):
                        _add(builder, cells[r][t], query, key)

        def by_loop(position, cells, addresses, row):
            first, stop = (builder.mul(plus(builder, position, n), vectors) for n in (0, 4))
            with _loop(builder, first, stop, 1) as (line, _):
                ahead.ask(line)
            with _loop(builder, int64(0), width_, WORDS) as (column, _):
                places = [_at(builder, plus(builder, row, r), width_, column) for r in range(len(cells))]
                queries = [load_pairs(builder, q_, place) for place in places]
                for t, address in enumerate(addresses):
                    key = load_pairs(builder, address, column)
                    for r, query in enumerate(queries):
                        _add(builder, cells[r][t], query, key)

        def four(position, height, add, queries):
            addresses = [keys.row(plus(builder, position, n)) for n in range(4)]
            cells = _cells(builder, height, 4, lambda r, t: const(0.0, F32, LANES))
            add(position, cells, addresses, queries)
            return [sums_of_four(builder, [builder.load(cell) for cell in row]) for row in cells]

        def tile(row, height):
            def positions(add, queries):
                with _loop(builder, int64(0), positions_, LANES) as (position, _):
                    fours = [four(plus(builder, position, 4 * n), height, add, queries) for n in range(4)]
                    for r in range(height):
                        total = sums_of_sixteen(builder, [each[r] for each in fours])
                        store(builder, total, out_, _at(builder, plus(builder, row, r), os_, position))

            common = builder.icmp_signed("==", width_, int64(2 * WORDS))
            with builder.if_else(common) as (then, otherwise):
                with then:
                    first = [_at(builder, plus(builder, row, r), width_, int64(0)) for r in range(height)]
                    positions(
                        by_vectors,
                        [[load_pairs(builder, q_, plus(builder, at, n * WORDS)) for at in first] for n in range(2)],
                    )
                with otherwise:
                    positions(by_loop, row)

        _by_height(builder, rows_, (3, 1), tile)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 10), codegen


@intrinsic
def pair_weigh(typingctx, rows, weights, stride, rest, base, offsets, positions, width, acc, soon, lines):
    """acc[r] += sum over t of weights[r, t] * value[t] for few rows: acc float32 [rows, width].

    Weights are bfloat16, what is left of them lies `rest` bytes behind them. See `pair_scores` for the others.
    """

    def codegen(context, builder, signature, args):
        rows_, w_, ws_, rest_, base_, offsets_, positions_, width_, acc_, soon_, lines_ = args
        values, ahead = _Positions(builder, base_, offsets_), Lines(builder, soon_, lines_)
        left_ = builder.add(w_, rest_)

        def tile(row, height):
            def columns(first, size):
                start = builder.mul(first, int64(WORDS))
                places = [
                    [
                        _at(builder, plus(builder, row, r), width_, plus(builder, start, c * LANES))
                        for c in range(2 * size)
                    ]
                    for r in range(height)
                ]
                cells = _cells(builder, height, 2 * size, lambda r, c: load(builder, _F32, acc_, places[r][c], LANES))
                line = builder.mul(first, positions_)
                with _loop(builder, int64(0), positions_, 2) as (position, _):
                    addresses = [values.row(plus(builder, position, n)) for n in range(2)]
                    # From the second cache to the first; what lies behind the last positions need not exist.
                    for n in range(8, 10):
                        coming = builder.add(values.row(plus(builder, position, n)), builder.shl(start, int64(1)))
                        for c in range(size):
                            prefetch(builder, plus(builder, coming, c * 2 * WORDS), FIRST_CACHE)
                    pairs = []
                    for n in range(size):
                        column = plus(builder, start, n * WORDS)
                        pairs += interleave(builder, *(load_pairs(builder, address, column) for address in addresses))
                    for n in range(2 * size):
                        ahead.ask(builder.add(line, plus(builder, builder.mul(position, int64(size)), n)))
                    for r in range(height):
                        place = _at(builder, plus(builder, row, r), ws_, position)
                        for part in (w_, left_):
                            weight = load_pair(builder, part, place)
                            for cell, pair in zip(cells[r], pairs, strict=True):
                                _add(builder, cell, weight, pair)
                for r in range(height):
                    for cell, place in zip(cells[r], places[r], strict=True):
                        store(builder, builder.load(cell), acc_, place)

            steps(builder, builder.lshr(width_, int64(5)), 2, columns)

        _by_height(builder, rows_, (3, 1), tile)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 11), codegen


@intrinsic
def pack_keys(typingctx, base, offsets, positions, width, target, stride, soon, lines):
    """Lay keys out as pairs of columns: target[d / 2, t] is elements d and d + 1 of the key at base + offsets[t].

    Rows of the target are `stride` pairs long. See `pair_scores` for the others.
    """

    def codegen(context, builder, signature, args):
        base_, offsets_, positions_, width_, target_, stride_, soon_, lines_ = args
        keys, ahead = _Positions(builder, base_, offsets_), Lines(builder, soon_, lines_)
        with _loop(builder, int64(0), positions_, LANES) as (position, _):
            line = builder.mul(position, builder.lshr(width_, int64(5)))
            with _loop(builder, int64(0), width_, WORDS) as (column, _):
                first = builder.add(line, builder.lshr(column, int64(1)))
                rows = []
                for n in range(LANES):
                    rows.append(load_pairs(builder, keys.row(plus(builder, position, n)), column))
                    ahead.ask(plus(builder, first, n))
                pair = builder.lshr(column, int64(1))
                for n, vector in enumerate(transpose(builder, rows)):
                    place = _at(builder, plus(builder, pair, n), stride_, position)
                    builder.store(vector, pointer(builder, target_, place, 4, vector.type), align=64)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 8), codegen


@intrinsic
def pack_values(typingctx, base, offsets, positions, width, target, soon, lines):
    """Lay values out as pairs of rows: target[t / 2, d] is element d of the values at base + offsets[t] and [t + 1].

    See `pair_scores` for the others.
    """

    def codegen(context, builder, signature, args):
        base_, offsets_, positions_, width_, target_, soon_, lines_ = args
        values, ahead = _Positions(builder, base_, offsets_), Lines(builder, soon_, lines_)
        with _loop(builder, int64(0), positions_, 2) as (position, _):
            addresses = [values.row(plus(builder, position, n)) for n in range(2)]
            line = builder.mul(position, builder.lshr(width_, int64(5)))
            row = builder.mul(builder.lshr(position, int64(1)), width_)
            with _loop(builder, int64(0), width_, WORDS) as (column, _):
                first = builder.add(line, builder.lshr(column, int64(4)))
                pairs = interleave(builder, *(load_pairs(builder, address, column) for address in addresses))
                for n, vector in enumerate(pairs):
                    ahead.ask(plus(builder, first, n))
                    place = builder.add(row, plus(builder, column, n * LANES))
                    builder.store(vector, pointer(builder, target_, place, 4, vector.type), align=64)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 7), codegen


@intrinsic(prefer_literal=True)
def pair_product(typingctx, split, rows, a, a_stride, rest, b, b_stride, pairs, chunks, out, out_stride):
    """The product of rows a, bfloat16, and b, pairs of rows: out float32 [rows, 16 * chunks].

    split is a literal: 0 to set out to a . b; 1 to add to it, of an a in two parts, the second `rest` bytes behind the
    first. a_stride is in elements, b_stride in pairs.
    """

    def codegen(context, builder, signature, args):
        _, rows_, a_, as_, rest_, b_, bs_, pairs_, chunks_, out_, os_ = args
        parts = [a_]
        if split.literal_value:
            parts.append(builder.add(a_, rest_))

        def tile(row, height):
            def columns(chunk, size):
                start = builder.mul(chunk, int64(LANES))
                places = [
                    [_at(builder, plus(builder, row, r), os_, plus(builder, start, c * LANES)) for c in range(size)]
                    for r in range(height)
                ]

                def initial(r, c):
                    return (
                        load(builder, _F32, out_, places[r][c], LANES)
                        if split.literal_value
                        else const(0.0, F32, LANES)
                    )

                cells = _cells(builder, height, size, initial)
                with _loop(builder, int64(0), pairs_, 1) as (pair, _):
                    at = _at(builder, pair, bs_, start)
                    others = [
                        load_pairs(builder, b_, builder.shl(plus(builder, at, c * LANES), int64(1)))
                        for c in range(size)
                    ]
                    for r in range(height):
                        place = _at(builder, plus(builder, row, r), as_, builder.shl(pair, int64(1)))
                        for part in parts:
                            own = load_pair(builder, part, place)
                            for cell, other in zip(cells[r], others, strict=True):
                                _add(builder, cell, own, other)
                for r in range(height):
                    for cell, place in zip(cells[r], places[r], strict=True):
                        store(builder, builder.load(cell), out_, place)

            steps(builder, chunks_, 4, columns)

        _by_height(builder, rows_, _HEIGHTS, tile)
        return context.get_dummy_value()

    return types.void(split, *[types.int64] * 10), codegen
