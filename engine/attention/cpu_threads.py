"""Run a compiled worker on torch's own threads.

A second thread pool beside torch's would cost twice: each pool's idle threads spin for a while and take cores from the
other, at every change between attention and linear layers. torch's wheels run on an OpenMP library that every compiled
caller may enter through `GOMP_parallel` (GNU libgomp's interface, which LLVM's and Intel's libraries offer as well).
Where none is found, Python threads do it: `ctypes` releases the interpreter lock, the worker needs no interpreter.
"""

from __future__ import annotations

import ctypes
import functools
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

_WORKER = ctypes.CFUNCTYPE(None, ctypes.c_int64)
_BRIEF_WORKER = ctypes.PYFUNCTYPE(None, ctypes.c_int64)


def launcher(worker: int, num_threads: int) -> Callable[[int], None]:
    """A function that calls a worker with one integer on several threads at once and returns when all are done.

    Args:
        worker: Address of a C function `void (int64)` that is safe to run concurrently with itself.
        num_threads: At most as many; the caller's own is one of them.
    """
    function = _WORKER(worker)
    if num_threads <= 1:
        return function
    parallel = _gomp_parallel()
    if parallel is not None:
        return lambda argument: parallel(worker, argument, num_threads, 0)

    def run(argument: int) -> None:
        others = [_pool().submit(function, argument) for _ in range(num_threads - 1)]
        function(argument)
        for other in others:
            other.result()

    return run


def brief(worker: int) -> Callable[[int], None]:
    """A function that calls a worker on the caller's thread, for what takes some microseconds.

    The interpreter stays locked meanwhile: to get the lock back from another Python thread may take milliseconds.

    Args:
        worker: Address of a C function `void (int64)`.
    """
    return _BRIEF_WORKER(worker)


def description() -> str:
    """Which threads are used, for reports."""
    return "torch's OpenMP threads" if _gomp_parallel() is not None else "Python threads"


@functools.cache
def _gomp_parallel() -> Callable[[int, int, int, int], None] | None:
    for path in _openmp_libraries():
        try:
            function: Any = ctypes.CDLL(path).GOMP_parallel
        except (OSError, AttributeError):
            continue
        function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        function.restype = None
        return function  # type: ignore[no-any-return]
    return None


def _openmp_libraries() -> list[str]:
    """OpenMP libraries that this process has loaded, torch's own first; loading another would make a second pool."""
    if not sys.platform.startswith("linux"):
        return []
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    paths = dict.fromkeys(line.split(maxsplit=5)[-1] for line in maps.splitlines() if "/" in line)
    found = [path for path in paths if re.search(r"/lib(g|i|)omp5?[-.\w]*\.so[.\d]*$", path)]
    torch_root = str(Path(torch.__file__).resolve().parent)
    return sorted(found, key=lambda path: not path.startswith(torch_root))


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=max(1, torch.get_num_threads()), thread_name_prefix="attention")
