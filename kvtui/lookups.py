"""Where a session's past can be looked up."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.trace.lookup import Lookup

if TYPE_CHECKING:
    from kvtui.sources.source import Source


def lookup_of(source: Source) -> Lookup | None:
    """What looks things up in the trace that a source plays, or keeps of a running engine; None where it keeps none."""
    kept = getattr(source, "recording", None) or getattr(source, "kept", None)
    return Lookup(kept) if kept is not None else None


def first_of(source: Source) -> int:
    """The first step that can be looked at."""
    return int(getattr(source, "first", 0))
