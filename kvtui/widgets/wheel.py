"""The mouse wheel and the arrows, for panels that move a window of their own over more rows than it shows."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from textual import events
    from textual.geometry import Size

WHEEL_ROWS = 3
"""Rows that one notch of the wheel moves."""


class WheelScrolled:
    """Mixed into a panel, in front of its other bases."""

    if TYPE_CHECKING:

        @property
        def size(self) -> Size:
            """The panel's."""

    @property
    def window_rows(self) -> int:
        """Rows that the window shows."""
        return self.size.height

    @abstractmethod
    def scroll_rows(self, rows: int) -> None:
        """Move the window down by so many rows, up where negative, and draw it."""

    def action_scroll_up(self) -> None:
        """Move the window up by a row."""
        self.scroll_rows(-1)

    def action_scroll_down(self) -> None:
        """Move the window down by a row."""
        self.scroll_rows(1)

    def action_page_up(self) -> None:
        """Move the window up by what it shows."""
        self.scroll_rows(-max(1, self.window_rows))

    def action_page_down(self) -> None:
        """Move the window down by what it shows."""
        self.scroll_rows(max(1, self.window_rows))

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        """Move the window down, and nothing around it."""
        self._wheel(event, WHEEL_ROWS)

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        """Move the window up, and nothing around it."""
        self._wheel(event, -WHEEL_ROWS)

    def _wheel(self, event: events.MouseEvent, rows: int) -> None:
        event.stop()
        event.prevent_default()
        self.scroll_rows(rows)
