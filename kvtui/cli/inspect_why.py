"""Why: what happened to one block, or what became of one request and its time, for `kvtui inspect`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine.trace import explain
from engine.trace.biography import Biography, Happening
from engine.trace.block_words import block_words
from engine.trace.events import DecisionKind
from engine.trace.latency import end_of, latency_of
from engine.trace.lookup import Lookup
from kvtui.cli.errors import UsageError
from kvtui.latency_split import cells_of_parts, duration, latency_json, shown_parts
from kvtui.regret import regret_words
from kvtui.safe_text import clean

if TYPE_CHECKING:
    from engine.trace.lookup import RequestDecision
    from engine.trace.reader import Recording
    from engine.trace.state import PoolState
    from kvtui.glyphs import Glyphs

BAR = 60
"""Cells of the bar of a latency."""


def biography_at(recording: Recording, step: int, block: int) -> tuple[PoolState, Biography]:
    """The state after a step, and what happened to a block up to it, as far back as is kept of it.

    Raises:
        UsageError: the pool has no such block.
        RecordingError: a part of the file is damaged.
    """
    blocks = recording.header.num_blocks
    if not 0 <= block < blocks:
        raise UsageError(f"block {block} is not in {recording.path}: its pool has blocks 0 to {blocks - 1}")
    state = recording.state_at(step)
    life = Biography(state, block)
    life.search(Lookup(recording), most_steps=recording.num_steps)
    return state, life


def block_lines(state: PoolState, life: Biography, glyphs: Glyphs) -> list[str]:
    """A block's life, oldest first."""
    size = state.header.block_size
    lines = [f"block {life.block} at step {state.step:,}: {_condition(state, life.block)}"]
    if life.events and life.searched > life.first:
        lines.append(f"  what came before step {life.events[-1].first_step:,} is left out: --step shows earlier ones")
    width = max(len("step"), *(len(f"{event.step:,}") for event in life.events)) if life.events else 4
    lines += [f"  {'step':>{width}}  what happened"] if life.events else ["  nothing has happened to it"]
    lines += [f"  {event.step:>{width},}  {block_words(event, size)}" for event in reversed(life.events)]
    return [clean(line, ascii_only=glyphs.ascii) for line in lines]


def _condition(state: PoolState, block: int) -> str:
    refs, owner = int(state.refs[block]), int(state.owner[block])
    if refs > 1:
        return f"in use, {refs} references, the longest is #{owner}'s"
    if refs:
        return f"in use by #{owner}"
    return "cached: nobody holds it, its content can still be found" if state.key[block] else "free"


def block_json(state: PoolState, life: Biography) -> dict[str, Any]:
    """A block's life for programs, oldest first."""
    size = state.header.block_size
    return {
        "step": state.step,
        "block": life.block,
        "refs": int(state.refs[life.block]),
        "owner": int(state.owner[life.block]),
        "key": int(state.key[life.block]),
        "searched_from_step": life.searched,
        "events": [
            event._asdict() | {"what": Happening(event.what).name.lower(), "text": block_words(event, size)}
            for event in reversed(life.events)
        ],
    }


def request_at(recording: Recording, step: int, number: int) -> tuple[PoolState, list[RequestDecision]]:
    """A state that has the request, after the step or after its end, and what was decided about it until then.

    Raises:
        UsageError: there is no such request, or it had not arrived.
        RecordingError: a part of the file is damaged.
    """
    lookup = Lookup(recording)
    state = recording.state_at(step)
    if number not in state.requests:
        end = lookup.end_of(number)
        if end is None or end > step:
            when = "" if step == recording.num_steps - 1 else f" up to step {step}"
            raise UsageError(f"request {number} did not arrive{when} in {recording.path}: `kvtui inspect` counts them")
        state = recording.state_at(end)
    request = state.requests[number]
    return state, lookup.decisions(number, request.arrival_step, state.step + 1)


def request_lines(state: PoolState, number: int, decided: list[RequestDecision], glyphs: Glyphs) -> list[str]:
    """What became of a request, where its time went, and every decision about it."""
    request = state.requests[number]
    latency = latency_of(request, end_of(state))
    outcome = request.finish_reason if request.status.is_finished else request.status.name.lower()
    counts = f"{request.num_prompt_tokens:,} prompt + {request.num_output_tokens:,} output tokens"
    parts = shown_parts(latency)
    total = latency.total_ns
    split = " + ".join(f"{name} {duration(ns)} ({ns / total if total else 0:.0%})" for _, name, ns in parts)
    rows = [
        (f"request {number}", f"{request.name}: {outcome}, {counts}, at step {state.step:,}"),
        ("ended", request.message),
        ("latency", f"{duration(total)} = {split}"),
        ("", _bar(latency.parts, cells_of_parts(latency, BAR), glyphs)),
        ("", "" if latency.exact else "how long it was preempted is not in this recording: decode has it in it"),
        ("first token", duration(latency.first_token_ns) if latency.first_token_ns >= 0 else "not yet"),
        ("each later", f"{duration(latency.per_token_ns)} on average" if latency.per_token_ns >= 0 else ""),
        ("from cache", f"{request.num_cached:,} of {request.num_prompt_tokens:,} prompt tokens"),
        ("regret", regret_words(request, state.header.block_size) or ""),
        ("preempted", _times(request.preemptions)),
    ]
    lines = [f"{name:12} {text}" for name, text in rows if text]
    if decided:
        width = max(4, *(len(f"{row.step:,}") for row in decided))
        lines += ["", f"  {'step':>{width}}  what was decided about it"]
        lines += [f"  {row.step:>{width},}  {_reason(row)}" for row in decided]
    return [clean(line, ascii_only=glyphs.ascii) for line in lines]


def _times(count: int) -> str:
    return f"{count:,} times" if count > 1 else "once" if count else ""


def _bar(parts: tuple[int, ...], cells: list[int], glyphs: Glyphs) -> str:
    if not any(parts):
        return ""
    looks = (glyphs.free, glyphs.prefill, glyphs.decode, glyphs.evicted, glyphs.recompute)
    return "".join(look * count for look, count in zip(looks, cells, strict=True))


def _reason(row: RequestDecision) -> str:
    """What was decided, without naming the request again."""
    text = explain.long(row.decision)
    return text.removeprefix(f"Request {row.decision.request} ")


def request_json(state: PoolState, number: int, decided: list[RequestDecision]) -> dict[str, Any]:
    """The same for programs."""
    request = state.requests[number]
    return {
        "step": state.step,
        "request": number,
        "name": request.name,
        "status": request.status.name.lower(),
        "finish_reason": request.finish_reason or None,
        "message": request.message or None,
        "num_prompt_tokens": request.num_prompt_tokens,
        "num_output_tokens": request.num_output_tokens,
        "num_cached": request.num_cached,
        "preemptions": request.preemptions,
        "regret_blocks": request.regret_blocks,
        "regret_tokens": request.regret_blocks * state.header.block_size,
        "regret_evicted_in_step": request.regret_step if request.regret_blocks else None,
        "latency": latency_json(latency_of(request, end_of(state))),
        "decisions": [_decision_json(row) for row in decided],
    }


def _decision_json(row: RequestDecision) -> dict[str, Any]:
    decision = row.decision
    try:
        kind = DecisionKind(decision.kind).name.lower()
    except ValueError:
        kind = str(decision.kind)
    return {
        "step": row.step,
        "kind": kind,
        "reason": str(decision.reason),
        "numbers": decision.numbers,
        "text": explain.long(decision),
    }
