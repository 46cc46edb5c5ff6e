"""Compile a worker for this machine's processor, or take it from a folder where it was kept.

Compilation takes some seconds, once per machine: the result is kept in `NUMBA_CACHE_DIR`, or else in
`$KVTUI_CACHE/numba`, or else in the user's cache folder; in the latter two what no version has used for long is removed
(`cpu_cache.py`).
"""

from __future__ import annotations

import functools
import hashlib
import logging
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVarTuple

import numba
import numpy as np
import torch

from engine.attention import cpu_cache
from engine.cache_folder import cache_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType

logger = logging.getLogger("engine")

OPTIONS: dict[str, Any] = {"error_model": "numpy", "boundscheck": False}
"""Nobody could catch an exception of a worker; its arguments are checked before."""

TAGS: dict[torch.dtype, np.generic] = {
    torch.bfloat16: np.uint16(0),
    torch.float16: np.int16(0),
    torch.float32: np.float32(0),
    torch.int8: np.int8(0),
    torch.float8_e4m3fn: np.uint8(0),
}
"""The value that stands for an element type in `cpu_lanes`."""

_COMPILED_INTO_ALL = ("call", "compile", "emit", "features", "lanes", "memory")
_SHARED = [Path(__file__).with_name(f"cpu_{name}.py") for name in _COMPILED_INTO_ALL]

Form = TypeVarTuple("Form")
"""What tells workers apart: element types, or bits."""

_lock = threading.Lock()


class CompileError(RuntimeError):
    """A worker cannot be compiled for this processor: what it does has to be done another way."""


class Compiled:
    """A worker ready to run.

    Args:
        make: Gives the worker, a Python function of one address that Numba can compile.
        modules: What is compiled into it besides the worker's own file and what all share (`_SHARED`).

    Attributes:
        address: Of the C function `void (int64)`, good for as long as this object lives.
        seconds: That it took.

    Raises:
        CompileError: Numba raises all kinds on a processor that it does not know; its own exception is the cause.
    """

    def __init__(self, make: Callable[[], Callable[[int], None]], *modules: ModuleType) -> None:
        start = time.perf_counter()
        with _lock:
            folder = cache_dir([*_SHARED, *(Path(str(module.__file__)) for module in modules)])
            try:
                self._function = _compile(make(), folder)
            except Exception as reason:
                # A cache folder that cannot be written, or one with a broken file in it, costs time and nothing else.
                try:
                    self._function = _compile(make(), None)
                except Exception as error:
                    raise CompileError(f"{type(error).__name__}: {str(error).strip()[:200]}") from error
                logger.warning("compiling for the CPU without the cache in %s", folder, exc_info=reason)
        self.address = int(self._function.address)
        self.seconds = time.perf_counter() - start


def compiled_once(make: Callable[[*Form], Compiled]) -> Callable[[*Form], Compiled]:
    """Keep each worker that a function compiles, for good, so that its address may be kept as well.

    What cannot be compiled is tried once and not again for every layer of a model. Threads that ask at the same time
    get the same worker.

    Args:
        make: Compiles the worker of a form.
    """
    kept: dict[tuple[*Form], Compiled | CompileError] = {}
    lock = threading.Lock()

    @functools.wraps(make)
    def get(*form: *Form) -> Compiled:
        with lock:
            if form not in kept:
                try:
                    kept[form] = make(*form)
                except CompileError as error:
                    kept[form] = error
            found = kept[form]
        if isinstance(found, CompileError):
            raise found
        return found

    return get


def cache_dir(sources: Sequence[Path]) -> Path:
    """Where compiled workers are kept, unless `NUMBA_CACHE_DIR` says otherwise.

    Numba looks only at the file of the worker to see whether a compiled one is still good; the digest in the path
    covers the other files that were compiled into it.

    Args:
        sources: Those files.
    """
    digest = hashlib.sha256()
    for path in sources:
        digest.update(path.read_bytes())
    return cache_folder() / "numba" / digest.hexdigest()[:12]


def _compile(worker: Callable[[int], None], folder: Path | None) -> Any:
    config: Any = numba.config
    before = config.CACHE_DIR
    config.CACHE_DIR = before or str(folder or "")
    if folder is not None and not before:
        cpu_cache.use(folder)
    try:
        signature = numba.types.void(numba.types.int64)
        return numba.cfunc(signature, cache=folder is not None, **OPTIONS)(worker)
    finally:
        config.CACHE_DIR = before
