"""One row of the request table: its columns, and what stands in them."""

from __future__ import annotations

from itertools import chain, groupby, islice
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

from rich.style import Style

from engine.request import RequestStatus
from engine.trace.explain import short, verb
from kvtui.history import Mark
from kvtui.safe_text import SPECIAL, fit
from kvtui.widgets.line import Line
from kvtui.widgets.marks import glyph_of, mark_of, word_of

if TYPE_CHECKING:
    from textual.strip import Strip

    from engine.trace.state import PoolState, RequestState
    from kvtui.glyphs import Glyphs
    from kvtui.view import View

Pieces = tuple[tuple[str, bool], ...]
"""A block table as text, and of each piece whether it is a block that several requests share."""

_SHARED = Style(bold=True)
_WAITS = (RequestStatus.WAITING, RequestStatus.PREEMPTED)
_TAIL_BLOCKS = 2
_MOST_PIECES_PER_CELL = 4


class Columns(NamedTuple):
    """Where the columns stand in a panel of some width; a width of 0 leaves a column out.

    Attributes:
        name: Cells of what the request is called.
        state, computed, out, blocks, prefix, table, text: Cells of the others.
    """

    name: int
    state: int
    computed: int
    out: int
    blocks: int
    prefix: int
    table: int
    text: int


