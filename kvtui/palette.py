"""Hue says who: the colours of a theme, and the one hue that a request has in every panel.

Themes are data (`themes/*.toml`): roles with one colour each and a cycle of hues. The cycles start from the palette
of Okabe and Ito (Color Universal Design, 2008), which readers with any common colour blindness can tell apart,
darkened or lightened until every hue stands out from its background.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from rich.color import Color
from rich.color_triplet import ColorTriplet
from rich.style import Style

from kvtui.packaged import packaged_folder

if TYPE_CHECKING:
    from pathlib import Path

ROLES = (
    "background",
    "raised",
    "text",
    "muted",
    "faint",
    "cached",
    "border",
    "focus",
    "accent",
    "good",
    "warning",
    "error",
    "selection",
)
"""The colours that a theme must give. `raised` is behind header and footer, `selection` behind a selected row."""

MARKS = {"preempted": "warning", "evicted": "warning", "refused": "error", "copied": "accent", "finished": "good"}
"""The colours that a theme can give for the marks on the position bar, in the order of `MarkKind`, and the roles that
they have the colour of where it does not."""

_MOST_BYTES = 64 * 1024
_HEX = re.compile(r"#[0-9a-fA-F]{6}")
_ANSI = re.compile(r"default|(bright_)?(black|red|green|yellow|blue|magenta|cyan|white)")
_DIM_FRACTION = 0.72
_LIT_FRACTION = 0.6
_TINT_FRACTION = 0.3


class ThemeError(ValueError):
    """A theme file that cannot be used. Its text names the file, the entry and what is expected there."""


@dataclass(frozen=True)
class Palette:
    """The colours of one theme as styles, ready for strips; each carries the theme's background.

    Attributes:
        name: As in the theme file.
        dark: Whether the background is the dark side.
        ansi: The terminal's own sixteen colours instead of exact ones.
        colors: Role to colour: `#rrggbb`, or the name of an ANSI colour.
        hues: The cycle that requests take their hue from.
        marks: The colour of each kind of mark.
        mono: No colour at all (NO_COLOR): weight, dimness and reversal have to do.
    """

    name: str
    dark: bool
    ansi: bool
    colors: dict[str, str]
    hues: tuple[str, ...]
    marks: tuple[str, ...]
    mono: bool = False
    _cache: dict[object, Style] = field(default_factory=dict, repr=False, compare=False)

    def role(self, name: str) -> Style:
        """The style of a role, as a foreground on the background."""
        style = self._cache.get(name)
        if style is None:
            style = Style(dim=name in ("muted", "faint", "border")) if self.mono else self._on_background(name)
            self._cache[name] = style
        return style

    def mark(self, kind: int) -> Style:
        """The style of a kind of mark on the position bar; see `MARKS`."""
        key = ("mark", kind)
        style = self._cache.get(key)
        if style is None:
            style = Style(bold=True)
            if not self.mono:
                style += Style(color=Color.parse(self.marks[kind]), bgcolor=self._color("background"))
            self._cache[key] = style
        return style

    def hue(self, request: int, selected: int | None = None) -> Style:
        """The style of a request, the same in every panel.

        Args:
            request: The engine's number of it; a negative one (no request) is drawn muted.
            selected: The selected request; any other one is dimmed.
        """
        key = (request % len(self.hues) if request >= 0 else -1, selected is not None and selected != request)
        style = self._cache.get(key)
        if style is None:
            style = self._cache[key] = self._make_hue(*key)
        return style

    @cached_property
    def text(self) -> Style:
        """Ordinary text."""
        return self.role("text")

    @cached_property
    def strong(self) -> Style:
        """What the eye should find first."""
        return self.role("text") + Style(bold=True)

    @cached_property
    def muted(self) -> Style:
        """Labels and units."""
        return self.role("muted")

    @cached_property
    def faint(self) -> Style:
        """What is there without asking for attention: free blocks, rulers."""
        return self.role("faint")

    @cached_property
    def cached(self) -> Style:
        """Blocks that nobody holds and whose content can still be found."""
        return self.role("cached")

    @cached_property
    def accent(self) -> Style:
        """Keys, titles, the cursor."""
        return self.role("accent")

    @cached_property
    def good(self) -> Style:
        """Going well."""
        return self.role("good")

    @cached_property
    def warning(self) -> Style:
        """Under pressure: waits, preemptions, evictions."""
        return self.role("warning") + Style(bold=self.mono or None)

    @cached_property
    def error(self) -> Style:
        """Went wrong."""
        return self.role("error") + Style(bold=True)

    @cached_property
    def selection(self) -> Style:
        """Add this to a style to draw it selected: `style + palette.selection`."""
        return Style(reverse=True) if self.mono else Style(bgcolor=self._color("selection"))

    def lit(self, style: Style) -> Style:
        """A style lit up for a moment, for what just changed: its hue moved towards the text's, on a lit ground."""
        if self.mono or self.ansi:
            return style + Style(reverse=True)
        text, color = self._color("text").triplet, style.color.triplet if style.color is not None else None
        assert text is not None
        lit = Color.from_triplet(_blend(color, text, _LIT_FRACTION) if color is not None else text)
        return style + Style(color=lit, bgcolor=self._color("selection"), bold=True)

    def badge(self, style: Style) -> Style:
        """A style turned inside out, to write a number on a filled cell."""
        key = ("badge", style)
        badge = self._cache.get(key)
        if badge is None:
            turned = Style(bold=True) if self.mono else Style(reverse=True, bold=True)
            if not self.mono and not self.ansi:
                turned = Style(color=self._color("background"), bgcolor=style.color, bold=True)
            badge = self._cache[key] = style + turned
        return badge

    def shade(self, style: Style, part: float) -> Style:
        """A style's colour mixed with the background's: 1 is the colour itself, 0 the background."""
        key = ("shade", style, part)
        shaded = self._cache.get(key)
        if shaded is None:
            ground = self._color("background").triplet
            color = style.color.triplet if style.color is not None else None
            shaded = style
            if color is not None and ground is not None and not self.mono:
                shaded = style + Style(color=Color.from_triplet(_blend(color, ground, 1 - part)))
            self._cache[key] = shaded
        return shaded

    def over_cached(self, style: Style) -> Style:
        """A style on a ground tinted like cached blocks; as it is where the theme has no colours to mix."""
        if self.mono or self.ansi:
            return style
        return style + Style(bgcolor=self.shade(self.cached, _TINT_FRACTION).color)

    @cached_property
    def cursor(self) -> Style:
        """The cell under the cursor."""
        if self.mono or self.ansi:
            return Style(reverse=True, bold=True)
        return Style(color=self._color("background"), bgcolor=self._color("text"), bold=True)

    @cached_property
    def raised(self) -> Style:
        """Empty space of the header and footer; add it to a style to move that there."""
        return Style() if self.mono else Style(bgcolor=self._color("raised"))

    @cached_property
    def blank(self) -> Style:
        """Empty space."""
        return Style() if self.mono else Style(bgcolor=self._color("background"))

    def _on_background(self, name: str) -> Style:
        return Style(color=self._color(name), bgcolor=self._color("background"))

    def _color(self, name: str) -> Color:
        return Color.parse(self.colors[name])

    def _make_hue(self, index: int, dimmed: bool) -> Style:
        if self.mono:
            return Style(dim=dimmed or index < 0)
        background = self._color("background")
        color = Color.parse(self.hues[index]) if index >= 0 else self._color("muted")
        if not dimmed:
            return Style(color=color, bgcolor=background)
        if color.triplet is None or background.triplet is None:
            return Style(color=Color.parse("bright_black"), bgcolor=background)
        return Style(
            color=Color.from_triplet(_blend(color.triplet, background.triplet, _DIM_FRACTION)), bgcolor=background
        )


