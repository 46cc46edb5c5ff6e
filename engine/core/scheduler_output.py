"""What the scheduler hands to a runner: one iteration's batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from engine.request import FinishReason, Request
    from engine.trace.events import Op, Phase


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


class BlockCopy(NamedTuple):
    """A block whose content moves.

    Attributes:
        op: COPY within the cache; SWAP_OUT from it to the CPU pool; SWAP_IN back.
        source: Block to read, of the pool that `op` says.
        destination: Block to overwrite.
    """

    op: Op
    source: int
    destination: int


class Fork(NamedTuple):
    """A choice that begins with this iteration's sample.

    Attributes:
        share: Place in the batch of the request whose last logits it is sampled from.
        request: The choice; its known tokens are that request's.
    """

    share: int
    request: Request


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One iteration's batch.

    Attributes:
        scheduled: In order of arrival; may be empty.
        num_batched_tokens: Sum of their num_scheduled.
        copies: What to move before the forward, one after the other: a block may be read, and then be overwritten.
        forks: Further tokens to sample, after those of the batch.
    """

    scheduled: list[ScheduledRequest]
    num_batched_tokens: int
    copies: list[BlockCopy] = field(default_factory=list)
    forks: list[Fork] = field(default_factory=list)


class SampledToken(NamedTuple):
    """A token that one iteration brought, and the reason why its request ends with it, if it does."""

    request: Request
    token_id: int
    ends: FinishReason | None
