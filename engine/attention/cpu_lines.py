"""Cache lines that the inner loops of the compiled CPU attention ask for while they read others (`cpu_ahead.py`)."""

# mypy: ignore-errors
# Everything here is a value of LLVM's.

from __future__ import annotations

from engine.attention.cpu_emit import SECOND_CACHE, prefetch
from engine.attention.cpu_lanes import I64, pointer

LINE = 64
"""Bytes of a cache line."""


class Lines:
    """Lines to ask for: a base address, and that of their offsets from it, int64 bytes."""

    def __init__(self, builder, base, offsets, cache=SECOND_CACHE):
        self._builder, self._base, self._offsets, self._cache = builder, base, offsets, cache

    def ask(self, number):
        """Ask for one line."""
        offset = self._builder.load(pointer(self._builder, self._offsets, number, 8, I64), align=8)
        prefetch(self._builder, self._builder.add(self._base, offset), self._cache)
