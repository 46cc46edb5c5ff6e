"""The memory of the old way, drawn in step with the real one: what reserving in one piece would cost these requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from engine.request import RequestStatus
from engine.sizes import counted, in_bytes
from kvtui.safe_text import clean
from kvtui.safe_text import width as cells_of
from kvtui.view import RequestSelected
from kvtui.waste import Waste, waste_of
from kvtui.widgets.line import Line
from kvtui.widgets.line_panel import LinePanel

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    import numpy.typing as npt
    from rich.style import Style
    from textual import events
    from textual.strip import Strip

    from engine.trace.events import StepTrace
    from engine.trace.state import PoolState
    from kvtui.ghost import Fragmentation, Ghost
    from kvtui.glyphs import Glyphs
    from kvtui.view import View

_FREE, _LOST, _RESERVED, _LEVEL = 0, 1, 2, 3
_FIGURE_LINES = 6
_MOST_NAMED = 12
_BROADEST = 3
"""Characters of one block at most, in a pool that is small."""
_NAME_COLUMN = 17
"""Cells of the words in front of the figures."""


class Cells(NamedTuple):
    """What each cell of the strip looks like.

    Attributes:
        codes: uint8: free, lost to who waits, reserved, or 3 to 10 for what is filled, by eighths.
        owners: int64: whose piece it is; -1: nobody's.
    """

    codes: npt.NDArray[np.uint8]
    owners: npt.NDArray[np.int64]


class Figures(NamedTuple):
    """What is said below the strip.

    Attributes:
        running, waiting, waste: Of the trace: requests, and how well their memory is used.
        fits: Requests that have a piece.
        waiters, num_waiters: The first of those that have none, and how many they are.
        lost: Where the ghost's memory goes.
        copies: Slots of it that hold once more what is held already.
        needs: Blocks in a row that the head of its queue waits for; 0 where it does not wait for memory.
    """

    running: int
    waiting: int
    waste: Waste
    fits: int
    waiters: tuple[int, ...]
    num_waiters: int
    lost: Fragmentation
    copies: int
    needs: int

    @property
    def wasted_slots(self) -> int:
        """Slots of the ghost's pieces that hold nothing, or a copy."""
        return self.lost.reserved_slots - self.lost.filled_slots + self.copies

    @property
    def wasted(self) -> float:
        """Their share of what is reserved."""
        return self.wasted_slots / self.lost.reserved_slots if self.lost.reserved_slots else 0.0


