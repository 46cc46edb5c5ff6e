"""From a policy's name to its scheduler."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.baselines.reservation import ReservingScheduler
from engine.baselines.static_batching import StaticBatchScheduler
from engine.core.scheduler import Scheduler

if TYPE_CHECKING:
    from engine.config import EngineConfig, Policy

_OLDER: dict[Policy, type[Scheduler]] = {"contiguous": ReservingScheduler, "static": StaticBatchScheduler}


def scheduler_for(
    config: EngineConfig, *, max_model_len: int, eos_token_ids: frozenset[int], window: int = 0
) -> Scheduler:
    """The scheduler of `config.scheduler.policy`, with its block manager.

    Args:
        config: Of the engine.
        max_model_len: Longest sequence that the model allows.
        eos_token_ids: Tokens that end an output.
        window: Of a model whose layers all slide, else 0; the older policies have no use for it.
    """
    older = _OLDER.get(config.scheduler.policy)
    if older is not None:
        return older(config, max_model_len=max_model_len, eos_token_ids=eos_token_ids)
    return Scheduler(config, max_model_len=max_model_len, eos_token_ids=eos_token_ids, window=window)
