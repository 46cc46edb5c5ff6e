"""One request as a trace tells of it."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from engine.request import RequestStatus
from engine.trace.events import NO_BLOCK, NO_REQUEST

if TYPE_CHECKING:
    from engine.trace.columns import Column
    from engine.trace.events import Decision
    from engine.trace.vocabulary import Vocabulary

UNKNOWN = -1
"""Stands for a duration that the trace no longer tells."""
_LONGEST_NS = 1 << 61
"""A made-up trace may tell any times; two of these still fit 64 bits."""


class StoredText(NamedTuple):
    """The tokens of a request as a recording has them: nobody reads most of what a state brings along.

    Attributes:
        vocabulary: Of the recording.
        entries: int64: its entries, one for each token, all of them in it.
    """

    vocabulary: Vocabulary
    entries: Column


@dataclass(slots=True, eq=False)
class RequestState:
    """One request as the trace tells of it.

    Attributes:
        request: The engine's number for it.
        token_ids: Prompt and output.
        pieces: The text of each token, as many as `token_ids`.
        table: The block table; NO_BLOCK where a place holds none, as those behind a sliding window.
        num_computed: Tokens whose keys and values are in the cache.
        num_cached: Prompt tokens that its first admission found in the prefix cache.
        arrival_ns: Since the trace began, as all times here.
        admitted_ns: Start of the step that first admitted it; -1 before, as with the next two.
        first_token_ns: End of the step that brought its first token.
        finished_ns: End of the step that ended it.
        finish_reason: A `FinishReason` value; empty before the end.
        message: Why it ended, where it went wrong.
        waiting_for: The decision that keeps it waiting; None while it does not wait.
        last_phase: `Phase` of its last turn in a batch; -1 before the first.
        last_scheduled: Tokens computed for it in that turn.
        last_batch: Index of that turn's step; -1 before the first.
        arrival_step: Index of the step before which it arrived.
        first_token_step: Index of the step of its first new token; -1 before.
        last_token_step: Index of the step of its newest token; -1 before.
        finished_step: Index of the step that ended it; -1 before.
        admitted_step: Index of the step that first admitted it; -1 before.
        preempted_ns: Time between its preemptions and the steps that admitted it again, spells that are over; UNKNOWN
            where the state comes from a recording that did not keep it, as with the next two.
        recompute_ns: Time from those steps until what it had lost was computed again, spells that are over.
        early_stall_ns: How much of both came before its first token.
        stalled_since_ns: Start of the step that preempted it, while it waits since; -1 otherwise.
        recompute_since_ns: Start of the step that admitted it again, while it computes again; -1 otherwise.
        regret_blocks: Full blocks of its prompt that it computed although the cache had had them: see
            `PoolState.regret_blocks`.
        regret_step: Index of the step that evicted the last of them; -1 where none was.
        stored: `token_ids` and `pieces` until one of them is asked for, where a recording has them.
    """

    request: int
    name: str
    num_prompt_tokens: int
    max_tokens: int
    arrival_ns: int
    arrival_step: int = 0
    temperature: float = 0.0
    parent: int = NO_REQUEST
    status: RequestStatus = RequestStatus.WAITING
    token_ids: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    table: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_cached: int = 0
    admitted_ns: int = -1
    first_token_ns: int = -1
    finished_ns: int = -1
    finish_reason: str = ""
    message: str = ""
    waiting_for: Decision | None = None
    preemptions: int = 0
    last_phase: int = -1
    last_scheduled: int = 0
    last_batch: int = -1
    first_token_step: int = -1
    last_token_step: int = -1
    finished_step: int = -1
    admitted_step: int = -1
    preempted_ns: int = 0
    recompute_ns: int = 0
    early_stall_ns: int = 0
    stalled_since_ns: int = -1
    recompute_since_ns: int = -1
    regret_blocks: int = 0
    regret_step: int = -1
    stored: StoredText | None = None

    def keep_stored(self, text: StoredText) -> None:
        """Take the tokens out of this when they are asked for."""
        self.stored = text
        del self.token_ids, self.pieces

    def __getattr__(self, name: str) -> Any:
        """What is not there: tokens that are stored."""
        # Python comes here only for a slot without a value.
        if name in ("token_ids", "pieces") and self.stored is not None:
            self.token_ids, self.pieces = self.stored.vocabulary.look_up(self.stored.entries)
            self.stored = None
            return getattr(self, name)
        raise AttributeError(f"a request has no {name}")

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and output."""
        return len(self.token_ids) if self.stored is None else len(self.stored.entries)

    @property
    def num_blocks(self) -> int:
        """Blocks that it holds: the places of its table, but for those behind a sliding window."""
        table = self.table
        return len(table) - table.count(NO_BLOCK) if table and table[0] < 0 else len(table)

    def num_held(self, block_size: int) -> int:
        """Computed tokens whose keys and values its blocks hold: not those behind a sliding window."""
        return self.num_computed - (len(self.table) - self.num_blocks) * block_size

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return self.num_tokens - self.num_prompt_tokens

    def stall(self, now_ns: int) -> None:
        """It lost its blocks."""
        self.caught_up(now_ns)
        if self.stalled_since_ns < 0:
            self.stalled_since_ns = now_ns

    def run_again(self, now_ns: int) -> None:
        """It has blocks again."""
        if self.stalled_since_ns >= 0:
            self.preempted_ns = _longer(self.preempted_ns, now_ns - self.stalled_since_ns)
            self.stalled_since_ns = -1
            self.recompute_since_ns = now_ns

    def caught_up(self, now_ns: int) -> None:
        """What it had lost, if anything, is computed again."""
        if self.recompute_since_ns >= 0:
            self.recompute_ns = _longer(self.recompute_ns, now_ns - self.recompute_since_ns)
            self.recompute_since_ns = -1

    def note_first_token(self) -> None:
        """Its first token is there: what it lost time with up to now did not hold up the others."""
        known = self.preempted_ns != UNKNOWN and self.recompute_ns != UNKNOWN
        self.early_stall_ns = self.preempted_ns + self.recompute_ns if known else UNKNOWN

    def copy(self) -> RequestState:
        """Another one, equal and sharing nothing that changes."""
        stored = self.stored
        if stored is not None:
            self.token_ids, self.pieces = [], []
        other = RequestState(*_all_fields(self))
        other.table = self.table.copy()
        if stored is None:
            other.token_ids = self.token_ids.copy()
            other.pieces = self.pieces.copy()
        else:
            self.keep_stored(stored)
            other.keep_stored(stored)
        return other


def _longer(total_ns: int, spell_ns: int) -> int:
    return total_ns if total_ns == UNKNOWN else min(total_ns + max(0, spell_ns), _LONGEST_NS)


# Copying an object field by field through `copy` costs twenty times as much, and a state has hundreds of requests.
_all_fields = attrgetter(*(entry.name for entry in fields(RequestState)))
