"""Keep the libraries that load models from writing onto a screen that is not theirs."""

from __future__ import annotations

import contextlib
import os
import warnings
from logging import CRITICAL
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence progress bars, advice and warnings of transformers and the hub; errors still come as exceptions."""
    # Read when huggingface_hub and tqdm are first imported; the conversion of a GGUF file has no other switch.
    os.environ.setdefault("TQDM_DISABLE", "1")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    # Otherwise a fork after the first use of a tokenizer prints a warning.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import huggingface_hub.utils as hub
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    hub_verbosity = hub.logging.get_verbosity()
    logging.set_verbosity(CRITICAL)
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    hub.logging.set_verbosity(CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        hub.logging.set_verbosity(hub_verbosity)
        if bars:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]
