"""A palette as a Textual theme: the same colours for what Textual draws itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from textual.filter import LineFilter
from textual.scrollbar import ScrollBarRender
from textual.theme import BUILTIN_THEMES, Theme

if TYPE_CHECKING:
    from rich.segment import Segment
    from textual.color import Color

    from kvtui.palette import Palette

PREFIX = "kvtui-"
"""In front of a palette's name as a theme's name, so that it cannot be one of Textual's own."""

_VARIABLES = {"kv-border": "border", "kv-focus": "focus", "kv-muted": "muted", "kv-selection": "selection"}


def _css(color: str) -> str:
    return color if color.startswith("#") else f"ansi_{color}"


def variables_of(palette: Palette) -> dict[str, str]:
    """The CSS variables that our style sheet uses beyond Textual's own."""
    variables = dict(BUILTIN_THEMES["ansi-dark"].variables) if palette.ansi else {}
    variables.update({name: _css(palette.colors[role]) for name, role in _VARIABLES.items()})
    variables.update(
        {
            "scrollbar": variables["kv-border"],
            "scrollbar-hover": variables["kv-focus"],
            "scrollbar-active": variables["kv-focus"],
            "scrollbar-background": _css(palette.colors["background"]),
            "scrollbar-background-hover": _css(palette.colors["background"]),
            "scrollbar-background-active": _css(palette.colors["background"]),
            "scrollbar-corner-color": _css(palette.colors["background"]),
        }
    )
    return variables


def textual_theme(palette: Palette) -> Theme:
    """The theme that Textual's own widgets (command palette, input, notices) take their colours from."""
    colors = {role: _css(color) for role, color in palette.colors.items()}
    return Theme(
        name=PREFIX + palette.name,
        primary=colors["accent"],
        secondary=colors["focus"],
        accent=colors["accent"],
        foreground=colors["text"],
        background=colors["background"],
        surface=colors["background"],
        panel=colors["raised"],
        warning=colors["warning"],
        error=colors["error"],
        success=colors["good"],
        dark=palette.dark,
        ansi=palette.ansi,
        variables=variables_of(palette),
    )


class PlainScrollBar(ScrollBarRender):
    """A scroll bar of colour alone: no half blocks, which ASCII does not have."""

    VERTICAL_BARS: ClassVar[list[str]] = [" "] * len(ScrollBarRender.VERTICAL_BARS)
    HORIZONTAL_BARS: ClassVar[list[str]] = [" "] * len(ScrollBarRender.HORIZONTAL_BARS)


class Colorless(LineFilter):
    """Takes every colour away and leaves weight, dimness, underlining and reversal (NO_COLOR)."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        """Segments without colour."""
        return [
            segment if segment.style is None else segment._replace(style=segment.style.without_color)
            for segment in segments
        ]
