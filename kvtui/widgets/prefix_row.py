"""One line of the prefix tree: what it shows, and how it is drawn."""

from __future__ import annotations

from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple

from engine.sizes import counted
from kvtui.safe_text import clean, fit
from kvtui.widgets.line import Line

if TYPE_CHECKING:
    from rich.style import Style
    from textual.strip import Strip

    from engine.trace.state import PoolState
    from kvtui.glyphs import Glyphs
    from kvtui.prefix_tree import Node, PrefixTree, Run
    from kvtui.view import View

_WIDE = 70
_DEEPEST = 12
"""Levels that are drawn, the innermost."""
_LEAST_SHARED = 16
"""Characters that have to be the same before they are left out."""
_LONGEST_PIECE = 64
"""Characters of one token that are looked at."""


class Row(NamedTuple):
    """One line of the tree, equal only where it looks equal.

    Attributes:
        key: Of the run's first content.
        guides: For each level from the left, whether its run is the last among its siblings.
        refs: References of the first block: requests that use the run now.
        owner: Whose hue it has; -1: nobody's.
        dimmed: Another request, or another prefix, is selected.
        last: Step of the last operation on its first block; -1 where that is not known.
        counts: Blocks in use, cached, on the CPU pool alone.
        lost: Its beginning is gone, so that nobody can find it.
        behind: Its beginning is gone, and who comes to its end finds it all the same: that is behind a sliding window.
    """

    key: int
    guides: tuple[bool, ...]
    marked: bool
    selected: bool
    dimmed: bool
    folded: bool
    lost: bool
    behind: bool
    refs: int
    owner: int
    hits: int
    last: int
    counts: tuple[int, int, int]
    text: str


class Look(NamedTuple):
    """How the panel shows a line.

    Attributes:
        marked: It is under the cursor.
        folded: What branches off is hidden.
        selected: The run that is selected in the whole tree.
        width: Cells of the panel.
    """

    marked: bool
    folded: bool
    selected: Run | None
    width: int


