"""The compiled product of inputs in bytes with 8-bit or 4-bit weights, on processors with AVX-512 VNNI.

`vpdpbusd` adds four products of unsigned with signed bytes to each of sixteen 32-bit sums; nothing in between is cut.
The unsigned ones are the weights' codes, as they lie in memory or taken from both halves of a byte on the way; the
signed ones are the inputs (`byte_inputs.py`). Within a block of 32 inputs a sum is exact; then it is scaled and added
up in float32, block after block, with the block's minimum times the sum of its inputs.

A thread takes a panel of outputs, and all rows of the input pass by in register tiles. Second bytes are multiplied
first, four inputs at a time and only where some row of the tile has one, then the sums are shifted, then come the first
bytes. A row without second bytes has zeros there, which add nothing: so a row's result depends on no other row.
"""

# mypy: ignore-errors
# Compiled functions are typed by Numba; intrinsics by the signature that each returns.

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.attention.cpu_call import COUNTER_BYTES
from engine.attention.cpu_emit import call, int64
from engine.attention.cpu_features import processor_has
from engine.attention.cpu_lanes import F32, I32, I64, const, fma, pointer, span, splat, store
from engine.attention.cpu_memory import element_size, fetch_add, pointer_to
from engine.model.byte_inputs import ROW_BYTES, encode_row, fields_of_row
from engine.model.weight_codes import BLOCK

HAS_BYTE_PRODUCTS = processor_has("avx512f", "avx512bw", "avx512vnni")
"""Whether this processor has them."""

LANES = 16
"""32-bit sums of one register."""

VECTORS = 3
PANEL = VECTORS * LANES
"""Outputs of a panel."""

ROWS = 4
"""Rows of a register tile: its sums, whole and in float32, take 24 of 32 registers."""

GROUP = 4
GROUPS = BLOCK // GROUP
"""Inputs whose products one instruction adds up, and how many such groups make a block."""

ENCODED = 4
"""Rows that a thread encodes at a time."""

NEXT, DONE = 0, COUNTER_BYTES
"""Byte offsets of the counters that threads share, see `cpu_call`: next piece of work, rows that are encoded."""

FIELDS = (
    "counters",
    "x",
    "x_stride",
    "rows",
    "y",
    "num_rows",
    "weights",
    "bias",
    "num_inputs",
    "num_blocks",
    "num_panels",
    "item_panels",
)
"""Addresses, counts, and the bytes from one row of the input to the next. A thread takes `item_panels` at a time."""

PARAMS = np.dtype([(name, np.int64) for name in FIELDS])

BITS = {4: np.uint8(0), 8: np.int8(0)}
"""The tag that stands for a form of the weights: 4-bit codes with minima, 8-bit codes without (stored + 128)."""

