"""Batches as they were before continuous batching: made up once, and run until the last member is done."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.baselines.reservation import ReservingScheduler
from engine.trace.events import Reason

if TYPE_CHECKING:
    from engine.config import EngineConfig
    from engine.core.scheduler_output import SchedulerOutput


class StaticBatchScheduler(ReservingScheduler):
    """One batch after the other.

    A batch takes in whoever waits when it begins, up to max_num_seqs and to what the memory holds. It stays open for
    the steps that its prompts take within the token budget, and closes when nobody else is there, nothing else fits,
    or a member ends. A member that ends early gives its memory back, and its place stays empty.
    """

    def __init__(
        self, config: EngineConfig, *, max_model_len: int | None = None, eos_token_ids: frozenset[int] = frozenset()
    ) -> None:
        super().__init__(config, max_model_len=max_model_len, eos_token_ids=eos_token_ids)
        self._open = True
        self._size = 0

    def schedule(self) -> SchedulerOutput:
        """Choose the next batch: the same as before, as long as one of it is left."""
        if not self.running:
            self._open, self._size = True, 0
        elif len(self.running) < self._size:
            self._open = False
        output = super().schedule()
        self._size = max(self._size, len(self.running))
        if output.num_batched_tokens < self.max_num_batched_tokens:
            self._open = False
        return output

    def _closed(self, budget: int) -> tuple[Reason, dict[str, int]] | None:
        if not self._open:
            return Reason.BATCH_RUNNING, {"running": len(self.running), "batch": self._size}
        return super()._closed(budget)
