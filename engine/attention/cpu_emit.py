"""What functions that emit LLVM code write at every turn: an address, a count, a call of one of LLVM's own."""

# mypy: ignore-errors
# Everything here is a value of LLVM's.

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils

from engine.attention.cpu_lanes import I32, I64

SECOND_CACHE, FIRST_CACHE = 2, 3
"""What memory is fetched into: of LLVM's prefetch, how near to the processor."""


def int64(value: int) -> Any:
    """A number known now."""
    return ir.Constant(I64, value)


def plus(builder: Any, address: Any, value: int) -> Any:
    """An address or a count, and a number known now."""
    return builder.add(address, int64(value)) if value else address


def call(builder: Any, name: str, result: Any, *args: Any) -> Any:
    """Call a function that is known by its name."""
    signature = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, signature, name), args)


def prefetch(builder: Any, address: Any, cache: int) -> None:
    """Ask for the cache line at an address, which need not exist, into a cache and those behind it."""
    byte = builder.inttoptr(address, ir.IntType(8).as_pointer())
    call(builder, "llvm.prefetch.p0", ir.VoidType(), byte, *(ir.Constant(I32, n) for n in (0, cache, 1)))
