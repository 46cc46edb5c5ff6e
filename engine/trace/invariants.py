"""What must hold after every step, checked against the whole state at once.

`check` looks at every block and every table: for tests and for `kvtui inspect`. `quick_check` is a sum, cheap enough
to run live. The fold itself (`PoolState.apply`) notes operations that contradict the state they meet.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from engine.request import RequestStatus
from engine.trace.events import NO_BLOCK

if TYPE_CHECKING:
    from engine.trace.state import PoolState, RequestState

Entries = npt.NDArray[np.int64]
"""The entries of all block tables, one after the other."""

MAX_NAMED = 16
"""Violations of one kind that one check names; one is enough to look, a thousand hide it."""


class Violation(NamedTuple):
    """A broken invariant.

    Attributes:
        name: Which one, a short fixed word: `references`, `partition`, `free_queue`, `filled`, `hashed_full`,
            `counters`, `tables`, `cpu_pool`, or what an operation did wrong (`operation`,
            `request`, `sequence`, `size`).
        block: The block concerned, or -1 where none is.
        step: Index of the step after which it was broken.
        message: One line with the numbers.
    """

    name: str
    block: int
    step: int
    message: str

    def __str__(self) -> str:
        where = f"block {self.block}, " if self.block >= 0 else ""
        return f"{self.name}: {where}step {self.step}: {self.message}"


def quick_check(state: PoolState) -> list[Violation]:
    """Whether the state's own levels add up to the pool and equal the step's counters; costs three additions."""
    found: list[Violation] = []
    total = state.used + state.cached + state.free
    if total != state.header.num_blocks:
        found.append(
            Violation(
                "partition",
                -1,
                state.step,
                f"{state.used} used + {state.cached} cached + {state.free} free = {total}, "
                f"but the pool has {state.header.num_blocks} blocks",
            )
        )
    if state.step >= 0:
        counters = state.counters
        for what, folded, told in (
            ("used", state.used, counters.used_blocks),
            ("cached", state.cached, counters.cached_blocks),
            ("free", state.free, counters.free_blocks),
        ):
            if folded != told:
                found.append(
                    Violation(
                        "counters",
                        -1,
                        state.step,
                        f"the step counts {told} {what} blocks, its operations leave {folded}",
                    )
                )
    return found


def check(state: PoolState) -> list[Violation]:
    """Every invariant over the whole state; empty where all hold.

    Time is proportional to the pool and the tables, all of it in numpy.
    """
    found = quick_check(state)
    _check_tables(state, found)
    _check_partition(state, found)
    _check_free_queue(state, found)
    _check_hashed_full(state, found)
    if state.header.num_cpu_blocks:
        _check_cpu_pool(state, found)
    return found


def _check_tables(state: PoolState, found: list[Violation]) -> None:
    """References equal occurrences; running requests' blocks hold their computed tokens; the others have none.

    A running request has no place without a block, but for those behind the window of its next token.
    """
    holders = [request for request in state.requests.values() if request.table]
    lengths = np.array([len(request.table) for request in holders], np.int64)
    entries = np.fromiter(chain.from_iterable(request.table for request in holders), np.int64)
    _check_references(state, entries, found)
    _check_filled(state, holders, lengths, entries, found)
    _check_holes(state, found)
    size = state.header.block_size
    for request in state.requests.values():
        if request.status is RequestStatus.RUNNING:
            if request.num_computed > len(request.table) * size:
                room = f"but places for {len(request.table) * size}"
                message = f"request {request.request} has {request.num_computed} computed tokens, {room}"
                found.append(Violation("filled", -1, state.step, message))
        elif request.table:
            block = next((block for block in request.table if block >= 0), -1)
            who = f"request {request.request} is {request.status.name.lower()}"
            message = f"{who}, but its table still has {len(request.table)} places"
            found.append(Violation("tables", block, state.step, message))


def _check_references(state: PoolState, entries: Entries, found: list[Violation]) -> None:
    n = state.header.num_blocks
    occurrences = np.bincount(entries[entries >= 0], minlength=n)
    for block in np.flatnonzero(occurrences[:n] != state.refs)[:MAX_NAMED].tolist():
        message = f"{state.refs[block]} references, but it is in {occurrences[block]} places of block tables"
        found.append(Violation("references", block, state.step, message))


def _check_filled(
    state: PoolState, holders: list[RequestState], lengths: Entries, entries: Entries, found: list[Violation]
) -> None:
    size = state.header.block_size
    computed = np.array([request.num_computed for request in holders], np.int64)
    running = np.array([request.status is RequestStatus.RUNNING for request in holders], np.bool_)
    place = np.arange(len(entries)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    expected = np.clip(np.repeat(computed, lengths) - size * place, 0, size)
    wrong = (entries >= 0) & np.repeat(running, lengths) & (state.filled[entries] != expected)
    for at in np.flatnonzero(wrong)[:MAX_NAMED].tolist():
        request = holders[int(np.searchsorted(np.cumsum(lengths), at, side="right"))]
        block = int(entries[at])
        message = (
            f"{state.filled[block]} slots are filled, but request {request.request} with {request.num_computed} "
            f"computed tokens needs {expected[at]} at place {place[at]}"
        )
        found.append(Violation("filled", block, state.step, message))


def _check_holes(state: PoolState, found: list[Violation]) -> None:
    window, size = state.header.model.sliding_window, state.header.block_size
    named = 0
    for request in state.requests.values():
        if request.status is not RequestStatus.RUNNING or NO_BLOCK not in request.table:
            continue
        behind = max(0, request.num_computed - window + 1) // size if window else 0
        place = next((at for at in range(behind, len(request.table)) if request.table[at] == NO_BLOCK), -1)
        if place >= 0 and named < MAX_NAMED:
            named += 1
            who = f"request {request.request} with {request.num_computed} computed tokens"
            found.append(Violation("tables", -1, state.step, f"{who} has no block at place {place}"))


def _check_partition(state: PoolState, found: list[Violation]) -> None:
    """Used, cached and free are disjoint, and as many as the state says."""
    held = state.refs > 0
    hashed = state.key != 0
    used = int(np.count_nonzero(held))
    cached = int(np.count_nonzero(~held & hashed))
    free = state.header.num_blocks - used - cached
    if (used, cached, free) != (state.used, state.cached, state.free):
        found.append(
            Violation(
                "partition",
                -1,
                state.step,
                f"the blocks say {used} used, {cached} cached, {free} free; "
                f"the state counts {state.used}, {state.cached}, {state.free}",
            )
        )
    for block in np.flatnonzero(held != (state.owner >= 0))[:MAX_NAMED].tolist():
        owner, refs = int(state.owner[block]), int(state.refs[block])
        who = f"request {owner} owns it" if owner >= 0 else "nobody owns it"
        found.append(Violation("partition", block, state.step, f"{who}, but it has {refs} references"))


def _check_free_queue(state: PoolState, found: list[Violation]) -> None:
    """No two blocks without references share a place in the free queue."""
    idle = np.flatnonzero(state.refs <= 0)
    stamps = state.free_order[idle]
    order = np.argsort(stamps, kind="stable")
    ranked = stamps[order]
    for at in np.flatnonzero(ranked[1:] == ranked[:-1])[:MAX_NAMED].tolist():
        block, other = int(idle[order[at + 1]]), int(idle[order[at]])
        found.append(
            Violation("free_queue", block, state.step, f"it has the same place in the free queue as block {other}")
        )


def _check_hashed_full(state: PoolState, found: list[Violation]) -> None:
    """Content can be found only where every slot of the block is filled."""
    size = state.header.block_size
    for block in np.flatnonzero((state.key != 0) & (state.filled != size))[:MAX_NAMED].tolist():
        found.append(
            Violation(
                "hashed_full",
                block,
                state.step,
                f"its content can be found, but only {int(state.filled[block])} of {size} slots are filled",
            )
        )


def _check_cpu_pool(state: PoolState, found: list[Violation]) -> None:
    """Swapped contents belong to preempted requests, place by place; offloaded ones are full and there once."""

    def violate(cpu_block: int, message: str) -> None:
        found.append(Violation("cpu_pool", -1, state.step, f"CPU block {cpu_block} {message}"))

    held = state.cpu_filled > 0
    if int(np.count_nonzero(held)) != state.cpu_used:
        message = f"{np.count_nonzero(held)} CPU blocks are filled; the state counts {state.cpu_used}"
        found.append(Violation("cpu_pool", -1, state.step, message))
    for cpu_block in np.flatnonzero(~held & ((state.cpu_owner >= 0) | (state.cpu_key != 0)))[:MAX_NAMED].tolist():
        violate(cpu_block, "holds nothing, but has an owner or a key")
    places: set[tuple[int, int]] = set()
    for cpu_block in np.flatnonzero(held & (state.cpu_owner >= 0)).tolist():
        owner, logical = int(state.cpu_owner[cpu_block]), int(state.cpu_logical[cpu_block])
        request = state.requests.get(owner)
        if request is None or request.status is not RequestStatus.PREEMPTED:
            violate(cpu_block, f"is of request {owner}, which is not preempted")
        if (owner, logical) in places:
            violate(cpu_block, f"holds place {logical} of request {owner} a second time")
        places.add((owner, logical))
    offloaded = np.flatnonzero(held & (state.cpu_owner < 0))
    size = state.header.block_size
    keys = state.cpu_key[offloaded]
    for cpu_block in offloaded[(keys == 0) | (state.cpu_filled[offloaded] != size)][:MAX_NAMED].tolist():
        violate(cpu_block, "holds an offloaded content that is not full or has no key")
    if len(np.unique(keys)) != len(keys):
        found.append(Violation("cpu_pool", -1, state.step, "a content was offloaded twice"))
