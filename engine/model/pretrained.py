"""A checkpoint's model and tokenizer, by transformers; what is not whole is refused, and what is broken named."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch

from engine.config import ConfigError
from engine.model.quiet import quiet
from engine.model.vetting import check_config

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from engine.model.checkpoint import Checkpoint

_NAMED = 3
"""Tensors named in a message; of more, how many."""


def load_transformers(checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> tuple[Any, Any]:
    """A checkpoint's model, in eval mode on the device, and its tokenizer.

    Raises:
        ConfigError: It is not a decoder-only model that transformers knows, a file of it is broken, or its files lack
            a tensor of the model: transformers would make up numbers for it.
    """
    with quiet():
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

        path, name = checkpoint.path, checkpoint.name
        try:
            model_config = AutoConfig.from_pretrained(path, local_files_only=True)
            check_config(model_config, name)
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                path, dtype=dtype, local_files_only=True, output_loading_info=True, ignore_mismatched_sizes=True
            )
            model, found = loaded
            _check_whole(found, path, name)
            tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
        except ConfigError:
            raise
        except Exception as error:  # transformers, safetensors and tokenizers raise all kinds for broken files
            raise ConfigError(f"the model {name} in {path} cannot be loaded: {_reason(error, path)}") from error
        if not getattr(tokenizer, "is_fast", False):
            raise ConfigError(f"the model {name} has no fast tokenizer (tokenizer.json): convert its tokenizer first")
        try:
            return model.to(device).eval(), tokenizer
        except torch.OutOfMemoryError as error:
            raise ConfigError(f"the model {name} does not fit on {device}: use --device cpu") from error


def _check_whole(found: dict[str, Any], path: Path, name: str) -> None:
    """Refuse a model of which the files did not hold everything, by what transformers says that it found."""
    missing = sorted(found["missing_keys"])
    if missing:
        raise ConfigError(
            f"the model {name} in {path} is not whole: its files lack {_some(missing)}; fetch or convert it again, or "
            "correct its config.json"
        )
    others = [f"{key} is {list(is_)} and should be {list(needed)}" for key, is_, needed in found["mismatched_keys"]]
    if others:
        raise ConfigError(
            f"the model {name} in {path} does not fit its config.json: {_some(sorted(others))}; correct it, or fetch "
            "the model again"
        )


def _some(things: Collection[str]) -> str:
    named = ", ".join(list(things)[:_NAMED])
    return named if len(things) <= _NAMED else f"{named} and {len(things) - _NAMED} more"


def _reason(error: Exception, folder: Path) -> str:
    """What went wrong in a few words, and in which file where one cannot be opened."""
    from safetensors import safe_open

    text = " ".join(str(error).split())[:240]
    if isinstance(error, ArithmeticError | LookupError | AttributeError | TypeError):
        text = f"{type(error).__name__}: {text}"  # these say little by themselves
    for file in sorted([*folder.glob("*.safetensors"), *folder.glob("*.json")]):
        try:
            if file.suffix == ".json":
                json.loads(file.read_bytes())
            else:
                with safe_open(file, framework="pt"):
                    pass
        except Exception:
            return f"{text} ({file.name} is broken: fetch or convert it again)"
    return text
