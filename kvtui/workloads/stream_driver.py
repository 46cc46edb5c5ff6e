"""Keeps a stream of sessions going beside whoever else asks the engine, and gives way to them."""

from __future__ import annotations

import heapq
import time
from itertools import islice
from typing import TYPE_CHECKING

from kvtui.workloads.catalog import STREAM
from kvtui.workloads.driver import Talk, WorkloadDriver
from kvtui.workloads.stream import Room, callers
from kvtui.workloads.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from engine.engine import PagedEngine
    from kvtui.workloads.stream import Caller

GIVES_WAY_S = 10.0
"""Nothing is sent while the engine has requests of others, and so long after the last of them."""

WATCHED_S = 3600.0
"""A stream on screen that nobody touched for so long is held: it is likely that nobody looks."""


class StreamDriver(WorkloadDriver):
    """Adds callers to an engine one after the other, as many at a time as each of them says.

    What it keeps is bounded by the sessions that are open.
    """

    name = STREAM

    def __init__(
        self,
        engine: PagedEngine,
        stream: Iterator[Caller],
        *,
        watched: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """A driver for a stream.

        Args:
            engine: What the requests are added to.
            stream: Who comes; it may end.
            watched: Seconds after which it is held until somebody says `toggle`; None: never.
            clock: Seconds, never going back.
        """
        super().__init__(engine, Workload(STREAM, "", ()), clock=clock)
        self._stream = stream
        self._watched = watched
        self._began = clock()
        self._next = next(stream, None)
        self._next_at = self._began
        self._yields_until = float("-inf")

    @property
    def done(self) -> bool:
        """Whether the stream has ended and every session has had its last answer."""
        return self._next is None and super().done

    @property
    def state(self) -> str:
        """In words, for people."""
        if not self.held and not self.done and self._clock() < self._yields_until:
            return f"{self.name} gives way to others"
        return super().state

    def welcome(self, key: str) -> str:
        """Where the requests come from that nobody asked for."""
        return f"Example requests keep coming. {key} holds them; they give way to your own."

    def toggle(self) -> None:
        """Hold it, or let it go on, for as long as from its start."""
        super().toggle()
        self._began = self._clock()

    def poll(self) -> float | None:
        """Add who is due, unless others ask; seconds until the next one may be, or None while all wait for answers."""
        self._take_in()
        now = self._clock()
        if self._watched is not None and now - self._began > self._watched:
            self.held = True
            return None
        asked = self.num_asked  # Before the engine's: between the two requests can only end.
        if self._engine.num_open > asked:
            self._yields_until = now + GIVES_WAY_S
        if now < self._yields_until:
            return self._yields_until - now
        while self._next is not None and self._open < self._next.at_once and now >= self._next_at:
            heapq.heappush(self._due, (now, next(self._order), Talk(self._next.session)))
            self._open += 1
            self._next = next(self._stream, None)
            self._next_at = now + (self._next.gap if self._next is not None else 0.0)
        wait = self._send_due(now)
        if self._next is not None and self._open < self._next.at_once:
            until = max(0.0, self._next_at - now)
            return until if wait is None else min(wait, until)
        return wait


def stream_driver(
    engine: PagedEngine,
    seed: int,
    *,
    num: int | None,
    watched: float | None,
    clock: Callable[[], float] = time.monotonic,
) -> StreamDriver:
    """A driver for the stream that suits this engine.

    Args:
        engine: Its pool and its model say how long sessions can be.
        seed: Who comes.
        num: Only so many sessions.
        watched: See `StreamDriver`.
        clock: Likewise.
    """
    header = engine.header
    room = Room(
        pool_tokens=header.num_blocks * header.block_size,
        max_model_len=header.max_model_len,
        forks=header.policy == "paged",
        count=lambda text: len(engine.codec.encode(text)),
    )
    return StreamDriver(engine, islice(callers(seed, room), num), watched=watched, clock=clock)
