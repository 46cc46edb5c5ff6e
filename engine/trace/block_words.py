"""A few words for each thing that happened to a block."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.sizes import counted
from engine.trace.biography import Happening
from engine.trace.events import NO_REQUEST

if TYPE_CHECKING:
    from engine.trace.biography import BlockEvent
    from engine.trace.explain import NameOf

HASH_DIGITS = 8
"""Hexadecimal digits of a content key that are shown: as many as tell the contents of one session apart."""


def short_key(key: int) -> str:
    """The first digits of a content key."""
    return f"{key & 0xFFFFFFFFFFFFFFFF:016x}"[:HASH_DIGITS]


def block_words(event: BlockEvent, block_size: int, name_of: NameOf | None = None) -> str:
    """What happened, such as `taken by #21 for place 15 of its table`; one line, safe where the names are.

    Args:
        event: Of a `Biography`.
        block_size: Slots of the block.
        name_of: What a request is called; None calls it by its number.
    """
    who = "nobody known"
    if event.request != NO_REQUEST:
        who = name_of(event.request) if name_of is not None else f"#{event.request}"
    what = event.what
    if what == Happening.ALLOCATED:
        return f"taken by {who} for place {event.number} of its table"
    if what == Happening.SHARED:
        return f"shared with {who}, place {event.number} of its table: {event.refs} references"
    if what == Happening.REUSED:
        return f"found by {who} in the cache, for place {event.number} of its table"
    if what == Happening.FILLED:
        over = f", since step {event.first_step:,}" if event.first_step != event.step else ""
        return f"filled by {who}: {event.number}/{block_size} slots{over}"
    if what == Happening.HASHED:
        return f"full, and hashed: its content can be found as {short_key(event.key)}"
    if what == Happening.RELEASED:
        return f"released by {who}: {counted(event.refs, 'reference')} left"
    if what == Happening.CACHED:
        return f"released by {who}, nobody else holds it: cached as {short_key(event.key)}"
    if what == Happening.FREED:
        return f"released by {who}, nobody else holds it: free"
    if what == Happening.EVICTED:
        return f"evicted: content {short_key(event.key)} was lost, {who} needed the block"
    if what == Happening.COPIED_FROM:
        return f"copy on write: {counted(event.number, 'slot')} copied from block {event.other}"
    if what == Happening.COPIED_TO:
        return f"copy on write: {counted(event.number, 'slot')} copied to block {event.other}"
    if what == Happening.SWAPPED_OUT:
        why = f"for {who}" if event.request != NO_REQUEST else "before its eviction"
        return f"copied to CPU block {event.other} {why}"
    return f"content of {who} brought back from CPU block {event.other}"
