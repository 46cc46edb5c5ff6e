"""The same requests in the memory of the old way: each in one piece, reserved for the longest that it can come to.

The policy is that of `engine.baselines.reservation`, on the arrivals and ends that the trace tells of: first come,
first served; a request starts when the first hole that is large enough is found for it (first fit), and gives its piece
back when it ends in the trace. Nobody computes anything here. So the two memories are about the same requests at the
same moment, and the ghost never falls behind.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from engine.baselines.first_fit import Holes
from engine.request import FinishReason

if TYPE_CHECKING:
    from collections.abc import Iterable

    from engine.trace.events import Header, StepTrace
    from engine.trace.request_state import RequestState
    from engine.trace.state import PoolState


class Piece(NamedTuple):
    """Blocks in a row that a request has reserved."""

    start: int
    num: int


class Fragmentation(NamedTuple):
    """Where memory is lost at one moment, in blocks and slots (Kwon et al., SOSP 2023, section 3.1).

    Attributes:
        reserved_slots: Slots of the blocks in use.
        filled_slots: Of these, how many hold keys and values.
        free: Blocks that nobody holds.
        largest_hole: Most free blocks in a row.
    """

    reserved_slots: int
    filled_slots: int
    free: int
    largest_hole: int


class Ghost:
    """The memory of the old way.

    Attributes:
        header: Of the trace.
        pieces: By request, in the order in which they started.
        waiting: Blocks that those who have no piece would reserve, by request, in order of arrival.
        refused: The same of live requests that the whole pool is too small for.
        holes: The runs of free blocks.
    """

    def __init__(self, header: Header) -> None:
        self.header = header
        self._clear()

    def _clear(self) -> None:
        self.pieces: dict[int, Piece] = {}
        self.waiting: dict[int, int] = {}
        self.refused: dict[int, int] = {}
        self.holes = Holes(self.header.num_blocks)
        self._newest = -1
        self._arriving: list[RequestState] = []

    def reservation(self, request: RequestState) -> int:
        """Blocks for the prompt and all tokens that the request may generate."""
        return -(-self.longest(request) // self.header.block_size)

    def longest(self, request: RequestState) -> int:
        """Tokens that the request can come to: S_i^max."""
        return max(1, min(request.num_prompt_tokens + request.max_tokens, self.header.max_model_len))

    # -- following -----------------------------------------------------------------------------------------------

    def follow(self, state: PoolState, steps: Iterable[StepTrace]) -> None:
        """Take in steps that led to the state; work for each is proportional to who came and went in it."""
        for step in steps:
            self._arrivals(state, step.index)
            in_batch = {member[0] for member in step.batch} if step.finished else set()
            ended = [finish.request for finish in step.finished if finish.request not in in_batch]
            refused = {finish.request for finish in step.finished if finish.reason == FinishReason.REFUSED}
            later = []
            for request in self._arriving:
                if request.arrival_step > step.index:
                    later.append(request)
                elif request.request not in refused:
                    self._arrive(request)
            self._arriving = later
            self._turn(ended, [finish.request for finish in step.finished if finish.request in in_batch])

    def rebuild(self, state: PoolState) -> None:
        """Start anew from the requests that a state knows: the live ones, and the last ones that ended.

        It is what `follow` has come to where no more requests than those have ended yet. Later, pieces may lie
        elsewhere, until what was there before them has ended as well.
        """
        self._clear()
        arrivals: dict[int, list[RequestState]] = {}
        before: dict[int, list[int]] = {}
        after: dict[int, list[int]] = {}
        turns: set[int] = set()
        for request in state.requests.values():
            self._newest = request.request
            end = request.finished_step
            if request.status.is_finished and end < 0:
                end = request.last_batch
            if request.finish_reason == FinishReason.REFUSED or request.arrival_step > state.step:
                if not request.status.is_finished:
                    self._arriving.append(request)
                continue
            arrivals.setdefault(request.arrival_step, []).append(request)
            turns.add(request.arrival_step)
            if request.status.is_finished:
                (after if end == request.last_batch else before).setdefault(end, []).append(request.request)
                turns |= {end, end + 1}
        for step in sorted(turns):
            if step > state.step:
                break
            for request in arrivals.get(step, ()):
                self._arrive(request)
            self._turn(before.get(step, []), after.get(step, []))

    def _arrivals(self, state: PoolState, step: int) -> None:
        """Note who has come since the last time; the newest stand last in the state."""
        new: list[RequestState] = []
        for number in reversed(state.requests):
            if number == self._newest:
                break
            new.append(state.requests[number])
        if new:
            self._newest = new[0].request
            # Where the newest one of the last time is forgotten, those that are known already come again.
            known = self.pieces.keys() | self.waiting.keys() | self.refused.keys() if len(new) > 1 else ()
            self._arriving += [
                request
                for request in reversed(new)
                if request.request not in known and not (request.status.is_finished and request.finished_step < step)
            ]

    def _arrive(self, request: RequestState) -> None:
        needs = self.reservation(request)
        (self.refused if needs > self.header.num_blocks else self.waiting)[request.request] = needs

    def _turn(self, ended_before: list[int], ended_after: list[int]) -> None:
        """One step: those that were aborted leave, those that fit start, those that are done leave."""
        self._leave(ended_before)
        while self.waiting and len(self.pieces) < self.header.max_num_seqs:
            number, needs = next(iter(self.waiting.items()))
            start = self.holes.take(needs)
            if start is None:
                break
            del self.waiting[number]
            self.pieces[number] = Piece(start, needs)
        self._leave(ended_after)

    def _leave(self, numbers: list[int]) -> None:
        for number in numbers:
            piece = self.pieces.pop(number, None)
            if piece is not None:
                self.holes.give(*piece)
            else:
                self.waiting.pop(number, None)
                self.refused.pop(number, None)

    # -- reading -------------------------------------------------------------------------------------------------

    def filled(self, state: PoolState, number: int) -> int:
        """Slots of a request's piece that would hold something: as many as it has computed in the trace."""
        request = state.requests.get(number)
        piece = self.pieces[number]
        return min(request.num_computed, piece.num * self.header.block_size) if request is not None else 0

    def fragmentation(self, state: PoolState) -> Fragmentation:
        """Where memory is lost now; time proportional to the pieces."""
        reserved = sum(piece.num for piece in self.pieces.values())
        return Fragmentation(
            reserved_slots=reserved * self.header.block_size,
            filled_slots=sum(self.filled(state, number) for number in self.pieces),
            free=self.header.num_blocks - reserved,
            largest_hole=self.holes.largest,
        )

    def copies(self, state: PoolState) -> int:
        """Slots of the pieces that would hold once more what another piece holds: what the trace's blocks share."""
        if not state.shared:
            return 0
        tables = [state.table(number) for number in self.pieces if number in state.requests]
        places = np.fromiter(chain.from_iterable(tables), np.int64)
        places = places[places >= 0]
        once = np.unique(places)
        return int(state.filled[places].sum() - state.filled[once].sum())

    @property
    def head(self) -> int | None:
        """Who waits for memory at the head of the queue; None where nobody does, or a place in the batch is missing."""
        full = len(self.pieces) >= self.header.max_num_seqs
        return None if full else next(iter(self.waiting), None)
