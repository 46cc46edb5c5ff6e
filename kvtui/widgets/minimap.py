"""Where in the pool the view lies: one line under the grid, the whole pool from left to right."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvtui import block_codes as bc
from kvtui.block_look import BlockLook
from kvtui.block_mix import BlockMix
from kvtui.widgets.line import Line

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from textual.strip import Strip

    from engine.trace.state import PoolState
    from kvtui.block_order import OrderKeeper
    from kvtui.glyphs import Glyphs
    from kvtui.palette import Palette

_FEWEST_CELLS = 24
"""Beside the words; where there is no room for so many, the words are left out."""


class _Shown(NamedTuple):
    """What the line looks like: equal only where the line looks equal."""

    codes: bytes
    first: int
    stop: int
    words: str
    width: int


class Minimap:
    """Keeps the counts of the whole pool in as many cells as fit, and draws them with the view's part in brackets."""

    def __init__(self) -> None:
        self._mix: BlockMix | None = None
        self._shown: _Shown | None = None

    def forget(self) -> None:
        """Count anew: the state jumped, the order changed, or the line was out of sight."""
        self._mix = self._shown = None

    def take(self, state: PoolState, changed: NDArray[np.int64]) -> None:
        """Take in blocks that changed."""
        if self._mix is not None:
            self._mix.update(state, changed)

    def look_at(
        self, state: PoolState, order: OrderKeeper, num_hues: int, width: int, view: tuple[int, int], words: str
    ) -> bool:
        """Work out the line; whether it looks different.

        Args:
            state: What is counted.
            order: From left to right.
            num_hues: Length of the palette's cycle.
            width: Of the line.
            view: The places in sight, the first and the one after the last.
            words: Said of them, where there is room.
        """
        num_blocks = state.header.num_blocks
        words = words if width >= _FEWEST_CELLS + len(words) else ""
        room = max(1, width - 2 - (len(words) + 2 if words else 0))
        blocks = -(-num_blocks // room)
        num_cells = -(-num_blocks // blocks)
        mix = self._mix
        if mix is None or mix.blocks != blocks or mix.num_cells != num_cells:
            mix = self._mix = BlockMix(state, order, num_hues, blocks, 0, num_cells)
        codes = bc.mix_codes(mix, slice(None), bc.Emphasis())
        first = min(view[0] // blocks, num_cells - 1)
        stop = max(first + 1, min(num_cells, -(-view[1] // blocks)))
        shown = _Shown(codes.tobytes(), first, stop, words, width)
        different = shown != self._shown
        self._shown = shown
        return different

    def strip(self, palette: Palette, glyphs: Glyphs) -> Strip | None:
        """The line, if it was worked out."""
        shown = self._shown
        if shown is None:
            return None
        look = BlockLook(palette, glyphs, roomy=False, stacked=1)
        line = Line(shown.width, palette.blank)
        codes = np.frombuffer(shown.codes, np.uint16).tolist()
        for number, code in enumerate(codes):
            if number == shown.first:
                line.add("[", palette.strong)
            text, style = look.cell(code)
            inside = shown.first <= number < shown.stop
            line.add(text, style if inside else palette.shade(style, 0.6))
            if number == shown.stop - 1:
                line.add("]", palette.strong)
        if shown.words:
            line.right([(shown.words, palette.muted)])
        return line.strip()

    def place_at(self, x: int) -> int | None:
        """The place in the order that a column of the line stands for."""
        if self._shown is None or self._mix is None:
            return None
        x -= (x > self._shown.first) + (x > self._shown.stop)
        return x * self._mix.blocks if 0 <= x < self._mix.num_cells else None
