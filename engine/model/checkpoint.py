"""From the name of a model to the folder that holds it: the embedded one, a folder, or the Hugging Face hub."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from engine.config import ConfigError
from engine.model.quiet import quiet
from engine.model.weights import EMBEDDED_MODEL, EMBEDDED_NAME, embedded_model

if TYPE_CHECKING:
    from collections.abc import Callable

_FILES = ("*.json", "*.safetensors", "*.model", "*.jinja", "merges.txt", "vocab.txt")
"""What is fetched of a repository. No pickled weights: reading one can run code."""

_TIMEOUT = 5.0
"""Seconds to wait for the hub's first answer."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model on disk.

    Attributes:
        path: A folder with `config.json`, safetensors and a tokenizer.
        name: To show.
    """

    path: Path
    name: str


def find_checkpoint(model: str, progress: Callable[[str], None] = lambda _: None) -> Checkpoint:
    """Find a model, fetching or converting it where that has not been done.

    Args:
        model: `smollm2`, a folder, or the id of a repository on the hub.
        progress: Told, in a few words, what takes a while.

    Raises:
        ConfigError: There is no such model, or it cannot be had now; its text says what to do.
    """
    if model == EMBEDDED_MODEL:
        return Checkpoint(embedded_model(progress), EMBEDDED_NAME)
    # os.path rather than Path: any text is a question with an answer, be it too long or no user's home.
    path = Path(os.path.expanduser(model))  # noqa: PTH111
    if model and os.path.isdir(path):  # noqa: PTH112
        return _checked(path, path.resolve().name)
    if model and os.path.exists(path):  # noqa: PTH110
        raise ConfigError(f"the model {model!r} is a file: name the folder that holds it and its config.json")
    if not model or path.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1:
        raise ConfigError(f"the model {model!r} does not exist: name {EMBEDDED_MODEL}, a folder, or a hub id")
    return _checked(_from_hub(model, progress), model)


def _from_hub(model: str, progress: Callable[[str], None]) -> Path:
    with quiet():
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import (
            GatedRepoError,
            HfHubHTTPError,
            HFValidationError,
            LocalEntryNotFoundError,
            RepositoryNotFoundError,
        )

        progress(f"looking for {model} on the hub")
        try:
            return Path(snapshot_download(model, allow_patterns=list(_FILES), etag_timeout=_TIMEOUT))
        except HFValidationError as error:
            raise ConfigError(
                f"unknown model {model!r}: name {EMBEDDED_MODEL}, a folder, or a hub id such as org/name"
            ) from error
        except GatedRepoError as error:
            raise ConfigError(
                f"the model {model!r} is gated: accept its terms on the hub, then log in with `hf auth login`"
            ) from error
        except RepositoryNotFoundError as error:
            raise ConfigError(
                f"unknown model {model!r}: it is no folder, and the hub has no such repository (or it is private); "
                f"the embedded one is {EMBEDDED_MODEL}"
            ) from error
        except LocalEntryNotFoundError as error:
            raise ConfigError(
                f"unknown model {model!r}: it is no folder, it was never downloaded, and the hub cannot be reached; "
                f"use {EMBEDDED_MODEL}, a folder, or a network"
            ) from error
        except (HfHubHTTPError, OSError) as error:
            reason = " ".join(str(error).split())[:200]
            raise ConfigError(f"the model {model!r} could not be fetched from the hub: {reason}") from error


def _checked(path: Path, name: str) -> Checkpoint:
    if not (path / "config.json").is_file():
        raise ConfigError(f"{path} holds no model: it has no config.json")
    if not any(path.glob("*.safetensors")):
        raise ConfigError(f"the model in {path} has no safetensors weights: convert it to safetensors first")
    return Checkpoint(path, name)
