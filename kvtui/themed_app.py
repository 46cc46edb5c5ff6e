"""What kvtui's apps have in common: a palette, glyphs, no colour where NO_COLOR asks for none, and how they end."""

from __future__ import annotations

import asyncio
import os
import signal
from threading import Timer
from typing import TYPE_CHECKING

from textual.app import App
from textual.binding import Binding
from textual.scrollbar import ScrollBar, ScrollBarRender

from kvtui.glyphs import choose_glyphs
from kvtui.key_names import shown_keys
from kvtui.palette import Palette, ThemeError, load_palettes
from kvtui.settings import Settings, glyphs_with
from kvtui.terminal import drop_pending_writes, forget_told_size, hung_up, served
from kvtui.themes import PREFIX, Colorless, PlainScrollBar, textual_theme, variables_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from textual.driver import Driver
    from textual.filter import LineFilter

    from kvtui.capture_output import OutputCapture

_HUNG_UP_SECONDS = 1.0
"""Between two looks whether the terminal is still there."""

EXIT_TERMINAL_SECONDS = 1.5
"""How long a quit waits for a terminal that takes nothing."""


class ThemedApp(App[None]):
    """An app that draws with a palette and a set of glyphs.

    Args:
        theme: Name of a theme; goes before the one in the settings.
        ascii_only: Draw with ASCII alone; chosen by itself where the locale knows no Unicode.
        settings: The user's own.
        capture: What keeps the process's output off the screen meanwhile; None without a terminal of its own.
        driver_class: For tests and `run_on_terminal`.

    Attributes:
        exit_reason: Why it ended, where nobody asked for it.
        palette: The theme in use.
        palettes: All themes by name.
        glyphs: The set in use.
        remapped: Id of an action to the user's own keys for it.
        own_keys: The same by the action itself, as the keys are shown.

    Raises:
        ThemeError: There is no such theme.
    """

    DEFAULT_CSS = """
    ThemedApp.-ascii Toast.-information { border-left: ascii $success; }
    ThemedApp.-ascii Toast.-warning { border-left: ascii $warning; }
    ThemedApp.-ascii Toast.-error { border-left: ascii $error; }
    """

    def __init__(
        self,
        *,
        theme: str | None,
        ascii_only: bool,
        settings: Settings | None,
        capture: OutputCapture | None = None,
        driver_class: type[Driver] | None = None,
    ) -> None:
        forget_told_size()
        self.capture = capture
        self.exit_reason: str | None = None
        self._mono = bool(os.environ.get("NO_COLOR"))
        self.palettes = load_palettes(self._mono, settings.themes if settings else None)
        theme = theme or (settings.theme if settings else None)
        if theme is not None and theme not in self.palettes:
            raise ThemeError(f"there is no theme named {theme!r}: choose one of {', '.join(self.palettes)}")
        self.palette: Palette = self.palettes[theme] if theme else next(iter(self.palettes.values()))
        super().__init__(driver_class=driver_class)
        if theme is None and self.console.color_system == "standard" and "ansi" in self.palettes:
            self.palette = self.palettes["ansi"]
        for palette in self.palettes.values():
            self.register_theme(textual_theme(palette))
        self.theme = PREFIX + self.palette.name
        self.glyphs = choose_glyphs(ascii_only or (settings is not None and settings.ascii))
        self.remapped: Mapping[str, str] = {}
        self.own_keys: Mapping[str, str] = {}
        if settings is not None:
            self.glyphs = glyphs_with(settings, self.glyphs)
            self.remap(settings.keys)
        self.set_class(self.glyphs.ascii, "-ascii")
        ScrollBar.renderer = PlainScrollBar if self.glyphs.ascii else ScrollBarRender

    def _print(self, text: str, stderr: bool = False) -> None:
        """Python prints while the app runs; one `Print` message for each would cost a message, so none is sent."""
        if self.capture is not None and not self.is_headless:
            os.write(2 if stderr else 1, text.encode("utf-8", "replace"))
        else:
            super()._print(text, stderr)

    def end_with_terminal(self) -> None:
        """From now on, end by a signal, and when the terminal is gone: there would be nobody to draw for."""
        if self.is_headless:
            return
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, signal.Signals(number))
        if not served():
            self.set_interval(_HUNG_UP_SECONDS, self._look_for_terminal)

    def _on_signal(self, number: signal.Signals) -> None:
        self.leave(128 + number, f"ended by {number.name}")

    def _look_for_terminal(self) -> None:
        if hung_up():
            self.leave(128 + signal.SIGHUP, "ended: the terminal is gone")

    def leave(self, code: int, reason: str | None = None) -> None:
        """Give the terminal back and end with this exit code; the reason is printed once the shell has the screen."""
        if self.exit_reason is None:
            self.exit_reason = reason
        if self.capture is not None and not self.is_headless:
            drop_pending_writes(self._driver)
            watchdog = Timer(EXIT_TERMINAL_SECONDS, os._exit, (code or 1,))
            watchdog.daemon = True
            watchdog.start()
            self.watchdog = watchdog
        self.exit(return_code=code)

    async def action_quit(self) -> None:
        """Leave at once."""
        self.leave(0)

    def redraw(self) -> None:
        """Draw everything anew."""
        raise NotImplementedError

    def get_theme_variable_defaults(self) -> dict[str, str]:
        """Our CSS variables, for themes that do not bring them."""
        return variables_of(self.palette)

    def get_line_filters(self) -> Sequence[LineFilter]:
        """No colour at all where NO_COLOR asks for it."""
        return [Colorless()] if self._mono else super().get_line_filters()

    def remap(self, keys: Mapping[str, str]) -> None:
        """Give actions the user's own keys, by their ids."""
        self.remapped = dict(keys)
        self.set_keymap(self.remapped)
        named = [(b.id, b.action) for b in self.BINDINGS if isinstance(b, Binding) and b.id is not None]
        # Of several bindings of an action, the first is shown.
        self.own_keys = {action: shown_keys(keys[name]) for name, action in reversed(named) if name in keys}

    @property
    def own_bindings(self) -> list[tuple[str, str]]:
        """The user's own keys, as they are shown, each with what it does."""
        return [
            (shown_keys(self.remapped[binding.id]), binding.description)
            for binding in self.BINDINGS
            if isinstance(binding, Binding) and binding.id is not None and binding.id in self.remapped
        ]

    def runner(self, action: str) -> Callable[[], None]:
        """What runs an action, for the command palette."""

        def run() -> None:
            self.call_later(self.run_action, action)

        return run

    def action_command_palette(self) -> None:
        """Open the list of commands, in characters that the terminal has."""
        from kvtui.screens.commands import AsciiCommandPalette

        if not self.glyphs.ascii:
            super().action_command_palette()
        elif not isinstance(self.screen, AsciiCommandPalette):
            self.push_screen(AsciiCommandPalette(placeholder="Search for commands", id="--command-palette"))

    def action_next_theme(self) -> None:
        """Go around the themes."""
        names = list(self.palettes)
        self.set_theme(names[(names.index(self.palette.name) + 1) % len(names)])

    def set_theme(self, name: str) -> None:
        """Draw everything in another theme."""
        self.palette = self.palettes[name]
        self.theme = PREFIX + name
        self.redraw()
