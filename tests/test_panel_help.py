"""Help that begins with the panel one is in."""

from __future__ import annotations

from pathlib import Path

import pytest
from textual.widgets import Static

from engine.trace.reader import Recording
from kvtui.app import KvtuiApp
from kvtui.packaged import packaged_folder
from kvtui.screens.help import HelpScreen
from kvtui.screens.panel_help import PANEL_HELP
from kvtui.settings import Settings
from kvtui.sources.recorded import RecordingSource
from kvtui.widgets.tab_bar import TABS

IDS = ("blocks", "requests", "pool", "batch", "inspector", "log", "prefixes", "old-way", "formulas")


def test_every_tab_has_its_words() -> None:
    assert tuple(PANEL_HELP) == IDS
    assert len(IDS) == len(TABS)
    for panel in PANEL_HELP.values():
        assert 1 <= panel.words.count(". ") + 1 <= 3


@pytest.mark.parametrize("size", [(200, 50), (80, 24)])
@pytest.mark.parametrize("number", range(1, 10))
async def test_help_begins_with_the_panel_that_has_the_focus(number: int, size: tuple[int, int]) -> None:
    source = RecordingSource(Recording.open(packaged_folder("recordings") / "under-pressure.mcap"), 50)
    source.pause()
    app = KvtuiApp(source, theme="dark")
    async with app.run_test(size=size) as pilot:
        await pilot.press(str(number))
        await pilot.pause(0.1)
        await pilot.press("?")
        await pilot.pause(0.1)
        assert isinstance(app.screen, HelpScreen)
        first = str(app.screen.query(Static).first().content).splitlines()[0]
        assert first == PANEL_HELP[IDS[number - 1]].title
        await pilot.press("escape")
        assert not isinstance(app.screen, HelpScreen)


@pytest.mark.parametrize("ascii_only", [False, True])
async def test_the_keys_stand_apart_from_their_words_and_name_the_arrows_as_drawn(ascii_only: bool) -> None:
    source = RecordingSource(Recording.open(packaged_folder("recordings") / "under-pressure.mcap"), 50)
    source.pause()
    app = KvtuiApp(source, theme="dark", ascii_only=ascii_only)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("?")
        await pilot.pause(0.1)
        keys = app.screen.query(Static).last()
        lines = ["".join(segment.text for segment in keys.render_line(y)) for y in range(keys.size.height)]
        page = "\n".join(lines)
        assert "{" not in page
        assert f"In a live session {app.glyphs.arrow_left} looks back" in " ".join(page.split())
        assert "q ctrl+q" in page
        assert all(line[10:12] == "  " or not line.strip() for line in lines)
        assert all(line[:2] == "  " for line in lines)


async def test_keys_of_the_users_own_are_told_before_the_ones_that_they_replace() -> None:
    source = RecordingSource(Recording.open(packaged_folder("recordings") / "under-pressure.mcap"), 50)
    source.pause()
    app = KvtuiApp(source, theme="dark", settings=Settings(Path("config.toml"), keys={"app.pause": "space,z"}))
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("?")
        await pilot.pause(0.1)
        keys = app.screen.query(Static).last()
        lines = ["".join(segment.text for segment in keys.render_line(y)) for y in range(keys.size.height)]
        assert "space or z" in lines[1]
        assert "Pause or resume" in lines[1]
        assert "your own" in lines[0]
