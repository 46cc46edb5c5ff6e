"""Ask the operating system for large pages under a KV cache.

Every block of every layer lies on pages of its own, so that walking a block table misses the processor's page table
cache all the time; a page of 2 MiB holds many blocks. Linux gives such pages to who asks, when memory is first touched.
"""

from __future__ import annotations

import ctypes
import sys
import weakref

from engine.kv_cache import LARGE_PAGE, KVCache

_MADV_HUGEPAGE = 14
_advised: weakref.WeakSet[KVCache] = weakref.WeakSet()


def advise_large_pages(cache: KVCache) -> None:
    """Ask for large pages where there is something to gain, once per cache; where that fails, small ones do."""
    if cache in _advised:
        return
    _advised.add(cache)
    # One that is as large begins where a large page does.
    start, length = cache.data.data_ptr(), cache.data.nbytes // LARGE_PAGE * LARGE_PAGE
    if length > 0 and sys.platform.startswith("linux"):
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _MADV_HUGEPAGE)
