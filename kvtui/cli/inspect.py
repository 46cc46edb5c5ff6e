"""`kvtui inspect`: what is in a recording, and whether its states hold together."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engine.sizes import counted, in_bytes
from kvtui.cli.errors import FAILED, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.trace.audit import Audit
    from engine.trace.reader import Recording
    from kvtui.advisor import Advice
    from kvtui.glyphs import Glyphs

NAMED_VIOLATIONS = 5
"""Broken invariants that the report for people names."""
NAMED_RUNS = 8
"""Runs of unreadable steps that it names."""


def inspect_command(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A recording (.mcap), or the name of a packaged one.")],
    step: Annotated[
        int | None,
        typer.Option("--step", metavar="N", help="Show the state after this step; -1 is the last.", show_default=False),
    ] = None,
    block: Annotated[
        int | None,
        typer.Option("--block", metavar="N", help="Tell what happened to this block.", show_default=False),
    ] = None,
    request: Annotated[
        int | None,
        typer.Option(
            "--request", metavar="N", help="Tell where this request's time went, and why.", show_default=False
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Report on a recording: its header, its counts, and whether the invariants hold after every step.

    With --step N, the state at that step: requests with their block tables, and the pool block by block.
    With --block N, everything that happened to a block up to the step (or the end): who took, filled, shared and
    released it, and when its content was evicted. With --request N, where a request's time went (queued, prefill,
    decode, preempted) and every decision about it with its numbers.
    Exits 1 where an invariant is broken, naming the first one with its block and step, and where a part of the file
    cannot be read; the rest of it is counted all the same.

    Example: kvtui inspect demo.mcap --request 7
    """
    from engine.trace.reader import Recording
    from kvtui.cli.recordings import find_recording

    with Recording.open(find_recording(file)) as recording:
        if block is not None and request is not None:
            raise UsageError("--block and --request ask for two reports: leave one of them out")
        if block is not None or request is not None:
            _inspect_why(recording, _index(recording, -1 if step is None else step), block, request, as_json)
            return
        if step is not None:
            _inspect_step(recording, _index(recording, step), as_json)
            return
        from engine.trace.audit import audit

        found = audit(recording)
        _print(_audit_json(recording, found) if as_json else _audit_lines(recording, found))
        if found.num_violations or found.damage:
            raise typer.Exit(FAILED)


def _index(recording: Recording, step: int) -> int:
    """A step of the recording, counted from its end where negative."""
    if not recording.num_steps:
        raise UsageError(f"{recording.path} has no steps yet: leave --step out")
    index = step + recording.num_steps if step < 0 else step
    if not 0 <= index < recording.num_steps:
        raise UsageError(f"step {step} is not in {recording.path}: it has steps 0 to {recording.num_steps - 1}")
    return index


def _inspect_step(recording: Recording, index: int, as_json: bool) -> None:
    from kvtui.cli.inspect_state import state_json, state_lines

    state = recording.state_at(index)
    _print(state_json(state) if as_json else state_lines(state, _glyphs()))


def _inspect_why(recording: Recording, index: int, block: int | None, request: int | None, as_json: bool) -> None:
    from kvtui.cli import inspect_why as why

    if block is not None:
        state, life = why.biography_at(recording, index, block)
        _print(why.block_json(state, life) if as_json else why.block_lines(state, life, _glyphs()))
    elif request is not None:
        state, decided = why.request_at(recording, index, request)
        _print(
            why.request_json(state, request, decided)
            if as_json
            else why.request_lines(state, request, decided, _glyphs())
        )


def _print(report: dict[str, Any] | list[str]) -> None:
    print(json.dumps(report, indent=2) if isinstance(report, dict) else "\n".join(report))


def _overruns(recording: Recording, found: Audit) -> str:
    """What scheduling a step ahead cost; empty where that was not done."""
    if not recording.header.async_scheduling:
        return ""
    return f"{found.overruns:,} tokens thrown away: steps were scheduled before it was known who had ended"


def _glyphs() -> Glyphs:
    from kvtui.glyphs import ASCII, UNICODE

    return ASCII if _ascii_only() else UNICODE


def _ascii_only() -> bool:
    return "utf" not in (sys.stdout.encoding or "").lower()


