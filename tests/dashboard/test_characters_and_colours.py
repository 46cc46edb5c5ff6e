"""What a terminal may not be able to show, and what a prompt must not do to it: characters, escapes, colours."""

from __future__ import annotations

import pytest
from live_dashboard import Live
from screen_text import frame, screen_lines, text_of

from kvtui.palette import ThemeError, load_palettes

NASTY = "\x1b[31mred\x1b[0m [bold]no markup[/bold] \t字🙂👩‍👩‍👧\x07 end"


@pytest.mark.parametrize("size", [(160, 40), (80, 24)])
async def test_prompts_with_escapes_markup_and_wide_characters_stay_inside_their_borders(size) -> None:
    live = Live(num_blocks=200)
    live.ask(3, text=NASTY)
    async with live.app.run_test(size=size) as pilot:
        live.run(4)
        await frame(pilot)
        for key in ("1", "2", "5"):
            await pilot.press(key)
            await frame(pilot)
            picture = text_of(live.app)
            assert "\x1b" not in picture
            assert "\x07" not in picture
            assert "\t" not in picture
        assert "[bold]no markup[/bold]" in picture


async def test_ascii_draws_with_ascii_alone() -> None:
    for size in ((160, 40), (80, 24)):
        live = Live(ascii_only=True)
        live.ask(4, text="字🙂é ")
        async with live.app.run_test(size=size, notifications=True) as pilot:
            live.run(6)
            for key in "123456":
                await pilot.press(key)
                await frame(pilot)
                for line in screen_lines(live.app):
                    assert line.isascii(), line
            for severity in ("information", "warning", "error"):
                live.app.notify(f"a notice, {severity}", severity=severity)
            await pilot.pause(0.1)
            assert "a notice, error" in text_of(live.app)
            for line in screen_lines(live.app):
                assert line.isascii(), line
            await pilot.press("question_mark")
            await pilot.pause()
            for line in screen_lines(live.app):
                assert line.isascii(), line


async def test_the_command_palette_is_ascii_where_all_is() -> None:
    live = Live(ascii_only=True)
    async with live.app.run_test(size=(80, 24)) as pilot:
        await pilot.press("space", "ctrl+p")
        for _ in range(20):
            await pilot.pause(0.05)
            if "Blocks: zoom" in text_of(live.app):
                break
        picture = text_of(live.app)
        assert "Blocks: zoom" in picture
        assert "Search for commands" in picture
        assert picture.isascii(), [c for c in picture if not c.isascii()]


@pytest.mark.parametrize("name", ["LC_ALL", "LC_CTYPE", "LANG"])
def test_a_locale_without_unicode_gets_the_ascii_set(monkeypatch, name) -> None:
    for other in ("LC_ALL", "LC_CTYPE", "LANG"):
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, "C")
    assert Live().app.glyphs.ascii
    monkeypatch.setenv(name, "de_DE.UTF-8")
    assert not Live().app.glyphs.ascii


async def test_no_color_leaves_no_colour_anywhere(monkeypatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    live = Live()
    live.ask(4)
    async with live.app.run_test(size=(160, 40)) as pilot:
        live.run(6)
        live.app.select(1, 3)
        for key in ("", "question_mark"):
            if key:
                await pilot.press(key)
            await frame(pilot)
            for strip in live.app.screen._compositor.render_strips():
                for segment in strip:
                    style = segment.style
                    assert style is None or (style.color is None and style.bgcolor is None), segment


async def test_sixteen_colours_are_the_terminals_own_and_never_black_on_black() -> None:
    live = Live(theme="ansi")
    live.ask(4)
    async with live.app.run_test(size=(160, 40)) as pilot:
        live.run(6)
        await frame(pilot)
        for strip in live.app.screen._compositor.render_strips():
            for segment in strip:
                style = segment.style
                if style is None or not segment.text.strip() or style.color is None:
                    continue
                assert style.color.triplet is None, segment
                assert style.color != style.bgcolor or style.color.is_default, segment


async def test_every_theme_draws_and_the_key_goes_around_them() -> None:
    live = Live()
    live.ask(2)
    names = list(load_palettes())
    async with live.app.run_test(size=(120, 34)) as pilot:
        live.run(3)
        seen = []
        for _ in names:
            seen.append(live.app.palette.name)
            await pilot.press("t")
            await frame(pilot)
            screen_lines(live.app)
        assert seen == names
        assert live.app.palette.name == names[0]


def test_an_unknown_theme_names_the_known_ones() -> None:
    with pytest.raises(ThemeError, match="no theme named 'pink': choose one of dark"):
        Live(theme="pink")
