"""Which implementation of attention runs."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from engine.config import ConfigError

if TYPE_CHECKING:
    import torch

    from engine.attention.metadata import PagedAttention

_DEVICE_OF = {"cpu": "cpu", "triton": "cuda"}
"""Implementations that run on one kind of device only."""


def choose_attention(name: str, device: torch.device) -> tuple[str, PagedAttention]:
    """The implementation of that name; `auto` is the compiled one of the device, or else the reference.

    Returns:
        The name of what was chosen, and its function.

    Raises:
        ConfigError: It does not run on that device, or is not installed.
    """
    if name == "auto":
        for candidate, kind in _DEVICE_OF.items():
            if kind == device.type:
                try:
                    return candidate, _load(candidate)
                except ImportError:
                    break
        name = "reference"
    kind = _DEVICE_OF.get(name, device.type)
    if kind != device.type:
        raise ConfigError(f"the attention {name!r} does not run on {device.type}: use --attention auto")
    try:
        return name, _load(name)
    except ImportError as error:
        raise ConfigError(f"the attention {name!r} cannot be used here ({error}): use --attention auto") from error


def _load(name: str) -> PagedAttention:
    module = importlib.import_module(f"engine.attention.{name}")
    function: PagedAttention = module.paged_attention
    return function
