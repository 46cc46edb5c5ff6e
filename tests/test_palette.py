"""Themes: every hue can be seen on its background, and a broken theme file says what is wrong."""

from __future__ import annotations

import itertools

import pytest

from engine.trace.marks import MarkKind
from kvtui.palette import ROLES, ThemeError, load_palette, load_palettes

EXACT = [palette for palette in load_palettes().values() if not palette.ansi]

# How a deuteranope and a protanope see linear RGB (Viénot, Brettel and Mollon, 1999).
_DICHROMATS = {
    "deuteranope": ((0.29275, 0.70725, 0.0), (0.29275, 0.70725, 0.0), (-0.02234, 0.02234, 1.0)),
    "protanope": ((0.11238, 0.88762, 0.0), (0.11238, 0.88762, 0.0), (0.00401, -0.00401, 1.0)),
}


def contrast(first: str, second: str) -> float:
    """The contrast ratio of two `#rrggbb` colours, 1 to 21 (WCAG 2.2, relative luminance)."""
    lighter, darker = sorted((_luminance(first), _luminance(second)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def _luminance(color: str) -> float:
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _seen_by(color: str, matrix: tuple[tuple[float, ...], ...]) -> tuple[float, ...]:
    linear = [(int(color[i : i + 2], 16) / 255) ** 2.2 for i in (1, 3, 5)]
    return tuple(max(0.0, sum(m * c for m, c in zip(row, linear, strict=True))) ** (1 / 2.2) for row in matrix)


@pytest.mark.parametrize("palette", EXACT, ids=lambda palette: palette.name)
def test_every_hue_stands_out_from_the_background(palette) -> None:
    ground = palette.colors["background"]
    for hue in palette.hues:
        assert contrast(hue, ground) >= 3
    for role in ("text", "muted", "accent", "good", "warning", "error"):
        assert contrast(palette.colors[role], ground) >= 4.5
        assert contrast(palette.colors[role], palette.colors["raised"]) >= 4.5 or role in ("good", "accent", "warning")


@pytest.mark.parametrize("palette", EXACT, ids=lambda palette: palette.name)
def test_each_kind_of_mark_has_a_colour_of_its_own_that_stands_out(palette) -> None:
    assert len(set(palette.marks)) == len(MarkKind)
    assert all(contrast(color, palette.colors["background"]) >= 4.5 for color in palette.marks)


@pytest.mark.parametrize("palette", EXACT, ids=lambda palette: palette.name)
@pytest.mark.parametrize("reader", sorted(_DICHROMATS))
def test_neighbours_in_the_cycle_differ_for_colour_blind_readers(palette, reader) -> None:
    seen = [_seen_by(hue, _DICHROMATS[reader]) for hue in palette.hues]
    for first, second in itertools.pairwise([*seen, seen[0]]):
        assert sum((a - b) ** 2 for a, b in zip(first, second, strict=True)) ** 0.5 > 0.18


def test_contrast_is_the_one_of_the_guidelines() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("palette", list(load_palettes().values()), ids=lambda palette: palette.name)
def test_a_request_keeps_its_hue_and_the_others_step_back_when_one_is_selected(palette) -> None:
    assert palette.hue(3) == palette.hue(3, selected=3)
    assert palette.hue(3, selected=4) != palette.hue(3)
    assert palette.hue(0) != palette.hue(1)
    assert palette.hue(2) == palette.hue(2 + len(palette.hues))


def test_the_ansi_theme_never_draws_black_and_never_asks_for_exact_colours() -> None:
    palette = load_palettes()["ansi"]
    assert palette.colors["background"] == "default"
    names = [*palette.colors.values(), *palette.hues]
    assert "black" not in names
    assert not any(name.startswith("#") for name in names)


def test_without_colour_no_style_has_any() -> None:
    palette = load_palettes(mono=True)["dark"]
    styles = [palette.hue(1), palette.hue(1, 2), palette.selection, palette.cursor, palette.raised, palette.blank]
    styles += [palette.role(role) for role in ROLES]
    styles += [palette.lit(palette.hue(1)), palette.badge(palette.hue(1))]
    assert all(style.color is None and style.bgcolor is None for style in styles)
    assert palette.hue(1) != palette.hue(1, selected=2)
    assert palette.lit(palette.hue(1)) != palette.hue(1)


GOOD = "dark = true\nhues = ['#112233', '#445566']\n[colors]\n" + "\n".join(f"{role} = '#aabbcc'" for role in ROLES)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("hues = [", "not TOML"),
        (GOOD.replace("dark = true", ""), "dark"),
        (GOOD.replace("muted = '#aabbcc'", ""), "colors.muted should be a colour as #rrggbb"),
        (GOOD.replace("'#112233'", "'red'"), "hues[0] should be a colour as #rrggbb"),
        (GOOD.replace("'#112233'", "'#1122334'"), "hues[0]"),
        (GOOD.replace("['#112233', '#445566']", "['#112233']"), "hues should be a list of 2 to 64"),
        (GOOD.replace("['#112233', '#445566']", "7"), "hues"),
        (GOOD + "\n[marks]\nevicted = 'blue'\n", "marks.evicted should be a colour as #rrggbb"),
        (GOOD + "\n[marks]\nlost = '#112233'\n", "marks.lost should be one of preempted, evicted"),
        ("marks = 3\n" + GOOD, "[marks] should be a table"),
        ("x = '" + "y" * 70_000 + "'", "larger than 64 KiB"),
    ],
)
def test_a_broken_theme_names_the_file_and_what_is_expected(tmp_path, text, says) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ThemeError) as caught:
        load_palette(path)
    assert "mine.toml" in str(caught.value)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value).strip() or says == "not TOML"


def test_a_good_theme_file_is_taken(tmp_path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(GOOD)
    palette = load_palette(path)
    assert palette.name == "mine"
    assert palette.hues == ("#112233", "#445566")
    assert len(palette.marks) == len(MarkKind), "the roles' colours serve where it names none"
    path.write_text(GOOD + "\n[marks]\ncopied = '#010203'\n")
    assert load_palette(path).marks[MarkKind.COPIED] == "#010203"
