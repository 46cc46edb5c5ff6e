"""Memory that was freed, given back to the system."""

from __future__ import annotations

import ctypes


def give_back() -> None:
    """Give the system what glibc's allocator keeps for later; nothing where the C library is another.

    Loading lays weights out more than once, in pieces that leave holes between what stays.
    """
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return
    trim(0)
