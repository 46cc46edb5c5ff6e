"""The inspector's lists: a block's life, the decisions about a request, and the free queue; each line leads somewhere.

They are looked up when they are shown, newest first, a little at a time: what a frame may take is bounded, and so is
how far back a search goes before somebody asks for more.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from engine.trace import explain
from engine.trace.biography import Biography, Happening
from engine.trace.block_words import block_words
from engine.trace.events import DecisionKind
from engine.trace.file_format import RecordingError
from engine.trace.lookup import RequestDecision
from kvtui.lookups import first_of, lookup_of
from kvtui.safe_text import clean
from kvtui.widgets.spans import Entry

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.trace.biography import BlockEvent
    from engine.trace.events import StepTrace
    from kvtui.view import View

FRAME_SECONDS = 0.02
"""Longest that a frame searches; what is left is for the next one."""

STRETCH = 128
"""Steps searched between two looks at the clock."""

AHEAD = 8192
"""Steps that are searched without being asked."""

ENOUGH = 96
"""Events of a block, or decisions about a request, that are looked up without being asked."""

_LOOKS = {
    DecisionKind.PREEMPTED: "warning",
    DecisionKind.WAITS: "muted",
    DecisionKind.REFUSED: "error",
    DecisionKind.FAILED: "error",
}


class Search:
    """Looks back from the step shown, as far as was asked for.

    Attributes:
        damage: Why it cannot go on; empty where it can.
    """

    def __init__(self, view: View) -> None:
        self.view = view
        self.first = first_of(view.source)
        self.damage = ""
        self._allowed = AHEAD
        self._enough = ENOUGH

    @property
    def searched(self) -> int:
        """The first step that was looked at."""
        raise NotImplementedError

    @property
    def found(self) -> int:
        """How many there are."""
        raise NotImplementedError

    def look(self, start: int) -> None:
        """Look at the steps from `start` up to those looked at already."""
        raise NotImplementedError

    def extend(self, steps: Sequence[StepTrace]) -> None:
        """Add what the steps brought that came since."""
        raise NotImplementedError

    def entries(self, view: View) -> list[Entry]:
        """A line for each, newest first."""
        raise NotImplementedError

    @property
    def complete(self) -> bool:
        """Whether there is nothing earlier to be looked at."""
        return self.searched <= self.first or bool(self.damage) or lookup_of(self.view.source) is None

    @property
    def waits(self) -> bool:
        """Whether there is more, which nobody has asked for yet."""
        return not self.complete and (self._allowed <= 0 or self.found >= self._enough)

    def more(self) -> None:
        """Go on further back."""
        self._allowed += AHEAD
        self._enough = self.found + ENOUGH

    def work(self) -> bool:
        """Search for as long as a frame may take; whether it is to be called again."""
        deadline = time.monotonic() + FRAME_SECONDS
        while not self.complete and not self.waits:
            start = max(self.first, self.searched - STRETCH)
            self._allowed -= self.searched - start
            try:
                self.look(start)
            except RecordingError as error:
                self.damage = str(error)
            if time.monotonic() > deadline:
                break
        return not self.complete and not self.waits


class BlockLife(Search):
    """What happened to one block."""

    def __init__(self, view: View, block: int) -> None:
        super().__init__(view)
        self.life = Biography(view.state, block, self.first)
        self._made_of: object = None
        self._made: list[Entry] = []

    @property
    def searched(self) -> int:
        """The first step that was looked at."""
        return self.life.searched

    @property
    def found(self) -> int:
        """Events known."""
        return len(self.life.events)

    @property
    def complete(self) -> bool:
        """Whether there is nothing earlier to be looked at."""
        return self.life.complete or super().complete

    def look(self, start: int) -> None:
        """Look at the steps from `start` up to those looked at already."""
        lookup = lookup_of(self.view.source)
        if lookup is not None:
            self.life.search(lookup, self.searched - start)

    def extend(self, steps: Sequence[StepTrace]) -> None:
        """Add what the steps brought that came since."""
        self.life.extend(steps)

    def entries(self, view: View) -> list[Entry]:
        """A line an event, newest first; made anew only where there is another event, or another way to tell them."""
        events = self.life.events
        key = (len(events), events[:1], events[-1:], view.glyphs.ascii, _digits(view), view.names.longest)
        if key != self._made_of:
            self._made_of, self._made = key, [self._entry(view, event) for event in events]
        return self._made.copy()

    def _entry(self, view: View, event: BlockEvent) -> Entry:
        words = block_words(event, view.state.header.block_size, view.names.of)
        look = "warning" if event.what == Happening.EVICTED else event.request if event.request >= 0 else "text"
        return Entry(
            (
                (f"{event.step:>{_digits(view)},} ", "muted"),
                (clean(words, ascii_only=view.glyphs.ascii, limit=300), look),
            ),
            step=event.step,
        )


class RequestDecisions(Search):
    """Every decision about one request."""

    def __init__(self, view: View, request: int) -> None:
        super().__init__(view)
        self.request = request
        self.first = max(self.first, view.state.requests[request].arrival_step)
        self.decided: list[RequestDecision] = []
        self._searched = self._known = view.state.step + 1

    @property
    def searched(self) -> int:
        """The first step that was looked at."""
        return self._searched

    @property
    def found(self) -> int:
        """Decisions known."""
        return len(self.decided)

    def look(self, start: int) -> None:
        """Look at the steps from `start` up to those looked at already."""
        lookup = lookup_of(self.view.source)
        if lookup is not None:
            self.decided.extend(reversed(lookup.decisions(self.request, start, self._searched)))
        self._searched = start

    def extend(self, steps: Sequence[StepTrace]) -> None:
        """Add what the steps brought that came since."""
        for step in steps:
            if step.index < self._known:
                continue
            self._known = step.index + 1
            for decision in step.decisions:
                if decision.request == self.request:
                    self.decided.insert(0, RequestDecision(step.index, decision))

    def entries(self, view: View) -> list[Entry]:
        """A line a decision, newest first."""
        entries = []
        for step, decision in self.decided:
            words = explain.short(decision, view.names.of)
            look = next((look for kind, look in _LOOKS.items() if kind == decision.kind), "text")
            row = (
                (f"{step:>{_digits(view)},} ", "muted"),
                (clean(words, ascii_only=view.glyphs.ascii, limit=300), look),
            )
            entries.append(Entry(row, step=step))
        return entries


def _digits(view: View) -> int:
    return max(4, len(f"{view.state.step:,}"))


def older(search: Search, key: str) -> Entry | None:
    """The last line of a search: how far it went, and how to go on; None where there is nothing earlier."""
    if search.damage:
        return Entry(((clean(search.damage, limit=200), "error"),))
    if search.waits:
        earlier = f" older: the {search.searched - search.first:,} steps before {search.searched:,}; {key} looks there"
        return Entry(((earlier, "accent"),))
    if not search.complete:
        return Entry(((" looking further back", "muted"),))
    if lookup_of(search.view.source) is None:
        return Entry(((" what came before is not kept", "muted"),))
    if search.first > 0 and search.searched <= search.first and isinstance(search, BlockLife):
        return Entry(((f" what came before step {search.first:,} is not kept any more", "muted"),))
    return None
