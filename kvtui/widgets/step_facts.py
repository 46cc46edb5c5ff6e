"""A step in rows: what the scheduler decided in it, on what numbers, and whose content is lost next."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.trace import explain
from engine.trace.events import DecisionKind, Phase
from kvtui.latency_split import duration
from kvtui.regret import session_regret_words
from kvtui.safe_text import clean
from kvtui.widgets.spans import LABEL, Entry, called, flowing, groups

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from engine.trace.events import Decision, StepTrace
    from kvtui.view import View
    from kvtui.widgets.spans import Row, Span

QUEUE = 64
"""Blocks at the head of the free queue that are listed."""
_LISTED = 16
"""Decisions of one kind that are listed."""
_WORDS_OF_PHASE = (
    (Phase.PREFILL, "prefill"),
    (Phase.DECODE, "decode"),
    (Phase.RECOMPUTE, "recompute"),
    (Phase.OVERRUN, "overrun"),
)


def step_rows(view: View, width: int, *, brief: bool = False) -> list[Row]:
    """What the scheduler decided in the step shown: budgets used, blocks, who was admitted, deferred and preempted.

    Args:
        view: Its step is told.
        width: Cells of the panel.
        brief: One line, and one more where somebody gave way.
    """
    step = view.state.last_step
    if step is None:
        return [(("No step yet: the first request starts one.", "muted"),)]
    separator: Span = (f" {view.glyphs.dot} ", "faint")
    rows = flowing(groups(_budgets(view, step, separator), separator), separator, width)
    by_kind: dict[int, list[Decision]] = {}
    for decision in step.decisions:
        by_kind.setdefault(decision.kind, []).append(decision)
    for kind, label, look in (
        (DecisionKind.PREEMPTED, "yields", "warning"),
        (DecisionKind.ADMITTED, "admits", "text"),
        (DecisionKind.RESUMED, "resumes", "text"),
        (DecisionKind.REFUSED, "refuses", "error"),
        (DecisionKind.FAILED, "failed", "error"),
    ):
        told = [_told(view, decision, look) for decision in by_kind.get(kind, ())[:_LISTED]]
        if told and (not brief or kind == DecisionKind.PREEMPTED):
            rows.extend(flowing(told, separator, width, label))
    if brief:
        return rows
    total = step.schedule_ns + step.execute_ns + step.sample_ns + step.update_ns
    took: list[Span] = [(duration(total), "text")]
    for word in ("schedule", "execute", "sample", "update"):
        took.extend([separator, (f"{word} ", "muted"), (duration(getattr(step, f"{word}_ns")), "text")])
    rows.extend(flowing(groups(took, separator), separator, width, "took"))
    waits = list(_deferred(view))
    if waits:
        rows.extend(flowing(waits, separator, width, "defers"))
    regret = session_regret_words(view.state)
    if regret:
        rows.append(((f"{'regret':<{LABEL}}", "muted"), (regret, "warning")))
    return rows


def _budgets(view: View, step: StepTrace, separator: Span) -> list[Span]:
    header, counters = view.state.header, step.counters
    scheduled = sum(member[3] for member in step.batch)
    phases = [member[1] for member in step.batch]
    free = counters.cached_blocks + counters.free_blocks
    before = _free_before(view, step)
    tokens_look = "warning" if scheduled >= header.max_num_batched_tokens else "text"
    running = max(counters.running, len(step.batch))
    places_look = "warning" if running >= header.max_num_seqs else "text"
    spans: list[Span] = [(f"step {step.index:,}", "strong"), separator]
    counts = [f"{count} {word}" for phase, word in _WORDS_OF_PHASE if (count := phases.count(phase))]
    spans.extend([(", ".join(counts) or "nobody in its batch", "text"), separator])
    spans.extend([(f"{scheduled:,}/{header.max_num_batched_tokens:,}", tokens_look), (" tokens", "muted"), separator])
    spans.extend([(f"{running:,}/{header.max_num_seqs:,}", places_look), (" places", "muted"), separator])
    change = f"{before:,} {view.glyphs.arrow_right} {free:,}" if before >= 0 else f"{free:,}"
    spans.extend([(change, "warning" if free == 0 else "text"), (" blocks to be had", "muted")])
    return spans


def _free_before(view: View, step: StepTrace) -> int:
    """Blocks that could be taken before the step; -1 where that is not remembered."""
    if step.index == 0:
        return view.state.header.num_blocks
    history = view.history
    at = step.index - 1
    if history.last_index != step.index or len(history) < 2:
        return -1
    return int(history.series("cached", at, at + 1)[0] + history.series("free", at, at + 1)[0])


def _told(view: View, decision: Decision, look: str) -> Row:
    """Who, and on what numbers."""
    words = explain.short(decision, view.names.of).partition(": ")[2]
    words = clean(words, ascii_only=view.glyphs.ascii, limit=200)
    return ((called(view, decision.request), decision.request), (f" {words}", look))


def _deferred(view: View) -> Iterator[Row]:
    """Who waits first, and why; how many wait behind."""
    waiting = [
        request
        for request in view.state.requests.values()
        if request.waiting_for is not None and not request.status.is_finished
    ]
    behind = [
        request for request in waiting if request.waiting_for is not None and "ahead" in request.waiting_for.numbers
    ]
    for request in waiting:
        decision = request.waiting_for
        if decision is not None and "ahead" not in decision.numbers:
            yield _told(view, decision, "warning")
    if behind:
        yield ((f"{len(behind):,} behind", "muted"),)


def queue_heading(view: View, width: int) -> list[Row]:
    """What the list of the free queue says on top."""
    state = view.state
    if state.header.policy != "paged":
        return [(("Only a paged engine takes blocks in the order of a queue.", "muted"),)]
    separator: Span = (f" {view.glyphs.dot} ", "faint")
    spans: list[Span] = [("taken next", "strong"), separator, (f"{state.free + state.cached:,}", "text")]
    spans.extend([(" in the queue", "muted"), separator, (f"{state.cached:,}", "text")])
    spans.append((" with content that is lost then", "muted"))
    return flowing(groups(spans, separator), separator, width)


def queue_entries(view: View, queue: Sequence[int]) -> list[Entry]:
    """The blocks that are taken next, in order, each with whose content is lost then.

    Args:
        view: For the state.
        queue: The head of the free queue, as `PoolState.free_queue` finds it.
    """
    state, glyphs = view.state, view.glyphs
    if state.header.policy != "paged":
        return []
    entries: list[Entry] = []
    digits = len(str(state.header.num_blocks - 1))
    for at, block in enumerate(queue, 1):
        row: list[Span] = [(f"{at:>3}. ", "faint"), (f"block {block:>{digits}} ", "text")]
        if not int(state.key[block]):
            row.append((f"{glyphs.free} free", "muted"))
        else:
            owner, place = int(state.last_owner[block]), int(state.logical[block])
            row.append((f"{glyphs.cached} ", "warning"))
            row.append((called(view, owner) if owner >= 0 else "nobody known", owner if owner >= 0 else "muted"))
            row.append((f" place {place}, released in step {int(state.touched[block]):,} ", "muted"))
            text = "".join(state.block_text(block))
            row.append((clean(text, ascii_only=glyphs.ascii, limit=80), "faint"))
        entries.append(Entry(tuple(row), block=block))
    return entries