def _blend(color: ColorTriplet, towards: ColorTriplet, fraction: float) -> ColorTriplet:
    """A colour moved towards another one by a part of the way."""
    return ColorTriplet(*(round(c + (t - c) * fraction) for c, t in zip(color, towards, strict=True)))


def load_palette(path: Path, mono: bool = False) -> Palette:
    """Read one theme file; nothing in it is executed.

    Raises:
        ThemeError: Names the file, the entry and what is expected.
    """
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            raise ThemeError(f"theme {path.name}: larger than {_MOST_BYTES // 1024} KiB, so it is not a theme file")
        table = tomllib.loads(data.decode("utf-8"))
    except OSError as error:
        raise ThemeError(f"theme {path.name}: cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ThemeError(f"theme {path.name}: not TOML: {error}") from error
    return _palette_of(path, table, mono)


def _palette_of(path: Path, table: dict[str, object], mono: bool) -> Palette:
    ansi = table.get("ansi", False)
    pattern, kind = (_ANSI, "an ANSI colour name") if ansi else (_HEX, "a colour as #rrggbb")

    def need(condition: bool, entry: str, expected: str) -> None:
        if not condition:
            raise ThemeError(f"theme {path.name}: {entry} should be {expected}")

    colors, hues, dark = table.get("colors"), table.get("hues"), table.get("dark")
    need(isinstance(dark, bool) and isinstance(ansi, bool), "dark (and ansi)", "true or false")
    need(isinstance(colors, dict), "[colors]", "a table with one colour for each role")
    need(isinstance(hues, list), "hues", "a list of colours")
    assert isinstance(colors, dict)
    assert isinstance(hues, list)
    need(2 <= len(hues) <= 64, "hues", "a list of 2 to 64 colours")
    for role in ROLES:
        need(isinstance(colors.get(role), str) and bool(pattern.fullmatch(colors[role])), f"colors.{role}", kind)
    marks = table.get("marks", {})
    need(isinstance(marks, dict), "[marks]", f"a table of colours for {', '.join(MARKS)}")
    assert isinstance(marks, dict)
    for mark, color in marks.items():
        need(mark in MARKS, f"marks.{mark}", f"one of {', '.join(MARKS)}")
        need(isinstance(color, str) and bool(pattern.fullmatch(color)), f"marks.{mark}", kind)
    for i, hue in enumerate(hues):
        need(isinstance(hue, str) and bool(pattern.fullmatch(hue)), f"hues[{i}]", kind)
    return Palette(
        name=path.stem,
        dark=bool(dark),
        ansi=bool(ansi),
        colors={role: colors[role] for role in ROLES},
        hues=tuple(hues),
        marks=tuple(str(marks.get(mark, colors[role])) for mark, role in MARKS.items()),
        mono=mono,
    )


DEFAULT_THEME = "dark"


def load_palettes(mono: bool = False, own: Path | None = None) -> dict[str, Palette]:
    """All themes by name, the default first.

    Args:
        mono: Without any colour.
        own: A folder with the user's own, which may stand for packaged ones of the same name; it need not exist.

    Raises:
        ThemeError: If one of them cannot be used, or none is there.
    """
    folder = packaged_folder("themes")
    palettes = {path.stem: load_palette(path, mono) for path in sorted(folder.glob("*.toml"))}
    if DEFAULT_THEME not in palettes:
        raise ThemeError(f"no {DEFAULT_THEME}.toml in {folder}: kvtui is not installed completely; reinstall it")
    if own is not None:
        palettes.update({path.stem: load_palette(path, mono) for path in sorted(own.glob("*.toml"))})
    return {DEFAULT_THEME: palettes.pop(DEFAULT_THEME), **palettes}
