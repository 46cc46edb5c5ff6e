"""LLVM vectors of pairs of bfloat16, for processors that multiply them (AVX512_BF16).

`vdpbf16ps` adds two products of bfloat16 to each of 16 float32 sums, in the time that one product of float32 takes, and
nothing has to be converted. Products are exact; sums are rounded to nearest, and numbers below 2^-126 count as 0.

A float32 is nearly the sum of two bfloat16, itself rounded and what that left over: of weights both are multiplied, so
that no more than 2^-16 of them is lost.
"""

# mypy: ignore-errors
# Everything here is a value of LLVM's.

from __future__ import annotations

from typing import Any

from llvmlite import ir

from engine.attention.cpu_emit import call
from engine.attention.cpu_features import processor_has
from engine.attention.cpu_lanes import F32, I16, I32, const, fma, pointer

LANES = 16
"""Floats of one vector, and pairs of one."""

WORDS = 2 * LANES
"""bfloat16 of one vector."""

_FLOATS = ir.VectorType(F32, LANES)
_INTS = ir.VectorType(I32, LANES)


def supported() -> bool:
    """Whether this processor has the instructions."""
    return processor_has("avx512f", "avx512bw", "avx512vl", "avx512bf16")


class _BFloat16(ir.Type):
    """LLVM's `bfloat`, which llvmlite does not name."""

    null = "0.0"
    intrinsic_name = "bf16"

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat16)

    def __hash__(self) -> int:
        return hash(_BFloat16)


_PAIRS = ir.VectorType(_BFloat16(), WORDS)
_HALF = ir.VectorType(_BFloat16(), LANES)


def add_products(builder: Any, sums: Any, a: Any, b: Any) -> Any:
    """Give sums[i] + a[2 i] b[2 i] + a[2 i + 1] b[2 i + 1]; a and b are 16 integers of 32 bits."""
    pairs = (builder.bitcast(operand, _PAIRS) for operand in (a, b))
    return call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", _FLOATS, sums, *pairs)


def load_pairs(builder: Any, address: Any, index: Any) -> Any:
    """16 pairs of consecutive bfloat16, beginning with element number `index`."""
    return builder.load(pointer(builder, address, index, 2, _INTS), align=2)


def load_pair(builder: Any, address: Any, index: Any) -> Any:
    """One pair of bfloat16, beginning with element number `index`, in all lanes."""
    pair = builder.load(pointer(builder, address, index, 2, I32), align=2)
    one = builder.insert_element(ir.Constant(_INTS, ir.Undefined), pair, ir.Constant(I32, 0))
    return shuffle(builder, one, one, [0] * LANES)


def shuffle(builder: Any, a: Any, b: Any, picks: list[int]) -> Any:
    """The picked elements of two vectors; those of the second come after the first's."""
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, len(picks)), picks))


def interleave(builder: Any, a: Any, b: Any) -> tuple[Any, Any]:
    """Two rows of 32 bfloat16 as pairs of one of each: the first 16, and the others."""
    words = ir.VectorType(I16, WORDS)
    a, b = (builder.bitcast(row, words) for row in (a, b))
    halves = [[n + which for n in range(first, first + LANES) for which in (0, WORDS)] for first in (0, LANES)]
    low, high = (builder.bitcast(shuffle(builder, a, b, picks), _INTS) for picks in halves)
    return low, high


def _groups(builder: Any, a: Any, b: Any, size: int, order: tuple[int, ...]) -> Any:
    """Within each 4 lanes, or of all, groups of some lanes of two vectors; `order` numbers them, the second's last."""
    within = 4 if size < 4 else LANES
    parts = within // size
    picks = []
    for base in range(0, LANES, within):
        for group in order:
            first = base + group % parts * size + (LANES if group >= parts else 0)
            picks += range(first, first + size)
    return shuffle(builder, a, b, picks)


