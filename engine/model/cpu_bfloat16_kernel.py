"""The compiled worker of linear layers in bfloat16, for processors that multiply pairs of it (AVX512_BF16).

`vdpbf16ps` adds two products of bfloat16 to each of 16 float32 sums. Whole numbers up to 255 are exact in bfloat16, and
so are the codes that many weights were made of (`weight_codes.py`): with x as it is,

    y = sum over blocks of (scale * (codes . x) + minimum * sum of x)

where only the products' sums are rounded, in float32.

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

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.attention import cpu_pairs
from engine.attention.cpu_call import COUNTER_BYTES
from engine.attention.cpu_compile import OPTIONS
from engine.attention.cpu_emit import call, int64, plus
from engine.attention.cpu_features import processor_has
from engine.attention.cpu_lanes import F32, I16, I32, I64, const, pointer, reduce_add, reduce_add_four, span, splat
from engine.attention.cpu_memory import fetch_add, pointer_to
from engine.attention.cpu_pairs import LANES, add_products, narrowed
from engine.model.cpu_bfloat16_tiles import ROWS, multiply
from engine.model.cpu_bfloat16_weights import (
    BITS,
    BLOCK_BYTES,
    CONVERTED,
    FLOATS,
    INTS,
    PAIRS,
    PANEL,
    TAGS,
    VECTORS,
    WORDS,
    load_vector,
)
from engine.model.weight_codes import BLOCK

PART_ROWS = 128
"""Rows that a thread takes at once: they stay in its second cache while panels go by."""

CHUNK = 6
"""Blocks converted at a time: 20 KB of a first cache."""

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

_PLAIN_BYTES = BLOCK_BYTES[16]


def supported() -> bool:
    """Whether this processor has the instructions: those of pairs, and looking codes up among 128 bytes."""
    return cpu_pairs.supported() and processor_has("avx512vbmi")


def scratch_bytes(num_rows: int, num_inputs: int) -> int:
    """That one thread needs, in cache lines: converted blocks, sums of outputs, sums of blocks of the input."""
    return CHUNK * CONVERTED + -(-num_rows * (PANEL + -(-num_inputs // BLOCK)) * 4 // 64) * 64


_compiled = njit(**OPTIONS)


@intrinsic
def add_up(typingctx, row, count, target):
    """The sums of a row's blocks, float32; `count` is a number of blocks."""

    def codegen(context, builder, signature, args):
        row_, count_, target_ = args
        ones = ir.Constant(WORDS, [BITS[1]] * 32)

        def lanes(block):
            values = load_vector(builder, builder.add(row_, builder.mul(block, int64(2 * BLOCK))), WORDS, 2)
            return add_products(builder, const(0.0, F32, LANES), values, ones)

        fours = builder.and_(count_, int64(-4))
        with span(builder, fours, 4) as (block, _):
            total = reduce_add_four(builder, [lanes(plus(builder, block, n)) for n in range(4)])
            builder.store(total, pointer(builder, target_, block, 4, total.type), align=4)
        with cgutils.for_range_slice(builder, fours, count_, int64(1), intp=I64) as (block, _):
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
                load_vector(builder, plus(builder, address, v * 4 * LANES), FLOATS) for address in (totals_, bias_)
            )
            value = narrowed(builder, builder.fadd(total, added))
            place = builder.inttoptr(plus(builder, y_, v * 2 * LANES), bits.as_pointer())
            rounded.append((value, place))
        with builder.if_else(builder.icmp_signed(">=", count_, int64(PANEL))) as (whole, some):
            with whole:
                for value, place in rounded:
                    builder.store(value, place, align=2)
            with some:
                for v, (value, place) in enumerate(rounded):
                    left = splat(builder, builder.trunc(plus(builder, count_, -v * LANES), I32), LANES)
                    mask = builder.icmp_signed("<", ir.Constant(INTS, list(range(LANES))), left)
                    call(builder, "llvm.masked.store.v16i16.p0", ir.VoidType(), value, place, ir.Constant(I32, 2), mask)
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
        totals = scratch + CHUNK * CONVERTED
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
