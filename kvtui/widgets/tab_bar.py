"""The panels as tabs, for a terminal that has no room for all of them at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtui.widgets.line import Line
from kvtui.widgets.line_panel import LinePanel

if TYPE_CHECKING:
    from textual import events
    from textual.strip import Strip

    from kvtui.view import View

TABS = ("Blocks", "Requests", "Pool", "Batch", "Inspector", "Log", "Tree", "Old way", "Math")
"""In the order of the keys 1 to 9."""

_SHORT = ("Blk", "Req", "Pool", "Bat", "Insp", "Log", "Tree", "Old", "Math")
"""Where the terminal is too narrow for whole names."""


_AROUND = 3
"""Cells of a tab beside its name; one more in front where there is room."""


def _names(width: int) -> tuple[tuple[str, ...], str]:
    """The names, and what stands in front of each tab."""
    bare = sum(len(name) + _AROUND for name in TABS)
    return (TABS, " ") if bare + len(TABS) <= width + 1 else (TABS, "") if bare <= width + 1 else (_SHORT, "")


class TabBar(LinePanel, can_focus=False):
    """One line of numbered names; a click or the number opens one."""

    DEFAULT_CSS = """
    TabBar { height: 1; }
    """

    def __init__(self) -> None:
        super().__init__(id="tabs")
        self._current = 0
        self.log_lines = 0

    @property
    def current(self) -> int:
        """The open tab."""
        return self._current

    @current.setter
    def current(self, tab: int) -> None:
        self._current = tab
        self.redraw()

    def rows(self, view: View, width: int, height: int) -> list[tuple[int, int]]:
        """The one line there is."""
        return [(self._current, self.log_lines)]

    def draw(self, view: View, key: tuple[int, int], width: int) -> Strip:  # type: ignore[override]
        """The open tab stands out."""
        palette = view.palette
        line = Line(width, palette.blank)
        names, front = _names(width)
        for i, name in enumerate(names):
            style = palette.strong + palette.selection if i == key[0] else palette.muted
            line.add(f"{front}{i + 1} ", palette.accent + palette.selection if i == key[0] else palette.accent)
            line.add(f"{name} ", style)
        return line.strip()

    async def on_click(self, event: events.Click) -> None:
        """Open the tab under the pointer."""
        x = 0
        names, front = _names(self.size.width)
        for i, name in enumerate(names):
            x += len(front) + len(name) + _AROUND
            if event.x < x:
                await self.app.run_action(f"panel({i + 1})")
                return
