"""Memory as it was before paging: each request reserves, when it starts, one piece for the longest it can come to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.baselines.first_fit import FirstFitPool
from engine.core.found_prefix import NOTHING_FOUND, FoundPrefix
from engine.core.kv_cache_manager import KVCacheManager
from engine.core.scheduler import Scheduler
from engine.trace.events import Reason

if TYPE_CHECKING:
    from engine.config import CacheConfig, EngineConfig
    from engine.request import Request


class ReservedKVCache(KVCacheManager):
    """Block tables that are one run of neighbours from the first step to the last.

    Nothing is shared and nothing found again: a piece belongs to one request.

    Attributes:
        pool: Hands out runs.
    """

    pool: FirstFitPool

    def __init__(self, config: CacheConfig, max_model_len: int) -> None:
        super().__init__(config, pool=FirstFitPool(config.num_blocks))
        self.prefix_caching = False
        self._max_model_len = max_model_len

    def reservation(self, request: Request) -> int:
        """Blocks that the request reserves: for its prompt and all tokens that it may generate."""
        longest = min(request.num_prompt_tokens + request.params.max_tokens, self._max_model_len)
        return self.num_blocks_for(longest)

    def allocate_slots(self, request: Request, num_tokens: int, found: FoundPrefix = NOTHING_FOUND) -> bool:
        """Reserve the request's piece when it starts; from then on there is room for all of its tokens.

        Returns:
            Whether there was a hole for it. If not, nothing has changed.
        """
        request_id = request.request_id
        if request_id in self._tables:
            return True
        needs = self.reservation(request)
        if needs > self.pool.holes.largest:
            return False
        self._tables[request_id] = self.pool.allocate(needs, request_id)
        self._num_published[request_id] = 0
        return True


class ReservingScheduler(Scheduler):
    """Requests join and leave at every step, each with its memory reserved in one piece.

    Nobody ever gives way: whoever runs has all the memory that it can need. The price is that few run.
    """

    kv: ReservedKVCache

    def __init__(
        self, config: EngineConfig, *, max_model_len: int | None = None, eos_token_ids: frozenset[int] = frozenset()
    ) -> None:
        longest = min(config.scheduler.max_model_len, max_model_len or config.scheduler.max_model_len)
        kv = ReservedKVCache(config.cache, longest)
        super().__init__(config, max_model_len=longest, eos_token_ids=eos_token_ids, kv=kv)

    def add_request(self, request: Request) -> None:
        """Queue a request, or refuse at once what can never run."""
        needs, pool = self.kv.reservation(request), self.kv.pool.num_blocks
        if 0 < request.num_prompt_tokens < self.max_model_len and needs > pool:
            self._refuse(
                request,
                Reason.RESERVATION_NEVER_FITS,
                {"needs": needs, "pool": pool},
                f"the prompt and up to {self.max_tokens(request)} new tokens reserve {needs} blocks and the pool has "
                f"{pool}: ask for fewer tokens (max_tokens), or start with more blocks (--num-blocks)",
            )
        else:
            super().add_request(request)

    def _no_room(self, request: Request, needs: int, free: int) -> tuple[Reason, dict[str, int]]:
        reserves = self.kv.reservation(request)
        return Reason.NO_HOLE, {"needs": reserves, "largest_hole": self.kv.pool.holes.largest, "free": free}
