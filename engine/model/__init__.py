"""The model side: loader, runner, sampler, tokenizer. Needs torch and transformers."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from engine.config import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.config import EngineConfig
    from engine.engine import PagedEngine

_NEEDED = ("torch", "transformers", "tokenizers", "safetensors", "gguf", "accelerate")


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
    from engine.model.load import load

    return load(config, progress, title=title, description=description)
