"""Where a product in bfloat16 takes its weights from: codes in memory, or bfloat16.

Codes are turned into bfloat16 by looking them up in a register: 4-bit ones in one instruction for 32 of them, 8-bit
ones (sign and magnitude) in five for 64. The layout of a panel is in `cpu_bfloat16.py`.
"""

# mypy: ignore-errors
# Values of LLVM's, and tags of Numba's.

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types

from engine.attention.cpu_emit import FIRST_CACHE, call, int64, plus, prefetch
from engine.attention.cpu_lanes import F32, I8, I16, I32, const
from engine.attention.cpu_pairs import LANES
from engine.model.weight_codes import BLOCK

VECTORS = 3
"""Of sums, of one row."""

PANEL = VECTORS * LANES
"""Outputs of a panel."""

AHEAD = 2048
"""Bytes that codes are asked for before they are needed."""

PAIRS = BLOCK // 2
_PAIR_BYTES = VECTORS * 4 * LANES
"""Of two inputs' weights as bfloat16."""

SCALES = PAIRS * _PAIR_BYTES
MINIMA = SCALES + PANEL * 4
CONVERTED = MINIMA + PANEL * 4
"""Of a block that was converted: the weights, scales and minima in float32 behind them."""

TAGS = {4: np.uint8(0), 8: np.int8(0), 16: np.uint16(0)}
"""What stands for a form of the weights: 4-bit codes with minima, 8-bit codes without, bfloat16."""

BLOCK_BYTES = {4: PANEL * (4 + PAIRS), 8: PANEL * (2 + BLOCK), 16: PANEL * 2 * BLOCK}
"""Of a block of a panel."""

FLOATS = ir.VectorType(F32, LANES)
INTS = ir.VectorType(I32, LANES)
WORDS = ir.VectorType(I16, 2 * LANES)
_BYTES = ir.VectorType(I8, 4 * LANES)
_HALVES = ir.VectorType(ir.HalfType(), LANES)

BITS = (np.arange(128, dtype=np.float32).view(np.uint32) >> 16).tolist()
"""Whole numbers as bfloat16."""


def load_vector(builder, address, kind, align=64):
    """A vector of a kind at an address."""
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=align)


def _look_up_four(builder, source):
    """Weights of 8 inputs of one vector of outputs, as four pairs: each word has four codes, a pair's in one place."""
    table = ir.Constant(WORDS, [BITS[n % 16] for n in range(32)])
    words = load_vector(builder, source, WORDS)
    # Only five bits of an index count, and the table does not mind the fifth.
    indices = (builder.lshr(words, const(4 * n, I16, 32)) if n else words for n in range(4))
    return [call(builder, "llvm.x86.avx512.permvar.hi.512", WORDS, table, index) for index in indices]


def _look_up_eight(builder, source):
    """Weights of 4 inputs of one vector of outputs, as two pairs, from 64 bytes of sign and magnitude."""
    codes = load_vector(builder, source, _BYTES, 16)

    def look_up(shift):
        low, high = (ir.Constant(_BYTES, [b >> shift & 255 for b in BITS[n : n + 64]]) for n in (0, 64))
        return call(builder, "llvm.x86.avx512.vpermi2var.qi.512", _BYTES, low, codes, high)

    lower = look_up(0)
    upper = builder.or_(look_up(8), builder.and_(codes, const(0x80, I8, 64)))
    pairs = []
    for half in (0, 8):
        picks = [lane + half + n + which for lane in range(0, 64, 16) for n in range(8) for which in (0, 64)]
        pairs.append(builder.shuffle_vector(lower, upper, ir.Constant(ir.VectorType(I32, 64), picks)))
    return pairs


def _halves(builder, source, vector):
    """float16 numbers of a vector of outputs as float32."""
    return builder.fpext(load_vector(builder, plus(builder, source, vector * 2 * LANES), _HALVES, 2), FLOATS)


class Codes:
    """Blocks of a panel as they lie in memory."""

    def __init__(self, tag):
        self.minima = tag == types.uint8
        self._look_up, self.step = (_look_up_four, 4) if self.minima else (_look_up_eight, 2)
        self._codes = PANEL * (4 if self.minima else 2)
        self.block_bytes = BLOCK_BYTES[4 if self.minima else 8]

    def weights(self, builder, block, pair):
        """`[step][VECTORS]`, from the pair number `pair` on, a multiple of the step."""
        place = builder.add(plus(builder, block, self._codes), builder.mul(pair, int64(_PAIR_BYTES // self.step)))
        for v in range(VECTORS):
            prefetch(builder, plus(builder, place, AHEAD + v * 64), FIRST_CACHE)
        by_vector = [self._look_up(builder, plus(builder, place, v * 4 * LANES)) for v in range(VECTORS)]
        return list(zip(*by_vector, strict=True))

    def scale(self, builder, block, v):
        """Float32, one for each output of a vector."""
        return _halves(builder, block, v)

    def minimum(self, builder, block, v):
        """As the scales; only of codes that have minima."""
        return _halves(builder, plus(builder, block, 2 * PANEL), v)


class Converted:
    """Blocks in the scratch, or bfloat16 weights as they lie in memory."""

    block_bytes = CONVERTED
    step = 4

    def __init__(self, tag):
        self.minima = tag == types.uint8

    def weights(self, builder, block, pair):
        """As `Codes` has them."""
        place = builder.add(block, builder.mul(pair, int64(_PAIR_BYTES)))
        return [
            [load_vector(builder, plus(builder, place, n * _PAIR_BYTES + v * 64), INTS) for v in range(VECTORS)]
            for n in range(self.step)
        ]

    def scale(self, builder, block, v):
        """As `Codes` has them."""
        return load_vector(builder, plus(builder, block, SCALES + v * 64), FLOATS)

    def minimum(self, builder, block, v):
        """As `Codes` has them."""
        return load_vector(builder, plus(builder, block, MINIMA + v * 64), FLOATS)


class Converting(Codes):
    """Blocks as they lie in memory, that are put into the scratch on their way."""

    def __init__(self, tag, blocks, scratch):
        super().__init__(tag)
        self._blocks, self._scratch = blocks, scratch

    def _keep(self, builder, block, offset, value):
        index = builder.udiv(builder.sub(block, self._blocks), int64(self.block_bytes))
        place = builder.add(builder.add(self._scratch, builder.mul(index, int64(CONVERTED))), offset)
        builder.store(value, builder.inttoptr(place, value.type.as_pointer()), align=64)
        return value

    def weights(self, builder, block, pair):
        """As `Codes` has them."""
        rows = super().weights(builder, block, pair)
        place = builder.mul(pair, int64(_PAIR_BYTES))
        for n, weights in enumerate(rows):
            for v in range(VECTORS):
                self._keep(builder, block, plus(builder, place, n * _PAIR_BYTES + v * 64), weights[v])
        return rows

    def scale(self, builder, block, v):
        """As `Codes` has them."""
        return self._keep(builder, block, int64(SCALES + v * 64), super().scale(builder, block, v))

    def minimum(self, builder, block, v):
        """As `Codes` has them."""
        return self._keep(builder, block, int64(MINIMA + v * 64), super().minimum(builder, block, v))
