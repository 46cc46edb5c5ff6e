"""The physical blocks: one cell a block, its hue the owner, its glyph the state; or one cell for many, and their mix.

Drawing follows Textual's Line API. What is in sight becomes numbers, computed with numpy, and what differs from the
numbers drawn last is written to the terminal; a pool's size plays no part in it. `kvtui.block_layout` says where blocks
are drawn, `block_order` in which order, `block_codes` and `block_look` what they look like.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from rich.segment import Segment
from textual.geometry import Size
from textual.message import Message
from textual.strip import Strip

from kvtui import block_codes as bc
from kvtui.block_flash import Flash, changes_of
from kvtui.block_layout import BlockLayout, Scale, fitting_level, lay_out, levels_for
from kvtui.block_look import BlockLook, supports_pixels
from kvtui.block_mix import BlockMix
from kvtui.block_order import ADDRESS, OWNER, OrderKeeper
from kvtui.ready_strip import Ink, ReadyStrip, segments_of
from kvtui.view import Panel, View
from kvtui.widgets.minimap import Minimap

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray
    from textual import events

    from engine.trace.events import StepTrace
    from kvtui.paint import Painter

_LINES_FOR_A_MINIMAP = 4
_MOST_CELLS_COUNTED = 1 << 16
"""Up to so many cells are counted all; of more, those in sight."""


class _Window(NamedTuple):
    """The part of the grid in sight: its layout, the line at the top, the first row, and the one after the last."""

    layout: BlockLayout
    top: int
    first: int
    stop: int

    @property
    def units(self) -> tuple[int, int]:
        """The cells (or pixels) in sight."""
        per_row = self.layout.units_per_row
        return self.first * per_row, min(self.stop * per_row, self.layout.num_units)

    @property
    def lines(self) -> NDArray[np.int64]:
        """By row in sight, its line counted from the top."""
        return np.arange(self.first, self.stop) * self.layout.level.pitch - self.top


class BlockGrid(Panel):
    """Every block of the pool, at a scale of the user's choice: what is drawn.

    `kvtui.widgets.block_moves.MovableGrid` adds the keys and the mouse.
    """

    class Rescaled(Message):
        """Scale or order are others than before: what stands around the grid tells of them."""

    DEFAULT_CSS = """
    BlockGrid { scrollbar-size-vertical: 1; overflow-x: hidden; }
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(id="blocks")
        self._clock = clock
        self._layout_now: BlockLayout | None = None
        self._zoom = 0
        self._pixels = False
        self._cursor: int | None = None
        self._order = OrderKeeper(clock)
        self._flash = Flash(0)
        self._mix: BlockMix | None = None
        self._minimap = Minimap()
        self._mapped = False
        self._height = 0
        """Lines of the panel as it was laid out. Asking Textual for it costs as much as drawing a row."""
        self._window: _Window | None = None
        self._units: NDArray[np.uint16] = np.zeros(0, dtype=np.uint16)
        self._chars: NDArray[np.uint32] = np.zeros((0, 0), dtype=np.uint32)
        self._addresses: list[tuple[str, bool]] = []
        self._addressed: tuple[_Window, str, int | None] | None = None
        self._look_now: BlockLook | None = None
        self._ink: Ink | None = None

    @property
    def blocks_per_cell(self) -> int:
        """How many blocks a cell stands for at the present zoom."""
        return self._layout_now.level.blocks_per_cell if self._layout_now is not None else 1

    @property
    def scale(self) -> Scale:
        """What a cell is at the present zoom."""
        if self._layout_now is None:
            return Scale()
        level = self._layout_now.level
        return Scale(level.blocks_per_cell, level.stacked, level.cell > 1)

    @property
    def order(self) -> str:
        """The order in use, one of `kvtui.block_order.ORDERS`."""
        return self._order.order

    @property
    def flashing(self) -> bool:
        """Whether something is due without anything happening: a light to put out, an order to bring up to date."""
        return bool(self._flash) or (self.view is not None and self._order.stale(self.view.state))

    # -- taking views ------------------------------------------------------------------------------------------------

    def update_view(self, view: View, steps: Sequence[StepTrace], reset: bool) -> None:
        """Take a new view; see `Panel`."""
        old, self.view = self.view, view
        self._cursor = view.selected_block
        state, paused = view.state, view.source.paused
        num_blocks = state.header.num_blocks
        anew = reset or old is None or len(self._flash.kinds) != num_blocks
        if anew:
            self._flash = Flash(num_blocks)
            self._look_now = None
        now = self._clock()
        changed, kinds = changes_of(steps, num_blocks)
        dirty = [changed]
        if steps and paused:
            dirty.append(self._flash.put_out(float("inf")))
        if not reset or len(steps) == 1:
            dirty.append(self._flash.light_up(changed, kinds, now))
        if not paused:
            dirty.append(self._flash.put_out(now))
        if self._order.keep(state, at_once=paused, jumped=anew) or anew:
            self._forget_counts()
        elif len(changed):
            if self._mix is not None:
                self._mix.update(state, changed)
            self._minimap.take(state, changed)
        if anew:
            self._lay_out()
        if old is not None:
            self._follow_selection(old, view)
        alike = old is not None and (old.selected_block, old.selected_request, old.selected_blocks) == (
            view.selected_block,
            view.selected_request,
            view.selected_blocks,
        )
        self._recode(np.concatenate(dirty) if steps and alike and not anew else None)

    def _follow_selection(self, old: View, view: View) -> None:
        """Bring into sight what was just selected elsewhere."""
        if view.selected_block is not None and view.selected_block != old.selected_block:
            self.reveal(view.selected_block)
        elif view.selected_request is not None and view.selected_request != old.selected_request:
            self._reveal_any([block for block in view.state.table(view.selected_request) if block >= 0])
        elif view.selected_prefix != old.selected_prefix:
            self._reveal_any(view.selected_blocks)

    def _reveal_any(self, blocks: Sequence[int]) -> None:
        if blocks and not any(self._in_sight(block) for block in blocks[:4096]):
            self.reveal(blocks[0])

    def _forget_counts(self) -> None:
        self._mix = None
        self._minimap.forget()
        self._window = None

    # -- layout ------------------------------------------------------------------------------------------------------

    @property
    def _room(self) -> Size:
        """Cells for the grid, a scrollbar's included."""
        if not self.is_attached:
            return self.size
        size = self.scrollable_content_region.size
        return Size(size.width + self.scrollbar_size_vertical, size.height)

    def _lay_out(self) -> None:
        if self.view is None:
            return
        room = self._room
        self._height = room.height
        width, height = max(1, room.width), max(1, room.height)
        num_blocks = self.view.state.header.num_blocks
        pixels = self._pixels and supports_pixels(self.view.palette, self.view.glyphs)
        levels = levels_for(num_blocks, pixels)
        fitting = fitting_level(num_blocks, width, height, pixels)
        self._zoom = max(-fitting, min(self._zoom, len(levels) - 1 - fitting))
        level = levels[fitting + self._zoom]
        layout = lay_out(num_blocks, level, width, height)
        taller = layout.num_lines > height
        if taller:
            width = max(1, width - self.styles.scrollbar_size_vertical)
            layout = lay_out(num_blocks, level, width, height)
        self._mapped = taller and height >= _LINES_FOR_A_MINIMAP
        if layout != self._layout_now:
            self._layout_now = layout
            self._look_now = None
            self._mix = None
            if self.is_attached:
                self.post_message(self.Rescaled())
        if not self._mapped:
            self._minimap.forget()
        self._window = None
        self.virtual_size = Size(width, layout.num_lines + self._mapped)

    @property
    def _num_lines(self) -> int:
        """Lines of the panel that show blocks."""
        return max(0, self._height - self._mapped)

    def _in_sight(self, block: int) -> bool:
        if self._layout_now is None:
            return False
        line = self._layout_now.line_of_block(self._order.place(block)) - self.scroll_offset.y
        return 0 <= line < self._num_lines

    def reveal(self, block: int) -> None:
        """Bring a block's row into sight."""
        if self._layout_now is not None and not self._in_sight(block):
            line = self._layout_now.line_of_block(self._order.place(block))
            self.scroll_to(y=max(0, line - self._num_lines // 2), animate=False, force=True)

    def on_resize(self, _event: events.Resize) -> None:
        """Lay the grid out for its new size."""
        self._lay_out()
        self._recode()

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        """Draw what has come into sight."""
        super().watch_scroll_y(old_value, new_value)
        if round(old_value) != round(new_value):
            self._recode()

    # -- what is in sight, as numbers --------------------------------------------------------------------------------

    def _recode(self, dirty: NDArray[np.int64] | None = None) -> None:
        """Work out what is in sight and have what looks different drawn.

        Args:
            dirty: Blocks that may look different, where nothing else does; None: anything may.
        """
        view, layout = self.view, self._layout_now
        if view is None or layout is None:
            return
        top = self.scroll_offset.y
        window = _Window(layout, top, *layout.rows_between(top, self._num_lines))
        same = window == self._window
        self._window = window
        start, stop = window.units
        num_hues = len(view.palette.hues)
        if layout.level.blocks == 1:
            which = self._order.between(start, stop)
            self._units = bc.block_codes(view.state, which, num_hues, self._emphasis(start, stop, which))
        else:
            mix = self._counted(start, stop)
            emphasis = self._emphasis(start, stop, None)
            if same and dirty is not None and emphasis.selected is None:
                self._recode_cells(mix, dirty, start, emphasis)
            else:
                self._units = bc.mix_codes(mix, slice(start - mix.first, stop - mix.first), emphasis)
        chars = bc.char_codes(self._units, window.stop - window.first, layout)
        told = (window, self._order.order, view.selected_block)
        fixed = same and told == self._addressed and self._order.order == ADDRESS
        self._addressed = told
        self._show(chars, self._addresses if fixed else self._addresses_in(window), same)
        if self._mapped:
            self._look_at_map(window)

    def _recode_cells(self, mix: BlockMix, dirty: NDArray[np.int64], start: int, emphasis: bc.Emphasis) -> None:
        """Work out those cells in sight that some blocks lie in."""
        sought = np.zeros(len(self._units), dtype=np.bool_)
        cells = self._order.places_of(dirty) // mix.blocks - start
        sought[cells[(cells >= 0) & (cells < len(sought))]] = True
        cells = np.flatnonzero(sought)
        at = np.flatnonzero(cells == emphasis.cursor)
        part = bc.Emphasis(
            flash=None if emphasis.flash is None else emphasis.flash[cells],
            cursor=int(at[0]) if emphasis.cursor >= 0 and len(at) else -1,
        )
        self._units[cells] = bc.mix_codes(mix, cells + (start - mix.first), part)

    def _counted(self, start: int, stop: int) -> BlockMix:
        """Counts of the cells in sight, made where they are missing."""
        assert self.view is not None
        assert self._layout_now is not None
        mix = self._mix
        if mix is None or not mix.covers(start, stop):
            everything = self._layout_now.num_units <= _MOST_CELLS_COUNTED
            first, num_cells = (0, self._layout_now.num_units) if everything else (start, stop - start)
            num_hues, blocks = len(self.view.palette.hues), self._layout_now.level.blocks
            mix = self._mix = BlockMix(self.view.state, self._order, num_hues, blocks, first, num_cells)
        return mix

    def _emphasis(self, start: int, stop: int, which: slice | NDArray[np.int64] | None) -> bc.Emphasis:
        """What stands out among the cells from start to stop.

        Args:
            start: The first cell.
            stop: The one after the last.
            which: The blocks of the cells, where each is one block.
        """
        assert self.view is not None
        assert self._layout_now is not None
        view, order, blocks = self.view, self._order, self._layout_now.level.blocks
        flash: NDArray[np.uint8] | None = None
        if self._flash and which is not None:
            flash = self._flash.kinds[which]
        elif self._flash:
            lit = self._flash.lit
            cells = order.places_of(lit) // blocks - start
            inside = (cells >= 0) & (cells < stop - start)
            flash = np.zeros(stop - start, dtype=np.uint8)
            np.maximum.at(flash, cells[inside], self._flash.kinds[lit[inside]])
        selected: NDArray[np.int64] | None = None
        if view.selected_request is not None:
            table = np.array(view.state.table(view.selected_request), dtype=np.int64)
            cells = order.places_of(table[table >= 0]) // blocks - start
            selected = cells[(cells >= 0) & (cells < stop - start)]
        elif view.selected_prefix is not None:
            cells = order.places_of(np.array(view.selected_blocks, dtype=np.int64)) // blocks - start
            selected = cells[(cells >= 0) & (cells < stop - start)]
        cursor = -1
        if view.selected_block is not None and view.selected_block < view.state.header.num_blocks:
            cell = order.place(view.selected_block) // blocks
            cursor = cell - start if start <= cell < stop else -1
        hue = bc.OWN_HUES if view.selected_request is None else view.selected_request % len(view.palette.hues)
        return bc.Emphasis(flash, selected, hue, cursor)

    def _addresses_in(self, window: _Window) -> list[tuple[str, bool]]:
        """What stands before each row in sight, and whether the cursor is in the row."""
        assert self.view is not None
        layout = window.layout
        if not layout.gutter:
            return []
        per_row = layout.units_per_row * layout.level.blocks
        cursor = self.view.selected_block
        at = -1 if cursor is None else self._order.place(cursor) // per_row
        return [
            (f"{text if len(text) < layout.gutter else '':>{layout.gutter - 1}} ", row == at)
            for row, text in ((row, self._address(row * per_row)) for row in range(window.first, window.stop))
        ]

    def _address(self, place: int) -> str:
        """What stands before the row that begins at a place of the order."""
        assert self.view is not None
        if self._order.order == ADDRESS:
            return str(place)
        state, block = self.view.state, self._order.block(place)
        if self._order.order == OWNER:
            owner = int(state.owner[block])
            return f"#{owner}" if owner >= 0 else "cached" if state.key[block] else "free"
        touched = int(state.touched[block])
        return f"@{touched}" if touched >= 0 else ""

    def _look_at_map(self, window: _Window) -> None:
        assert self.view is not None
        view, blocks = self.view, window.layout.level.blocks
        num_blocks = view.state.header.num_blocks
        first, stop = (unit * blocks for unit in window.units)
        stop = min(stop, num_blocks)
        words = f"{first:,} to {stop - 1:,} of {num_blocks:,}"
        width, hues = window.layout.width, len(view.palette.hues)
        if self._minimap.look_at(view.state, self._order, hues, width, (first, stop), words):
            self.refresh_lines(window.top + self._num_lines)

    # -- drawing -----------------------------------------------------------------------------------------------------

    @property
    def _look(self) -> BlockLook:
        look = self._look_now
        if look is None:
            assert self.view is not None
            look = BlockLook(self.view.palette, self.view.glyphs, self.scale.roomy, self.scale.pixels)
            self._look_now = look
            filters = () if not self.is_attached else self.get_line_filters()
            self._ink = Ink(look.segment, filters, self.background_colors[1], self.app.console)
        return look

    def _show(self, chars: NDArray[np.uint32], addresses: list[tuple[str, bool]], same: bool) -> None:
        """Have drawn what looks different from what was drawn last."""
        old, self._chars = self._chars, chars
        old_addresses, self._addresses = self._addresses, addresses
        if not same or old.shape != chars.shape or len(addresses) != len(old_addresses):
            self.refresh()
            return
        assert self._window is not None
        lines = self._window.lines
        differs = (old != chars).any(axis=1)
        moved = []
        if addresses is not old_addresses:
            moved = [row for row, address in enumerate(addresses) if address != old_addresses[row]]
            differs[moved] = True
        rows = np.flatnonzero(differs)
        if not len(rows):
            return
        painter: Painter | None = getattr(self.app, "painter", None) if self.is_attached else None
        place = painter.place_of(self) if painter is not None and self._fits else None
        if painter is None or place is None:
            for line in lines[rows].tolist():
                self.refresh_lines(line + self._window.top)
            return
        _ = self._look
        assert self._ink is not None
        x, y = place
        text = [f"\x1b[{y + lines[row] + 1};{x + 1}H{self._ink.ansi(self._address_segment(row))}" for row in moved]
        text.append(self._ink.changes(old, chars, (x + self._window.layout.gutter, y), lines))
        painter.write(self, (int(lines[rows[0]]), int(lines[rows[-1]])), "".join(text))

    @property
    def _fits(self) -> bool:
        """Whether a row is not wider than the panel."""
        assert self._layout_now is not None
        used = self._layout_now.gutter + len(self._layout_now.cell_of_char)
        return used <= self._layout_now.width

    def render_line(self, y: int) -> Strip:
        """One line, in the panel's coordinates."""
        view, layout = self.view, self._layout_now
        region = self.scrollable_content_region
        if view is None or layout is None:
            return Strip.blank(region.width)
        if self._window is None or self._window.layout is not layout or self._window.top != self.scroll_offset.y:
            self._recode()
        blank = Strip.blank(region.width, view.palette.blank)
        if self._mapped and y == self._num_lines:
            strip = self._minimap.strip(view.palette, view.glyphs) or blank
            return strip.adjust_cell_length(region.width, view.palette.blank)
        window = self._window
        row = layout.row_of_line(y + self.scroll_offset.y)
        if window is None or row is None or not window.first <= row < window.stop:
            return blank
        used = layout.gutter + len(layout.cell_of_char)
        codes = self._chars[row - window.first]
        before = [self._address_segment(row - window.first)] if layout.gutter else []
        after = [Segment(" " * (region.width - used), view.palette.blank)] if used < region.width else []
        look = self._look
        assert self._ink is not None
        strip = ReadyStrip(
            lambda: [*before, *segments_of(codes, look.segment), *after],
            partial(self._ansi_of, self._ink, before, codes, after),
            max(used, region.width),
        )
        return strip.crop(0, region.width) if used > region.width else strip

    @staticmethod
    def _ansi_of(ink: Ink, before: list[Segment], codes: NDArray[np.uint32], after: list[Segment]) -> str:
        return ink.ansi(*before) + ink.row(codes) + ink.ansi(*after)

    def _address_segment(self, row: int) -> Segment:
        assert self.view is not None
        text, here = self._addresses[row]
        return Segment(text, self.view.palette.accent if here else self.view.palette.faint)