BLOCK_BYTES = {4: PANEL * (2 * 2 + BLOCK // 2), 8: PANEL * (4 + BLOCK)}
"""Of a block of a panel. Of 4 bits: scales and minima (float16), then codes; of 8: scales (float32), then codes."""

_FLOATS = ir.VectorType(F32, LANES)
_HALVES = ir.VectorType(ir.HalfType(), LANES)
_INTS = ir.VectorType(I32, LANES)


def _vector(builder, address, offset, kind):
    return builder.load(pointer(builder, address, int64(offset), 1, kind), align=2)


def _spread(builder, address, index, kind):
    """One number of four bytes in all lanes."""
    return splat(builder, builder.load(pointer(builder, address, index, 4, kind), align=4), LANES)


def _add_products(builder, sums, weights, inputs):
    # LLVM has taken vectors of bytes for this since version 22, and still reads the older form.
    return call(builder, "llvm.x86.avx512.vpdpbusd.512", _INTS, sums, weights, inputs)


def _each_group(builder, tag, codes, body):
    """Emit body(group, its weights as VECTORS vectors) for all groups of a block."""
    if tag == types.int8:
        for group in range(GROUPS):
            body(group, [_vector(builder, codes, 64 * (group * VECTORS + v), _INTS) for v in range(VECTORS)])
        return
    low = _low_halves()
    for group in range(GROUPS // 2):
        both = [_vector(builder, codes, 64 * (group * VECTORS + v), _INTS) for v in range(VECTORS)]
        body(group, [builder.and_(pair, low) for pair in both])
        high = [builder.and_(builder.lshr(pair, const(4, I32, LANES)), low) for pair in both]
        body(group + GROUPS // 2, high)


def _weights_of(builder, tag, codes, group):
    """The same of one group that is known only when it runs."""
    if tag == types.int8:
        first, shift = group, None
    else:
        first = builder.and_(group, int64(GROUPS // 2 - 1))
        upper = builder.icmp_unsigned(">=", group, int64(GROUPS // 2))
        shift = splat(builder, builder.select(upper, ir.Constant(I32, 4), ir.Constant(I32, 0)), LANES)
    weights = []
    for v in range(VECTORS):
        place = builder.add(builder.mul(first, int64(VECTORS)), int64(v))
        raw = builder.load(pointer(builder, codes, place, 64, _INTS), align=2)
        weights.append(raw if shift is None else builder.and_(builder.lshr(raw, shift), _low_halves()))
    return weights


def _low_halves():
    return const(0x0F0F0F0F, I32, LANES)


@contextmanager
def _any_groups(builder, marks):
    """What is emitted within runs where an input is marked: each row has a bit for each input of a block.

    Yields a loop over the groups that have such inputs.
    """
    some = marks[0]
    for mark in marks[1:]:
        some = builder.or_(some, mark)
    zero = ir.Constant(I32, 0)
    left = cgutils.alloca_once_value(builder, some)

    @contextmanager
    def each():
        again, done = builder.append_basic_block("marked"), builder.append_basic_block("marked.done")
        builder.branch(again)
        builder.position_at_end(again)
        marked = builder.load(left)
        group = builder.lshr(builder.cttz(marked, ir.Constant(ir.IntType(1), 1)), ir.Constant(I32, 2))
        ones = builder.shl(ir.Constant(I32, (1 << GROUP) - 1), builder.shl(group, ir.Constant(I32, 2)))
        builder.store(builder.and_(marked, builder.not_(ones)), left)
        yield builder.zext(group, I64)
        builder.cbranch(builder.icmp_signed("!=", builder.load(left), zero), again, done)
        builder.position_at_end(done)

    with builder.if_then(builder.icmp_signed("!=", some, zero)):
        yield each


def _tile(builder, tag, height, rows, row_bytes, num_blocks, panel, bias, write):
    """Emit write(r, v, sums) of a literal number of rows by a panel."""
    own = [builder.add(rows, builder.mul(row_bytes, int64(r))) for r in range(height)]
    fields = [fields_of_row(builder, row, num_blocks) for row in own]
    places = [(r, v) for r in range(height) for v in range(VECTORS)]
    totals = {place: cgutils.alloca_once(builder, _FLOATS) for place in places}
    whole = {place: cgutils.alloca_once(builder, _INTS) for place in places}
    for place in places:
        builder.store(const(0.0, F32, LANES), totals[place])
    bits = 8 if tag == types.int8 else 4
    with span(builder, num_blocks, 1) as (block, _):
        source = builder.add(panel, builder.mul(block, int64(BLOCK_BYTES[bits])))
        codes = builder.add(source, int64(4 * PANEL))
        words = builder.mul(block, int64(GROUPS))

        def add(inputs, group, weights):
            index = builder.add(words, group)
            for r in range(height):
                x = _spread(builder, inputs[r], index, I32)
                for v in range(VECTORS):
                    cell = whole[r, v]
                    builder.store(_add_products(builder, builder.load(cell), weights[v], x), cell)

        # Of codes that are stored with 128 added, that times the inputs' sum is taken off.
        less = [
            _spread(builder, sums, block, I32) if tag == types.int8 else ir.Constant(_INTS, None)
            for _, _, sums, _ in fields
        ]
        for r, v in places:
            builder.store(less[r], whole[r, v])
        marks = [builder.load(pointer(builder, masks, block, 4, I32), align=4) for *_, masks in fields]
        with _any_groups(builder, marks) as each_marked:
            for place in places:
                builder.store(ir.Constant(_INTS, None), whole[place])
            with each_marked() as group:
                add([second for second, *_ in fields], group, _weights_of(builder, tag, codes, group))
            for r, v in places:
                seconds = builder.shl(builder.load(whole[r, v]), const(8, I32, LANES))
                builder.store(builder.add(seconds, less[r]), whole[r, v])
        _each_group(builder, tag, codes, lambda group, weights: add(own, int64(group), weights))
        if tag == types.int8:
            scales = [_vector(builder, source, 64 * v, _FLOATS) for v in range(VECTORS)]
        else:
            scales, minima = (
                [
                    builder.fpext(_vector(builder, source, 2 * (first + LANES * v), _HALVES), _FLOATS)
                    for v in range(VECTORS)
                ]
                for first in (0, PANEL)
            )
        for r, (_, steps, sums, _) in enumerate(fields):
            step = _spread(builder, steps, block, F32)
            for v in range(VECTORS):
                total = builder.load(totals[r, v])
                value = builder.sitofp(builder.load(whole[r, v]), _FLOATS)
                # The step first: it is small, and a large input's own unit would be beyond float32 before the scale.
                total = fma(builder, value, builder.fmul(step, scales[v]), total)
                if tag != types.int8:
                    total = fma(builder, minima[v], _spread(builder, sums, block, F32), total)
                builder.store(total, totals[r, v])
    for r, v in places:
        added = builder.load(pointer(builder, bias, int64(v * LANES), 4, _FLOATS), align=4)
        write(r, v, builder.fadd(builder.load(totals[r, v]), added))


@intrinsic(prefer_literal=True)
def multiply(typingctx, tag, element, num_rows, rows, num_blocks, panel, bias, y, y_stride):
    """A panel of outputs, elements of a tag, for all rows; y_stride is in elements."""

    def codegen(context, builder, signature, args):
        _, _, num_rows_, rows_, num_blocks_, panel_, bias_, y_, y_stride_ = args
        row_bytes = builder.mul(num_blocks_, int64(ROW_BYTES))

        def tile(height, row):
            def write(r, v, sums):
                index = builder.mul(builder.add(row, int64(r)), y_stride_)
                store(builder, sums, y_, builder.add(index, int64(v * LANES)), element)

            first = builder.add(rows_, builder.mul(row, row_bytes))
            _tile(builder, tag, height, first, row_bytes, num_blocks_, panel_, bias_, write)

        whole = builder.and_(num_rows_, int64(-ROWS))
        with span(builder, whole, ROWS) as (row, _):
            tile(ROWS, row)
        row, height = whole, ROWS // 2
        while height:
            some = builder.and_(num_rows_, int64(height))
            with builder.if_then(builder.icmp_signed("!=", some, int64(0))):
                tile(height, row)
            row = builder.add(row, some)
            height //= 2
        return context.get_dummy_value()

    return types.void(tag, element, *[types.int64] * 7), codegen


def make_worker(tag: Any, element: Any) -> Any:
    """The worker of a form of weights and a type of rows, still Python: it works on the call at an address."""
    block_bytes = BLOCK_BYTES[8 if isinstance(tag, np.int8) else 4]

    def worker(address):
        p = carray(pointer_to(address), 1, PARAMS)[0]
        row_bytes = p.num_blocks * ROW_BYTES
        pieces = (p.num_rows + ENCODED - 1) // ENCODED
        ticket = fetch_add(p.counters + NEXT, 1)
        while ticket < pieces:
            first = ticket * ENCODED
            stop = min(first + ENCODED, p.num_rows)
            for row in range(first, stop):
                encode_row(tag, element, p.x + row * p.x_stride, p.num_inputs, p.num_blocks, p.rows + row * row_bytes)
            fetch_add(p.counters + DONE, stop - first)
            ticket = fetch_add(p.counters + NEXT, 1)
        # Every row that is not encoded yet is in the hands of a thread that is at it.
        while fetch_add(p.counters + DONE, 0) < p.num_rows:
            pass
        while True:
            first = (ticket - pieces) * p.item_panels
            if first >= p.num_panels:
                return
            for panel in range(first, min(first + p.item_panels, p.num_panels)):
                multiply(
                    tag,
                    element,
                    p.num_rows,
                    p.rows,
                    p.num_blocks,
                    p.weights + panel * p.num_blocks * block_bytes,
                    p.bias + panel * PANEL * 4,
                    p.y + panel * PANEL * element_size(element),
                    p.num_panels * PANEL,
                )
            ticket = fetch_add(p.counters + NEXT, 1)

    return worker
