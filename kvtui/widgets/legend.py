"""What the glyphs of the block grid mean, with how many blocks look so: always in sight under the grid."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvtui.widgets.line import Line
from kvtui.widgets.line_panel import LinePanel

if TYPE_CHECKING:
    from textual.strip import Strip

    from kvtui.view import View

Counts = tuple[int, int, int, int, int]
"""Free, cached, in use by one, shared; and blocks a cell stands for."""


class Legend(LinePanel, can_focus=False):
    """One line; what does not fit is left out from the right."""

    DEFAULT_CSS = """
    Legend { height: 1; }
    """

    def __init__(self) -> None:
        super().__init__(id="legend")
        self.blocks_per_cell = 1

    def rows(self, view: View, width: int, height: int) -> list[Counts]:
        """The one line there is."""
        state = view.state
        shared = int(np.count_nonzero(np.asarray(state.refs) > 1))
        return [(int(state.free), int(state.cached), int(state.used) - shared, shared, self.blocks_per_cell)]

    def draw(self, view: View, key: Counts, width: int) -> Strip:  # type: ignore[override]
        """Glyph, word and count of each state."""
        free, cached, owned, shared, blocks = key
        palette, glyphs = view.palette, view.glyphs
        levels = glyphs.levels[0] + glyphs.levels[3] + glyphs.levels[-1]
        line = Line(width, palette.blank)
        entries = [
            (glyphs.free, palette.faint, "free", free),
            (glyphs.cached, palette.cached, "cached", cached),
            (levels, palette.accent, "in use", owned),
            ("2" if blocks == 1 else "", palette.badge(palette.accent), "shared", shared),
        ]
        if blocks > 1:
            line.add(f"1 cell = {blocks:,} blocks", palette.strong).gap(2)
        for glyph, style, word, count in entries:
            size = len(glyph) + len(word) + len(f"{count:,}") + 4
            if size - 2 > line.room:
                break
            line.add(glyph, style).gap(1 if glyph else 0)
            line.add(word, palette.muted).gap().add(f"{count:,}", palette.text).gap(2)
        swapped = ((glyphs.swapped, palette.warning, "swapped"),) if view.state.header.num_cpu_blocks else ()
        for glyph, style, word in (
            (glyphs.evicted, palette.warning, "evicted"),
            *swapped,
            (glyphs.free, palette.lit(palette.faint), "just changed"),
        ):
            if len(word) + 2 > line.room:
                break
            line.add(glyph, style).gap().add(word, palette.muted).gap(2)
        return line.strip()