def _audit_json(recording: Recording, found: Audit) -> dict[str, Any]:
    import msgspec

    from engine.trace.marks import MarkKind

    return {
        "path": str(recording.path),
        "size_bytes": recording.size,
        "complete": recording.complete,
        "unread_bytes": recording.unread,
        "header": msgspec.to_builtins(recording.header),
        "counts": {
            "steps": found.num_steps,
            "requests": found.num_requests,
            "duration_s": round(found.duration_ns / 1e9, 6),
            "prompt_tokens": found.prompt_tokens,
            "generated_tokens": found.generated_tokens,
            "computed_tokens": found.computed_tokens,
            "prefix_queried_tokens": found.prefix_queried_tokens,
            "prefix_hit_tokens": found.prefix_hit_tokens,
            "prefix_hit_rate": round(found.prefix_hit_rate, 4),
            "preemptions": found.preemptions,
            "evictions": found.evictions,
            "overruns": found.overruns,
            "regret_blocks": found.regret_blocks,
            "peak_used_blocks": found.peak_used,
            "peak_running": found.peak_running,
            "peak_waiting": found.peak_waiting,
            "finished": dict(found.finished),
            "ops": dict(found.ops),
            "decisions": dict(found.decisions),
            "marked_steps": {kind.name.lower(): found.marked_steps[kind] for kind in MarkKind},
        },
        "bottleneck": _advice_json(recording, found),
        "invariants": {
            "hold": not found.num_violations,
            "check_interval": found.check_interval,
            "broken": found.num_violations,
            "violations": [violation._asdict() for violation in found.violations],
        },
        "damage": found.damage or None,
        "unreadable_steps": [list(run) for run in found.lost],
    }


def _audit_lines(recording: Recording, found: Audit) -> list[str]:
    from functools import partial

    from engine.trace.marks import MarkKind
    from kvtui.safe_text import clean as clean_text

    clean = partial(clean_text, ascii_only=_ascii_only())
    header, model = recording.header, recording.header.model
    seconds = found.duration_ns / 1e9
    per_second = f", {found.generated_tokens / seconds:,.1f} new tokens/s" if seconds > 0 else ""
    limits = f"{header.max_num_seqs} sequences, {header.max_num_batched_tokens:,} tokens a step"
    dtype = clean(model.dtype) + (f", {clean(model.weights)} weights" if model.weights else "")
    if model.kv_dtype not in ("", model.dtype):
        dtype += f", {clean(model.kv_dtype)} KV cache"
    chunk = f", prefill chunks of {header.max_prefill_chunk:,}" if header.max_prefill_chunk else ""
    how = f"preemption by {clean(header.preemption)}" if header.policy == "paged" else f"policy {clean(header.policy)}"
    rows = [
        ("recording", f"{clean(str(recording.path))}, {recording.size / 1024:,.0f} KiB"),
        ("title", clean(header.title) or "(none)"),
        ("", clean(header.description)),
        ("made by", f"{header.source}, {header.provenance}, schema {header.schema_version}"),
        (
            "model",
            f"{clean(model.name)} on {clean(model.device)}, {dtype}, attention {clean(model.attention)}",
        ),
        ("pool", f"{header.num_blocks:,} blocks of {header.block_size} tokens, {_kib(recording)} KiB each"),
        ("", f"prefix caching {'on' if header.prefix_caching else 'off'}, {how}"),
        ("limits", f"{limits}{chunk}, {header.max_model_len:,} tokens a request"),
        ("steps", _steps(recording, found)),
    ]
    counts = [
        ("requests", f"{found.num_requests:,}{_counted(found.finished, ': ')}"),
        ("tokens", f"{found.prompt_tokens:,} of prompts, {found.generated_tokens:,} generated{per_second}"),
        ("", f"{found.computed_tokens:,} computed, {found.prefix_hit_tokens:,} found in the prefix cache"),
        ("prefix hits", f"{found.prefix_hit_rate:.1%} of {found.prefix_queried_tokens:,} prompt tokens asked for"),
        ("peaks", f"{found.peak_used:,} blocks used, {found.peak_running:,} running, {found.peak_waiting:,} waiting"),
        ("preemptions", _in_steps(found.preemptions, found.marked_steps[MarkKind.PREEMPTED])),
        ("evictions", _in_steps(found.evictions, found.marked_steps[MarkKind.EVICTED])),
        ("overruns", _overruns(recording, found)),
        ("regret", _regret(recording, found)),
        ("held up by", _held_up(recording, found)),
        ("operations", _counted(found.ops) or "none"),
        ("decisions", _counted(found.decisions) or "none"),
    ]
    if found.num_steps or not found.damage:
        rows += counts
    rows.append(("invariants", _verdict(found)))
    lines = [f"{name:12} {value}" for name, value in rows if value]
    lines += [f"{'':12} {clean(str(violation))}" for violation in found.violations[:NAMED_VIOLATIONS]]
    lines += _damage_lines(recording, found, clean)
    return lines


