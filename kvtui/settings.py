"""The user's own settings: a TOML file that is read once, before anything is drawn.

    theme = "light"
    ascii = false
    frame_rate = 12
    hide = ["old-way", "formulas"]

    [keys]
    "app.pause" = "p"
    "app.step" = ["right", "f"]

    [glyphs]
    evicted = "x"

Themes of one's own lie beside it, in `themes/NAME.toml`. What the command line says goes before what stands here.
"""

from __future__ import annotations

import os
import tomllib
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import platformdirs
from rich.cells import cell_len

from kvtui.glyphs import UNICODE, Glyphs
from kvtui.key_names import key_of

if TYPE_CHECKING:
    from collections.abc import Mapping

VARIABLE = "KVTUI_CONFIG"
"""Names another file."""

PANELS = ("requests", "prefixes", "pool", "old-way", "formulas", "batch", "inspector", "log")
"""Panels that can be left out; the blocks cannot."""

_LARGEST_FILE = 100_000
_RATES = (1, 30)
_COUNTED = {"levels": len(UNICODE.levels), "history": len(UNICODE.history)}


class SettingsError(ValueError):
    """The file says something that cannot be done. Its text is one line that names the file and what to change."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What the user wants.

    Attributes:
        path: The file, whether or not it exists.
        theme: Name of a theme.
        ascii: Draw with ASCII alone.
        frame_rate: The most frames a second; None for what the eye needs.
        hide: Ids of panels that are left out.
        keys: Id of an action to its keys, comma-separated.
        glyphs: Name of a glyph to what is drawn for it in the Unicode set.
    """

    path: Path
    theme: str | None = None
    ascii: bool = False
    frame_rate: int | None = None
    hide: frozenset[str] = frozenset()
    keys: Mapping[str, str] = field(default_factory=dict)
    glyphs: Mapping[str, str] = field(default_factory=dict)

    @property
    def themes(self) -> Path:
        """Where the user's own themes lie."""
        return self.path.parent / "themes"


def settings_path() -> Path:
    """Where the file is looked for: `KVTUI_CONFIG`, or the system's place for configuration."""
    chosen = os.environ.get(VARIABLE)
    if chosen:
        return Path(chosen).expanduser()
    return Path(platformdirs.user_config_dir("kvtui", appauthor=False)) / "config.toml"


def load_settings(path: Path | None = None) -> Settings:
    """Read the file; where there is none, everything is as it comes.

    Raises:
        SettingsError: It cannot be read, or says something that cannot be done.
    """
    path = path or settings_path()
    try:
        if path.stat().st_size > _LARGEST_FILE:
            raise SettingsError(f"{path} is too large for a settings file: at most {_LARGEST_FILE:,} bytes are read")
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        if os.environ.get(VARIABLE):
            raise SettingsError(f"{path} is not there: make it, or unset {VARIABLE}") from None
        return Settings(path)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SettingsError(f"{path} cannot be read: {' '.join(str(error).split())[:200]}") from error
    known = {f.name for f in fields(Settings)} - {"path"}
    for name in table:
        if name not in known:
            raise SettingsError(f"{path}: there is no setting {name!r}: use {', '.join(sorted(known))}")
    reader = _Reader(path, table)
    return Settings(
        path=path,
        theme=reader.value("theme", str, None),
        ascii=reader.value("ascii", bool, False),
        frame_rate=reader.frame_rate(),
        hide=reader.hide(),
        keys=reader.keys(),
        glyphs=reader.glyphs(),
    )


def glyphs_with(settings: Settings, glyphs: Glyphs) -> Glyphs:
    """A set with the user's own characters put in; the ASCII set stays as it is."""
    if glyphs.ascii or not settings.glyphs:
        return glyphs
    values = {f.name: getattr(glyphs, f.name) for f in fields(Glyphs)}
    return Glyphs(**(values | dict(settings.glyphs)))


class _Reader:
    """The file's values, each checked where it is taken."""

    def __init__(self, path: Path, table: dict[str, Any]) -> None:
        self._path = path
        self._table = table

    def value(self, name: str, kind: type, default: Any) -> Any:
        value = self._table.get(name, default)
        if value is not default and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
            raise SettingsError(f"{self._path}: {name} = {value!r} is not possible: it takes a {_NAMES[kind]}")
        return value

    def frame_rate(self) -> int | None:
        rate: int | None = self.value("frame_rate", int, None)
        if rate is not None and not _RATES[0] <= rate <= _RATES[1]:
            raise SettingsError(
                f"{self._path}: frame_rate = {rate} is not possible: use {_RATES[0]} to {_RATES[1]} frames a second"
            )
        return rate

    def hide(self) -> frozenset[str]:
        names: list[Any] = self.value("hide", list, [])
        for name in names:
            if name not in PANELS:
                raise SettingsError(f"{self._path}: hide = {name!r} is no panel: use {', '.join(PANELS)}")
        return frozenset(names)

    def keys(self) -> dict[str, str]:
        keys: dict[str, Any] = self.value("keys", dict, {})
        if not keys:
            return {}
        # Textual takes time to import, and a command without a screen has no use for it.
        from textual.binding import Binding

        from kvtui.actions import Actions

        now: dict[str, str] = {b.id: b.key for b in Actions.BINDINGS if isinstance(b, Binding) and b.id}
        chosen: dict[str, str] = {}
        for name, value in keys.items():
            each = [value] if isinstance(value, str) else value
            if name not in now:
                raise SettingsError(f"{self._path}: there is no action {name!r}: use one of {', '.join(now)}")
            if not isinstance(each, list) or not each or not all(isinstance(key, str) and key for key in each):
                raise SettingsError(f'{self._path}: "{name}" = {value!r} is not possible: give a key or a list of keys')
            chosen[name] = ",".join(key_of(str(key)) for key in each)
        owner: dict[str, str] = {}
        for name, shown in (now | chosen).items():
            for key in shown.split(","):
                other = owner.setdefault(key, name)
                if other != name:
                    raise SettingsError(
                        f"{self._path}: the key {key!r} would be both {other} and {name}: give one of them another"
                    )
        return chosen

    def glyphs(self) -> dict[str, str]:
        glyphs: dict[str, Any] = self.value("glyphs", dict, {})
        known = [f.name for f in fields(Glyphs) if f.name != "ascii"]
        for name, value in glyphs.items():
            if name not in known:
                raise SettingsError(f"{self._path}: there is no glyph {name!r}: use one of {', '.join(known)}")
            count = _COUNTED.get(name, 1)
            if not isinstance(value, str) or len(value) != count or cell_len(value) != count or not value.isprintable():
                what = "a character" if count == 1 else f"{count} characters"
                raise SettingsError(
                    f"{self._path}: the glyph {name} = {value!r} is not possible: give {what}, each one cell wide"
                )
        return glyphs


_NAMES: dict[type, str] = {str: "text", bool: "true or false", int: "whole number", list: "list", dict: "table"}
