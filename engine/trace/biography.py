"""What happened to one block, newest first: who took, filled, shared and released it, and what its content came to.

Nothing is kept for it while the trace goes by. The operations are looked up when somebody asks, backward from the
present step and a stretch at a time, so that a recording of any length answers at once. How many references the block
had, and under which key its content could be found, follows from the present state by undoing one operation after the
other.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, NamedTuple

from engine.trace.events import NO_REQUEST, Op

if TYPE_CHECKING:
    from collections.abc import Iterable

    from engine.trace.events import BlockOp, StepTrace
    from engine.trace.lookup import Lookup
    from engine.trace.state import PoolState

STRETCH = 1024
"""Steps searched at a time."""

MAX_EVENTS = 512
"""Events kept of one block; a search that has so many is over."""

_SECOND_BLOCK = (Op.COPY, Op.SWAP_IN)
"""Operations whose block of the pool is `b`; a copy concerns the block `a` as well."""


class Happening(enum.IntEnum):
    """What an event is."""

    ALLOCATED = 0
    """`request` took it from the free queue, for place `number` of its table."""
    SHARED = 1
    """`request` refers to it as well, as place `number`; `refs` do now."""
    REUSED = 2
    """It was cached: `request` found its content again, for place `number`."""
    FILLED = 3
    """`request` wrote to it, from step `first_step` on; `number` slots are filled now."""
    HASHED = 4
    """Full: its content can be found under `key`."""
    RELEASED = 5
    """`request` let go; `refs` still refer to it."""
    CACHED = 6
    """`request` let go as the last; the content can still be found under `key`."""
    FREED = 7
    """`request` let go as the last; the content could not be found, and is gone."""
    EVICTED = 8
    """The content under `key` was lost: `request` took the block."""
    COPIED_FROM = 9
    """Copy on write: its first `number` slots were copied from block `other`."""
    COPIED_TO = 10
    """Copy on write: its first `number` slots were copied to block `other`."""
    SWAPPED_OUT = 11
    """Copied to CPU block `other` for `request`; for NO_REQUEST, since the content was about to be evicted."""
    SWAPPED_IN = 12
    """Filled from CPU block `other` for `request`."""


class BlockEvent(NamedTuple):
    """One thing that happened to a block.

    Attributes:
        step: In which step; of several fills that follow each other, the last.
        first_step: The first of them; else `step`.
        what: A `Happening`.
        request: Who did it, or NO_REQUEST.
        number: A place or a number of slots; see `Happening`.
        other: The other block of a copy, or a CPU block; -1 where there is none.
        refs: References to the block after it; UNKNOWN_REFS where the trace contradicts itself.
        key: The content key that it concerns; 0 where there is none.
    """

    step: int
    first_step: int
    what: int
    request: int
    number: int
    other: int
    refs: int
    key: int


def concerns(op: int, a: int, b: int, block: int) -> bool:
    """Whether an operation is about a block of the pool."""
    if op == Op.DROP:
        return False
    if op == Op.COPY:
        return block in (a, b)
    return block == (b if op == Op.SWAP_IN else a)


def ops_of(steps: Iterable[StepTrace], block: int) -> list[tuple[int, BlockOp]]:
    """The operations on a block in some steps, in their order, each with its step."""
    return [(step.index, row) for step in steps for row in step.ops if concerns(row[0], row[1], row[2], block)]


class Biography:
    """The events of one block up to a step, newest first.

    Attributes:
        block: Which.
        step: The step after which it was begun; later ones are added by `extend`.
        events: Newest first; `search` stops where it has MAX_EVENTS.
        searched: The first step whose operations have been looked at: all from there to the present.
        first: The first step that there is to look at.
    """

    def __init__(self, state: PoolState, block: int, first: int = 0) -> None:
        """Begin at the state's step; nothing is looked up yet.

        Args:
            state: After the last step that counts.
            block: One of its pool.
            first: The first step of which the trace is still there.
        """
        self.block = block
        self.step = state.step
        self.first = first
        self.events: list[BlockEvent] = []
        # Nothing happened to it after the last operation on it.
        self.searched = min(state.step, int(state.touched[block])) + 1
        self._refs = self._refs_now = int(state.refs[block])
        self._key = self._key_now = int(state.key[block])
        self._taker = NO_REQUEST

    @property
    def complete(self) -> bool:
        """Whether all that there is has been looked at, or more than is kept."""
        return self.searched <= self.first or len(self.events) >= MAX_EVENTS

    def search(self, lookup: Lookup, most_steps: int, enough: int = MAX_EVENTS) -> None:
        """Look further back: at most so many steps, or until there are at least `enough` events.

        Raises:
            RecordingError: a part of the trace is damaged; what came after it is there.
        """
        stop_at = max(self.first, self.searched - most_steps)
        while self.searched > stop_at and len(self.events) < enough and not self.complete:
            start = max(stop_at, self.searched - STRETCH)
            for step, row in reversed(lookup.block_ops(self.block, start, self.searched)):
                if len(self.events) > MAX_EVENTS:
                    return
                self._before(step, *row)
                self.searched = step
            self.searched = start

    def extend(self, steps: Iterable[StepTrace]) -> None:
        """Add the operations of the steps that came after those known."""
        for step in steps:
            if step.index <= self.step:
                continue
            self.step = step.index
            mine = ops_of((step,), self.block)
            for at, (index, row) in enumerate(mine):
                taker = next((later[2] for _, later in mine[at:] if later[0] == Op.ALLOCATE), NO_REQUEST)
                self._after(index, *row, taker=taker)
        if len(self.events) > 2 * MAX_EVENTS:
            del self.events[MAX_EVENTS:]

    def _before(self, step: int, op: int, a: int, b: int, c: int) -> None:
        """Add an operation that came before all that are known, and undo it."""
        refs, key = self._refs, self._key
        event = self._event(step, op, a, b, c, refs, key, self._taker)
        if op == Op.ALLOCATE:
            self._refs, self._key, self._taker = 0, 0, b
        elif op == Op.SHARE:
            self._refs = max(0, refs - 1)
        elif op == Op.RELEASE:
            self._refs = refs + 1
        elif op == Op.HASH:
            self._key = 0
        elif op == Op.EVICT:
            self._key = b
        if self.events and event is not None and _continues(self.events[-1], event):
            newer = self.events[-1]
            self.events[-1] = newer._replace(first_step=event.first_step)
        elif event is not None:
            self.events.append(event)

    def _after(self, step: int, op: int, a: int, b: int, c: int, *, taker: int) -> None:
        """Add an operation that came after all that are known."""
        refs, key = self._refs_now, self._key_now
        if op == Op.ALLOCATE:
            refs, key = 1, 0
        elif op == Op.SHARE:
            refs += 1
        elif op == Op.RELEASE:
            refs = max(0, refs - 1)
        elif op == Op.HASH:
            key = b
        elif op == Op.EVICT:
            key = 0
        self._refs_now, self._key_now = refs, key
        event = self._event(step, op, a, b, c, refs, key, taker)
        if self.events and event is not None and _continues(event, self.events[0]):
            self.events[0] = event._replace(first_step=self.events[0].first_step)
        elif event is not None:
            self.events.insert(0, event)

    def _event(self, step: int, op: int, a: int, b: int, c: int, refs: int, key: int, taker: int) -> BlockEvent | None:
        """The event of an operation, with the references and the key after it."""
        made = {
            Op.ALLOCATE: (Happening.ALLOCATED, b, c, -1),
            Op.SHARE: (Happening.SHARED if refs > 1 else Happening.REUSED, b, c, -1),
            Op.FILL: (Happening.FILLED, b, c, -1),
            Op.HASH: (Happening.HASHED, NO_REQUEST, 0, -1),
            Op.RELEASE: (
                Happening.RELEASED if refs else Happening.CACHED if key else Happening.FREED,
                b,
                0,
                -1,
            ),
            Op.EVICT: (Happening.EVICTED, taker, 0, -1),
            Op.COPY: (Happening.COPIED_FROM, NO_REQUEST, c, a)
            if b == self.block
            else (Happening.COPIED_TO, NO_REQUEST, c, b),
            Op.SWAP_OUT: (Happening.SWAPPED_OUT, c, 0, b),
            Op.SWAP_IN: (Happening.SWAPPED_IN, c, 0, a),
        }.get(op)  # type: ignore[call-overload]
        if made is None:
            return None
        what, request, number, other = made
        if op in (Op.HASH, Op.EVICT):
            key = b
        return BlockEvent(step, step, int(what), request, number, other, refs, key)


def _continues(newer: BlockEvent, older: BlockEvent) -> bool:
    """Whether two fills that follow each other are told as one."""
    return newer.what == older.what == Happening.FILLED and newer.request == older.request
