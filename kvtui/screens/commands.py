"""The command palette in ASCII: Textual's own draws an emoji and block characters."""

from __future__ import annotations

from textual.command import CommandPalette, SearchIcon


class AsciiCommandPalette(CommandPalette):
    """Textual's command palette with a plain frame and sign."""

    DEFAULT_CSS = """
    AsciiCommandPalette #--input, AsciiCommandPalette #--input.--list-visible { border: ascii $foreground 50%; }
    AsciiCommandPalette CommandList, AsciiCommandPalette CommandList:focus { border: blank; }
    AsciiCommandPalette LoadingIndicator { display: none; }
    """

    def on_mount(self) -> None:
        """Put a plain sign in front of the line to type in."""
        self.query_one(SearchIcon).icon = ">"
