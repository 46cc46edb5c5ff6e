"""The mouse wheel, for panels that move a window of their own over more rows than it shows."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from textual import events

WHEEL_ROWS = 3
"""Rows that one notch of the wheel moves."""


class WheelScrolled:
    """Mixed into a panel, in front of its other bases."""

    @abstractmethod
    def scroll_rows(self, rows: int) -> None:
        """Move the window down by so many rows, up where negative, and draw it."""

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
