"""Gives the requests of a keyframe what segments have of them: what their arrivals told, and their tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from engine.trace.file_format import DAMAGE
from engine.trace.keyframe import num_tokens
from engine.trace.request_state import StoredText
from engine.trace.state import MAX_TEXT, MAX_TOKENS

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.trace.columns import Column
    from engine.trace.keyframe import Keyframe
    from engine.trace.request_state import RequestState
    from engine.trace.state import PoolState
    from engine.trace.trace_reader import TraceReader


_WIDEST_TABLE = 1 << 20
"""Requests numbered this close together are found in a table, in a tenth of the time that a search takes."""


def restore_requests(reader: TraceReader, state: PoolState, keyframe: Keyframe) -> None:
    """Complete the requests of a state that was made from a keyframe.

    Raises:
        ValueError: the keyframe contradicts itself or the segments.
    """
    requests, counts = state.requests, num_tokens(keyframe)
    if not requests:
        return
    most = sum(counts.values())
    if most > MAX_TOKENS:
        raise ValueError(f"a keyframe with {most} tokens is not possible")
    numbers = np.array(sorted(requests), np.int64)
    arrived = np.array([requests[number].arrival_step for number in numbers.tolist()], np.int64)
    first = np.array([requests[number].first_token_step for number in numbers.tolist()], np.int64)
    last = np.array([requests[number].last_token_step for number in numbers.tolist()], np.int64)
    known = _known_before(reader._base, state)
    unknown = set(requests) - known.keys()
    since, place_of = np.where(first < 0, reader.num_steps, first), _places_in(numbers)
    owners: list[Column] = [np.zeros(0, np.int64)]
    entries: list[Column] = [np.zeros(0, np.int64)]
    damaged = False
    found = 0
    for at in _segments_with(reader, arrived, first, last):
        try:
            segment = reader._segment(at)
        except DAMAGE:
            damaged = True
            continue
        for arrival in segment.arrivals:
            request = requests.get(arrival.request)
            at_step = segment.first_step + arrival.offset
            if request is not None and arrival.request in unknown and request.arrival_step == at_step:
                unknown.remove(arrival.request)
                request.name = arrival.name[:MAX_TEXT]
                request.max_tokens = arrival.max_tokens
                request.arrival_ns = arrival.time_ns
                request.temperature = arrival.temperature
                request.parent = arrival.parent
                prompt = segment.prompt(arrival)[: request.num_prompt_tokens]
                owners.append(np.full(len(prompt), arrival.request))
                entries.append(prompt)
        step, owner, entry = segment.token_columns(state.step + 1)
        place = place_of(owner)
        ours = (numbers[place] == owner) & (step >= since[place])
        if not ours.all():
            owner, entry = owner[ours], entry[ours]
        owners.append(owner)
        entries.append(entry)
        found += len(entry)
        if found > most:
            raise ValueError(f"the requests of a keyframe have more tokens than its {most}")
    entry = np.concatenate(entries)
    vocabulary = reader._vocabulary
    vocabulary.check(entry)
    # As narrow as they are, places are sorted in a fraction of the time.
    place = place_of(np.concatenate(owners)).astype(np.uint16 if len(numbers) <= 1 << 16 else np.int64)
    entry = entry[np.argsort(place, kind="stable")]
    stops = np.cumsum(np.bincount(place, minlength=len(numbers))).tolist()
    start = 0
    for number, stop in zip(numbers.tolist(), stops, strict=True):
        request, earlier = requests[number], known.get(number)
        if earlier is None:
            request.keep_stored(StoredText(vocabulary, entry[start:stop]))
        else:
            ids, pieces = vocabulary.look_up(entry[start:stop])
            request.token_ids, request.pieces = earlier.token_ids + ids, earlier.pieces + pieces
        if request.num_tokens != counts[number] or number in unknown:
            if not damaged:
                raise ValueError(f"request {number} has {request.num_tokens} tokens instead of {counts[number]}")
            # A damaged segment costs the text of those who ran in it, not the steps after it.
            request.stored = None
            request.token_ids = [-1] * counts[number]
            request.pieces = ["\ufffd"] * counts[number]
        state._num_tokens += counts[number]
        start = stop


def _places_in(numbers: Column) -> Callable[[Column], Column]:
    """Says where requests are among some, all different and in order; of one that is not there, any place."""
    low, span = int(numbers[0]), int(numbers[-1]) - int(numbers[0]) + 1
    if span > _WIDEST_TABLE:
        return lambda wanted: np.minimum(np.searchsorted(numbers, wanted), len(numbers) - 1)
    table = np.zeros(span, np.int64)
    table[numbers - low] = np.arange(len(numbers))
    return lambda wanted: table.take(wanted - low, mode="clip")


def _known_before(base: PoolState | None, state: PoolState) -> dict[int, RequestState]:
    """The requests that were there when the trace that is left begins; what their arrivals told is taken over."""
    if base is None:
        return {}
    known: dict[int, RequestState] = {}
    for number, request in state.requests.items():
        before = base.requests.get(number)
        if before is not None and before.arrival_step == request.arrival_step:
            known[number] = before
            for name in ("name", "max_tokens", "arrival_ns", "temperature", "parent"):
                setattr(request, name, getattr(before, name))
    return known


def _segments_with(reader: TraceReader, arrived: Column, first: Column, last: Column) -> list[int]:
    """The segments in which requests arrived or, from their first token to their last, could have got tokens."""
    started = first >= 0
    starts = np.concatenate((arrived, first[started]))
    stops = np.concatenate((arrived, last[started]))
    if not bool(((starts >= 0) & (starts <= stops) & (stops < reader.num_steps)).all()):
        raise ValueError("a keyframe names steps that are not there")
    there = stops >= reader.first_step
    starts, stops = np.maximum(starts[there], reader.first_step), stops[there]
    firsts = reader._layout.segments[:, 0]
    change = np.zeros(len(firsts) + 1, np.int64)
    np.add.at(change, np.searchsorted(firsts, starts, side="right") - 1, 1)
    np.add.at(change, np.searchsorted(firsts, stops, side="right"), -1)
    return np.flatnonzero(np.cumsum(change[:-1])).tolist()
