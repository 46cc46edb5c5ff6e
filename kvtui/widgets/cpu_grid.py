"""The CPU pool under the block grid: what was swapped out, for whom, and evicted prefixes that are kept there.

One cell a CPU block, or several where there is no room, in the order of their addresses. What was just written or taken
back is lit.
"""

from __future__ import annotations

import time
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from engine.trace.events import NO_REQUEST, Op
from kvtui.block_flash import FLASH_SECONDS
from kvtui.widgets.line import Line
from kvtui.widgets.line_panel import LinePanel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from rich.style import Style
    from textual.strip import Strip

    from engine.trace.events import StepTrace
    from kvtui.view import View

_MOST_LINES = 3
_CELLS_A_LINE = 64
_LABEL = "CPU "
_MOST_STEPS = 32
_FREE, _KEPT = -2, -1

Cell = tuple[int, int, bool]
"""Owner (or that it is free, or holds a cached content of nobody's), eighths in use, just changed."""


def lines_for(num_cpu_blocks: int) -> int:
    """How many lines a pool of this size is given."""
    return min(_MOST_LINES, -(-num_cpu_blocks // _CELLS_A_LINE))


class CpuGrid(LinePanel, can_focus=False):
    """A smaller second grid, there only where the engine has a CPU pool.

    Args:
        num_cpu_blocks: Its size.
    """

    def __init__(self, num_cpu_blocks: int) -> None:
        super().__init__(id="cpu-grid")
        self.styles.height = lines_for(num_cpu_blocks)
        self._moved: dict[int, float] = {}
        """CPU blocks that changed, and until when they are lit."""

    def follow(self, view: View, steps: Sequence[StepTrace], reset: bool) -> None:
        """Note which CPU blocks the last steps wrote, read or let go."""
        if reset:
            self._moved.clear()
        if not steps:
            return  # stays lit while nothing happens
        now = time.monotonic()
        self._moved = {block: until for block, until in self._moved.items() if until > now}
        for step in steps[-_MOST_STEPS:]:
            for op in step.ops:
                if op.op in (Op.SWAP_OUT, Op.SWAP_IN, Op.DROP):
                    self._moved[int(op.b if op.op == Op.SWAP_OUT else op.a)] = now + FLASH_SECONDS

    def rows(self, view: View, width: int, height: int) -> list[tuple[int, int, tuple[Cell, ...]]]:
        """The cells of each line, with the number of its first block and the blocks of a cell."""
        n = view.state.header.num_cpu_blocks
        per_line = max(1, width - len(_LABEL) - len(str(n)) - 1)
        per_cell = -(-n // (per_line * height))
        owners = self._owners(view, per_cell)
        filled = np.add.reduceat(view.state.cpu_filled, np.arange(0, n, per_cell))
        slots = np.diff(np.append(np.arange(0, n, per_cell), n)) * view.state.header.block_size
        eighths = -(-filled.astype(np.int64) * 8 // slots)
        moved = {block // per_cell for block in self._moved}
        cells = [(int(o), int(e), i in moved) for i, (o, e) in enumerate(zip(owners, eighths, strict=True))]
        return [
            (start * per_cell, per_cell, tuple(cells[start : start + per_line]))
            for start in range(0, len(cells), per_line)
        ]

    def _owners(self, view: View, per_cell: int) -> NDArray[np.int64]:
        """Who has each cell: of several blocks, the request with the largest number that is in it."""
        state = view.state
        free = state.cpu_filled == 0
        kept = np.where(free, _FREE, np.where(state.cpu_owner == NO_REQUEST, _KEPT, state.cpu_owner))
        return np.maximum.reduceat(kept.astype(np.int64), np.arange(0, len(kept), per_cell))

    def draw(self, view: View, key: tuple[int, int, tuple[Cell, ...]], width: int) -> Strip:  # type: ignore[override]
        """The label, the first block's number, and the cells."""
        palette, glyphs, selected = view.palette, view.glyphs, view.selected_request
        first, _, cells = key
        line = Line(width, palette.blank)
        digits = len(str(view.state.header.num_cpu_blocks))
        line.add(_LABEL if first == 0 else " " * len(_LABEL), palette.muted)
        line.add(f"{first:>{digits}} ", palette.faint)

        def look(cell: Cell) -> tuple[str, Style]:
            owner, eighths, moved = cell
            if owner == _FREE:
                return (glyphs.swapped, palette.lit(palette.muted)) if moved else (glyphs.free, palette.faint)
            style = palette.cached if owner == _KEPT else palette.hue(owner, selected)
            glyph = glyphs.cached if owner == _KEPT else glyphs.levels[max(0, min(8, eighths) - 1)]
            return (glyphs.swapped, palette.lit(style)) if moved else (glyph, style)

        for (glyph, style), run in groupby(map(look, cells)):
            line.add(glyph * len(list(run)), style)
        return line.strip()
