"""The whole state at one step, as a recording keeps it now and then so that a seek need not start at step 0.

A keyframe has all but what the recording has already, once: what each request's arrival told, the text of its tokens,
and the last step itself. `engine.trace.reader` puts them back. Numbers travel as columns (`engine.trace.columns`).
"""

from __future__ import annotations

from dataclasses import fields
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from engine.request import RequestStatus
from engine.trace.block_fold import ARRAYS, INT32_MAX, MAX_EVICTED, MAX_VIOLATIONS
from engine.trace.columns import column, pack, unpack
from engine.trace.columns import differences as delta
from engine.trace.columns import sums as undo_delta
from engine.trace.events import Counters, Decision, Header, Op, Phase
from engine.trace.invariants import Violation  # noqa: TC001 (msgspec reads the annotations)
from engine.trace.request_state import UNKNOWN, RequestState
from engine.trace.state import MAX_FINISHED, MAX_REQUESTS, PoolState
from engine.trace.vocabulary import encodable

if TYPE_CHECKING:
    from engine.trace.columns import Column

_MAX_PLACES = 1 << 22
"""Places of all block tables together at most."""

_LATER_ARRAYS = frozenset({"parent", "hits", "cpu_parent"})
"""Arrays that the first keyframes did not have."""

_ANY = (-(2**63), 2**63 - 1)
_COUNT = (0, INT32_MAX)
_STEP = (-1, INT32_MAX)
_REQUEST_COLUMNS = {
    "request": _COUNT,
    "status": (0, int(max(RequestStatus))),
    "num_prompt_tokens": _COUNT,
    "num_computed": _COUNT,
    "num_cached": _COUNT,
    "arrival_step": _COUNT,
    "admitted_ns": _ANY,
    "first_token_ns": _ANY,
    "finished_ns": _ANY,
    "preemptions": _COUNT,
    "last_phase": (-1, int(max(Phase))),
    "last_scheduled": _ANY,
    "last_batch": _STEP,
    "first_token_step": _STEP,
    "last_token_step": _STEP,
    "num_tokens": _COUNT,
    "num_places": (0, _MAX_PLACES),
}
"""The numbers of a request that a keyframe has, and the values that they can have."""
_LATER_COLUMNS = {
    "finished_step": _STEP,
    "admitted_step": _STEP,
    "preempted_ns": _ANY,
    "recompute_ns": _ANY,
    "early_stall_ns": _ANY,
    "stalled_since_ns": _ANY,
    "recompute_since_ns": _ANY,
    "regret_blocks": _COUNT,
    "regret_step": _STEP,
}
"""Likewise; recordings of the first kvtui do not have them."""


class Holder(NamedTuple):
    """A request that holds a block, and the block's place in its table."""

    request: int
    logical: int


class Ending(NamedTuple):
    """How a request ended; `row` counts the requests of the keyframe."""

    row: int
    reason: str
    message: str


class Waiting(NamedTuple):
    """Why a request waits; `row` counts the requests of the keyframe."""

    row: int
    decision: Decision


class Keyframe(msgspec.Struct, frozen=True, tag="keyframe"):
    """The state after a step.

    Attributes:
        step: Its index.
        arrays: The arrays of `PoolState` by name, each a column.
        num_requests: Rows of `requests`.
        requests: Attributes of `RequestState` by name, each a column of differences; `num_tokens` says how many tokens
            each has, and `num_places` how long its table is.
        tables: Column: the entries of all block tables, one after the other.
        endings: Of the requests that have ended.
        waiting: Of the requests that wait.
        holders: Of blocks with several references, who holds them, the longest first.
        finished: The finished requests that are kept, in the order in which they ended.
        next_order: The stamp that the next released block gets in `free_order`.
        evicted: Columns of `PoolState.evicted`: the keys, the steps of their evictions, and the steps in which they
            were computed again; empty where none was, or where the first kvtui made the recording.
        num_evicted: How many keys; -1 where the first kvtui made the recording.
        regret_since: First step that `regret_blocks` counts.
    """

    step: int
    time_ns: int
    arrays: dict[str, bytes]
    num_requests: int
    requests: dict[str, bytes]
    tables: bytes
    endings: list[Ending]
    waiting: list[Waiting]
    holders: dict[int, list[Holder]]
    finished: list[int]
    counters: Counters
    next_order: int
    violations: list[Violation]
    num_violations: int
    evicted: list[bytes] = []
    num_evicted: int = -1
    regret_blocks: int = 0
    regret_since: int = 0