def row_of(view: View, tree: PrefixTree, run: Run, look: Look) -> Row:
    """What a run's line shows now; work proportional to the line."""
    state, head = view.state, run.nodes[0]
    block = head.blocks[0] if head.blocks else -1
    refs = sum(int(state.refs[b]) for b in head.blocks)
    headless = run.above is tree.top and (head.parent != 0 or (block >= 0 and int(state.logical[block]) > 0))
    window = state.header.model.sliding_window
    # The token that follows looks at window - 1 others.
    reaches = headless and window > 0 and run.is_as_long_as(max(1, -(-(window - 1) // state.header.block_size)))
    request = view.selected_request
    other = request is not None and not uses(state, request, head)
    lasts = [int(state.touched[b]) for node in (head, run.nodes[-1]) for b in node.blocks]
    return Row(
        key=head.key,
        guides=_guides(tree, run),
        marked=look.marked,
        selected=run is look.selected,
        dimmed=run is not look.selected if look.selected is not None else other,
        folded=bool(run.below) and look.folded,
        lost=headless and not reaches,
        behind=reaches,
        refs=refs,
        owner=int(state.owner[block]) if refs and block >= 0 else -1,
        hits=run.hits,
        last=max(lasts, default=-1),
        counts=(run.counts[0], run.counts[1], run.counts[2]),
        text=_text_of(state, run, look.width, view.glyphs),
    )


def told_apart(rows: list[Row], runs: list[Run], glyphs: Glyphs) -> list[Row]:
    """The rows without the words that they begin with as the sibling above them does: what differs is what one needs.

    Siblings part in the middle of a block, so that their first block may say the same but for its last tokens.
    """
    line_end = clean("\n", ascii_only=glyphs.ascii)
    above: dict[Run | None, str] = {}
    told: list[Row] = []
    for row, run in zip(rows, runs, strict=True):
        shared = "".join(a for a, _ in takewhile(_are_equal, zip(row.text, above.get(run.above, ""), strict=False)))
        cut = max(len(shared.rpartition(end)[0] + end) if end in shared else 0 for end in (" ", line_end))
        above[run.above] = row.text
        short = f"{glyphs.ellipsis}{row.text[cut:]}"
        told.append(row._replace(text=short) if _LEAST_SHARED <= cut < len(row.text) else row)
    return told


def _are_equal(characters: tuple[str, str]) -> bool:
    return characters[0] == characters[1]


def uses(state: PoolState, request: int, node: Node) -> bool:
    """Whether the request has the node's content in its table."""
    table = state.table(request)
    return any(
        0 <= (place := int(state.logical[block])) < len(table) and table[place] == block for block in node.blocks
    )


def _guides(tree: PrefixTree, run: Run) -> tuple[bool, ...]:
    """From the outermost level inwards; a run at the top has none. At most `_DEEPEST`, the innermost."""
    guides: list[bool] = []
    while run.above is not None and run.above is not tree.top and len(guides) < _DEEPEST:
        guides.append(tree.is_last(run))
        run = run.above
    return tuple(reversed(guides))


def _text_of(state: PoolState, run: Run, cells: int, glyphs: Glyphs) -> str:
    """The beginning of a run's text, safe to draw; empty where whose it was is not known any more."""
    pieces: list[str] = []
    size = 0
    for node in run.nodes:
        there = next((text for block in node.blocks if (text := state.block_text(block))), None) or _cpu_text(
            state, node
        )
        if not there or size >= cells:
            break
        for piece in there:
            pieces.append(piece[:_LONGEST_PIECE])
            size += len(pieces[-1])
    return clean("".join(pieces).strip(), ascii_only=glyphs.ascii, limit=2 * cells)


def _cpu_text(state: PoolState, node: Node) -> list[str]:
    size = state.header.block_size
    for block in node.cpu_blocks:
        request = state.requests.get(int(state.cpu_owner[block]))
        place = int(state.cpu_logical[block])
        if request is not None and place >= 0:
            return request.pieces[place * size : (place + 1) * size]
    return []


def draw_heading(view: View, width: int) -> Strip:
    """What the columns are."""
    palette = view.palette
    line = Line(width, palette.blank).gap().add(" now", palette.faint).add(" hits", palette.faint)
    if width >= _WIDE:
        line.add("  last step", palette.faint)
    return line.gap(2).add("prefix", palette.faint).strip()


def draw_row(view: View, row: Row, width: int) -> Strip:
    """One run: its numbers, its place in the tree, its size and its text."""
    palette, glyphs = view.palette, view.glyphs
    faint = palette.faint
    line = Line(width, palette.blank)
    line.add(glyphs.cursor if row.marked else " ", palette.accent)
    hue = faint if row.dimmed else palette.cached if row.owner < 0 else palette.hue(row.owner)
    refs = f"{row.refs:,}" if row.refs else glyphs.free
    line.gap(4 - len(refs)).add(refs, palette.badge(hue) if row.refs > 1 and not row.dimmed else hue)
    strong = faint if row.dimmed or not row.hits else palette.text
    line.add(f"{row.hits:>5,}" if row.hits else glyphs.free.rjust(5), strong)
    if width >= _WIDE:
        last = "now" if row.refs else f"{row.last:,}" if row.last >= 0 else ""
        line.add(last.rjust(11), faint if row.dimmed else palette.muted)
    line.gap(2)
    _draw_guides(line, row.guides, view)
    if row.folded:
        line.add("+ ", faint if row.dimmed else palette.accent)
    styles: tuple[tuple[str, Style], ...] = (
        (glyphs.levels[-1], hue),
        (glyphs.cached, faint if row.dimmed else palette.cached),
        (glyphs.swapped, faint if row.dimmed else palette.warning),
    )
    plain = faint if row.dimmed else palette.muted
    mixed = sum(count > 0 for count in row.counts) > 1
    for (glyph, style), count in zip(styles, row.counts, strict=True):
        if count:
            line.add(glyph, style).add(f"{count:,} " if mixed else " ", faint if row.dimmed else palette.text)
    blocks = sum(row.counts)
    tokens = blocks * view.state.header.block_size
    size = f"{counted(blocks, 'block')} {glyphs.dot} {counted(tokens, 'token')}  "
    if width < _WIDE:
        size = f"{tokens:,} tok  "
    line.add(size, plain)
    if row.lost:
        line.add("beginning gone ", faint if row.dimmed else palette.warning)
    elif row.behind:
        line.add("beginning behind the window ", plain)
    text = row.text or "(its text is not kept any more)"
    line.add(fit(text, line.room, ascii_only=glyphs.ascii), plain if row.dimmed or not row.text else palette.text)
    return line.strip(palette.selection if row.selected else None)


def _draw_guides(line: Line, guides: tuple[bool, ...], view: View) -> None:
    ascii_only, style = view.glyphs.ascii, view.palette.faint
    through, blank, tee, corner = ("| ", "  ", "|-", "`-") if ascii_only else ("│ ", "  ", "├─", "└─")
    for last in guides[:-1]:
        line.add(blank if last else through, style)
    if guides:
        line.add(corner if guides[-1] else tee, style)