def columns_for(cells: int, prefer_text: bool = False, longest: int = 4) -> Columns:
    """Lay the columns out; each takes one cell more than its width, for the space before it.

    Args:
        cells: Width of the panel.
        prefer_text: Whether the text gets the last column where there is no room for the block table too.
        longest: Cells of the longest name.
    """
    name = min(max(longest, 4), 6 if cells < 40 else 12 if cells < 70 else 18)
    state, computed, blocks = 11, 9, 6
    out = prefix = 0
    if cells >= 60:
        out, prefix = 4, 6
    if cells < 34:
        blocks = 0
    if cells < 28:
        computed = 0
    fixed = sum(w + 1 for w in (name, state, computed, out, blocks, prefix) if w)
    rest = cells - fixed - 1
    table = text = 0
    if rest >= 30:
        table = min(rest * 45 // 100, 40)
        text = rest - table - 1
    elif rest >= 6:
        table, text = (0, rest) if prefer_text else (rest, 0)
    return Columns(name, state, computed, out, blocks, prefix, table, text)


def table_pieces(state: PoolState, table: list[int], cells: int, glyphs: Glyphs) -> Pieces:
    """A block table in so many cells: all of it, or its head and its last blocks; `12×3` has three references.

    Places in front that hold no block any more, being behind a sliding window, are one piece: `-×25`.

    Costs what is shown, however long the table.
    """
    if cells < 3 or not table:
        return ()

    def piece(block: int) -> tuple[str, bool]:
        refs = int(state.refs[block]) if 0 <= block < len(state.refs) else 0
        return (f"{block}{glyphs.times}{refs}" if refs > 1 else str(block) if block >= 0 else "-", refs > 1)

    behind: list[tuple[str, bool]] = []
    if table[0] < 0:
        released = next((place for place, block in enumerate(table) if block >= 0), len(table))
        behind = [(f"-{glyphs.times}{released}" if released > 1 else "-", False)]
        table = table[released:]
    if len(table) <= cells // 2 + 1:
        pieces = [*behind, *(piece(block) for block in table)]
        if sum(len(text) + 1 for text, _ in pieces) - 1 <= cells:
            return _spaced(pieces)
    tail = [piece(block) for block in table[-_TAIL_BLOCKS:]] if cells >= 16 else []
    room = cells - 1 - sum(len(text) + 1 for text, _ in tail)
    head: list[tuple[str, bool]] = []
    for text, shared in chain(behind, map(piece, islice(table, max(1, len(table) - len(tail))))):
        if len(text) + 1 > room:
            break
        head.append((text, shared))
        room -= len(text) + 1
    return _spaced([*head, (glyphs.ellipsis, False), *tail])


def _spaced(pieces: list[tuple[str, bool]]) -> Pieces:
    last = len(pieces) - 1
    return tuple((text + " " if i < last else text, shared) for i, (text, shared) in enumerate(pieces))


def draw_heading(view: View, columns: Columns, cells: int) -> Strip:
    """The names of the columns."""
    muted = view.palette.muted
    line = (
        Line(cells, view.palette.blank)
        .gap()
        .add(fit("request" if columns.name >= len("request") else "#", columns.name), muted)
    )
    labels = (
        ("state", columns.state, str.ljust),
        ("computed", columns.computed, str.rjust),
        ("out", columns.out, str.rjust),
        ("blocks", columns.blocks, str.rjust),
        ("prefix", columns.prefix, str.rjust),
        ("block table", columns.table, str.ljust),
        ("text", columns.text, str.ljust),
    )
    for label, size, align in labels:
        if size:
            line.gap().add(align(label, size)[:size], muted)
    return line.strip()


def draw_request(
    view: View, request: RequestState, columns: Columns, cells: int, *, marked: bool, table: Pieces
) -> Strip:
    """One request.

    Args:
        view: For the palette, the glyphs and the selection.
        request: Which.
        columns: From `columns_for`.
        cells: Width of the panel.
        marked: Whether the cursor stands on it.
        table: From `table_pieces`.
    """
    palette, glyphs = view.palette, view.glyphs
    selected = view.selected_request == request.request
    dimmed = view.selected_request is not None and not selected
    ended = request.status.is_finished
    mark = mark_of(request)
    quiet = palette.faint if dimmed else palette.muted
    text = quiet if dimmed or ended else palette.text
    hue = quiet if ended else palette.hue(request.request, view.selected_request)
    if dimmed:
        word_style = alert = quiet
    else:
        alert = palette.error if mark == Mark.ENDED_BADLY else palette.warning
        word_style = alert if mark in (Mark.PREEMPTED, Mark.ENDED_BADLY) else text

    line = Line(cells, palette.blank)
    line.add(glyphs.cursor if marked else " ", palette.accent)
    line.add(view.names.fitted(request.request, columns.name, ascii_only=glyphs.ascii), hue)
    line.gap().add(glyph_of(mark, glyphs), hue)
    line.gap().add(word_of(request).ljust(columns.state - 2), word_style)
    numbers = " " + _progress(request.num_computed, request.num_tokens, columns.computed) if columns.computed else ""
    note = _note(view, request)
    if note:
        line.add(numbers, text).gap(2)
        line.add(fit(note, line.room, ascii_only=glyphs.ascii), alert if request.waiting_for or ended else quiet)
        return line.strip(palette.selection if selected else None)
    for value, size in (
        (max(0, request.num_output_tokens), columns.out),
        (request.num_blocks, columns.blocks),
        (request.num_cached, columns.prefix),
    ):
        if size:
            numbers += " " + _short(value, size).rjust(size)
    line.add(numbers, text)
    if columns.table:
        stop = line.room - 1 - columns.table
        line.gap()
        for shared, run in groupby(table, key=itemgetter(1)):
            line.add("".join(piece for piece, _ in run), hue + _SHARED if shared else hue)
        line.gap(line.room - stop)
    if columns.text:
        line.gap().add(_tail(request, columns.text, glyphs.ascii), text)
    return line.strip(palette.selection if selected else None)


def _note(view: View, request: RequestState) -> str:
    """Why it waits or how it went wrong; empty for a request that runs or ended well."""
    if request.status in _WAITS:
        decision = request.waiting_for
        if decision is None:
            return "in the queue"
        return short(decision, view.names.of).removeprefix(f"{verb(decision.kind)}: ")
    return request.message


def _progress(computed: int, known: int, size: int) -> str:
    text = f"{computed}/{known}"
    if len(text) > size:
        half = (size - 1) // 2
        text = f"{_short(computed, half)}/{_short(known, half)}"
    return text.rjust(size)[:size]


def _short(value: int, size: int) -> str:
    """A number in at most so many cells, in thousands or millions where it must be."""
    text = str(value)
    for unit, letter in ((1000, "k"), (1_000_000, "M"), (10**9, "G"), (10**12, "T")):
        if len(text) <= size:
            break
        text = f"{value // unit}{letter}"
    return text if len(text) <= size else "9" * (size - 1) + "+"


def _tail(request: RequestState, cells: int, ascii_only: bool) -> str:
    """The newest text of a request, output after prompt, without tokens that are no text; costs what is shown."""
    pieces: list[str] = []
    size = 0
    for piece in islice(reversed(request.pieces), _MOST_PIECES_PER_CELL * cells):
        if SPECIAL.fullmatch(piece):
            continue
        pieces.append(piece[-4 * cells :])
        size += len(piece)
        if size > 2 * cells or len(pieces) > 2 * cells:
            break
    return fit("".join(reversed(pieces)), cells, keep="tail", ascii_only=ascii_only)
