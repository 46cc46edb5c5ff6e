"""The state after a step, as text and as JSON, for `kvtui inspect --step`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from engine.request import RequestStatus
from engine.trace import explain
from engine.trace.events import Phase
from engine.trace.invariants import check
from kvtui.safe_text import clean, fit

if TYPE_CHECKING:
    from engine.trace.state import PoolState, RequestState
    from kvtui.glyphs import Glyphs

GRID_CELLS = 64
"""Cells of the grid in a row, in groups of 8."""
GRID_ROWS = 32
"""Rows of the grid at most; in larger pools a cell stands for several blocks."""
TABLE_BLOCKS = 12
"""Blocks of a table that are listed, before the last ones and an ellipsis."""
QUEUE = 8
"""Blocks at the head of the free queue that are listed; JSON has all of them."""
FINISHED = 8
"""Finished requests that are listed, the latest."""


def state_lines(state: PoolState, glyphs: Glyphs) -> list[str]:
    """A report for people, safe to print whatever is in the recording."""
    counters, step = state.counters, state.last_step
    queues = f"{counters.running} running, {counters.waiting} waiting ({counters.preempted} preempted)"
    lines = [
        f"step {state.step:,} at {state.time_ns / 1e9:,.3f} s: {queues}",
        f"{state.used:,} used + {state.cached:,} cached + {state.free:,} free = {state.header.num_blocks:,} blocks",
    ]
    if state.header.num_cpu_blocks:
        lines.append(f"{state.cpu_used:,} of {state.header.num_cpu_blocks:,} CPU blocks hold something")
    if step is not None:
        lines.append(
            f"schedule {step.schedule_ns / 1e6:.2f} ms, execute {step.execute_ns / 1e6:.2f} ms, "
            f"sample {step.sample_ns / 1e6:.2f} ms, update {step.update_ns / 1e6:.2f} ms"
        )
    live = [request for request in state.requests.values() if not request.status.is_finished]
    lines += ["", *_request_lines(live, glyphs)]
    finished = [request for request in state.requests.values() if request.status.is_finished]
    if finished:
        finished.sort(key=lambda request: request.finished_ns)
        lines += ["", f"finished lately ({len(finished)} known)"]
        lines += [
            f"  {_number(request)}  {clean(request.finish_reason, ascii_only=glyphs.ascii):8} "
            f"{request.num_output_tokens:,} new tokens"
            f"{': ' + clean(request.message, ascii_only=glyphs.ascii) if request.message else ''}"
            for request in finished[-FINISHED:]
        ]
    if step is not None and step.decisions:
        lines += ["", "decided in this step"]
        lines += [f"  {clean(explain.long(decision), ascii_only=glyphs.ascii)}" for decision in step.decisions]
    taken_next = _queue_text(state, glyphs)
    if taken_next:
        lines += ["", f"taken next: {taken_next}"]
    lines += ["", *grid_lines(state, glyphs)]
    broken = check(state) + state.violations
    if broken:
        lines += ["", "broken invariants"]
        lines += [f"  {clean(str(violation), ascii_only=glyphs.ascii)}" for violation in broken]
    return lines


def _request_lines(live: list[RequestState], glyphs: Glyphs) -> list[str]:
    if not live:
        return ["no live requests"]
    lines = [f"  {'#':>5}  {'name':16}  {'state':9}  {'computed':>11}  {'blocks':>6}  block table"]
    for request in live:
        state, table = _state_word(request), _table_text(request.table, glyphs)
        if request.waiting_for is not None:
            table = clean(explain.short(request.waiting_for), ascii_only=glyphs.ascii)
        lines.append(
            f"  {_number(request)}  {fit(request.name, 16, ascii_only=glyphs.ascii)}  {state:9}  "
            f"{f'{request.num_computed}/{request.num_tokens}':>11}  {request.num_blocks:>6}  {table}".rstrip()
        )
    return lines


def _queue_text(state: PoolState, glyphs: Glyphs) -> str:
    """The head of the free queue, each block with whose content is lost when it is taken."""
    if state.header.policy != "paged":
        return ""
    blocks = state.free_queue(QUEUE).tolist()
    told = [
        f"{block} (#{int(state.last_owner[block])}'s place {int(state.logical[block])})"
        if state.key[block]
        else f"{block}"
        for block in blocks
    ]
    more = state.free + state.cached - len(blocks)
    return ", ".join(told) + (f" {glyphs.ellipsis} {more:,} more" if more > 0 else "")


def _number(request: RequestState) -> str:
    return f"{request.request:>5}"


def _state_word(request: RequestState) -> str:
    if request.status is not RequestStatus.RUNNING:
        return request.status.name.lower()
    try:
        return Phase(request.last_phase).name.lower()
    except ValueError:
        return "running"


def _table_text(table: list[int], glyphs: Glyphs) -> str:
    released = next((place for place, block in enumerate(table) if block >= 0), len(table))
    shown = [f"-{glyphs.times}{released}"] if released > 1 else ["-"] * released
    shown += [str(block) if block >= 0 else "-" for block in table[released:]]
    if len(shown) > TABLE_BLOCKS + 2:
        shown = [*shown[:TABLE_BLOCKS], glyphs.ellipsis, shown[-1]]
    return " ".join(shown)


def grid_lines(state: PoolState, glyphs: Glyphs) -> list[str]:
    """The pool as a grid, a cell a block, or a cell for several where it would take over 32 rows."""
    n = state.header.num_blocks
    per_cell = -(-n // (GRID_CELLS * GRID_ROWS))
    legend = (
        f"{glyphs.free} free  {glyphs.cached} cached  {glyphs.levels[0]}{glyphs.levels[-1]} in use by filled slots  "
        f"2-9{glyphs.many} references"
    )
    if per_cell > 1:
        legend = (
            f"a cell is {per_cell} blocks: {glyphs.free} all free  {glyphs.cached} some cached, none in use  "
            f"{glyphs.levels[0]}{glyphs.levels[-1]} share in use"
        )
    cells = _cells(state, glyphs) if per_cell == 1 else _coarse_cells(state, glyphs, per_cell)
    width = len(str(n - 1))
    lines = [legend]
    for start in range(0, len(cells), GRID_CELLS):
        row = cells[start : start + GRID_CELLS]
        groups = (row[at : at + 8] for at in range(0, len(row), 8))
        lines.append(f"  {start * per_cell:>{width}}  {' '.join(groups)}")
    return lines


def _cells(state: PoolState, glyphs: Glyphs) -> str:
    size = state.header.block_size
    cells: list[str] = []
    for refs, key, filled in zip(state.refs.tolist(), state.key.tolist(), state.filled.tolist(), strict=True):
        if refs > 1:
            cells.append(str(refs) if refs <= 9 else glyphs.many)
        elif refs == 1:
            cells.append(glyphs.level(filled, size))
        else:
            cells.append(glyphs.cached if key else glyphs.free)
    return "".join(cells)


def _coarse_cells(state: PoolState, glyphs: Glyphs, per_cell: int) -> str:
    starts = np.arange(0, state.header.num_blocks, per_cell)
    used = np.add.reduceat((state.refs > 0).astype(np.int64), starts).tolist()
    cached = np.add.reduceat(((state.refs == 0) & (state.key != 0)).astype(np.int64), starts).tolist()
    return "".join(
        glyphs.level(u, per_cell) if u else glyphs.cached if c else glyphs.free
        for u, c in zip(used, cached, strict=True)
    )


def state_json(state: PoolState) -> dict[str, Any]:
    """The state for programs: every block and every request that is known."""
    return {
        "step": state.step,
        "time_ns": state.time_ns,
        "counters": state.counters._asdict(),
        "blocks": {
            "used": state.used,
            "cached": state.cached,
            "free": state.free,
            **{
                name: getattr(state, name).tolist()
                for name in ("owner", "logical", "refs", "filled", "key", "last_owner", "last_op", "touched")
            },
        },
        "free_queue": state.free_queue(state.header.num_blocks).tolist(),
        "regret_blocks": state.regret_blocks,
        "requests": [
            {
                "request": request.request,
                "name": request.name,
                "status": request.status.name.lower(),
                "num_prompt_tokens": request.num_prompt_tokens,
                "num_output_tokens": request.num_output_tokens,
                "num_computed": request.num_computed,
                "num_cached": request.num_cached,
                "preemptions": request.preemptions,
                "table": request.table,
                "waiting_for": explain.short(request.waiting_for) if request.waiting_for is not None else None,
                "finish_reason": request.finish_reason or None,
                "message": request.message or None,
            }
            for request in state.requests.values()
        ],
        "decisions": [explain.long(d) for d in state.last_step.decisions] if state.last_step is not None else [],
        "violations": [violation._asdict() for violation in check(state) + state.violations],
    }
