"""What every panel is given, and what it answers with: the seam between the app and its panels."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import compress
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np
from textual.binding import Binding
from textual.geometry import Size
from textual.message import Message
from textual.scroll_view import ScrollView

from engine.trace.marks import ALL_KINDS
from kvtui.names import Names

if TYPE_CHECKING:
    from collections.abc import Sequence

    from textual.binding import BindingType
    from textual.filter import LineFilter

    from engine.trace.events import StepTrace
    from engine.trace.state import PoolState
    from kvtui.glyphs import Glyphs
    from kvtui.history import History
    from kvtui.palette import Palette
    from kvtui.sources.source import Source


@dataclass(frozen=True, slots=True)
class View:
    """One moment of the session as every panel sees it. Panels read it and never change it.

    Attributes:
        source: For its position, length, speed, `live` and `paused`.
        state: `source.state`: the fold.
        history: Series over the steps.
        palette: Hue says who.
        glyphs: Glyph says what.
        selected_request: All panels dim the others; None: nothing is selected.
        selected_block: None: nothing is selected.
        selected_prefix: Content key of a prefix; None: none is selected. Then no request and no block is.
        selected_blocks: The blocks that hold it: they stay lit.
        next_blocks: The blocks that are taken next, the first one first; empty where they are not to be marked.
        running: Requests in the batch of the last step.
        listen_url: Where requests can be sent to; None where nobody listens.
        fed: What brings requests by itself, what it does and the key that holds it; empty where nothing comes.
        names: What the requests are called.
        mark_kinds: The kinds of marks that are shown on the position bar, as bits; see `engine.trace.marks`.
    """

    source: Source
    state: PoolState
    history: History
    palette: Palette
    glyphs: Glyphs
    selected_request: int | None = None
    selected_block: int | None = None
    selected_prefix: int | None = None
    selected_blocks: tuple[int, ...] = ()
    next_blocks: tuple[int, ...] = ()
    running: frozenset[int] = frozenset()
    listen_url: str | None = None
    fed: str = ""
    names: Names = field(default_factory=Names)
    mark_kinds: int = ALL_KINDS


class RequestSelected(Message):
    """The user picked a request (or none) in a panel; the app answers with a new view.

    Attributes:
        request: Which.
        jump: Whether the user wants to be taken to it, out of the panel.
        inspect: Whether the user wants to read about it.
    """

    def __init__(self, request: int | None, *, jump: bool = False, inspect: bool = False) -> None:
        super().__init__()
        self.request = request
        self.jump = jump
        self.inspect = inspect


class Prefix(NamedTuple):
    """A prefix that was picked.

    Attributes:
        key: Content key of a block in it.
        blocks: The blocks that hold it.
        contents: What each of them holds, as content keys.
    """

    key: int
    blocks: tuple[int, ...]
    contents: tuple[int, ...]

    def blocks_in(self, state: PoolState) -> tuple[int, ...]:
        """Those of the blocks that hold the same in this state."""
        if not self.blocks:
            return ()
        same = state.key[np.array(self.blocks)] == np.array(self.contents)
        return self.blocks if same.all() else tuple(compress(self.blocks, same.tolist()))


class PrefixSelected(Message):
    """The user picked a prefix (or none) in a panel; the app answers with a new view."""

    def __init__(self, prefix: Prefix | None) -> None:
        super().__init__()
        self.prefix = prefix


class BlockSelected(Message):
    """The user picked a block (or none) in a panel; the app answers with a new view."""

    def __init__(self, block: int | None) -> None:
        super().__init__()
        self.block = block


class Panel(ScrollView, can_focus=True, inherit_bindings=False):
    """A part of the screen that draws the view, one line at a time.

    The app calls `update_view` at its frame rate and only when something changed. A panel keeps the view, works out
    which of its rows look different and refreshes those (`refresh_lines`), not itself.

    Strips carry the palette's background themselves: the Line API adds none.
    """

    # Arrows to the sides belong to the session's time, not to the panel; so do home and end, except in a long list.
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "scroll_up", "scroll up", show=False, id="panel.up"),
        Binding("down,j", "scroll_down", "scroll down", show=False, id="panel.down"),
        Binding("pageup", "page_up", "page up", show=False, id="panel.page-up"),
        Binding("pagedown", "page_down", "page down", show=False, id="panel.page-down"),
    ]

    view: View | None = None

    def get_line_filters(self) -> Sequence[LineFilter]:
        """None where the strips hold exact colours already: the filters are over half the cost of a frame."""
        palette = self.view.palette if self.view is not None else None
        return [] if palette is not None and not palette.ansi and not palette.mono else self.app.get_line_filters()

    @property
    def size(self) -> Size:
        """Of the content, worked out from the panel's own: asking the compositor takes as long as drawing a line."""
        outer, gutter = self._size, self.styles.gutter
        return Size(max(0, outer.width - gutter.width), max(0, outer.height - gutter.height))

    def refresh_lines(self, y_start: int, line_count: int = 1) -> None:
        """Have lines drawn again, y counted from the top of what can be scrolled to; the short way where it is open."""
        self.refresh_rows(range(y_start, y_start + line_count))

    def refresh_rows(self, rows: Sequence[int]) -> None:
        """Have some lines drawn again, counted likewise."""
        painter = getattr(self.app, "painter", None) if self.is_attached else None
        top, height = self.scroll_offset.y, self.size.height
        inside = all(0 <= y - top < height for y in rows)
        first = self.gutter.top - top
        if painter is None or not inside or not painter.take(self, [y + first for y in rows]):
            for y in rows:
                super().refresh_lines(y)

    def update_view(self, view: View, steps: Sequence[StepTrace], reset: bool) -> None:
        """Take a new view.

        Args:
            view: What to draw from now on.
            steps: Applied since the last call, oldest first; empty when only the selection, size or theme changed.
            reset: The state jumped, or the theme or glyphs changed: everything drawn before is void.
        """
        raise NotImplementedError
