"""From a policy's name to its scheduler."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.baselines.reservation import ReservingScheduler
from engine.baselines.static_batching import StaticBatchScheduler
from engine.core.scheduler import Scheduler

if TYPE_CHECKING:
    from engine.config import EngineConfig, Policy

_SCHEDULERS: dict[Policy, type[Scheduler]] = {
    "paged": Scheduler,
    "contiguous": ReservingScheduler,
    "static": StaticBatchScheduler,
}


def scheduler_for(config: EngineConfig, *, max_model_len: int, eos_token_ids: frozenset[int]) -> Scheduler:
    """The scheduler of `config.scheduler.policy`, with its block manager."""
    make = _SCHEDULERS[config.scheduler.policy]
    return make(config, max_model_len=max_model_len, eos_token_ids=eos_token_ids)