class OldWay(LinePanel):
    """A strip of memory with a piece for each request, and figures beside the trace's own.

    A click selects the request that a piece belongs to.
    """

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:  # noqa: A002
        super().__init__(id=id, classes=classes)
        self.ghost: Ghost | None = None
        self._of: PoolState | None = None
        self._figures: Figures | None = None
        self._cells_shown: tuple[Cells, int] | None = None

    def follow(self, view: View, steps: Sequence[StepTrace], reset: bool) -> None:
        """Keep the ghost in step; after a jump it is made again from the requests that the state knows."""
        state = view.state
        if self.ghost is None or self.ghost.header is not state.header:
            from kvtui.ghost import Ghost  # With what it stands on, dear to import before a first picture.

            self.ghost = Ghost(state.header)
            reset = True
        if reset or self._of is not state:
            self.ghost.rebuild(state)
        else:
            self.ghost.follow(state, steps)
        self._of = state
        if steps or reset or self._figures is None:
            self._figures = figures_of(state, self.ghost)
        figures = self._figures
        live = figures.fits + figures.num_waiters
        dot = view.glyphs.dot
        what = f"{figures.fits:,} of {live:,} requests fit" if live else "no request"
        self.set_title("The old way", f"{view.glyphs.horizontal} {what}", f"{dot} memory reserved in one piece")

    # -- the picture ---------------------------------------------------------------------------------------------

    def rows(self, view: View, width: int, height: int) -> Sequence[Hashable]:
        """The strip, what its glyphs mean, and the figures; where there is little room, the strip and one line."""
        figures, ghost = self._figures, self.ghost
        if figures is None or ghost is None:
            return []
        if not figures.fits and not figures.num_waiters:
            return self._empty_state(view)
        rich = height >= _FIGURE_LINES + 2
        legend: list[Hashable] = [("legend", figures.needs > 0)] if rich else []
        below: list[Hashable] = [("figures", row, figures, view.selected_request) for row in range(_FIGURE_LINES - 1)]
        if not rich:
            below = [("short", figures)] if height > 1 else []
        lines = max(1, height - len(legend) - len(below))
        cells = max(1, width - 2)
        num_blocks = view.state.header.num_blocks
        drawn = strip_cells(view.state, ghost, max(1, -(-num_blocks // (lines * cells))))
        broad = next((b for b in range(_BROADEST, 1, -1) if cells // b * lines >= num_blocks), 1)
        cells -= cells % broad
        if broad > 1:
            drawn = Cells(drawn.codes.repeat(broad), drawn.owners.repeat(broad))
        self._cells_shown = (drawn, cells)
        lines = min(lines, -(-len(drawn.codes) // cells))
        selected = view.selected_request
        strip: list[Hashable] = []
        for start in range(0, lines * cells, cells):
            part = slice(start, start + cells)
            strip.append(("strip", drawn.codes[part].tobytes(), drawn.owners[part].tobytes(), selected))
        gap: list[Hashable] = [""] if rich and height - lines - len(legend) - len(below) > 0 else []
        return [*strip, *legend, *gap, *below]

    @staticmethod
    def _empty_state(view: View) -> list[Hashable]:
        return [
            "",
            "No request is live.",
            "Before paging, each one reserved memory in one piece for the longest it could come to.",
            "Here they are shown so, beside what they take.",
            "Send some: kvtui inject." if view.source.live else f"Go on with {view.glyphs.arrow_right}.",
        ]

    def draw(self, view: View, key: Hashable, width: int) -> Strip:
        """One line, by its kind."""
        assert isinstance(key, tuple)
        line = Line(width, view.palette.blank).gap()
        kind, *values = key
        if kind == "strip":
            _draw_strip(line, view, *values)
        elif kind == "legend":
            _draw_legend(line, view, *values)
        elif kind == "short":
            _draw_short(line, view, *values)
        else:
            _draw_figures(line, view, values[0], values[1])
        return line.strip()

    def on_click(self, event: events.Click) -> None:
        """Select the request whose piece was clicked."""
        offset = event.get_content_offset(self)
        if offset is None or self._cells_shown is None or self.view is None:
            return
        drawn, cells = self._cells_shown
        at = offset.y * cells + offset.x - 1
        if 1 <= offset.x <= cells and at < len(drawn.owners) and drawn.owners[at] >= 0:
            owner = int(drawn.owners[at])
            self.post_message(RequestSelected(None if owner == self.view.selected_request else owner))


def figures_of(state: PoolState, ghost: Ghost) -> Figures:
    """Count both memories."""
    running = sum(1 for request in state.requests.values() if request.status is RequestStatus.RUNNING)
    live = len(ghost.pieces) + len(ghost.waiting) + len(ghost.refused)
    waiters: list[int] = []
    for number in (*ghost.refused, *ghost.waiting):
        if len(waiters) == _MOST_NAMED:
            break
        waiters.append(number)
    head = ghost.head
    return Figures(
        running=running,
        waiting=max(0, live - running),
        waste=waste_of(state),
        fits=len(ghost.pieces),
        waiters=tuple(waiters),
        num_waiters=len(ghost.waiting) + len(ghost.refused),
        lost=ghost.fragmentation(state),
        copies=ghost.copies(state),
        needs=ghost.waiting[head] if head is not None else 0,
    )


def strip_cells(state: PoolState, ghost: Ghost, per_cell: int) -> Cells:
    """The ghost's memory, so many blocks a cell; work proportional to the pieces and the cells."""
    num_blocks, size = ghost.header.num_blocks, ghost.header.block_size
    num_cells = -(-num_blocks // per_cell)
    per_cell_slots = per_cell * size
    filled = np.zeros(num_cells, np.int64)
    reserved = np.zeros(num_cells, np.bool_)
    owners = np.full(num_cells, -1, np.int64)
    for number, piece in ghost.pieces.items():
        first, last = piece.start // per_cell, (piece.start + piece.num - 1) // per_cell
        reserved[first : last + 1] = True
        ours = owners[first : last + 1]
        ours[ours < 0] = number
        _fill(filled, piece.start * size, piece.start * size + ghost.filled(state, number), per_cell_slots)
    head = ghost.head
    codes = np.full(num_cells, _FREE if head is None else _LOST, np.uint8)
    codes[reserved] = _RESERVED
    some = filled > 0
    codes[some] = _LEVEL + np.clip((filled[some] * 8 + per_cell_slots - 1) // per_cell_slots - 1, 0, 7)
    return Cells(codes, owners)


def _fill(filled: npt.NDArray[np.int64], start: int, stop: int, per_cell: int) -> None:
    """Count the slots from start to stop in the cells that they lie in."""
    if start >= stop:
        return
    first, last = start // per_cell, (stop - 1) // per_cell
    filled[first : last + 1] += per_cell
    filled[first] -= start - first * per_cell
    filled[last] -= (last + 1) * per_cell - stop


def _glyphs(glyphs: Glyphs) -> tuple[str, str, str]:
    """Free, free but in too small a hole, reserved and not used."""
    return (glyphs.free, "-", "u") if glyphs.ascii else (glyphs.free, "╌", "□")


def _draw_strip(line: Line, view: View, codes: bytes, owners: bytes, selected: int | None) -> None:
    palette, glyphs = view.palette, view.glyphs
    free, lost, reserved = _glyphs(glyphs)
    looks = np.frombuffer(codes, np.uint8)
    whose = np.frombuffer(owners, np.int64)
    changes = np.flatnonzero((looks[1:] != looks[:-1]) | (whose[1:] != whose[:-1])) + 1
    starts = [0, *changes.tolist()]
    for start, stop in zip(starts, [*starts[1:], len(looks)], strict=True):
        code = int(looks[start])
        if code == _FREE:
            text, style = free, palette.faint
        elif code == _LOST:
            text, style = lost, palette.warning
        else:
            style = palette.hue(int(whose[start]), selected)
            text = reserved if code == _RESERVED else glyphs.levels[code - _LEVEL]
        line.add(text * (stop - start), style)


def _draw_legend(line: Line, view: View, somebody_waits: bool) -> None:
    palette = view.palette
    free, lost, reserved = _glyphs(view.glyphs)
    hue = palette.accent
    entries: list[tuple[str, Style, str]] = [
        (view.glyphs.levels[-1], hue, "computed"),
        (reserved, hue, "reserved, not used"),
        (lost, palette.warning, "free, in too small a hole") if somebody_waits else (free, palette.faint, "free"),
    ]
    for glyph, style, words in entries:
        if line.room > len(words) + 3:
            line.add(glyph, style).gap().add(words, palette.muted).gap(2)


def _draw_short(line: Line, view: View, figures: Figures) -> None:
    palette = view.palette
    live = figures.fits + figures.num_waiters
    line.add(f"{figures.fits:,} of {live:,} fit", palette.strong).add(
        f", {figures.wasted:.0%} of what they reserve is wasted", palette.muted
    )


def _draw_figures(line: Line, view: View, row: int, figures: Figures) -> None:
    palette = view.palette
    words, here, there = _figure_row(view, row, figures)
    label = palette.faint if row == 0 else palette.muted
    column = max(12, min(26, (line.cells - _NAME_COLUMN) // 3))
    line.add(words, label).to(_NAME_COLUMN)
    worse = row in (2, 3, 4) and _worse(row, figures)
    line.add(here, label if row == 0 else palette.text).to(_NAME_COLUMN + column).gap()
    line.add(there, label if row == 0 else palette.warning if worse else palette.text)
    if row == 2 and figures.num_waiters:
        line.gap()
        for number in figures.waiters:
            name = clean(view.names.of(number), ascii_only=view.glyphs.ascii, limit=24)
            if cells_of(name) + 3 > line.room:
                break
            line.add(name, palette.hue(number, view.selected_request)).gap()


def _worse(row: int, figures: Figures) -> bool:
    if row == 2:
        return figures.num_waiters > figures.waiting
    if row == 3:
        return figures.wasted > figures.waste.waste
    return figures.needs > 0


def _figure_row(view: View, row: int, figures: Figures) -> tuple[str, str, str]:
    """Words and the two figures, the trace's and the ghost's."""
    header, lost, waste, dot = view.state.header, figures.lost, figures.waste, view.glyphs.dot
    size, per_token = header.block_size, header.model.kv_bytes_per_token
    if row == 0:
        here = "paged" if header.policy == "paged" else f"here ({clean(header.policy, limit=12)})"
        return "", here, "in one piece, for the longest"
    if row == 1:
        return "run", f"{figures.running:,}", f"{figures.fits:,}"
    if row == 2:
        return "wait", f"{figures.waiting:,}", f"{figures.num_waiters:,}"
    if row == 3:
        idle = waste.used_blocks * size - waste.held_tokens
        copies = f", {in_bytes(figures.copies * per_token)} of it copies" if figures.copies else ""
        return (
            "wasted",
            f"{waste.waste:.1%} {dot} {in_bytes(max(0, idle) * per_token)}",
            f"{figures.wasted:.1%} {dot} {in_bytes(figures.wasted_slots * per_token)}{copies}",
        )
    free = f"{counted(lost.free, 'block')}, at most {lost.largest_hole:,} in a row"
    if figures.needs:
        lies_free = f"{counted(lost.free, 'block')} {dot} {in_bytes(lost.free * size * per_token)}"
        free = f"{lies_free}, no {figures.needs:,} in a row"
    state = view.state
    return "free", counted(state.free + state.cached, "block"), free
