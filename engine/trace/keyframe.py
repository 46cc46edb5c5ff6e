"""The whole state at one step, as a recording keeps it now and then so that a seek need not start at step 0.

A keyframe has everything but the text of the requests and the last step itself: both are in the recording already,
once, and `engine.trace.reader` puts them back. Arrays travel as their little-endian bytes.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any, NamedTuple

import msgspec
import numpy as np

from engine.request import RequestStatus
from engine.trace.events import Counters, Decision, Header, Op
from engine.trace.invariants import Violation  # noqa: TC001
from engine.trace.segment import encodable
from engine.trace.state import (
    ARRAYS,
    MAX_FINISHED,
    MAX_REQUESTS,
    MAX_VIOLATIONS,
    PoolState,
    RequestState,
)


class Holder(NamedTuple):
    """A request that holds a block, and the block's place in its table."""

    request: int
    logical: int


class RequestFrame(msgspec.Struct, frozen=True, array_like=True):
    """A `RequestState` without its text; `num_tokens` says how many tokens the text has. Same names, same meaning."""

    request: int
    name: str
    num_prompt_tokens: int
    max_tokens: int
    arrival_ns: int
    arrival_step: int
    temperature: float
    parent: int
    status: int
    table: list[int]
    num_computed: int
    num_cached: int
    admitted_ns: int
    first_token_ns: int
    finished_ns: int
    finish_reason: str
    message: str
    waiting_for: Decision | None
    preemptions: int
    last_phase: int
    last_scheduled: int
    last_batch: int
    first_token_step: int
    last_token_step: int
    num_tokens: int


class Keyframe(msgspec.Struct, frozen=True, tag="keyframe"):
    """The state after a step.

    Attributes:
        step: Its index.
        arrays: The arrays of `PoolState` by name, little-endian.
        holders: Of blocks with several references, who holds them, the longest first.
        finished: The finished requests that are kept, in the order in which they ended.
        next_order: The stamp that the next released block gets in `free_order`.
    """

    step: int
    time_ns: int
    arrays: dict[str, bytes]
    requests: list[RequestFrame]
    holders: dict[int, list[Holder]]
    finished: list[int]
    counters: Counters
    next_order: int
    violations: list[Violation]
    num_violations: int


def to_keyframe(state: PoolState) -> Keyframe:
    """The state as a message; see `Keyframe`."""
    return Keyframe(
        step=state.step,
        time_ns=state.time_ns,
        arrays={
            name: getattr(state, name).astype(np.dtype(dtype).newbyteorder("<"), copy=False).tobytes()
            for name, dtype in ARRAYS.items()
        },
        requests=[_to_frame(request) for request in state.requests.values()],
        holders={block: [Holder(*holder) for holder in holders] for block, holders in state._holders.items()},
        finished=list(state._finished),
        counters=state.counters,
        next_order=state._next_order,
        violations=state.violations.copy(),
        num_violations=state.num_violations,
    )


_FRAME_FIELDS = [name for name in RequestFrame.__struct_fields__ if name not in ("status", "table", "num_tokens")]


def _to_frame(request: RequestState) -> RequestFrame:
    scalars: dict[str, Any] = {name: getattr(request, name) for name in _FRAME_FIELDS}
    for name in ("name", "finish_reason", "message"):
        scalars[name] = encodable(scalars[name])
    return RequestFrame(
        **scalars, status=int(request.status), table=request.table.copy(), num_tokens=len(request.token_ids)
    )


def from_keyframe(header: Header, keyframe: Keyframe) -> PoolState:
    """The state that a keyframe was made from, its requests without text and `last_step` None.

    Raises:
        ValueError: the keyframe does not fit the header or contradicts itself.
    """
    state = PoolState(header)
    n = header.num_blocks
    state.step = keyframe.step
    state.time_ns = keyframe.time_ns
    for name, dtype in ARRAYS.items():
        array: np.ndarray[Any, Any] = getattr(state, name)
        data = keyframe.arrays.get(name, b"")
        if len(data) != array.nbytes:
            raise ValueError(f"the array {name} has {len(data)} bytes instead of {array.nbytes}")
        array[:] = np.frombuffer(data, np.dtype(dtype).newbyteorder("<"))
    for name, low, high in (
        ("owner", -1, _INT32_MAX),
        ("logical", -1, _INT32_MAX),
        ("refs", 0, _INT32_MAX),
        ("filled", 0, header.block_size),
        ("last_owner", -1, _INT32_MAX),
        ("last_op", -1, max(Op)),
        ("touched", -1, keyframe.step),
        ("free_order", 0, keyframe.next_order - 1),
        ("cpu_filled", 0, header.block_size),
    ):
        values = getattr(state, name)
        if len(values) and not low <= int(values.min()) <= int(values.max()) <= high:
            raise ValueError(f"the array {name} has values from {values.min()} to {values.max()}")
    if len(keyframe.requests) > MAX_REQUESTS or len(keyframe.finished) > MAX_FINISHED:
        raise ValueError(f"{len(keyframe.requests)} requests are too many")
    for frame in keyframe.requests:
        state.requests[frame.request] = _from_frame(frame, n)
    if len(set(keyframe.finished)) != len(keyframe.finished) or not all(
        number in state.requests for number in keyframe.finished
    ):
        raise ValueError("a finished request is named twice or has no state")
    if not all(0 <= block < n for block in keyframe.holders):
        raise ValueError(f"a holder of a block outside the pool of {n}")
    state._holders = {
        block: [(holder.request, holder.logical) for holder in holders] for block, holders in keyframe.holders.items()
    }
    state._finished.extend(keyframe.finished)
    state.counters = keyframe.counters
    state.used = int(np.count_nonzero(state.refs))
    state.cached = int(np.count_nonzero((state.refs == 0) & (state.key != 0)))
    state.free = n - state.used - state.cached
    if not 0 <= keyframe.next_order < 2**62:
        raise ValueError(f"free_order goes on at {keyframe.next_order}")
    state._next_order = keyframe.next_order
    state.violations = keyframe.violations[:MAX_VIOLATIONS]
    state.num_violations = keyframe.num_violations
    return state


def _from_frame(frame: RequestFrame, num_blocks: int) -> RequestState:
    if not all(-1 <= block < num_blocks for block in frame.table):
        raise ValueError(f"the table of request {frame.request} names a block outside the pool of {num_blocks}")
    if not 0 <= frame.num_prompt_tokens <= frame.num_tokens:
        raise ValueError(f"request {frame.request} has {frame.num_tokens} tokens, {frame.num_prompt_tokens} of prompt")
    scalars: dict[str, Any] = {name: getattr(frame, name) for name in _FRAME_FIELDS}
    return RequestState(**scalars, status=RequestStatus(frame.status), table=frame.table.copy())


_INT32_MAX = 2**31 - 1
_REQUEST_FIELDS = [field.name for field in fields(RequestState)]


def differences(state: PoolState, other: PoolState) -> list[str]:
    """How two states differ, one line each; empty where they are equal in everything that can be seen."""
    found: list[str] = []
    for name in (
        *("header", "step", "time_ns", "used", "cached", "free", "counters", "last_step", "violations"),
        *("num_violations", "_next_order", "_holders", "_finished"),
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
