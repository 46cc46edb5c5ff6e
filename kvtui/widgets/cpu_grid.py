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
    from collections.abc import Callable, Sequence

    from rich.style import Style
    from textual.strip import Strip

    from engine.trace.events import StepTrace
    from engine.trace.state import PoolState
    from kvtui.view import View

_MOST_LINES = 3
_CELLS_A_LINE = 64
_LABEL = "CPU "
_MOST_STEPS = 32
_FREE, _KEPT = -2, -1
_OF_THE_CPU_POOL = frozenset(map(int, (Op.SWAP_OUT, Op.SWAP_IN, Op.DROP)))

Cell = tuple[int, int, bool]
"""Owner (or that it is free, or holds a cached content of nobody's), eighths in use, just changed."""


def lines_for(num_cpu_blocks: int) -> int:
    """How many lines a pool of this size is given."""
    return min(_MOST_LINES, -(-num_cpu_blocks // _CELLS_A_LINE))


class CpuGrid(LinePanel, can_focus=False):
    """A smaller second grid, there only where the engine has a CPU pool.

    Args:
        num_cpu_blocks: Its size.
        clock: Seconds that only grow; tests bring their own.
    """

    def __init__(self, num_cpu_blocks: int, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(id="cpu-grid")
        self._clock = clock
        self.styles.height = lines_for(num_cpu_blocks)
        self._moved: dict[int, float] = {}
        """CPU blocks that changed, and until when they are lit."""
        self._of: PoolState | None = None
        self._scale = (0, 0)
        """Cells of a line, and blocks of a cell."""
        self._cells: list[Cell] = []
        self._lines: list[tuple[int, int, tuple[Cell, ...]]] = []
        self._dirty: set[int] = set()
        """CPU blocks that may look different from what their cells say."""

    def redraw(self, everything: bool = False) -> None:
        """Work out the cells of what changed, or all, and refresh the lines that look different."""
        if everything:
            self._cells = []
        super().redraw(everything)

    @property
    def flashing(self) -> bool:
        """Whether there is a light to put out, whatever else happens."""
        return bool(self._moved)

    def follow(self, view: View, steps: Sequence[StepTrace], reset: bool) -> None:
        """Note which CPU blocks the last steps wrote, read or let go; while paused, the last step's stay lit."""
        if reset or view.state is not self._of:
            self._of = view.state
            self._moved.clear()
            self._cells = []
        paused, now = view.source.paused, self._clock()
        over = [block for block, until in self._moved.items() if (steps if paused else until <= now)]
        for block in over:
            del self._moved[block]
        self._dirty.update(over)
        early = len(steps) - _MOST_STEPS
        for number, step in enumerate(steps):
            for op, a, b, _ in step.ops:
                if op in _OF_THE_CPU_POOL:
                    block = b if op == Op.SWAP_OUT else a
                    self._dirty.add(block)
                    if number >= early:
                        self._moved[block] = now + FLASH_SECONDS

    def rows(self, view: View, width: int, height: int) -> list[tuple[int, int, tuple[Cell, ...]]]:
        """The cells of each line, with the number of its first block and the blocks of a cell."""
        n = view.state.header.num_cpu_blocks
        per_line = max(1, width - len(_LABEL) - len(str(n)) - 1)
        scale = per_line, -(-n // (per_line * height))
        per_cell = scale[1]
        if scale != self._scale or not self._cells:
            self._scale = scale
            self._cells = [(_FREE, 0, False)] * -(-n // per_cell)
            self._lines = [(start * per_cell, per_cell, ()) for start in range(0, len(self._cells), per_line)]
            changed = list(range(len(self._cells)))
        else:
            changed = sorted({block // per_cell for block in self._dirty if 0 <= block < n})
        self._dirty.clear()
        if changed:
            self._work_out(view.state, changed)
        for line in sorted({cell // per_line for cell in changed}):
            start = line * per_line
            self._lines[line] = (start * per_cell, per_cell, tuple(self._cells[start : start + per_line]))
        return list(self._lines)

    def _work_out(self, state: PoolState, changed: list[int]) -> None:
        """What some cells say. Of several blocks, the request with the largest number that is in them has the cell."""
        n, per_cell = state.header.num_cpu_blocks, self._scale[1]
        blocks = np.array(changed)[:, None] * per_cell + np.arange(per_cell)
        there = blocks < n
        blocks = np.minimum(blocks, n - 1)
        filled = np.where(there, state.cpu_filled[blocks], 0)
        owner = state.cpu_owner[blocks]
        owners = np.where(filled == 0, _FREE, np.where(owner == NO_REQUEST, _KEPT, owner)).max(axis=1)
        eighths = -(-filled.sum(axis=1, dtype=np.int64) * 8 // (there.sum(axis=1) * state.header.block_size))
        moved = {block // per_cell for block in self._moved}
        for cell, who, level in zip(changed, owners.tolist(), eighths.tolist(), strict=True):
            self._cells[cell] = (who, level, cell in moved)

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
