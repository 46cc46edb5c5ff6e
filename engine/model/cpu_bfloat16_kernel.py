"""The compiled worker of linear layers in bfloat16, for processors that multiply pairs of it (AVX512_BF16).

`vdpbf16ps` adds two products of bfloat16 to each of 16 float32 sums. Whole numbers up to 255 are exact in bfloat16, and
so are the codes that many weights were made of (`weight_codes.py`): with x as it is,

    y = sum over blocks of (scale * (codes . x) + minimum * sum of x)

where only the products' sums are rounded, in float32. Codes are turned into bfloat16 by looking them up in a register:
4-bit ones in one instruction for 32 of them, 8-bit ones (sign and magnitude) in five for 64.

A panel is the weights of `PANEL` outputs; its layout is in `cpu_bfloat16.py`. A thread takes some rows of the input and
a panel, turns `CHUNK` blocks of it into bfloat16 in a scratch that stays in its first cache, multiplies all these rows
with them in register tiles, and goes on to the next blocks (Goto and van de Geijn 2008, "Anatomy of high-performance
matrix multiplication"). The first rows' tile looks codes up itself and leaves them in the scratch for the others on its
way, so that one hides behind the other; up to one tile of rows needs no scratch. Always each output is summed in the
same order: a row's result depends on no other row.
"""

# mypy: ignore-errors
# Compiled functions are typed by Numba, from the tag; intrinsics by the signature that each returns.

from __future__ import annotations

from typing import Any

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.attention.cpu_call import COUNTER_BYTES
from engine.attention.cpu_compile import OPTIONS
from engine.attention.cpu_lanes import (
    F32,
    I8,
    I16,
    I32,
    I64,
    const,
    fma,
    pointer,
    reduce_add,
    reduce_add_four,
    span,
    splat,
)
from engine.attention.cpu_vector import fetch_add, pointer_to
from engine.model.weight_codes import BLOCK

LANES = 16
"""Sums of one register."""

VECTORS = 3
PANEL = VECTORS * LANES
"""Outputs of a panel."""

ROWS = 4
"""Rows of a register tile: 12 sums of a block and 12 of what came before it, of 32 registers."""

PART_ROWS = 128
"""Rows that a thread takes at once: they stay in its second cache while panels go by."""

CHUNK = 6
"""Blocks converted at a time: 20 KB of a first cache."""

AHEAD = 2048
"""Bytes that codes are asked for before they are needed."""

PAIRS = BLOCK // 2
_PAIR_BYTES = VECTORS * 4 * LANES
"""Of two inputs' weights as bfloat16."""

_SCALES = PAIRS * _PAIR_BYTES
_MINIMA = _SCALES + PANEL * 4
_CONVERTED = _MINIMA + PANEL * 4
"""Of a block that was converted: the weights, scales and minima in float32 behind them."""

NEXT, SLOT = 0, COUNTER_BYTES
"""Byte offsets of the counters that threads share, see `cpu_call`: next ticket for work, scratch handed out."""

FIELDS = (
    "counters",
    "scratch",
    "scratch_bytes",
    "x",
    "x_stride",
    "weights",
    "bias",
    "y",
    "num_rows",
    "part_rows",
    "num_inputs",
    "num_outputs",
    "num_threads",
)
"""Addresses, counts, the bytes of one thread's scratch, and the stride of the input's rows in elements."""

PARAMS = np.dtype([(name, np.int64) for name in FIELDS])

TAGS = {4: np.uint8(0), 8: np.int8(0), 16: np.uint16(0)}
"""What stands for a form of the weights: 4-bit codes with minima, 8-bit codes without, bfloat16."""

BLOCK_BYTES = {4: PANEL * (4 + PAIRS), 8: PANEL * (2 + BLOCK), 16: PANEL * 2 * BLOCK}
"""Of a block of a panel."""

_PLAIN_BYTES = BLOCK_BYTES[16]


def supported() -> bool:
    """Whether this processor has the instructions."""
    features = llvm.get_host_cpu_features()
    return all(features.get(name, False) for name in ("avx512bf16", "avx512bw", "avx512vbmi"))


