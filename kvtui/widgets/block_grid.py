"""The physical blocks: one cell a block, its hue the owner, its glyph the state.

Drawing follows Textual's Line API: codes of the whole pool are computed with numpy, rows whose codes differ from the
last drawn ones are refreshed, and a row's runs of equal codes become segments that are kept for the next time.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from rich.segment import Segment
from textual.binding import Binding
from textual.geometry import Size
from textual.strip import Strip

from engine.trace.events import Op
from kvtui import block_codes as bc
from kvtui.block_layout import BlockLayout, fitting_level, lay_out, levels_for
from kvtui.view import BlockSelected, Panel, View

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray
    from textual import events
    from textual.binding import BindingType

    from engine.trace.events import StepTrace

FLASH_SECONDS = 0.45
"""How long a change stays lit while the session runs; while it is paused, it stays lit."""

_STEPS_WORTH_A_FLASH = 32
_MOST_CACHED_SEGMENTS = 20_000

_FLASH_OF_OP = {
    Op.ALLOCATE: bc.FLASH_CHANGED,
    Op.SHARE: bc.FLASH_CHANGED,
    Op.RELEASE: bc.FLASH_CHANGED,
    Op.EVICT: bc.FLASH_EVICTED,
    Op.SWAP_OUT: bc.FLASH_SWAPPED,
}


class BlockGrid(Panel):
    """Every block of the pool, at a scale at which all of them are visible.

    Keys: `h` `j` `k` `l` and the arrows up and down move the cursor, `+` and `-` zoom. A click selects.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("h", "move(-1, 0)", "block to the left", show=False, id="grid.left"),
        Binding("l", "move(1, 0)", "block to the right", show=False, id="grid.right"),
        Binding("k,up", "move(0, -1)", "block above", show=False, id="grid.up"),
        Binding("j,down", "move(0, 1)", "block below", show=False, id="grid.down"),
        Binding("plus,equals_sign", "zoom(-1)", "zoom in", show=False, id="grid.zoom-in"),
        Binding("minus", "zoom(1)", "zoom out", show=False, id="grid.zoom-out"),
        Binding("escape", "deselect", "select nothing", show=False, id="grid.deselect"),
    ]

    DEFAULT_CSS = """
    BlockGrid { scrollbar-size-vertical: 1; overflow-x: hidden; }
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(id="blocks")
        self._clock = clock
        self._layout_now: BlockLayout | None = None
        self._zoom = 0
        self._cursor: int | None = None
        self._codes: NDArray[np.uint16] = np.zeros((0, 0), dtype=np.uint16)
        self._segments: dict[tuple[int, int], Segment] = {}
        self._flash: NDArray[np.uint8] = np.zeros(0, dtype=np.uint8)
        self._flashes: deque[tuple[float, NDArray[np.int64]]] = deque()
        self._flash_expiry: NDArray[np.float64] = np.zeros(0)

    @property
    def blocks_per_cell(self) -> int:
        """How many blocks a cell stands for at the present zoom."""
        return self._layout_now.level.blocks if self._layout_now is not None else 1

    @property
    def flashing(self) -> bool:
        """Whether something is lit up that will have to be put out."""
        return bool(self._flashes)

    def update_view(self, view: View, steps: Sequence[StepTrace], reset: bool) -> None:
        """Take a new view; see `Panel`."""
        old, self.view = self.view, view
        self._cursor = view.selected_block
        num_blocks = view.state.header.num_blocks
        if reset or old is None or len(self._flash) != num_blocks:
            self._flash = np.zeros(num_blocks, dtype=np.uint8)
            self._flash_expiry = np.zeros(num_blocks)
            self._flashes.clear()
            self._segments.clear()
            self._lay_out()
        now = self._clock()
        if steps and view.source.paused:
            self._put_out(float("inf"))
        if not reset or len(steps) == 1:
            self._light_up(steps, now)
        if not view.source.paused:
            self._put_out(now)
        self._recode()
        if old is not None and view.selected_block is not None and view.selected_block != old.selected_block:
            self._reveal(view.selected_block)

    def _light_up(self, steps: Sequence[StepTrace], now: float) -> None:
        """Mark the blocks that the last steps changed."""
        kinds: dict[int, int] = {}
        flash_of_op = _FLASH_OF_OP
        for step in steps[-_STEPS_WORTH_A_FLASH:]:
            for op, a, b, _ in step.ops:
                kind = flash_of_op.get(op)  # type: ignore[call-overload]
                if kind is not None:
                    if kind > kinds.get(a, 0):
                        kinds[a] = kind
                elif op == Op.COPY or op == Op.SWAP_IN:
                    kinds[b] = bc.FLASH_CHANGED if op == Op.COPY else bc.FLASH_SWAPPED
        if kinds:
            blocks = np.fromiter(kinds.keys(), dtype=np.int64, count=len(kinds))
            inside = (blocks >= 0) & (blocks < len(self._flash))
            self._flash[blocks[inside]] = np.fromiter(kinds.values(), dtype=np.uint8, count=len(kinds))[inside]
            self._flash_expiry[blocks[inside]] = now + FLASH_SECONDS
            self._flashes.append((now + FLASH_SECONDS, blocks[inside]))

    def _put_out(self, now: float) -> None:
        while self._flashes and self._flashes[0][0] <= now:
            _, blocks = self._flashes.popleft()
            self._flash[blocks[self._flash_expiry[blocks] <= now]] = 0

    def _lay_out(self) -> None:
        if self.view is None:
            return
        width, height = self.scrollable_content_region.size if self.is_attached else self.size
        num_blocks = self.view.state.header.num_blocks
        levels = levels_for(num_blocks)
        fitting = fitting_level(num_blocks, max(1, width), max(1, height))
        self._zoom = max(-fitting, min(self._zoom, len(levels) - 1 - fitting))
        level = levels[fitting + self._zoom]
        self._layout_now = lay_out(num_blocks, level, max(1, width), max(1, height))
        if self._layout_now.num_lines > height and not self.show_vertical_scrollbar:
            width -= self.styles.scrollbar_size_vertical
            self._layout_now = lay_out(num_blocks, level, max(1, width), max(1, height))
        self._codes = np.zeros((0, 0), dtype=np.uint16)
        self.virtual_size = Size(width, self._layout_now.num_lines)

    def _recode(self) -> None:
        """Compute what every cell looks like and refresh the rows that look different."""
        view, layout = self.view, self._layout_now
        if view is None or layout is None:
            return
        state, selected = view.state, view.selected_request
        table: NDArray[np.int32] | None = None
        if selected is not None:
            known = state.requests.get(selected)
            table = np.array([b for b in known.table if b >= 0] if known is not None else [], dtype=np.int32)
        num_hues = len(view.palette.hues)
        emphasis = bc.Emphasis(
            flash=self._flash,
            selected_table=table,
            selected_hue=(selected or 0) % num_hues,
            cursor=-1 if view.selected_block is None else view.selected_block,
        )
        flat = bc.cell_codes(state, layout.level.blocks, num_hues, emphasis)
        cells = np.zeros(layout.num_rows * layout.columns, dtype=np.uint16)
        cells[: len(flat)] = flat
        codes = cells.reshape(layout.num_rows, layout.columns)
        old, self._codes = self._codes, codes
        if old.shape != codes.shape:
            self.refresh()
            return
        for row in np.flatnonzero((old != codes).any(axis=1)).tolist():
            self.refresh_lines(row * layout.level.pitch)

    def render_line(self, y: int) -> Strip:
        """One line, in the panel's coordinates."""
        view, layout = self.view, self._layout_now
        width = self.scrollable_content_region.width
        if view is None or layout is None:
            return Strip.blank(width)
        row = layout.row_of_line(y + self.scroll_offset.y)
        if row is None or row >= len(self._codes):
            return Strip.blank(width, view.palette.blank)
        segments = [self._address(row)] if layout.gutter else []
        segments.extend(self._row_segments(self._codes[row]))
        used = layout.gutter + len(layout.cell_of_char)
        if used < width:
            segments.append(Segment(" " * (width - used), view.palette.blank))
        strip = Strip(segments, max(used, width))
        return strip.crop(0, width) if used > width else strip

    def _address(self, row: int) -> Segment:
        assert self.view is not None
        assert self._layout_now is not None
        layout, palette = self._layout_now, self.view.palette
        first = row * layout.columns * layout.level.blocks
        cursor = self.view.selected_block
        here = cursor is not None and first <= cursor < first + layout.columns * layout.level.blocks
        return Segment(f"{first:>{layout.gutter - 1}} ", palette.accent if here else palette.faint)

    def _row_segments(self, codes: NDArray[np.uint16]) -> list[Segment]:
        """A row as segments: one for each run of equal codes."""
        assert self._layout_now is not None
        cells = self._layout_now.cell_of_char
        chars = np.where(cells >= 0, codes[cells], 0)
        chars[self._layout_now.is_second_char] |= bc.SECOND
        starts = np.concatenate(([0], np.flatnonzero(chars[1:] != chars[:-1]) + 1))
        runs = np.diff(starts, append=len(chars))
        cache = self._segments
        if len(cache) > _MOST_CACHED_SEGMENTS:
            cache.clear()
        segments = []
        for key in zip(chars[starts].tolist(), runs.tolist(), strict=True):
            segment = cache.get(key)
            if segment is None:
                segment = cache[key] = self._make_segment(*key)
            segments.append(segment)
        return segments

    def _make_segment(self, code: int, run: int) -> Segment:
        assert self.view is not None
        palette, glyphs = self.view.palette, self.view.glyphs
        glyph = code & bc.GLYPH_MASK
        if glyph == bc.BLANK:
            return Segment(" " * run, palette.blank)
        second = bool(code & bc.SECOND)
        hue = (code >> bc.HUE_SHIFT) & bc.HUE_MASK
        if glyph == bc.FREE:
            text, style = " " if second else glyphs.free, palette.faint
        elif glyph == bc.CACHED:
            text, style = glyphs.cached, palette.cached
        elif glyph == bc.EVICTED:
            text, style = glyphs.evicted, palette.warning
        elif glyph == bc.SWAPPED:
            text, style = glyphs.swapped, palette.warning
        else:
            # Hue n of the cycle is the hue of request n; a selected request n + 1 dims it.
            style = palette.hue(hue - 1, hue if code & bc.DIMMED else None)
            if glyph < bc.SHARED:
                text = self._level(glyph - bc.LEVEL)
            else:
                text = " " if second else glyphs.many if glyph == bc.MANY else str(glyph - bc.SHARED + 2)
        lit = code & bc.FLASH and not code & bc.DIMMED
        if lit:
            style = palette.lit(style)
        if bc.SHARED <= glyph <= bc.MANY and not (lit and palette.mono):
            style = palette.badge(style)
        if code & bc.CURSOR:
            text, style = (glyphs.marked if bc.LEVEL <= glyph < bc.SHARED else text), palette.cursor
        return Segment(text * run, style)

    def _level(self, level: int) -> str:
        """The glyph of a level. In wide cells a full one leaves a hair of space above, so that rows stay apart."""
        assert self.view is not None
        assert self._layout_now is not None
        levels = self.view.glyphs.levels
        roomy = self._layout_now.level.cell > 1 and not self.view.glyphs.ascii
        return levels[max(0, level - 1)] if roomy and level >= len(levels) - 2 else levels[level]

    def on_resize(self, _event: events.Resize) -> None:
        """Lay the grid out for its new size."""
        self._lay_out()
        self._recode()

    def on_click(self, event: events.Click) -> None:
        """Select the block under the pointer; nothing where there is none."""
        offset = event.get_content_offset(self)
        if self._layout_now is not None and offset is not None:
            self.post_message(BlockSelected(self._layout_now.block_at(offset.x, offset.y + self.scroll_offset.y)))

    def action_move(self, dx: int, dy: int) -> None:
        """Move the cursor by cells; the first move puts it on the first block."""
        view, layout = self.view, self._layout_now
        if view is None or layout is None:
            return
        # Keys come faster than the app answers with a view, so the cursor moves here first.
        step = (dx + dy * layout.columns) * layout.level.blocks
        block = 0 if self._cursor is None else self._cursor + step
        if 0 <= block < view.state.header.num_blocks:
            self._cursor = block
            self.post_message(BlockSelected(block))

    def action_zoom(self, by: int) -> None:
        """Move along the zoom levels: negative is closer."""
        self._zoom += by
        self._lay_out()
        self._recode()
        if self.view is not None and self.view.selected_block is not None:
            self._reveal(self.view.selected_block)

    def action_deselect(self) -> None:
        """Select nothing."""
        self.post_message(BlockSelected(None))

    def _reveal(self, block: int) -> None:
        """Bring a block's row into sight."""
        if self._layout_now is None:
            return
        line, height = self._layout_now.line_of_block(block), self.scrollable_content_region.height
        top = round(self.scroll_y)
        if not top <= line < top + height:
            self.scroll_to(y=max(0, line - height // 2), animate=False)
