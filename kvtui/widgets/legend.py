"""What the glyphs of the block grid mean, with how many blocks look so, and its scale: always in sight below it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kvtui import block_codes as bc
from kvtui.block_look import BlockLook, spaced_levels
from kvtui.widgets.line import Line
from kvtui.widgets.line_panel import LinePanel

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.style import Style
    from textual import events
    from textual.strip import Strip

    from kvtui.block_layout import Scale
    from kvtui.view import View


class _Shown(NamedTuple):
    """What the line shows."""

    free: int
    cached: int
    owned: int
    shared: int
    next_free: int
    next_cached: int
    scale: Scale


class Legend(LinePanel, can_focus=False):
    """One line; what does not fit is left out from the right. The signs beside the scale zoom when clicked.

    Args:
        scale: Says what a cell of the grid is.
    """

    DEFAULT_CSS = """
    Legend { height: 1; }
    """

    def __init__(self, scale: Callable[[], Scale]) -> None:
        super().__init__(id="legend")
        self._scale = scale
        self._zooms: tuple[int, int] = (-1, -1)

    def rows(self, view: View, width: int, height: int) -> list[_Shown]:
        """The one line there is."""
        state = view.state
        evicted = sum(1 for block in view.next_blocks if state.key[block])
        taken = len(view.next_blocks) - evicted
        used = state.used - state.shared
        return [_Shown(state.free, state.cached, used, state.shared, taken, evicted, self._scale())]

    def draw(self, view: View, key: _Shown, width: int) -> Strip:  # type: ignore[override]
        """Scale first, then glyph, word and count of each state."""
        palette, glyphs, scale = view.palette, view.glyphs, key.scale
        line = Line(width, palette.blank)
        line.add("-", palette.accent).gap()
        start = 0
        line.add(scale_words(scale), palette.strong).gap()
        self._zooms = (start, width - line.room)
        line.add("+", palette.accent).gap(2)
        many = scale.blocks > 1
        free, cached, used = _looks(scale, view)
        pixel = "▀" if scale.pixels > 1 else ""
        marked = [
            (pixel or glyphs.next_free, palette.accent, "taken next", key.next_free),
            (pixel or glyphs.next_cached, palette.warning, "evicted next", key.next_cached),
        ]
        entries = [
            *(entry for entry in marked if entry[3]),
            (*free, "free", key.free),
            (*cached, "cached", key.cached),
            (*used, "share in use" if many else "in use", key.owned),
            ("" if many else "2", palette.badge(palette.accent), "shared", key.shared),
        ]
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

    async def on_click(self, event: events.Click) -> None:
        """Zoom out on the minus, in on the plus."""
        offset = event.get_content_offset(self)
        if offset is not None and offset.x in self._zooms:
            await self.app.run_action(f"grid_zoom({1 if offset.x == self._zooms[0] else -1})")


def _looks(scale: Scale, view: View) -> list[tuple[str, Style]]:
    """What free, cached and used blocks look like at this scale."""
    palette, glyphs = view.palette, view.glyphs
    if scale.pixels > 1:
        look = BlockLook(palette, glyphs, roomy=False, stacked=scale.pixels)
        return [("▀", look.pixel(bc.FREE)), ("▀", look.pixel(bc.CACHED)), ("▀", palette.accent)]
    shape = spaced_levels(glyphs) if scale.roomy else glyphs.levels
    used = shape[0] + shape[3] + shape[-1]
    return [(glyphs.free, palette.faint), (glyphs.cached, palette.cached), (used, palette.accent)]


def scale_words(scale: Scale) -> str:
    """The scale in words: `1 cell = 64 blocks`."""
    unit, blocks = ("pixel", scale.blocks // scale.pixels) if scale.pixels > 1 else ("cell", scale.blocks)
    return f"1 {unit} = {blocks:,} block{'' if blocks == 1 else 's'}"
