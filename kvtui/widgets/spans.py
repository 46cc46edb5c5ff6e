"""Rows of an inspector page: spans of safe text with their looks, wrapped, flowing, and pointing somewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kvtui.safe_text import clean, wrap
from kvtui.safe_text import width as cells_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvtui.view import View

Span = tuple[str, str | int]
"""Safe text and what it is drawn in: the name of a palette style, or a request for its hue."""

Row = tuple[Span, ...]

LABEL = 8
"""Cells in front of what has a label."""

MOST_LINES = 6
"""Of one reason, or of one enumeration."""


class Entry(NamedTuple):
    """A line of a list that leads somewhere.

    Attributes:
        row: What it says.
        step: The step that it leads to; -1: none.
        block: The block that it leads to; -1: none.
    """

    row: Row
    step: int = -1
    block: int = -1


def called(view: View, request: int) -> str:
    """What a request is called, safe to draw."""
    return clean(view.names.of(request), ascii_only=view.glyphs.ascii)


def told(label: str, text: str, look: str, width: int, *, ascii_only: bool) -> list[Row]:
    """Words behind a label, wrapped.

    Args:
        label: Of the first line; the others begin below its text.
        text: Untrusted.
        look: Name of a palette style.
        width: Cells of the panel.
        ascii_only: Use no character outside printable ASCII.
    """
    lines = wrap(text, max(1, width - LABEL), MOST_LINES, ascii_only=ascii_only)
    return [((f"{label if i == 0 else '':<{LABEL}}", "muted"), (line, look)) for i, line in enumerate(lines)]


def flowing(groups: Iterable[Row], joint: Span | None, width: int, label: str = "") -> list[Row]:
    """Groups of spans on as many lines as they need, never broken within a group.

    Args:
        groups: What belongs together.
        joint: Stands between two of them on one line.
        width: Cells of the panel.
        label: Of the first line; the others are indented alike.
    """
    rows: list[Row] = []
    start: Row = ((f"{label:<{LABEL}}", "muted"),) if label else ()
    line, used = list(start), LABEL if label else 0
    empty = True
    for group in groups:
        size = sum(cells_of(text) for text, _ in group)
        between = cells_of(joint[0]) if joint is not None and not empty else 0
        if not empty and used + between + size > width:
            rows.append(tuple(line))
            if len(rows) == MOST_LINES:
                # Too long now, so that its end says that more follows.
                rows[-1] += ((" " * width, "muted"),)
                return rows
            line, used, between = [(" " * LABEL, "muted")], LABEL, 0
        if between and joint is not None:
            line.append(joint)
        line.extend(group)
        used += between + size
        empty = False
    if not empty:
        rows.append(tuple(line))
    return rows


def groups(spans: list[Span], joint: Span) -> list[Row]:
    """Spans between joints, as groups."""
    groups: list[list[Span]] = [[]]
    for span in spans:
        if span is joint:
            groups.append([])
        else:
            groups[-1].append(span)
    return [tuple(group) for group in groups if group]
