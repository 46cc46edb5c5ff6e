"""Rows of a batch computed each on its own, to compare with the batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable


def one_by_one(layer: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """What a layer makes of each row of x alone, on one thread."""
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        return torch.cat([layer(x[n : n + 1]) for n in range(len(x))])
    finally:
        torch.set_num_threads(threads)