def scratch_bytes(num_rows: int, num_inputs: int) -> int:
    """That one thread needs, in cache lines: converted blocks, sums of outputs, sums of blocks of the input."""
    return CHUNK * _CONVERTED + -(-num_rows * (PANEL + -(-num_inputs // BLOCK)) * 4 // 64) * 64


class _BFloat16(ir.Type):
    """LLVM's `bfloat`, which llvmlite does not name."""

    null = "0.0"
    intrinsic_name = "bf16"

    def _to_string(self):
        return "bfloat"

    def __eq__(self, other):
        return isinstance(other, _BFloat16)

    def __hash__(self):
        return hash(_BFloat16)


_compiled = njit(**OPTIONS)
_VEC = ir.VectorType(F32, LANES)
_INTS = ir.VectorType(I32, LANES)
_WORDS = ir.VectorType(I16, 2 * LANES)
_BYTES = ir.VectorType(I8, 4 * LANES)
_HALVES = ir.VectorType(ir.HalfType(), LANES)
_NARROW = ir.VectorType(_BFloat16(), LANES)
_PAIRED = ir.VectorType(_BFloat16(), 2 * LANES)

_BITS = (np.arange(128, dtype=np.float32).view(np.uint32) >> 16).tolist()
"""Whole numbers as bfloat16."""


def _int(value):
    return ir.Constant(I64, value)


def _plus(builder, address, value):
    return builder.add(address, _int(value))


def _vector(builder, address, kind, align=64):
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=align)


def _prefetch(builder, address):
    """Ask for the cache line at an address, which need not exist."""
    byte = ir.IntType(8).as_pointer()
    args = [builder.inttoptr(address, byte), *(ir.Constant(I32, n) for n in (0, 3, 1))]
    _call(builder, "llvm.prefetch.p0", ir.VoidType(), *args)


def _call(builder, name, result, *args):
    signature = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, signature, name), args)


def _add_products(builder, sums, a, b):
    """Give sums[i] + a[2 i] b[2 i] + a[2 i + 1] b[2 i + 1]."""
    pairs = (builder.bitcast(operand, _PAIRED) for operand in (a, b))
    return _call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", _VEC, sums, *pairs)


def _look_up_four(builder, source):
    """Weights of 8 inputs of one vector of outputs, as four pairs: each word has four codes, a pair's in one place."""
    table = ir.Constant(_WORDS, [_BITS[n % 16] for n in range(32)])
    words = _vector(builder, source, _WORDS)
    # Only five bits of an index count, and the table does not mind the fifth.
    indices = (builder.lshr(words, const(4 * n, I16, 32)) if n else words for n in range(4))
    return [_call(builder, "llvm.x86.avx512.permvar.hi.512", _WORDS, table, index) for index in indices]


def _look_up_eight(builder, source):
    """Weights of 4 inputs of one vector of outputs, as two pairs, from 64 bytes of sign and magnitude."""
    codes = _vector(builder, source, _BYTES, 16)

    def look_up(shift):
        low, high = (ir.Constant(_BYTES, [b >> shift & 255 for b in _BITS[n : n + 64]]) for n in (0, 64))
        return _call(builder, "llvm.x86.avx512.vpermi2var.qi.512", _BYTES, low, codes, high)

    lower = look_up(0)
    upper = builder.or_(look_up(8), builder.and_(codes, const(0x80, I8, 64)))
    pairs = []
    for half in (0, 8):
        picks = [lane + half + n + which for lane in range(0, 64, 16) for n in range(8) for which in (0, 64)]
        pairs.append(builder.shuffle_vector(lower, upper, ir.Constant(ir.VectorType(I32, 64), picks)))
    return pairs


def _halves(builder, source, vector):
    """float16 numbers of a vector of outputs as float32."""
    return builder.fpext(_vector(builder, _plus(builder, source, vector * 2 * LANES), _HALVES, 2), _VEC)


