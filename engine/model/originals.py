"""The weights of a checkpoint as they were before a model's type rounded them.

A model that is loaded in bfloat16 from a file in float32 has lost the codes that its weights were made of, if they
were (`weight_codes.py`): rounded, the weights of a block no longer lie evenly spaced. So they are looked for in the
file, one matrix at a time.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

logger = logging.getLogger("engine")


class Originals:
    """Gives a model's weight as the checkpoint's file has it.

    Args:
        model: That was loaded from the folder; its weights are not kept.
        folder: With safetensors files.
    """

    def __init__(self, model: torch.nn.Module, folder: Path) -> None:
        self._names = {_place(weight): name for name, weight in model.named_parameters()}
        self._files = dict(_files_of(folder))

    def __call__(self, weight: torch.Tensor) -> torch.Tensor:
        """The float32 matrix that a weight of the model was rounded from, or the weight itself.

        Itself where the file has it in another type or under another name, or has something else under its name: what
        is given is always what rounds to the weight.
        """
        name = self._names.get(_place(weight))
        file = self._files.get(name or "")
        if name is None or file is None or weight.dtype == torch.float32:
            return weight.detach()
        with _open(file) as tensors:
            original: torch.Tensor = tensors.get_tensor(name)
        if original.dtype == torch.float32 and torch.equal(original.to(weight.dtype), weight):
            return original
        return weight.detach()


def _place(weight: torch.Tensor) -> tuple[int, torch.Size]:
    return weight.data_ptr(), weight.shape


def _files_of(folder: Path) -> Iterator[tuple[str, Path]]:
    """Names of tensors, and the files that hold them."""
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with _open(file) as tensors:
                yield from ((name, file) for name in tensors.keys())  # noqa: SIM118 - it is no mapping
        except Exception:  # transformers has read what it needs; a file beside it may be broken
            logger.debug("%s is not looked into for weights", file, exc_info=True)


def _open(file: Path) -> Any:
    from safetensors import safe_open

    return safe_open(file, framework="pt")
