"""A block in rows: what it holds, for whom, and the text of its tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from engine.request import RequestStatus
from kvtui.safe_text import clean
from kvtui.widgets.spans import called, flowing, groups

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from engine.trace.state import PoolState
    from kvtui.view import View
    from kvtui.widgets.spans import Row, Span

SOON = 8
"""A cached block with fewer in front of it in the free queue is about to lose its content."""


def block_rows(view: View, block: int, width: int) -> list[Row]:
    """What a block holds, for whom, and the text of its tokens."""
    state, dot = view.state, view.glyphs.dot
    if not 0 <= block < state.header.num_blocks:
        return []
    separator: Span = (f" {dot} ", "faint")
    refs, key, owner = int(state.refs[block]), int(state.key[block]), int(state.owner[block])
    filled, size = int(state.filled[block]), state.header.block_size
    facts: list[Span] = [(f"block {block}", "strong"), separator]
    if refs:
        facts.extend([("owner ", "muted"), (called(view, owner), owner)])
        facts.extend([separator, (f"place {int(state.logical[block])} of its table", "text")])
        facts.extend([separator, (f"{filled}/{size}", "text"), (" slots filled", "muted")])
        if refs > 1:
            facts.extend([separator, (f"{refs} references", "strong")])
    elif key:
        facts.append(("cached: nobody holds it, its content can still be found", "text"))
    else:
        facts.append(("free", "text"))
    if not refs and state.header.policy == "paged":
        before = int(np.count_nonzero((state.refs == 0) & (state.free_order < state.free_order[block])))
        when = f"{before:,} others are taken before it" if before > 1 else "one is taken before it"
        when = when if before else "it is taken next"
        facts.extend([separator, (when, "warning" if key and before < SOON else "muted")])
    if key:
        facts.extend([separator, (f"hash {key & 0xFFFFFFFFFFFFFFFF:016x}"[:13] + view.glyphs.ellipsis, "muted")])
    elif refs:
        facts.extend([separator, ("not hashed: not full yet" if filled < size else "not hashed", "muted")])
    rows = flowing(groups(facts, separator), separator, width)
    if refs > 1:
        holders: list[Row] = [((called(view, request), request),) for request in _holders(state, block)]
        rows.extend(flowing(holders, (" ", "muted"), width, "shared"))
    pieces = state.block_text(block)
    if pieces:
        rows.extend(flowing([(span,) for span in _token_spans(pieces, view)], None, width, "tokens"))
    return rows


def _holders(state: PoolState, block: int) -> Iterable[int]:
    """The live requests with this block in their table."""
    for number, request in state.requests.items():
        if request.status in (RequestStatus.RUNNING, RequestStatus.WAITING) and block in request.table:
            yield number


def _token_spans(pieces: Sequence[str], view: View) -> list[Span]:
    """Tokens one after the other in two alternating styles, so that their borders can be seen."""
    spans: list[Span] = []
    for i, piece in enumerate(pieces):
        text = clean(piece, ascii_only=view.glyphs.ascii, limit=64)
        spans.append(
            (text.replace(" ", "_") if view.glyphs.ascii else text.replace(" ", "␣"), ("text", "accent")[i % 2])
        )
    return spans