def _damage_lines(recording: Recording, found: Audit, clean: Callable[[str], str]) -> list[str]:
    """What cannot be read, and how much can."""
    if not found.damage:
        return []
    lines = [f"{'damage':12} {clean(found.damage)}"]
    more = [f"{first:,} to {last:,}" for first, last in found.lost]
    if len(more) > 1 or not all(f"steps {first} to {last}" in found.damage for first, last in found.lost):
        rest = f" and {counted(len(more) - NAMED_RUNS, 'more run')}" if len(more) > NAMED_RUNS else ""
        lines.append(f"{'':12} in all, the steps {', '.join(more[:NAMED_RUNS])}{rest}")
    if found.num_steps:
        lines.append(f"{'':12} all counts are of the steps that can be read")
    return lines


def _steps(recording: Recording, found: Audit) -> str:
    seconds = found.duration_ns / 1e9
    if not found.damage:
        behind = f"; {in_bytes(recording.unread)} behind them cannot be read" if recording.unread else ""
        end = "" if recording.complete else f", not closed properly{behind}"
        return f"{found.num_steps:,} in {seconds:,.1f} s{end}"
    if not found.num_steps:
        return f"none of {recording.num_steps:,} can be read"
    return f"{found.num_steps:,} of {recording.num_steps:,} can be read, up to {seconds:,.1f} s"


def _advice(recording: Recording, found: Audit) -> Advice:
    import numpy as np

    from kvtui.advisor import advise

    levels = np.frombuffer(found.levels, np.int64).reshape(-1, 5)
    waiting, running, batch, tokens, preemptions = levels.T
    return advise(
        recording.header,
        None,
        waiting=waiting,
        running=running,
        batch=batch,
        tokens=tokens,
        preemptions=preemptions,
        never_fit=found.never_fit,
    )


def _advice_json(recording: Recording, found: Audit) -> dict[str, Any]:
    from kvtui.advisor import advice_json

    return advice_json(_advice(recording, found))


def _held_up(recording: Recording, found: Audit) -> str:
    from kvtui.advisor import advice_words

    return advice_words(_advice(recording, found), last="")[0] if found.num_steps else ""


def _regret(recording: Recording, found: Audit) -> str:
    blocks = found.regret_blocks
    if not blocks:
        return ""
    tokens = blocks * recording.header.block_size
    return f"{blocks:,} evicted blocks computed again, {tokens:,} prompt tokens: twice the blocks would have kept them"


def _in_steps(events: int, steps: int) -> str:
    return f"{events:,}, in {counted(steps, 'step')}" if events else "none"


def _kib(recording: Recording) -> str:
    header = recording.header
    return f"{header.block_size * header.model.kv_bytes_per_token / 1024:,.0f}"


def _counted(counts: dict[str, int], before: str = "") -> str:
    text = ", ".join(f"{number:,} {name}" for name, number in sorted(counts.items(), key=lambda item: -item[1]))
    return before + text if text else ""


def _verdict(found: Audit) -> str:
    if not found.num_violations:
        if found.damage:
            if not found.checked:
                return "not checked: there is no step whose state is known"
            return f"all hold in the {counted(found.checked, 'step')} whose state is known"
        if found.check_interval == 1:
            return "all hold after every step"
        return f"all hold (checked after every {found.check_interval} steps and the last)"
    return f"BROKEN, {found.num_violations:,} times; the first:"