def to_keyframe(state: PoolState) -> Keyframe:
    """The state as a message; see `Keyframe`."""
    requests = list(state.requests.values())
    columns = {
        name: column(int(getattr(request, name)) for request in requests)
        for name in (*_REQUEST_COLUMNS, *_LATER_COLUMNS)
        if name != "num_places"
    }
    columns["num_places"] = column(len(request.table) for request in requests)
    return Keyframe(
        step=state.step,
        time_ns=state.time_ns,
        arrays={name: pack(getattr(state, name).astype(np.int64)) for name in ARRAYS},
        num_requests=len(requests),
        requests={name: pack(delta(values)) for name, values in columns.items()},
        tables=pack(column(chain.from_iterable(request.table for request in requests))),
        endings=[
            Ending(row, encodable(request.finish_reason), encodable(request.message))
            for row, request in enumerate(requests)
            if request.finish_reason or request.message
        ],
        waiting=[
            Waiting(row, request.waiting_for) for row, request in enumerate(requests) if request.waiting_for is not None
        ],
        holders={block: [Holder(*holder) for holder in holders] for block, holders in state._holders.items()},
        finished=list(state._finished),
        counters=state.counters,
        next_order=state._next_order,
        violations=state.violations.copy(),
        num_violations=state.num_violations,
        evicted=[
            pack(column(state.evicted)),
            *(pack(delta(column(steps))) for steps in zip(*state.evicted.values(), strict=True)),
        ],
        num_evicted=len(state.evicted),
        regret_blocks=state.regret_blocks,
        regret_since=state.regret_since,
    )


def num_tokens(keyframe: Keyframe) -> dict[int, int]:
    """How many tokens each request had, by its number.

    Raises:
        ValueError: the keyframe contradicts itself.
    """
    numbers, counts = _request_column(keyframe, "request"), _request_column(keyframe, "num_tokens")
    return dict(zip(numbers.tolist(), counts.tolist(), strict=True))


def from_keyframe(header: Header, keyframe: Keyframe) -> PoolState:
    """The state that a keyframe was made from, without what the recording has elsewhere; `last_step` is None.

    Raises:
        ValueError: the keyframe does not fit the header or contradicts itself.
    """
    state = PoolState(header)
    n = header.num_blocks
    if not (-1 <= keyframe.step <= INT32_MAX and 0 <= keyframe.next_order < 2**62):
        raise ValueError(f"step {keyframe.step} or stamp {keyframe.next_order} is not possible")
    state.step = keyframe.step
    state.time_ns = keyframe.time_ns
    state._next_order = keyframe.next_order
    limits = _limits(header, keyframe)
    for name in ARRAYS:
        if name in _LATER_ARRAYS and name not in keyframe.arrays:
            continue
        array: np.ndarray[Any, Any] = getattr(state, name)
        values = unpack(keyframe.arrays.get(name, b""), len(array))
        _expect(name, values, *limits[name])
        array[:] = values
    state.used = int(np.count_nonzero(state.refs))
    state.cached = int(np.count_nonzero((state.refs == 0) & (state.key != 0)))
    state.free = n - state.used - state.cached
    state.held_slots = int(state.filled[state.refs > 0].sum(dtype=np.int64))
    state.cpu_used = int(np.count_nonzero(state.cpu_filled))
    _read_requests(state, keyframe)
    if not all(0 <= block < n for block in keyframe.holders):
        raise ValueError(f"a holder of a block outside the pool of {n}")
    state._holders = {
        block: [(holder.request, holder.logical) for holder in holders] for block, holders in keyframe.holders.items()
    }
    if "parent" not in keyframe.arrays:
        state.derive_parents()
    _read_evicted(state, keyframe)
    state.counters = keyframe.counters
    state.violations = keyframe.violations[:MAX_VIOLATIONS]
    state.num_violations = keyframe.num_violations
    return state


def _read_evicted(state: PoolState, keyframe: Keyframe) -> None:
    if keyframe.num_evicted < 0:
        state.regret_since = keyframe.step + 1
        return
    if not (0 <= keyframe.regret_blocks <= 2**62 and 0 <= keyframe.regret_since <= INT32_MAX):
        raise ValueError(f"{keyframe.regret_blocks} regretted blocks are not possible")
    state.regret_blocks, state.regret_since = keyframe.regret_blocks, keyframe.regret_since
    n = keyframe.num_evicted
    if n == 0:
        return
    if n > min(state.header.num_blocks, MAX_EVICTED) or len(keyframe.evicted) != 3:
        raise ValueError(f"{n} evicted contents are not possible")
    keys = unpack(keyframe.evicted[0], n)
    steps = [undo_delta(unpack(data, n)) for data in keyframe.evicted[1:]]
    for values in steps:
        _expect("evicted", values, -1, keyframe.step)
    state.evicted = dict(zip(keys.tolist(), zip(*(values.tolist() for values in steps), strict=True), strict=True))


