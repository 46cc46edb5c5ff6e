"""A request in rows: what it is doing, why it waits, where its time went, and where its blocks are."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from engine.trace import explain
from engine.trace.latency import end_of, latency_of
from kvtui.latency_split import cells_of_parts, duration, shown_parts
from kvtui.regret import regret_words
from kvtui.safe_text import clean, fit
from kvtui.widgets.marks import word_of
from kvtui.widgets.request_row import table_pieces
from kvtui.widgets.spans import LABEL, called, flowing, groups, told

if TYPE_CHECKING:
    from engine.trace.latency import Latency
    from engine.trace.state import RequestState
    from kvtui.view import View
    from kvtui.widgets.spans import Row, Span

_LOOKS = ("faint", "text", "good", "warning", "error")
"""Of the parts of a latency, in their order: waiting is pale, work is plain, what pressure cost stands out."""
_BAR = 24


def request_rows(view: View, request: RequestState, width: int) -> list[Row]:
    """What a request is doing, why it waits or how it ended, and where its blocks are."""
    ascii_only = view.glyphs.ascii
    separator: Span = (f" {view.glyphs.dot} ", "faint")
    name = clean(view.names.full(request.request), ascii_only=ascii_only)
    facts: list[Span] = [(name, request.request), separator, (word_of(request), "strong")]
    total = min(request.num_prompt_tokens + request.max_tokens, view.state.header.max_model_len)
    facts.extend([separator, (f"{request.num_computed}/{request.num_tokens}", "text"), (" tokens computed", "muted")])
    if not request.status.is_finished:
        facts.append((f", at most {total}", "muted"))
    if request.num_cached:
        facts.extend([separator, (f"{request.num_cached}", "good"), (" from the cache", "muted")])
    if request.preemptions:
        facts.extend([separator, (f"preempted {request.preemptions}{view.glyphs.times}", "warning")])
    if request.parent >= 0:
        facts.extend([separator, ("forked from ", "muted"), (called(view, request.parent), request.parent)])
    swapped = int(np.count_nonzero(view.state.cpu_owner == request.request))
    if swapped:
        noun = "block" if swapped == 1 else "blocks"
        facts.extend([separator, (f"{swapped} {noun} swapped out", "warning")])
    rows = flowing(groups(facts, separator), separator, width)
    if request.waiting_for is not None and not request.status.is_finished:
        rows.extend(
            told("why", explain.long(request.waiting_for, view.names.of), "warning", width, ascii_only=ascii_only)
        )
    if request.message:
        rows.extend(told("ended", request.message, "error", width, ascii_only=ascii_only))
    if request.table:
        room = width - LABEL
        pieces = table_pieces(view.state, request.table, max(1, room), view.glyphs)
        blocks = fit("".join(text for text, _ in pieces), max(1, room), ascii_only=ascii_only)
        rows.append(((f"{'blocks':<{LABEL}}", "muted"), (blocks, request.request)))
    return rows


def latency_rows(view: View, request: RequestState, width: int) -> list[Row]:
    """Where its time went: a bar and the numbers, then the first token and the mean of the later ones."""
    latency = latency_of(request, end_of(view.state))
    if latency.total_ns <= 0:
        return []
    separator: Span = (f" {view.glyphs.dot} ", "faint")
    spans: list[Span] = [*_bar(view, latency), (f" {duration(latency.total_ns)}", "strong")]
    for at, name, ns in shown_parts(latency):
        looks = _LOOKS[at] if at != 0 else "muted"
        spans.extend([separator, (f"{name} ", "muted"), (f"{duration(ns)} {latency.share(at):.0%}", looks)])
    rows = flowing(groups(spans, separator), separator, width, "time")
    if not latency.exact:
        rows.append(((" " * LABEL, "muted"), ("how long it was preempted was not recorded: decode has it", "muted")))
    later: list[Span] = []
    if latency.first_token_ns >= 0:
        later.extend([("first token ", "muted"), (duration(latency.first_token_ns), "text")])
    if latency.per_token_ns >= 0:
        later.extend([separator, (duration(latency.per_token_ns), "text"), (" for each later one", "muted")])
    if request.num_cached:
        later.extend([separator, (f"{request.num_cached}", "good")])
        later.append((f" of {request.num_prompt_tokens} prompt tokens from the cache", "muted"))
    regret = regret_words(request, view.state.header.block_size)
    if later:
        rows.extend(flowing(groups(later, separator), separator, width, "tokens"))
    if regret:
        rows.extend(told("regret", regret, "warning", width, ascii_only=view.glyphs.ascii))
    return rows


def _bar(view: View, latency: Latency) -> list[Span]:
    glyphs = view.glyphs
    signs = (glyphs.free, glyphs.prefill, glyphs.decode, glyphs.evicted, glyphs.recompute)
    given = cells_of_parts(latency, _BAR)
    return [(sign * count, look) for sign, count, look in zip(signs, given, _LOOKS, strict=True) if count]
