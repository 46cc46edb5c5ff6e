"""Small arrays on their way to the device, without the host waiting for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import DTypeLike, NDArray


def upload(
    values: NDArray[Any] | Sequence[float], device: torch.device, dtype: DTypeLike | None = None
) -> torch.Tensor:
    """A tensor on the device with these values; on a CPU it may share an array's memory.

    To a CUDA device it goes by way of pinned memory: a copy from any other makes the host wait for all that the device
    has still to do. torch keeps the pinned memory from being used again before the copy is done.
    """
    tensor = torch.from_numpy(np.ascontiguousarray(values, dtype=dtype))
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
