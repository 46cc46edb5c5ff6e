"""What instructions this processor has."""

from __future__ import annotations

import functools

import llvmlite.binding as llvm


@functools.cache
def processor_has(*features: str) -> bool:
    """Whether this processor has all of some instructions, by LLVM's names for them.

    LLVM takes a tenth of a millisecond to answer; layers ask one by one.
    """
    known = llvm.get_host_cpu_features()
    return all(known.get(name, False) for name in features)
