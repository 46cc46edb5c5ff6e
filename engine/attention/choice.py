"""Which implementation of attention runs."""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING

import torch

from engine.config import ConfigError

if TYPE_CHECKING:
    from engine.attention.metadata import PagedAttention

logger = logging.getLogger("engine")

_DEVICE_OF = {"cpu": "cpu", "triton": "cuda"}
"""Implementations that run on one kind of device only."""

_LEAST_CAPABILITY = (8, 0)
"""Of a CUDA device for Triton. On older ones its products are not those of the matrix units: the tiles neither fit into
the shared memory of a program nor into its registers."""


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
                reason = lacks(candidate, device)
                if reason:
                    logger.warning("attention is computed by torch, slowly: %s", reason)
                    break
                try:
                    return candidate, _load(candidate)
                except ImportError as error:
                    logger.warning("attention is computed by torch, slowly: %s", error)
                    break
        name = "reference"
    kind = _DEVICE_OF.get(name, device.type)
    if kind != device.type:
        raise ConfigError(f"the attention {name!r} does not run on {device.type}: use --attention auto")
    reason = lacks(name, device)
    if reason:
        raise ConfigError(f"the attention {name!r} cannot be used here: {reason}; use --attention auto")
    try:
        return name, _load(name)
    except ImportError as error:
        raise ConfigError(f"the attention {name!r} cannot be used here ({error}): use --attention auto") from error


def lacks(name: str, device: torch.device) -> str:
    """What an implementation needs and the device has not; empty where there is nothing."""
    if name != "triton" or torch.version.hip:
        return ""
    has = torch.cuda.get_device_capability(device)
    if has >= _LEAST_CAPABILITY:
        return ""
    least = ".".join(map(str, _LEAST_CAPABILITY))
    return f"{device} has compute capability {has[0]}.{has[1]}, and Triton's kernels need {least}"


def _load(name: str) -> PagedAttention:
    module = importlib.import_module(f"engine.attention.{name}")
    function: PagedAttention = module.paged_attention
    return function