def transpose(builder: Any, rows: list[Any]) -> list[Any]:
    """The columns of 16 vectors of 16 lanes."""
    for size, low, high in ((1, (0, 4, 1, 5), (2, 6, 3, 7)), (2, (0, 2), (1, 3))):
        # Rows n and n + size of every 2 size rows.
        mixed = list(rows)
        for n in range(LANES):
            if n & size:
                continue
            a, b = rows[n], rows[n + size]
            at = (n // (2 * size)) * 2 * size + (n % size) * 2
            mixed[at] = _groups(builder, a, b, size, low)
            mixed[at + 1] = _groups(builder, a, b, size, high)
        rows = mixed
    columns = [None] * LANES
    for n in range(4):
        # rows[4 a + n] has in its group k column 4 k + n of rows 4 a to 4 a + 3.
        ab = [_groups(builder, rows[n], rows[4 + n], 4, order) for order in ((0, 1, 4, 5), (2, 3, 6, 7))]
        cd = [_groups(builder, rows[8 + n], rows[12 + n], 4, order) for order in ((0, 1, 4, 5), (2, 3, 6, 7))]
        for half in range(2):
            columns[8 * half + n] = _groups(builder, ab[half], cd[half], 4, (0, 2, 4, 6))
            columns[8 * half + 4 + n] = _groups(builder, ab[half], cd[half], 4, (1, 3, 5, 7))
    return columns


def sums_of_four(builder: Any, vectors: list[Any]) -> Any:
    """Of four vectors, in each group of 4 lanes: the four sums of such a group."""

    def pair(a: Any, b: Any, size: int, low: tuple[int, ...], high: tuple[int, ...]) -> Any:
        return builder.fadd(_groups(builder, a, b, size, low), _groups(builder, a, b, size, high))

    ab, cd = (pair(*two, 1, (0, 4, 1, 5), (2, 6, 3, 7)) for two in (vectors[:2], vectors[2:]))
    return pair(ab, cd, 2, (0, 2), (1, 3))


def sums_of_sixteen(builder: Any, fours: list[Any]) -> Any:
    """The sums of 16 vectors, from four results of `sums_of_four`."""

    def pair(a: Any, b: Any) -> Any:
        return builder.fadd(_groups(builder, a, b, 4, (0, 2, 4, 6)), _groups(builder, a, b, 4, (1, 3, 5, 7)))

    return pair(pair(*fours[:2]), pair(*fours[2:]))


def largest_of(builder: Any, vec: Any) -> Any:
    """The largest lane."""
    left = LANES
    while left > 1:
        left //= 2
        a, b = (shuffle(builder, vec, vec, list(range(start, start + left))) for start in (0, left))
        vec = builder.select(builder.fcmp_ordered(">", a, b), a, b)
    return builder.extract_element(vec, ir.Constant(I32, 0))


def narrowed(builder: Any, value: Any) -> Any:
    """16 float32 as the bits of bfloat16, rounded to nearest even."""
    rounded = call(builder, "llvm.x86.avx512bf16.cvtneps2bf16.512", _HALF, value)
    return builder.bitcast(rounded, ir.VectorType(I16, LANES))


def split(builder: Any, value: Any) -> tuple[Any, Any]:
    """16 float32 as the bits of bfloat16, rounded to nearest even, and of what that leaves over."""
    rounded = narrowed(builder, value)
    bits = builder.zext(rounded, _INTS)
    back = builder.bitcast(builder.shl(bits, const(16, I32, LANES)), _FLOATS)
    return rounded, narrowed(builder, builder.fsub(value, back))


def power_of_two(builder: Any, x: Any) -> Any:
    """2 to the power of x <= 127, within 3 units in the last place; 0 below -126, NaN for NaN.

    Cephes `exp2f` (S. Moshier): x = n + r, a polynomial in r, the exponent put together from n.
    """
    low = builder.fcmp_ordered("<", x, const(-126.0, F32, LANES))
    x = builder.select(low, const(-126.0, F32, LANES), x)
    n = call(builder, "llvm.roundeven.v16f32", _FLOATS, x)
    r = builder.fsub(x, n)
    poly = const(1.535336188319500e-4, F32, LANES)
    for c in (1.339887440266574e-3, 9.618437357674640e-3, 5.550332471162809e-2):
        poly = fma(builder, poly, r, const(c, F32, LANES))
    for c in (2.402264791363012e-1, 6.931472028550421e-1, 1.0):
        poly = fma(builder, poly, r, const(c, F32, LANES))
    mask, rounding = ir.Constant(I16, -1), ir.Constant(I32, 4)
    result = call(builder, "llvm.x86.avx512.mask.scalef.ps.512", _FLOATS, poly, n, poly, mask, rounding)
    return builder.select(low, const(0.0, F32, LANES), result)
