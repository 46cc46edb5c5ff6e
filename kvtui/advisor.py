"""What holds the session up at present, on what numbers, and which setting would move it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from engine.request import FinishReason
from engine.sizes import counted
from engine.trace.bottleneck import SETTINGS, Limit, limits_of
from engine.trace.events import Reason

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.trace.columns import Column
    from engine.trace.events import Header
    from engine.trace.state import PoolState
    from kvtui.history import History

WINDOW = 64
"""Steps that count as the present."""

HARDLY = 0.05
"""A limit that is met in a smaller share of the steps is not worth moving."""


class Advice(NamedTuple):
    """What held somebody up in the last steps.

    Attributes:
        limit: What did in most of them; NOTHING where nothing did in any.
        held: In how many steps it did.
        steps: Of how many.
        counts: Steps by `Limit`.
        preemptions: Requests that gave way in them.
        value: The limit's present value: blocks, sequences, tokens a step; 0 for NOTHING and BATCH.
        waiting: Requests that wait now.
        head: The request that waits for blocks, with how many it needs and how many are free; None where none does.
        never_fit: Requests that were refused, since their prompt needs more blocks than the pool has, and the most
            that one of them needs.
    """

    limit: Limit
    held: int
    steps: int
    counts: tuple[int, ...]
    preemptions: int
    value: int
    waiting: int
    head: tuple[int, int, int] | None
    never_fit: tuple[int, int] = (0, 0)


def advise(
    header: Header,
    state: PoolState | None,
    *,
    waiting: Column,
    running: Column,
    batch: Column,
    tokens: Column,
    preemptions: Column,
    never_fit: tuple[int, int] = (0, 0),
) -> Advice:
    """Find the limit that held somebody up in most of these steps; see `engine.trace.bottleneck.limits_of`.

    Args:
        header: For the limits.
        state: After the last of the steps, for who waits now; None leaves that out.
        waiting: As the others, one number a step.
        running: Likewise.
        batch: Likewise.
        tokens: Likewise.
        preemptions: Likewise.
        never_fit: Requests that these steps refused for want of blocks, and the most that one of them needs.
    """
    found = limits_of(header, waiting=waiting, running=running, batch=batch, tokens=tokens, preemptions=preemptions)
    counts = np.bincount(found, minlength=len(Limit)).tolist()
    limit = Limit(max(range(1, len(Limit)), key=lambda code: counts[code]))
    if not counts[limit]:
        limit = Limit.BLOCKS if never_fit[0] else Limit.NOTHING
    values = {
        Limit.BLOCKS: header.num_blocks,
        Limit.SEQUENCES: header.max_num_seqs,
        Limit.TOKENS: header.max_num_batched_tokens,
    }
    return Advice(
        limit,
        counts[limit],
        len(found),
        tuple(counts),
        int(preemptions.sum()),
        values.get(limit, 0),
        state.counters.waiting if state is not None else 0,
        _head(state) if state is not None and limit == Limit.BLOCKS else None,
        never_fit,
    )


def advise_now(history: History, state: PoolState) -> Advice | None:
    """The same of the last steps that are remembered; None before the first."""
    stop = history.last_index + 1
    first = stop - min(len(history), WINDOW)
    if first == stop:
        return None
    series = {name: history.series(name, first, stop) for name in ("waiting", "running", "batch", "preemptions")}
    tokens = sum(
        (history.series(f"{phase}_tokens", first, stop) for phase in ("prefill", "recompute", "decode")),
        start=np.zeros(stop - first, np.int64),
    )
    since = int(history.series("start_ns", first, first + 1)[0])
    return advise(state.header, state, **series, tokens=tokens, never_fit=_never_fit(state, since))


def blocks_of_prompt(num_tokens: int, block_size: int) -> int:
    """Blocks that a prompt needs at least, with the first token after it."""
    return -(-(num_tokens + 1) // block_size)


def _never_fit(state: PoolState, since_ns: int) -> tuple[int, int]:
    """Of the requests that ended since: how many were refused because the pool is too small, and the most needed."""
    size, pool = state.header.block_size, state.header.num_blocks
    needs = [
        blocks_of_prompt(request.num_prompt_tokens, size)
        for request in state.requests.values()
        if request.finished_ns >= since_ns
        and request.finish_reason == FinishReason.REFUSED
        # Longer than any request may be: more blocks would not have helped.
        and request.num_prompt_tokens < state.header.max_model_len
    ]
    too_many = [count for count in needs if count > pool]
    return len(too_many), max(too_many, default=0)


def _head(state: PoolState) -> tuple[int, int, int] | None:
    """Who waits for blocks, and its numbers."""
    if not state.counters.waiting:
        return None
    for number, request in state.requests.items():
        decision = request.waiting_for
        if decision is not None and decision.reason == Reason.NO_BLOCKS and not request.status.is_finished:
            needs, free = decision.numbers.get("needs", 0), decision.numbers.get("free", 0)
            return (number, needs, free) if needs > free >= 0 else None
    return None


def advice_words(advice: Advice, name_of: Callable[[int], str] | None = None, last: str = "the last ") -> list[str]:
    """The advice in words, from the longest form to the shortest; safe to draw where the names are.

    Args:
        advice: Of some steps.
        last: Says which steps these are.
        name_of: What a request is called, as `Names.of`; None calls it #7.
    """
    limit, held, steps = advice.limit, advice.held, advice.steps
    of = f"{last}{counted(steps, 'step')}"
    if limit == Limit.NOTHING:
        return [f"nothing: in {of} nobody waited", "nothing"]
    share = f"in {held:,} of {of}"
    setting = SETTINGS[limit]
    move = f"raise {setting} (now {advice.value:,})"
    refused, needs = advice.never_fit
    if limit == Limit.BLOCKS and refused and held < refused:
        what = f"blocks: {counted(refused, 'request')} refused"
        return [f"{what}, one needs {needs:,}; {move}", f"{what}; {move}", f"{what}; {setting}", f"blocks: {setting}"]
    if limit == Limit.BATCH:
        whole = f"the static batch {share}"
        return [f"{whole}: {advice.waiting:,} wait for its end; --policy paged would take them in", whole]
    what = {Limit.BLOCKS: "blocks", Limit.SEQUENCES: "places", Limit.TOKENS: "tokens a step"}[limit]
    if held < HARDLY * steps:
        return [f"hardly anything: {what} {share}", "hardly anything"]
    why = {
        Limit.BLOCKS: _why_blocks(advice, name_of),
        Limit.SEQUENCES: f"{advice.value:,} may run, {advice.waiting:,} wait",
        Limit.TOKENS: f"all {advice.value:,} were scheduled",
    }[limit]
    return [
        f"{what} {share}: {why}; {move}",
        f"{what} {share}: {why}; {setting}",
        f"{what} {share}; {move}",
        f"{what} {share}; {setting}",
        f"{what}: {setting}",
        what,
    ]


def advice_brief(advice: Advice) -> list[str]:
    """The limit and its setting in a few words, the longest form first; none where nothing is to be moved."""
    limit, setting = advice.limit, SETTINGS.get(advice.limit, "")
    refused = limit == Limit.BLOCKS and advice.never_fit[0] > advice.held
    if limit == Limit.NOTHING or (advice.held < HARDLY * advice.steps and not refused):
        return []
    if limit == Limit.BATCH:
        return ["held up by the static batch: --policy paged", "held up by the static batch"]
    what = {Limit.BLOCKS: "blocks", Limit.SEQUENCES: "places", Limit.TOKENS: "tokens a step"}[limit]
    return [
        f"held up by {what}: raise {setting} (now {advice.value:,})",
        f"held up by {what}: raise {setting}",
        f"held up by {what}: {setting}",
        f"held up by {what}",
    ]


def _why_blocks(advice: Advice, name_of: Callable[[int], str] | None) -> str:
    parts = []
    if advice.head is not None:
        request, needs, free = advice.head
        name = name_of(request) if name_of is not None else f"#{request}"
        parts.append(f"{name} needs {needs:,}, {free:,} free")
    if advice.preemptions:
        parts.append(counted(advice.preemptions, "preemption"))
    return ", ".join(parts) or f"{advice.waiting:,} wait"


def advice_json(advice: Advice) -> dict[str, Any]:
    """The advice for programs."""
    return {
        "limit": advice.limit.name.lower(),
        "steps_held_up": advice.held,
        "steps": advice.steps,
        "steps_by_limit": {limit.name.lower(): advice.counts[limit] for limit in Limit},
        "setting": SETTINGS.get(advice.limit),
        "value": advice.value or None,
        "never_fit": advice.never_fit[0],
        "never_fit_needs": advice.never_fit[1] or None,
    }
