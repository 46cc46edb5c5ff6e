"""A request's latency in words and numbers: what it was spent on, for the inspector and for `kvtui inspect`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine.trace.latency import PARTS

if TYPE_CHECKING:
    from engine.trace.latency import Latency


def duration(ns: int) -> str:
    """A time that people read: `834 us`, `12.4 ms`, `987 ms`, `3.21 s`, `132 s`."""
    ns = max(0, ns)
    if ns < 1_000_000:
        return f"{ns / 1e3:.0f} us"
    ms = ns / 1e6
    if ms < 999.5:
        return f"{ms:.1f} ms" if ms < 99.95 else f"{ms:.0f} ms"
    seconds = ns / 1e9
    return f"{seconds:.2f} s" if seconds < 99.995 else f"{seconds:,.0f} s"


def shown_parts(latency: Latency) -> list[tuple[int, str, int]]:
    """(place, name, ns) of the parts worth naming: the first three always, what a preemption cost where there was one.

    Where the recording did not keep that cost, prefill and decode have it in them.
    """
    return [(at, name, ns) for at, (name, ns) in enumerate(zip(PARTS, latency.parts, strict=True)) if at < 3 or ns]


def cells_of_parts(latency: Latency, cells: int) -> list[int]:
    """How many of so many cells each part gets; a part that is there gets at least one, and together they are all.

    The largest remainders get the cells that are left over (Hare's method), after those that would round to nothing.
    """
    parts, total = latency.parts, sum(latency.parts)
    if total <= 0 or cells < 1:
        return [0] * len(parts)
    there = [at for at, ns in enumerate(parts) if ns > 0]
    if len(there) > cells:
        there = sorted(there, key=lambda at: -parts[at])[:cells]
    given = [0] * len(parts)
    for at in there:
        given[at] = max(1, parts[at] * cells // total)
    while sum(given) > cells:
        given[max(there, key=lambda at: given[at])] -= 1
    by_remainder = sorted(there, key=lambda at: -(parts[at] * cells % total))
    for at in by_remainder[: cells - sum(given)]:
        given[at] += 1
    given[max(there, key=lambda at: parts[at])] += cells - sum(given)
    return given


def latency_json(latency: Latency) -> dict[str, Any]:
    """The split for programs, in nanoseconds; None for what is not known yet."""
    return {
        **{f"{name}_ns": ns for name, ns in zip(PARTS, latency.parts, strict=True)},
        "total_ns": latency.total_ns,
        "first_token_ns": latency.first_token_ns if latency.first_token_ns >= 0 else None,
        "per_token_ns": latency.per_token_ns if latency.per_token_ns >= 0 else None,
        "preemption_kept": latency.exact,
    }
