"""What the scheduler hands to a runner: one iteration's batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from engine.request import FinishReason, Request
    from engine.trace.events import Phase


class ScheduledRequest(NamedTuple):
    """A request's share of one iteration.

    Attributes:
        request: Whose tokens.
        phase: What they are for.
        computed_before: Position of the first one; everything before it is in the cache.
        num_scheduled: How many.
        block_ids: Its block table, in logical order, long enough for all of them. Shared with the block manager: read
            it during the step and never change it.
    """

    request: Request
    phase: Phase
    computed_before: int
    num_scheduled: int
    block_ids: list[int]

    @property
    def samples(self) -> bool:
        """Whether all known tokens are computed by this step, so that the next one is sampled from it."""
        return self.computed_before + self.num_scheduled == self.request.num_tokens

    @property
    def token_ids(self) -> list[int]:
        """The scheduled tokens, num_scheduled of them."""
        return self.request.tokens(self.computed_before, self.computed_before + self.num_scheduled)


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One iteration's batch.

    Attributes:
        scheduled: In order of arrival; may be empty.
        num_batched_tokens: Sum of their num_scheduled.
    """

    scheduled: list[ScheduledRequest]
    num_batched_tokens: int


class SampledToken(NamedTuple):
    """A token that one iteration brought, and the reason why its request ends with it, if it does."""

    request: Request
    token_id: int
    ends: FinishReason | None
