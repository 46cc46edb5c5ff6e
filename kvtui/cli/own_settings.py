"""The user's settings for a command, checked before anything slow begins."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtui.cli.errors import UsageError

if TYPE_CHECKING:
    from kvtui.settings import Settings


def settings_for(theme: str | None) -> Settings:
    """The settings file, with a theme that exists.

    Args:
        theme: What the command line asks for.

    Raises:
        SettingsError: The file cannot be used.
        UsageError: There is no such theme.
    """
    from kvtui.palette import load_palettes
    from kvtui.settings import load_settings

    settings = load_settings()
    names = load_palettes(own=settings.themes)
    wanted = theme or settings.theme
    if wanted is not None and wanted not in names:
        where = "" if theme else f" ({settings.path})"
        raise UsageError(f"there is no theme named {wanted!r}{where}: choose one of {', '.join(names)}")
    return settings
