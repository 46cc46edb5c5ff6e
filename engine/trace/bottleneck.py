"""What held requests up, step by step: too few blocks, too few places, too few tokens a step, or nothing.

It follows from the levels that every step tells, so that a thousand steps cost a few array operations. The scheduler
asks in the same order: is there a place, is there budget, are there blocks (`engine.core.scheduler`).
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from engine.trace.columns import Column
    from engine.trace.events import Header


class Limit(enum.IntEnum):
    """What held somebody up in a step."""

    NOTHING = 0
    """Nobody waited, and nobody gave way."""
    BLOCKS = 1
    """Somebody waited for blocks, or lost its own: `num_blocks`."""
    SEQUENCES = 2
    """Somebody waited, and as many ran as may: `max_num_seqs`."""
    TOKENS = 3
    """As many tokens were scheduled as may be: `max_num_batched_tokens`."""
    BATCH = 4
    """Somebody waited for a static batch to end."""


SETTINGS = {
    Limit.BLOCKS: "--num-blocks",
    Limit.SEQUENCES: "--max-num-seqs",
    Limit.TOKENS: "--max-num-batched-tokens",
    Limit.BATCH: "--policy",
}
"""The option of `kvtui run` that moves each limit."""


def limits_of(
    header: Header, *, waiting: Column, running: Column, batch: Column, tokens: Column, preemptions: Column
) -> npt.NDArray[np.uint8]:
    """The `Limit` of each of n steps.

    Args:
        header: For the limits.
        waiting: int64[n]: requests that wait after the step.
        running: int64[n]: requests that run after it.
        batch: int64[n]: members of its batch.
        tokens: int64[n]: tokens scheduled in it.
        preemptions: int64[n]: requests that gave way in it.
    """
    waits = waiting > 0
    full = np.maximum(batch, running) >= header.max_num_seqs
    found = np.zeros(len(waiting), np.uint8)
    found[waits] = Limit.BATCH if header.policy == "static" else Limit.BLOCKS
    found[tokens >= header.max_num_batched_tokens] = Limit.TOKENS
    found[waits & full] = Limit.SEQUENCES
    found[preemptions > 0] = Limit.BLOCKS
    return found
