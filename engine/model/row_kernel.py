"""The compiled worker of the operations between linear layers: each row of a batch on its own.

Every thread of a call runs it and takes runs of rows until none is left. What a row becomes depends on that row alone.
Elements become float32 in registers and are rounded where the model's own layers have a tensor: after the addition, and
at the end.
"""

# mypy: ignore-errors
# Compiled functions are typed by Numba, from the tag.

from __future__ import annotations

import struct
from typing import Any

import numpy as np
from numba import carray, types
from numba.extending import intrinsic

from engine.attention.cpu_lanes import F32, chunks, const, exp, load, rms_norm, store
from engine.attention.cpu_memory import element_size, fetch_add, pointer_to

ADD_NORM, NORM, GATE = range(3)
"""What is done to each row."""

FIELDS = ("next_row", "operation", "num_rows", "rows_per_item", "width", "source", "update", "weight", "out")

PARAMS = np.dtype([(name, np.int64) for name in FIELDS] + [("eps", np.float32)])
"""One call. `width` is the number of elements of an output's row, half of those of a gate's source; `next_row` starts
at 0 and is what threads share; `weight` has the same type as the rows; what an operation does not need is 0."""

CALL = struct.Struct(f"={len(FIELDS)}qf")


@intrinsic
def _norm_row(typingctx, tag, hidden, weight, out, count, eps):
    """Set out to the RMS norm of hidden."""

    def codegen(context, builder, signature, args):
        _, hidden_, weight_, out_, count_, eps_ = args

        def read(i, lanes):
            return load(builder, tag, hidden_, i, lanes)

        rms_norm(builder, tag, count_, eps_, weight_, read, read, lambda i, value: store(builder, value, out_, i, tag))
        return context.get_dummy_value()

    return types.void(tag, types.int64, types.int64, types.int64, types.int64, types.float32), codegen


@intrinsic
def _add_norm_row(typingctx, tag, hidden, update, weight, out, count, eps):
    """Add update to hidden, and set out to the RMS norm of that."""

    def codegen(context, builder, signature, args):
        _, hidden_, update_, weight_, out_, count_, eps_ = args

        def read(i, lanes):
            return load(builder, tag, hidden_, i, lanes)

        def add(i, lanes):
            total = builder.fadd(read(i, lanes), load(builder, tag, update_, i, lanes))
            store(builder, total, hidden_, i, tag)
            # The norm is that of what was stored.
            return total if tag == types.float32 else read(i, lanes)

        rms_norm(builder, tag, count_, eps_, weight_, add, read, lambda i, value: store(builder, value, out_, i, tag))
        return context.get_dummy_value()

    return types.void(tag, *[types.int64] * 5, types.float32), codegen


@intrinsic
def _gate_row(typingctx, tag, gate, up, out, count):
    """Set out to silu(gate) * up, where silu(x) = x / (1 + exp(-x))."""

    def codegen(context, builder, signature, args):
        _, gate_, up_, out_, count_ = args

        def chunk(i, lanes):
            def number(value):
                return const(value, F32, lanes)

            x = load(builder, tag, gate_, i, lanes)
            minus = builder.fneg(x)
            # The exponential overflows beyond 88, where silu has long been 0.
            power = builder.select(
                builder.fcmp_ordered(">", minus, number(88.0)), number(float("inf")), exp(builder, minus)
            )
            silu = builder.fdiv(x, builder.fadd(power, number(1.0)))
            store(builder, builder.fmul(silu, load(builder, tag, up_, i, lanes)), out_, i, tag)

        chunks(builder, count_, chunk)
        return context.get_dummy_value()

    return types.void(tag, *[types.int64] * 4), codegen


def make_worker(tag: Any) -> Any:
    """The worker of an element type, still Python: it works on the call whose `PARAMS` are at an address."""

    def worker(address):
        p = carray(pointer_to(address), 1, PARAMS)[0]
        size = p.width * element_size(tag)
        while True:
            first = fetch_add(address, p.rows_per_item)
            if first >= p.num_rows:
                return
            for row in range(first, min(first + p.rows_per_item, p.num_rows)):
                out = p.out + row * size
                if p.operation == GATE:
                    source = p.source + row * 2 * size
                    _gate_row(tag, source, source + size, out, p.width)
                elif p.operation == NORM:
                    _norm_row(tag, p.source + row * size, p.weight, out, p.width, p.eps)
                else:
                    source = p.source + row * size
                    _add_norm_row(tag, source, p.update + row * size, p.weight, out, p.width, p.eps)

    return worker
