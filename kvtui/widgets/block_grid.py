"""The physical blocks: one cell a block, its hue the owner, its glyph the state; or one cell for many, and their mix.

Drawing follows Textual's Line API. What is in sight becomes numbers, computed with numpy, and what differs from the
numbers drawn last is written to the terminal; a pool's size plays no part in it. `kvtui.block_layout` says where blocks
are drawn, `block_order` in which order, `block_codes` and `block_look` what they look like.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from rich.segment import Segment
from textual.geometry import Size
from textual.message import Message
from textual.strip import Strip

from kvtui.block_flash import Flash, changes_of
from kvtui.block_layout import BlockLayout, Scale, fitting_level, lay_out, levels_for
from kvtui.block_look import BlockLook, supports_pixels
from kvtui.block_order import ADDRESS, OrderKeeper
from kvtui.block_sight import Sight, Window
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
        self._sight = Sight(self._order)
        self._minimap = Minimap()
        self._mapped = False
        self._height = 0
        """Lines of the panel as it was laid out. Asking Textual for it costs as much as drawing a row."""
        self._window: Window | None = None
        self._chars: NDArray[np.uint32] = np.zeros((0, 0), dtype=np.uint32)
        self._addresses: list[tuple[str, bool]] = []
        self._addressed: tuple[Window, str, int | None] | None = None
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
        anew = reset or old is None or old.state is not state
        if anew:
            self._flash = Flash(num_blocks)
            self._look_now = None
        now = self._clock()
        # After a jump the steps tell how it came to this, not what differs from what was drawn.
        changed, kinds = changes_of(steps if not anew or len(steps) == 1 else (), state)
        out = [self._flash.put_out(float("inf"))] if steps and paused else []
        lit = self._flash.light_up(changed, kinds, now)
        if not paused:
            out.append(self._flash.put_out(now))
        if self._order.keep(state, at_once=paused, jumped=anew) or anew:
            self._forget_counts()
        elif len(changed):
            self._sight.take(state, changed)
            self._minimap.take(state, changed)
        self._sight.take_lights(self._flash, lit, *out)
        if anew:
            self._lay_out()
        if old is not None:
            self._follow_selection(old, view)
        alike = old is not None and _emphasis_of(old) == _emphasis_of(view)
        if old is not None and old.next_blocks != view.next_blocks:
            out.append(np.array(old.next_blocks + view.next_blocks, dtype=np.int64))
        self._recode(np.concatenate((changed, *out)) if alike and not anew else None)

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
        self._sight.forget()
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
        levels = levels_for(num_blocks, width, height, pixels)
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
            self._sight.forget()
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
        window = Window(layout, top, *layout.rows_between(top, self._num_lines))
        same = window == self._window
        if same and dirty is not None and not len(dirty):
            return
        self._window = window
        chars = self._sight.chars(view, window, self._flash, dirty if same else None)
        told = (window, self._order.order, view.selected_block)
        fixed = same and told == self._addressed and self._order.order == ADDRESS
        self._addressed = told
        self._show(chars, self._addresses if fixed else self._sight.addresses(view, window), same)
        if self._mapped:
            self._look_at_map(window)

    def _look_at_map(self, window: Window) -> None:
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
        moved = []
        if addresses is not old_addresses:
            moved = [row for row, address in enumerate(addresses) if address != old_addresses[row]]
        changed = (old.reshape(-1) != chars.reshape(-1)).nonzero()[0]
        if not len(changed) and not moved:
            return
        painter: Painter | None = getattr(self.app, "painter", None) if self.is_attached else None
        place = painter.place_of(self) if painter is not None and self._fits else None
        if painter is None or place is None:
            for row in sorted({*moved, *(changed // chars.shape[1]).tolist()}):
                self.refresh_lines(int(lines[row]) + self._window.top)
            return
        _ = self._look
        assert self._ink is not None
        x, y = place
        text = [f"\x1b[{y + lines[row] + 1};{x + 1}H{self._ink.ansi(self._address_segment(row))}" for row in moved]
        text.append(self._ink.changes(chars, changed, (x + self._window.layout.gutter, y), lines))
        ends = [*moved, *(int(changed[end]) // chars.shape[1] for end in (0, -1) if len(changed))]
        painter.write(self, (int(lines[min(ends)]), int(lines[max(ends)])), "".join(text))

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


def _emphasis_of(view: View) -> tuple[object, ...]:
    """What of a view changes how blocks look, other than the blocks."""
    selected = (view.selected_block, view.selected_request, view.selected_prefix, view.selected_blocks)
    return (*selected, id(view.palette), id(view.glyphs))