class _Codes:
    """Blocks of a panel as they lie in memory."""

    def __init__(self, tag):
        self.minima = tag == types.uint8
        self._look_up, self.step = (_look_up_four, 4) if self.minima else (_look_up_eight, 2)
        self._codes = PANEL * (4 if self.minima else 2)
        self.block_bytes = BLOCK_BYTES[4 if self.minima else 8]

    def weights(self, builder, block, pair):
        """`[step][VECTORS]`, from the pair number `pair` on, a multiple of the step."""
        place = builder.add(_plus(builder, block, self._codes), builder.mul(pair, _int(_PAIR_BYTES // self.step)))
        for v in range(VECTORS):
            _prefetch(builder, _plus(builder, place, AHEAD + v * 64))
        by_vector = [self._look_up(builder, _plus(builder, place, v * 4 * LANES)) for v in range(VECTORS)]
        return list(zip(*by_vector, strict=True))

    def scale(self, builder, block, v):
        return _halves(builder, block, v)

    def minimum(self, builder, block, v):
        return _halves(builder, _plus(builder, block, 2 * PANEL), v)


class _Converted:
    """Blocks in the scratch, or bfloat16 weights as they lie in memory."""

    block_bytes = _CONVERTED
    step = 4

    def __init__(self, tag):
        self.minima = tag == types.uint8

    def weights(self, builder, block, pair):
        place = builder.add(block, builder.mul(pair, _int(_PAIR_BYTES)))
        return [
            [_vector(builder, _plus(builder, place, n * _PAIR_BYTES + v * 64), _INTS) for v in range(VECTORS)]
            for n in range(self.step)
        ]

    def scale(self, builder, block, v):
        return _vector(builder, _plus(builder, block, _SCALES + v * 64), _VEC)

    def minimum(self, builder, block, v):
        return _vector(builder, _plus(builder, block, _MINIMA + v * 64), _VEC)


class _Converting(_Codes):
    """Blocks as they lie in memory, that are put into the scratch on their way."""

    def __init__(self, tag, blocks, scratch):
        super().__init__(tag)
        self._blocks, self._scratch = blocks, scratch

    def _keep(self, builder, block, offset, value):
        index = builder.udiv(builder.sub(block, self._blocks), _int(self.block_bytes))
        place = builder.add(builder.add(self._scratch, builder.mul(index, _int(_CONVERTED))), offset)
        builder.store(value, builder.inttoptr(place, value.type.as_pointer()), align=64)
        return value

    def weights(self, builder, block, pair):
        rows = super().weights(builder, block, pair)
        place = builder.mul(pair, _int(_PAIR_BYTES))
        for n, weights in enumerate(rows):
            for v in range(VECTORS):
                self._keep(builder, block, _plus(builder, place, n * _PAIR_BYTES + v * 64), weights[v])
        return rows

    def scale(self, builder, block, v):
        return self._keep(builder, block, _int(_SCALES + v * 64), super().scale(builder, block, v))

    def minimum(self, builder, block, v):
        return self._keep(builder, block, _int(_MINIMA + v * 64), super().minimum(builder, block, v))


class _Tile:
    """Sums of some rows by one panel, in registers."""

    def __init__(self, builder, height, x, x_stride, totals):
        self._builder = builder
        self._inputs = [builder.add(x, builder.mul(_int(2 * r), x_stride)) for r in range(height)]
        self._places = [
            _plus(builder, totals, (r * PANEL + v * LANES) * 4) for r in range(height) for v in range(VECTORS)
        ]
        self.cells = [cgutils.alloca_once(builder, _VEC) for _ in self._places]
        self.height = height

    def start(self, first):
        """From zero, or go on from what stands in the totals."""
        builder = self._builder
        for cell in self.cells:
            builder.store(const(0.0, F32, LANES), cell)
        with builder.if_then(builder.icmp_signed("==", first, _int(0))):
            for cell, place in zip(self.cells, self._places, strict=True):
                builder.store(_vector(builder, place, _VEC), cell)

    def add(self, cells, pair, weights):
        """Add the products of a pair of inputs to sums."""
        builder = self._builder
        for r, x in enumerate(self._inputs):
            both = builder.load(pointer(builder, x, pair, 4, I32), align=2)
            given = splat(builder, both, LANES)
            for v in range(VECTORS):
                cell = cells[r * VECTORS + v]
                builder.store(_add_products(builder, builder.load(cell), given, weights[v]), cell)

    def finish(self):
        for cell, place in zip(self.cells, self._places, strict=True):
            self._builder.store(self._builder.load(cell), self._builder.inttoptr(place, _VEC.as_pointer()), align=64)


def _multiply_blocks(builder, height, source, first, x, x_stride, blocks, count, sums, sums_stride, totals):
    """Add `count` blocks of a panel, scaled, to the totals of a literal number of rows."""
    tile = _Tile(builder, height, x, x_stride, totals)
    tile.start(first)
    cells = [cgutils.alloca_once(builder, _VEC) for _ in tile.cells]
    with span(builder, count, 1) as (index, _):
        block = builder.add(blocks, builder.mul(index, _int(source.block_bytes)))
        for cell in cells:
            builder.store(const(0.0, F32, LANES), cell)
        begin = builder.mul(index, _int(PAIRS))
        with span(builder, _int(PAIRS), source.step) as (pair, _):
            for n, weights in enumerate(source.weights(builder, block, pair)):
                tile.add(cells, builder.add(begin, _plus(builder, pair, n)), weights)
        scales = [source.scale(builder, block, v) for v in range(VECTORS)]
        minima = [source.minimum(builder, block, v) for v in range(VECTORS)] if source.minima else []
        for r in range(height):
            given = None
            if minima:
                place = builder.add(builder.mul(_int(r), sums_stride), index)
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
    whole = builder.and_(count, _int(-source.step))
    with span(builder, whole, source.step) as (pair, _):
        for n, given in enumerate(source.weights(builder, weights, pair)):
            tile.add(tile.cells, _plus(builder, pair, n), given)
    with cgutils.for_range_slice(builder, whole, count, _int(1), intp=I64) as (pair, _):
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
            x_row = builder.add(x_, builder.mul(builder.mul(row, _int(2)), x_stride_))
            sums_row = builder.add(sums_, builder.mul(builder.mul(row, _int(4)), sums_stride_))
            totals_row = builder.add(totals_, builder.mul(row, _int(PANEL * 4)))
            emit(builder, height, source, first_, x_row, x_stride_, blocks, count_, sums_row, sums_stride_, totals_row)

        def tiles(source, blocks, begin):
            """Whole tiles from a row on, and what is left."""
            count = builder.sub(num_rows_, begin)
            whole = builder.mul(builder.udiv(count, _int(ROWS)), _int(ROWS))
            with span(builder, whole, ROWS) as (row, _):
                tile(source, blocks, builder.add(begin, row), ROWS)
            for height in range(1, ROWS):
                with builder.if_then(builder.icmp_signed("==", builder.sub(count, whole), _int(height))):
                    tile(source, blocks, builder.add(begin, whole), height)

        if not coded:
            tiles(_Converted(tag), weights_, _int(0))
            return context.get_dummy_value()
        with builder.if_else(builder.icmp_signed("<=", num_rows_, _int(ROWS))) as (few, many):
            with few:
                for height in range(1, ROWS + 1):
                    with builder.if_then(builder.icmp_signed("==", num_rows_, _int(height))):
                        tile(_Codes(tag), weights_, _int(0), height)
            with many:
                tile(_Converting(tag, weights_, scratch_), weights_, _int(0), ROWS)
                tiles(_Converted(tag), scratch_, _int(ROWS))
        return context.get_dummy_value()

    return types.void(tag, *([types.int64] * 10)), codegen


@intrinsic
def add_up(typingctx, row, count, target):
    """The sums of a row's blocks, float32; `count` is a number of blocks."""

    def codegen(context, builder, signature, args):
        row_, count_, target_ = args
        ones = ir.Constant(_WORDS, [_BITS[1]] * 32)

        def lanes(block):
            values = _vector(builder, builder.add(row_, builder.mul(block, _int(2 * BLOCK))), _WORDS, 2)
            return _add_products(builder, const(0.0, F32, LANES), values, ones)

        fours = builder.and_(count_, _int(-4))
        with span(builder, fours, 4) as (block, _):
            total = reduce_add_four(builder, [lanes(_plus(builder, block, n)) for n in range(4)])
            builder.store(total, pointer(builder, target_, block, 4, total.type), align=4)
        with cgutils.for_range_slice(builder, fours, count_, _int(1), intp=I64) as (block, _):
            builder.store(reduce_add(builder, lanes(block)), pointer(builder, target_, block, 4, F32), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@intrinsic
def put_out(typingctx, totals, bias, y, count):
    """y[:count] = totals[:count] + bias[:count] as bfloat16, for at most `PANEL` outputs."""

    def codegen(context, builder, signature, args):
        totals_, bias_, y_, count_ = args
        bits = ir.VectorType(I16, LANES)
        rounded = []
        for v in range(VECTORS):
            total, added = (
                _vector(builder, _plus(builder, address, v * 4 * LANES), _VEC) for address in (totals_, bias_)
            )
            narrow = _call(builder, "llvm.x86.avx512bf16.cvtneps2bf16.512", _NARROW, builder.fadd(total, added))
            place = builder.inttoptr(_plus(builder, y_, v * 2 * LANES), bits.as_pointer())
            rounded.append((builder.bitcast(narrow, bits), place))
        with builder.if_else(builder.icmp_signed(">=", count_, _int(PANEL))) as (whole, some):
            with whole:
                for value, place in rounded:
                    builder.store(value, place, align=2)
            with some:
                for v, (value, place) in enumerate(rounded):
                    left = splat(builder, builder.trunc(_plus(builder, count_, -v * LANES), I32), LANES)
                    mask = builder.icmp_signed("<", ir.Constant(_INTS, list(range(LANES))), left)
                    _call(
                        builder, "llvm.masked.store.v16i16.p0", ir.VoidType(), value, place, ir.Constant(I32, 2), mask
                    )
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), codegen


@_compiled
def _run(p, tag, block_bytes, x, num_rows, weights, scratch, totals, sums):
    """Totals of some rows by a panel."""
    blocks = -(-p.num_inputs // BLOCK)
    coded = block_bytes != _PLAIN_BYTES
    # Few rows leave nothing in the scratch.
    most = CHUNK if num_rows > ROWS else blocks
    for start in range(0, blocks, most):
        count = min(most, blocks - start)
        if not coded:
            count = min(count * PAIRS, p.num_inputs // 2 - start * PAIRS)
        multiply(
            tag,
            num_rows,
            np.int64(start == 0),
            x + start * BLOCK * 2,
            p.x_stride,
            weights + start * block_bytes,
            count,
            sums + start * 4,
            blocks,
            totals,
            scratch,
        )


def make_worker(bits: int) -> Any:
    """The worker of a form of weights, still Python: it works on the call whose `PARAMS` are at an address."""
    # Nothing compiled among what the worker encloses: such a thing is another one in every process, and what Numba has
    # kept of the worker would never be found again.
    tag, block_bytes, minima = TAGS[bits], BLOCK_BYTES[bits], bits == 4

    def worker(address):
        p = carray(pointer_to(address), 1, PARAMS)[0]
        scratch = p.scratch + fetch_add(p.counters + SLOT, 1) * p.scratch_bytes
        totals = scratch + CHUNK * _CONVERTED
        sums = totals + p.part_rows * PANEL * 4
        blocks = -(-p.num_inputs // BLOCK)
        num_panels = -(-p.num_outputs // PANEL)
        added_up = np.int64(-1)
        # Panels that follow one another, so that fetching ahead is not in vain; fewer at a time towards the end.
        share = 2 * p.num_threads
        first, left, ticket = np.int64(0), -(-p.num_rows // p.part_rows) * num_panels, np.int64(0)
        while True:
            mine = fetch_add(p.counters + NEXT, 1)
            while ticket < mine:
                taken = max(left // share, 1)
                first, left, ticket = first + taken, left - taken, ticket + 1
            if left <= 0:
                return
            for item in range(first, first + max(left // share, 1)):
                row = item // num_panels * p.part_rows
                panel = item % num_panels
                num_rows = min(p.part_rows, p.num_rows - row)
                x = p.x + row * p.x_stride * 2
                if minima and row != added_up:
                    for r in range(num_rows):
                        add_up(x + r * p.x_stride * 2, blocks, sums + r * blocks * 4)
                    added_up = row
                _run(p, tag, block_bytes, x, num_rows, p.weights + panel * blocks * block_bytes, scratch, totals, sums)
                output = panel * PANEL
                for r in range(num_rows):
                    y = p.y + ((row + r) * p.num_outputs + output) * 2
                    put_out(totals + r * PANEL * 4, p.bias + output * 4, y, p.num_outputs - output)

    return worker
