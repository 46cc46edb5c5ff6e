"""Why each waiting request waits: noted when it becomes so or its numbers change, not at every step."""

from __future__ import annotations

import logging
from itertools import islice, pairwise
from typing import TYPE_CHECKING

from engine.trace.events import Decision, DecisionKind, Reason

if TYPE_CHECKING:
    from collections import OrderedDict

    from engine.request import Request

logger = logging.getLogger("engine")


class WaitReasons:
    """What was last noted about each waiting request.

    The head of the queue has a reason of its own; everybody else waits behind the one in front. That changes for all at
    once only where the order changed, so a step without arrivals costs nothing here, however many wait.
    """

    def __init__(self) -> None:
        self._told: dict[int, Decision] = {}
        self._block_misses: dict[int, int] = {}
        self._num_arrived = 0
        self._order_changed = False

    def arrived(self) -> None:
        """A request joined the end of the queue."""
        self._num_arrived += 1

    def order_changed(self) -> None:
        """One came to the front, or left from somewhere else than the front."""
        self._order_changed = True

    def left(self, request_id: int) -> None:
        """A request waits no longer. How often it found too few blocks is logged now: one line, not one per step."""
        self._told.pop(request_id, None)
        misses = self._block_misses.pop(request_id, 0)
        if misses:
            logger.info("request %d waited for blocks: not enough were free in %d steps", request_id, misses)

    def head_waits(self, request: Request, reason: Reason, numbers: dict[str, int]) -> list[Decision]:
        """The decision to note about the head of the queue; none if nothing is new."""
        request_id = request.request_id
        if reason in (Reason.NO_BLOCKS, Reason.NO_HOLE):
            self._block_misses[request_id] = self._block_misses.get(request_id, 0) + 1
        return self._note(Decision(DecisionKind.WAITS, request_id, reason, numbers))

    def others_wait(self, waiting: OrderedDict[int, Request]) -> list[Decision]:
        """The decisions to note about those behind the head: all of them if the order changed, else the new ones."""
        num_new, self._num_arrived = self._num_arrived, 0
        if not num_new and not self._order_changed:
            return []
        count = len(waiting) if self._order_changed else num_new + 1
        self._order_changed = False
        last = list(islice(reversed(waiting), count))[::-1]
        return [
            decision
            for ahead, behind in pairwise(last)
            for decision in self._note(Decision(DecisionKind.WAITS, behind, Reason.BEHIND, {"ahead": ahead}))
        ]

    def _note(self, decision: Decision) -> list[Decision]:
        if self._told.get(decision.request) == decision:
            return []
        self._told[decision.request] = decision
        return [decision]
