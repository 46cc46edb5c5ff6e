"""One sentence for a decision of the scheduler, with the numbers that it was taken on.

`short` fits a table cell next to the request; `long` stands alone. Either calls other requests by their number, or by
what `name_of` calls them. Neither raises for a decision from a
recording that lacks numbers or has an unknown reason; such text is cut to a bounded length, and whoever draws it must
make it safe to draw.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from engine.trace.events import DecisionKind, Reason

if TYPE_CHECKING:
    from engine.trace.events import Decision

_VERBS = {
    DecisionKind.ADMITTED: "admitted",
    DecisionKind.WAITS: "waits",
    DecisionKind.PREEMPTED: "preempted",
    DecisionKind.REFUSED: "refused",
    DecisionKind.RESUMED: "resumed",
    DecisionKind.FAILED: "failed",
}

_SHORT = {
    Reason.FITS: "takes {needs:block} of {free} free",
    Reason.SWAPPED_IN: "swapped in {swapped:block}",
    Reason.FORKED: "forked from {parent:#}, shares {shared:block}",
    Reason.NO_BLOCKS: "needs {needs:block}, {free} free",
    Reason.NO_HOLE: "needs {needs} in a row, hole {largest_hole}, {free} free",
    Reason.BATCH_RUNNING: "{running} of the batch of {batch} still run",
    Reason.SEQUENCE_CAP: "{running} of {limit} places taken",
    Reason.TOKEN_BUDGET: "{scheduled} of {limit} tokens scheduled",
    Reason.BEHIND: "behind {ahead:#}",
    Reason.GAVE_WAY: "gave {released:block} to {to:#}, which needs {needs}",
    Reason.GAVE_WAY_TO_ITSELF: "needs {needs:block}, {free} free, youngest itself",
    Reason.SWAPPED_OUT: "swapped out {swapped:block} for {to:#}, which needs {needs}",
    Reason.SWAPPED_OUT_ITSELF: "swapped out {swapped:block}, needs {needs}, {free} free",
    Reason.NEVER_FITS: "needs {needs:block}, pool has {pool}",
    Reason.RESERVATION_NEVER_FITS: "reserves {needs:block}, pool has {pool}",
    Reason.TOO_LONG: "{tokens:token}, limit {limit}",
    Reason.EMPTY_PROMPT: "empty prompt",
    Reason.PARENT_ENDED: "{parent:#} has ended",
    Reason.OUTGREW_POOL: "needs {needs:block}, pool has {pool}",
    Reason.STEP_FAILED: "its step failed",
}

_LONG = {
    Reason.FITS: "it takes {needs:new block} of the {free} free ones",
    Reason.SWAPPED_IN: "{swapped:block were} swapped in from the CPU pool, and it goes on where it was",
    Reason.FORKED: "it is forked from {parent:request #} and shares its {shared:block}",
    Reason.NO_BLOCKS: "its tokens need {needs:block}, but only {free} can be taken",
    Reason.NO_HOLE: (
        "it reserves {needs:block} in a row for the longest it can come to, and the largest hole has {largest_hole} of "
        "the {free} free ones"
    ),
    Reason.BATCH_RUNNING: (
        "a static batch takes in nobody until all of it is done, and {running} of its {batch:request} still run"
    ),
    Reason.SEQUENCE_CAP: "{running:request} run already, and the limit is {limit} (max_num_seqs)",
    Reason.TOKEN_BUDGET: (
        "{scheduled:token} are scheduled in this step already, and the limit is {limit} (max_num_batched_tokens)"
    ),
    Reason.BEHIND: "first come, first served, and {ahead:request #} is ahead of it",
    Reason.GAVE_WAY: (
        "{to:request #} needed {needs:block} and {free} were free, so this one, the youngest, released its "
        "{released:block}; its tokens are kept, their keys and values are computed again later"
    ),
    Reason.GAVE_WAY_TO_ITSELF: (
        "it needed {needs:block}, {free} were free, and it is the youngest itself, so it released its "
        "{released:block}; its tokens are kept, their keys and values are computed again later"
    ),
    Reason.SWAPPED_OUT: (
        "{to:request #} needed {needs:block} and {free} were free, so this one, the youngest, released its "
        "{released:block}; {swapped:block were} swapped out to the CPU pool, to be brought back later"
    ),
    Reason.SWAPPED_OUT_ITSELF: (
        "it needed {needs:block}, {free} were free, and it is the youngest itself, so it released its "
        "{released:block}; {swapped:block were} swapped out to the CPU pool, to be brought back later"
    ),
    Reason.NEVER_FITS: "its prompt and one new token need {needs:block}, and the whole pool has {pool}",
    Reason.RESERVATION_NEVER_FITS: (
        "its prompt and all that it may generate reserve {needs:block}, and the whole pool has {pool}"
    ),
    Reason.TOO_LONG: "its prompt has {tokens:token}, and the longest request is {limit} (max_model_len)",
    Reason.EMPTY_PROMPT: "its prompt is empty",
    Reason.PARENT_ENDED: "it was to be forked from {parent:request #}, which has ended",
    Reason.OUTGREW_POOL: "alone in the pool it needs {needs:block}, and the whole pool has {pool}",
    Reason.STEP_FAILED: "the step that it was in failed",
}


NameOf = Callable[[int], str]
"""What a request is called, by its number."""


class _Number:
    """A number in a template: `{needs}` is the number, `{needs:block}` counts blocks, `{ahead:#}` names a request.

    `{swapped:block were}` is "1 block was" or "2 blocks were".
    """

    def __init__(self, value: int | None, name_of: NameOf | None = None) -> None:
        self.value = value
        self.name_of = name_of

    def __format__(self, noun: str) -> str:
        text = "?" if self.value is None else f"{self.value:,}"
        if noun.endswith("#"):
            if self.name_of is not None and self.value is not None:
                return self.name_of(self.value)
            return f"{noun.removesuffix(' #')} {text}" if noun != "#" else f"#{text}"
        if not noun:
            return text
        if noun.endswith(" were"):
            return f"{self.__format__(noun.removesuffix(' were'))} {'was' if self.value == 1 else 'were'}"
        return f"{text} {noun}" if self.value == 1 else f"{text} {noun}s"


class _Numbers(dict[str, _Number]):
    def __missing__(self, name: str) -> _Number:
        return _Number(None)


def verb(kind: int) -> str:
    """The word for a kind of decision."""
    try:
        return _VERBS[DecisionKind(kind)]
    except ValueError:
        return f"decision {kind}"


def short(decision: Decision, name_of: NameOf | None = None) -> str:
    """Such as `waits: needs 6 blocks, 4 free`."""
    return f"{verb(decision.kind)}: {_fill(_SHORT, decision, name_of)}"


def long(decision: Decision, name_of: NameOf | None = None) -> str:
    """Such as `Request 12 waits: its tokens need 6 blocks, but only 4 can be taken.`."""
    word = verb(decision.kind)
    if decision.kind != DecisionKind.WAITS:
        word = f"is {word}" if decision.kind != DecisionKind.FAILED else word
    cached = decision.numbers.get("cached_tokens", 0)
    prefix = f"; {_Number(cached):token} of it came from the prefix cache" if cached else ""
    if decision.reason == Reason.FORKED or decision.reason == Reason.SWAPPED_IN:
        prefix = f", with {_Number(cached):token} computed"
    elif (brought := decision.numbers.get("swapped", 0)) and decision.reason == Reason.FITS:
        prefix += f", {_Number(brought):block} of it from the CPU pool"
    if behind := decision.numbers.get("behind", 0):
        prefix += f"; for {_Number(behind):place} behind its window it needs no block"
    who = name_of(decision.request) if name_of is not None else f"Request {decision.request}"
    return f"{who} {word}: {_fill(_LONG, decision, name_of)}{prefix}."


def _fill(templates: dict[Reason, str], decision: Decision, name_of: NameOf | None) -> str:
    try:
        template = templates[Reason(decision.reason)]
    except ValueError:
        told = ", ".join(f"{name} {value}" for name, value in list(decision.numbers.items())[:8])
        return f"{decision.reason} {told}".strip()[:200]
    return template.format_map(_Numbers({name: _Number(value, name_of) for name, value in decision.numbers.items()}))
