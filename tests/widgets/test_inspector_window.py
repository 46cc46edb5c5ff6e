"""A list in the inspector that is longer than its window: that there is more, how much, and how to see it."""

from __future__ import annotations

import re

import pytest
from textual import events

from engine.trace.reader import Recording
from kvtui.app import KvtuiApp
from kvtui.packaged import packaged_folder
from kvtui.sources.recorded import RecordingSource


def foot(app: KvtuiApp) -> str:
    """The inspector's lower border as it is on screen."""
    app.screen._compositor_refresh()
    region = app.main.inspector.region
    return app.screen._compositor.render_strips()[region.bottom - 1].text[region.x : region.right]


def listed(app: KvtuiApp) -> list[str]:
    """The lines of the list in sight, bare."""
    app.screen._compositor_refresh()
    region = app.main.inspector.region
    strips = app.screen._compositor.render_strips()[region.y + 1 : region.bottom - 1]
    rows = [strip.text[region.x : region.right].strip("│ ▸") for strip in strips]
    return [row for row in rows if re.match(r"[\d,]+ (?!references)", row)]


@pytest.mark.parametrize("size", [(200, 50), (120, 36), (80, 24)])
async def test_the_border_says_which_lines_are_in_sight_of_how_many_and_keys_and_wheel_lead_to_the_others(size) -> None:
    with Recording.open(packaged_folder("recordings") / "under-pressure.mcap") as recording:
        source = RecordingSource(recording, 400)
        source.pause()
        app = KvtuiApp(source)
        async with app.run_test(size=size) as pilot:
            app.select_block(0)
            for _ in range(5):
                app.hurry()
                await pilot.pause(0.1)
            shown = len(listed(app))
            told = re.search(r"lines 1 to (\d+) of (\d+) · wheel, (or )?j k( in this panel)?", foot(app))
            assert told is not None, foot(app)
            assert int(told[1]) == shown
            assert int(told[2]) > shown
            first = listed(app)
            await pilot._post_mouse_events([events.MouseScrollDown], "#inspector", offset=(5, 3), button=0)
            for _ in range(3):
                await pilot._post_mouse_events([events.MouseScrollDown], "#inspector", offset=(5, 3), button=0)
            await pilot.pause(0.1)
            assert app.main.inspector._cursor == 12
            await pilot.press(*("5" if size[0] < 110 else ""))
            app.main.inspector.focus()
            await pilot.press(*["j"] * (shown + 12))
            await pilot.pause(0.1)
            assert listed(app) != first
            assert "in this panel" not in foot(app)
            start = re.search(r"lines (\d+) to", foot(app))
            assert start is not None
            assert int(start[1]) > 1
            await pilot.press("v")
            await pilot.pause(0.1)
            assert start[0] not in foot(app), "the text has lines of its own"
