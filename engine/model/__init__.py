"""The model side: loader, runner, sampler, tokenizer. Needs torch and transformers."""

from __future__ import annotations

import importlib.util
import os
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING

from engine.config import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.config import EngineConfig
    from engine.engine import PagedEngine

_NEEDED = ("torch", "transformers", "tokenizers", "safetensors", "gguf", "accelerate")


_SPINS = "5000"
"""Turns that an OpenMP worker of GCC's runtime waits awake, some 0.1 ms. By default it is 60 times as long: longer than
another program's turn on the core, so that on a busy machine the workers burn the time that they wait for."""


def load_engine(
    config: EngineConfig,
    *,
    progress: Callable[[str], None] = lambda _: None,
    title: str = "",
    description: str = "",
) -> PagedEngine:
    """Load a model and put an engine around it.

    Args:
        config: Which model, where, and the limits.
        progress: Told, in a few words, what is being done.
        title: Of the trace.
        description: Of the trace.

    Raises:
        ConfigError: A package, the model, the device or memory is missing; its text is one line that says what to do.
    """
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"running a model needs {', '.join(missing)}: pip install 'kvtui[engine]'")
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)  # read when torch is first imported
    loaded: Future[PagedEngine] = Future()

    def work() -> None:
        try:
            from engine.model.load import load

            loaded.set_result(load(config, progress, title=title, description=description))
        except BaseException as error:
            loaded.set_exception(error)

    # In a thread that ends: each thread that has computed anything keeps OpenMP workers of its own, and with more
    # workers than cores OpenMP lets all of them sleep and be woken at every operation, which costs a tenth of the
    # speed. Whoever steps the engine is then the only one that has any. (A daemon: Ctrl-C need not wait for it.)
    thread = threading.Thread(target=work, name="load", daemon=True)
    thread.start()
    try:
        return loaded.result()
    finally:
        if loaded.done():
            thread.join()
