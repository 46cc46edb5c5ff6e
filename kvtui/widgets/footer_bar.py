"""The keys that matter now, on the last line; each can be clicked."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kvtui.widgets.line import Line
from kvtui.widgets.line_panel import LinePanel

if TYPE_CHECKING:
    from collections.abc import Mapping

    from textual import events
    from textual.strip import Strip

    from kvtui.view import View


class Hint(NamedTuple):
    """A key as it is shown, what it does in a word or two, and the app's action behind it."""

    key: str
    word: str
    action: str


class FooterBar(LinePanel, can_focus=False):
    """Hints from left to right; those that do not fit are left out, the way out and the help last of all."""

    DEFAULT_CSS = """
    FooterBar { height: 1; dock: bottom; }
    """

    def __init__(self) -> None:
        super().__init__(id="footer")
        self._places: list[tuple[int, int, str]] = []
        self.goes_back = False
        """Whether escape leads back to another panel."""
        self.panel = "blocks"
        """Id of the panel that has the focus."""

    def hints(self, view: View) -> list[Hint]:
        """What can be done, the most useful first."""
        glyphs, source = view.glyphs, view.source
        arrows = f"{glyphs.arrow_left} {glyphs.arrow_right}"
        hints = [Hint("q", "quit", "quit"), Hint("?", "help", "help")]
        if source.live:
            engine = Hint("space", "run engine" if source.engine_paused else "pause engine", "toggle_pause")
            if source.looking_back:
                hints.append(Hint("L", "live", "seek_end"))
                hints.append(Hint(arrows, "step the past", "step(1)"))
                hints.append(Hint("r", "play" if source.paused else "hold", "toggle_play"))
                hints.append(engine)
            else:
                hints.append(engine)
                hints.append(Hint(glyphs.arrow_left, "look back", "step(-1)"))
                hints.append(Hint(glyphs.arrow_right, "step engine", "step(1)"))
        else:
            hints.append(Hint("space", "resume" if source.paused else "pause", "toggle_pause"))
            hints.append(Hint(arrows, "step", "step(1)"))
            hints.append(Hint("[ ]", "speed", "faster"))
        if source.looking_back or not source.live:
            hints.append(Hint(", .", "marks", "mark(1)"))
        hints.append(Hint("/", "find", "find"))
        hints.append(Hint("tab", "panels", "next_panel"))
        if view.fed:
            hints.append(Hint("w", "requests", "hold_feed"))
        if source.live:
            hints.append(Hint("[ ]", "speed", "faster"))
        if view.selected_prefix is not None:
            hints.insert(3, Hint("enter", "its requests", "prefix_request"))
        elif self.panel == "requests":
            hints.insert(3, Hint("enter", "inspect", "inspect_request"))
        if self.goes_back:
            hints.insert(3, Hint("esc", "back", "deselect"))
        elif any(x is not None for x in (view.selected_request, view.selected_block, view.selected_prefix)):
            hints.append(Hint("esc", "deselect", "deselect"))
        else:
            hints.append(Hint("hjkl" if self.panel == "blocks" else "h", "pick a block", "pick_block"))
        hints.extend([Hint("ctrl+p", "commands", "command_palette"), Hint("t", "theme", "next_theme")])
        hints.extend([Hint("7", "prefix tree", "panel(7)"), Hint("8", "old way", "panel(8)")])
        hints.append(Hint("F", "formulas", "formulas"))
        hints.extend([Hint("+ -", "zoom", "grid_zoom(-1)"), Hint("o", "order", "grid_order")])
        hints.append(Hint("e", "evicted next", "mark_next"))
        return hints

    def rows(self, view: View, width: int, height: int) -> list[tuple[Hint, ...]]:
        """The hints that fit; the way out and the help move to the end, where one looks for them."""
        own: Mapping[str, str] = getattr(self.app, "own_keys", {})
        fitting: list[Hint] = []
        used = 1
        for default in self.hints(view):
            hint = default._replace(key=own.get(default.action, default.key))
            used += len(hint.key) + len(hint.word) + 4
            if used - 2 > width:
                break
            fitting.append(hint)
        return [(*fitting[2:], *reversed(fitting[:2]))]

    def draw(self, view: View, key: tuple[Hint, ...], width: int) -> Strip:  # type: ignore[override]
        """Keys stand out, words explain."""
        palette = view.palette
        line = Line(width, palette.raised).add(" ", palette.raised)
        places: list[tuple[int, int, str]] = []
        for hint in key:
            start = width - line.room
            line.add(hint.key, palette.accent + palette.raised).add(f" {hint.word}", palette.muted + palette.raised)
            places.append((start, width - line.room, hint.action))
            line.add("   ", palette.raised)
        self._places = places
        return line.strip()

    async def on_click(self, event: events.Click) -> None:
        """Do what was clicked."""
        for start, stop, action in self._places:
            if start <= event.x < stop:
                await self.app.run_action(action)