def _limits(header: Header, keyframe: Keyframe) -> dict[str, tuple[int, int]]:
    """The values that each array can have."""
    return {
        "owner": (-1, INT32_MAX),
        "logical": (-1, INT32_MAX),
        "refs": (0, INT32_MAX),
        "filled": (0, header.block_size),
        "key": (-(2**63), 2**63 - 1),
        "parent": (-(2**63), 2**63 - 1),
        "hits": (0, INT32_MAX),
        "last_owner": (-1, INT32_MAX),
        "last_op": (-1, int(max(Op))),
        "touched": (-1, keyframe.step),
        "free_order": (0, keyframe.next_order - 1),
        "cpu_owner": (-1, INT32_MAX),
        "cpu_logical": (-1, INT32_MAX),
        "cpu_filled": (0, header.block_size),
        "cpu_key": (-(2**63), 2**63 - 1),
        "cpu_parent": (-(2**63), 2**63 - 1),
    }


def _request_column(keyframe: Keyframe, name: str) -> Column:
    if not 0 <= keyframe.num_requests <= MAX_REQUESTS:
        raise ValueError(f"{keyframe.num_requests} requests are not possible")
    values = undo_delta(unpack(keyframe.requests.get(name, b""), keyframe.num_requests))
    _expect(name, values, *(_REQUEST_COLUMNS | _LATER_COLUMNS)[name])
    return values


def _expect(name: str, values: Column, low: int, high: int) -> None:
    if len(values) and not low <= int(values.min()) <= int(values.max()) <= high:
        raise ValueError(f"{name} has values from {values.min()} to {values.max()}, not {low} to {high}")


def _read_requests(state: PoolState, keyframe: Keyframe) -> None:
    later = [name for name in _LATER_COLUMNS if name in keyframe.requests]
    columns = {name: _request_column(keyframe, name) for name in (*_REQUEST_COLUMNS, *later)}
    lengths = columns.pop("num_places")
    del columns["num_tokens"]
    requests: list[RequestState] = []
    for row in zip(*(values.tolist() for values in columns.values()), strict=True):
        values = dict(zip(columns, row, strict=True))
        status = RequestStatus(values.pop("status"))
        request = RequestState(**values, name="", max_tokens=0, arrival_ns=0, status=status)
        if "preempted_ns" not in later and request.preemptions:
            request.preempted_ns = request.recompute_ns = request.early_stall_ns = UNKNOWN
        requests.append(request)
    num_places = int(lengths.sum())
    if num_places > _MAX_PLACES:
        raise ValueError(f"block tables of {num_places} places are not possible")
    entries = unpack(keyframe.tables, num_places)
    _expect("tables", entries, -1, state.header.num_blocks - 1)
    start = 0
    for request, length in zip(requests, lengths.tolist(), strict=True):
        request.table = entries[start : start + length].tolist()
        start += length
    for ending in keyframe.endings:
        requests[ending.row].finish_reason = ending.reason
        requests[ending.row].message = ending.message
    for waiting in keyframe.waiting:
        requests[waiting.row].waiting_for = waiting.decision
    state.requests = {request.request: request for request in requests}
    if len(state.requests) != len(requests) or len(keyframe.finished) > MAX_FINISHED:
        raise ValueError("a request is there twice, or too many have ended")
    if len(set(keyframe.finished)) != len(keyframe.finished) or not state.requests.keys() >= set(keyframe.finished):
        raise ValueError("a finished request is named twice or is not there")
    state._finished.extend(keyframe.finished)


_REQUEST_FIELDS = [field.name for field in fields(RequestState) if field.name != "stored"]


def differences(state: PoolState, other: PoolState) -> list[str]:
    """How two states differ, one line each; empty where they are equal in everything that can be seen."""
    found: list[str] = []
    for name in (
        *(
            "header",
            "step",
            "time_ns",
            "used",
            "cached",
            "free",
            "held_slots",
            "cpu_used",
            "counters",
            "last_step",
            "violations",
        ),
        *("num_violations", "_next_order", "_holders", "_finished", "evicted", "regret_blocks", "regret_since"),
    ):
        a, b = getattr(state, name), getattr(other, name)
        if a != b:
            found.append(f"{name}: {a!r:.200} / {b!r:.200}")
    for name in ARRAYS:
        a, b = getattr(state, name), getattr(other, name)
        if a.shape != b.shape:
            found.append(f"{name}: shape {a.shape} / {b.shape}")
            continue
        different = np.flatnonzero(a != b)
        if len(different):
            at = int(different[0])
            found.append(f"{name}: {len(different)} blocks differ, the first is {at}: {a[at]} / {b[at]}")
    if list(state.requests) != list(other.requests):
        found.append(f"requests: {list(state.requests)!r:.200} / {list(other.requests)!r:.200}")
    for number in state.requests.keys() & other.requests.keys():
        mine, theirs = state.requests[number], other.requests[number]
        for name in _REQUEST_FIELDS:
            a, b = getattr(mine, name), getattr(theirs, name)
            if a != b:
                found.append(f"request {number}: {name}: {a!r:.200} / {b!r:.200}")
    return found
