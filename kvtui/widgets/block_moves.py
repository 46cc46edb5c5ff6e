"""Keys and mouse of the block grid: cursor, zoom about a block, pan, order, and the map of the pool."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from textual.binding import Binding

from kvtui.block_layout import fitting_level, levels_for
from kvtui.block_look import supports_pixels
from kvtui.block_order import ORDERS
from kvtui.view import BlockSelected
from kvtui.widgets.block_grid import BlockGrid
from kvtui.widgets.wheel import WHEEL_ROWS

if TYPE_CHECKING:
    from textual import events
    from textual.binding import BindingType

_DENSEST_OF_ONE = 3
"""Index of the level at which as many cells as fit are one block each."""


class MovableGrid(BlockGrid):
    """The block grid as a user moves it.

    Keys: `h` `j` `k` `l` and the arrows up and down move the cursor, `+` and `-` zoom about it, `J` and `K` and the
    page keys pan, `0` shows the whole pool, `o` goes around the orders, `p` turns pixels on and off. A click selects,
    the wheel pans, and zooms with ctrl; a press on the map goes there.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("h", "move(-1, 0)", "block to the left", show=False, id="grid.left"),
        Binding("l", "move(1, 0)", "block to the right", show=False, id="grid.right"),
        Binding("k,up", "move(0, -1)", "block above", show=False, id="grid.up"),
        Binding("j,down", "move(0, 1)", "block below", show=False, id="grid.down"),
        Binding("J", "pan(1)", "pan down", show=False, id="grid.pan-down"),
        Binding("K", "pan(-1)", "pan up", show=False, id="grid.pan-up"),
        Binding("plus,equals_sign", "zoom(-1)", "zoom in", show=False, id="grid.zoom-in"),
        Binding("minus", "zoom(1)", "zoom out", show=False, id="grid.zoom-out"),
        Binding("escape", "deselect", "select nothing", show=False, id="grid.deselect"),
    ]

    # -- zoom --------------------------------------------------------------------------------------------------------

    def zoom_by(self, by: int, at: tuple[int, int] | None = None) -> None:
        """Move along the zoom levels, and keep a block in the line where it is.

        Args:
            by: How many levels; negative is closer.
            at: Column and line of the panel: the block there stays; None: the cursor's where it is in sight, else the
                first one.
        """
        if self.view is None or self._layout_now is None:
            return
        place, line = self._anchor(at)
        self._zoom += by
        self._lay_out()
        target = self._layout_now.line_of_block(place) - line
        self.scroll_to(y=max(0, min(target, self.virtual_size.height - self._room.height)), animate=False, force=True)
        self._recode()

    def _anchor(self, at: tuple[int, int] | None) -> tuple[int, int]:
        """The block that stays where it is when zooming, by its place in the order, and its line in the panel."""
        assert self.view is not None
        assert self._layout_now is not None
        layout, top = self._layout_now, self.scroll_offset.y
        cursor = self.view.selected_block
        if at is None and cursor is not None and self._in_sight(cursor):
            place = self._order.place(cursor)
            return place, layout.line_of_block(place) - top
        x, line = (0, 0) if at is None else at
        place_there = layout.block_at(x, line + top)
        if place_there is not None:
            return place_there, line
        row = min(max(0, (line + top) // layout.level.pitch), layout.num_rows - 1)
        place = min(row * layout.units_per_row * layout.level.blocks, layout.num_blocks - 1)
        return place, layout.line_of_block(place) - top

    def action_zoom(self, by: int) -> None:
        """Zoom about the cursor: negative is closer."""
        self.zoom_by(by)

    def show_whole_pool(self) -> None:
        """Go to the roomiest scale at which every block is in sight."""
        self.zoom_by(-self._zoom)

    def go_to(self, block: int) -> None:
        """Bring a block into sight, as a cell of its own."""
        if self.view is None or self._layout_now is None:
            return
        if self.blocks_per_cell > 1:
            fitting = fitting_level(self._layout_now.num_blocks, *self._room, self._pixels_possible)
            self._zoom = _DENSEST_OF_ONE - fitting
            self._lay_out()
            self._recode()
        self.reveal(block)

    # -- pixels and order --------------------------------------------------------------------------------------------

    @property
    def _pixels_possible(self) -> bool:
        return self._pixels and self.view is not None and supports_pixels(self.view.palette, self.view.glyphs)

    def toggle_pixels(self) -> str:
        """Draw cells that stand for many blocks as two pixels, or as a glyph again; says what came of it."""
        if self.view is None or self._layout_now is None:
            return "nothing to draw yet"
        if not supports_pixels(self.view.palette, self.view.glyphs):
            return "pixels need a theme with exact colours, and Unicode"
        self._pixels = not self._pixels
        levels = levels_for(self._layout_now.num_blocks, *self._room, self._pixels)
        closest = _DENSEST_OF_ONE + 1 - levels.index(self._layout_now.level) if self.blocks_per_cell == 1 else 0
        self.zoom_by(closest if self._pixels and len(levels) > _DENSEST_OF_ONE + 1 else 0)
        return "half blocks: two pixels a cell" if self._pixels else "one glyph a cell"

    def next_order(self) -> str:
        """Go around the orders; returns the one chosen."""
        if self.view is None:
            return self.order
        order = ORDERS[(ORDERS.index(self.order) + 1) % len(ORDERS)]
        self._order.choose(order, self.view.state)
        self._forget_counts()
        self._recode()
        if self.view.selected_block is not None:
            self.reveal(self.view.selected_block)
        self.post_message(self.Rescaled())
        return order

    # -- cursor and pan ----------------------------------------------------------------------------------------------

    def action_move(self, dx: int, dy: int) -> None:
        """Move the cursor by cells; the first move puts it on the first block in sight."""
        view, layout, window = self.view, self._layout_now, self._window
        if view is None or layout is None:
            return
        # Keys come faster than the app answers with a view, so the cursor moves here first.
        step = (dx + dy * layout.columns) * layout.level.blocks
        if self._cursor is None:
            place = window.units[0] * layout.level.blocks if window is not None else 0
        else:
            place = self._order.place(self._cursor) + step
        if 0 <= place < view.state.header.num_blocks:
            self._cursor = self._order.block(place)
            self.post_message(BlockSelected(self._cursor))

    def action_pan(self, by: int) -> None:
        """Move half a panel up or down."""
        self._pan(by * max(1, self._num_lines // 2))

    def _pan(self, lines: int) -> None:
        self.scroll_to(y=self.scroll_y + lines, animate=False, force=True)

    def action_page_down(self) -> None:
        """Move a panel down."""
        self._pan(self._num_lines)

    def action_page_up(self) -> None:
        """Move a panel up."""
        self._pan(-self._num_lines)

    def action_deselect(self) -> None:
        """Select nothing."""
        self.post_message(BlockSelected(None))

    # -- mouse -------------------------------------------------------------------------------------------------------

    def on_click(self, event: events.Click) -> None:
        """Select the block under the pointer; nothing where there is none; on the map, go there."""
        offset = event.get_content_offset(self)
        if self._layout_now is None or offset is None:
            return
        if self._mapped and offset.y == self._num_lines:
            place = self._minimap.place_at(offset.x)
            if place is not None:
                line = self._layout_now.line_of_block(place)
                self.scroll_to(y=max(0, line - self._num_lines // 2), animate=False, force=True)
            return
        place = self._layout_now.block_at(offset.x, offset.y + self.scroll_offset.y)
        self.post_message(BlockSelected(None if place is None else self._order.block(place)))

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        """Pan down; with ctrl, zoom out about the pointer."""
        self._wheel(event, 1)

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        """Pan up; with ctrl, zoom in about the pointer."""
        self._wheel(event, -1)

    def _wheel(self, event: events.MouseEvent, by: int) -> None:
        event.stop()
        event.prevent_default()
        offset = event.get_content_offset(self)
        if event.ctrl or event.meta:
            self.zoom_by(by, None if offset is None else (offset.x, min(offset.y, max(0, self._num_lines - 1))))
        else:
            self._pan(by * WHEEL_ROWS)
