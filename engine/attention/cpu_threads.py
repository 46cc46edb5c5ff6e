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


def run(worker: int, argument: int, num_threads: int) -> None:
    """Call a worker with one integer on num_threads threads at once, and return when all are done.

    Args:
        worker: Address of a C function `void (int64)` that is safe to run concurrently with itself.
        argument: What each of them is given.
        num_threads: At most as many; the caller's own is one of them.
    """
    if num_threads <= 1:
        _WORKER(worker)(argument)
        return
    parallel = _gomp_parallel()
    if parallel is not None:
        parallel(worker, argument, num_threads, 0)
        return
    function = _WORKER(worker)
    others = [_pool().submit(function, argument) for _ in range(num_threads - 1)]
    function(argument)
    for other in others:
        other.result()


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
