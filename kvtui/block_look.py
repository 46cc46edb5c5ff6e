"""The glyph and the style behind a code of the block grid."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.segment import Segment
from rich.style import Style

from kvtui import block_codes as bc

if TYPE_CHECKING:
    from kvtui.glyphs import Glyphs
    from kvtui.palette import Palette

_LEAST_SHADE, _MOST_SHADE = 0.3, 1.0
"""Of a pixel's hue: with the fewest slots (or blocks) in use, and with all."""


def supports_pixels(palette: Palette, glyphs: Glyphs) -> bool:
    """Whether two pixels can be stacked in a cell: that needs half blocks and exact colours."""
    return not (glyphs.ascii or palette.mono or palette.ansi)


class BlockLook:
    """What a code looks like in a theme, a glyph set and a level.

    Args:
        palette: The theme.
        glyphs: The glyph set.
        roomy: Cells stand apart: a full one leaves a hair of space above, so that rows stay apart too.
        stacked: Pixels in a cell, 1 or 2.
    """

    def __init__(self, palette: Palette, glyphs: Glyphs, roomy: bool, stacked: int) -> None:
        self.palette, self.glyphs = palette, glyphs
        self._levels = spaced_levels(glyphs) if roomy else glyphs.levels
        self._stacked = stacked

    def segment(self, code: int, run: int) -> Segment:
        """A run of characters of one code."""
        if self._stacked == 2:
            return self._pixels(code & bc.UNIT_MASK, code >> bc.UNIT_BITS, run)
        text, style = self.cell(code)
        return Segment(text * run, style)

    def cell(self, code: int) -> tuple[str, Style]:
        """One character of a cell, and its style."""
        palette, glyphs = self.palette, self.glyphs
        glyph = code & bc.GLYPH_MASK
        if glyph == bc.BLANK:
            return " ", palette.blank
        second = bool(code & bc.SECOND)
        if glyph == bc.FREE:
            text, style = " " if second else glyphs.free, palette.faint
        elif glyph == bc.CACHED:
            text, style = glyphs.cached, palette.cached
        elif glyph == bc.NEXT_FREE:
            text, style = " " if second else glyphs.next_free, palette.accent
        elif glyph == bc.NEXT_CACHED:
            text, style = glyphs.next_cached, palette.warning
        elif glyph == bc.EVICTED:
            text, style = glyphs.evicted, palette.warning
        elif glyph == bc.SWAPPED:
            text, style = glyphs.swapped, palette.warning
        else:
            style = self._hue(code)
            if glyph < bc.SHARED:
                text = self._levels[glyph - bc.LEVEL]
                style = palette.over_cached(style) if code & bc.MOSTLY_CACHED else style
            else:
                text = " " if second else glyphs.many if glyph == bc.MANY else str(glyph - bc.SHARED + 2)
        lit = code & bc.FLASH and not code & bc.DIMMED
        if lit:
            style = palette.lit(style)
        if bc.SHARED <= glyph <= bc.MANY and not (lit and palette.mono):
            style = palette.badge(style)
        if code & bc.CURSOR:
            text, style = (glyphs.marked if bc.LEVEL <= glyph < bc.SHARED else text), palette.cursor
        return text, style

    def _hue(self, code: int) -> Style:
        # Hue n of the cycle is the hue of request n; a selected request n + 1 dims it.
        hue = (code >> bc.HUE_SHIFT) & bc.HUE_MASK
        return self.palette.hue(hue - 1, hue if code & bc.DIMMED else None)

    def _pixels(self, upper: int, lower: int, run: int) -> Segment:
        style = Style(color=self.pixel(upper).color, bgcolor=self.pixel(lower).color)
        return Segment("▀" * run, style)

    def pixel(self, code: int) -> Style:
        """The style whose foreground a pixel has."""
        palette = self.palette
        glyph = code & bc.GLYPH_MASK
        if code & bc.CURSOR:
            return palette.text
        if glyph == bc.BLANK:
            return palette.shade(palette.faint, 0.0)
        if glyph in (bc.EVICTED, bc.SWAPPED, bc.NEXT_CACHED):
            return palette.warning
        if glyph == bc.NEXT_FREE:
            return palette.accent
        if glyph == bc.FREE:
            style = palette.shade(palette.faint, 0.35)
        elif glyph == bc.CACHED:
            style = palette.shade(palette.cached, 0.8)
        else:
            level = min(glyph - bc.LEVEL, bc.NUM_LEVELS - 1) / (bc.NUM_LEVELS - 1)
            style = palette.shade(self._hue(code), _LEAST_SHADE + (_MOST_SHADE - _LEAST_SHADE) * level)
        return palette.lit(style) if code & bc.FLASH and not code & bc.DIMMED else style


def spaced_levels(glyphs: Glyphs) -> str:
    """The levels of cells that stand apart: the fullest is a hair lower."""
    return glyphs.levels if glyphs.ascii else glyphs.levels[:-2] + glyphs.levels[-3] + glyphs.levels[-2]
