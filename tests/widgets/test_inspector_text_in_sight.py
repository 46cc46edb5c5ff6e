"""A request's text that is longer than the inspector: how much of it is in sight, and how to see the rest."""

from __future__ import annotations

import re

import pytest
from test_inspector_window import foot

from engine.trace.reader import Recording
from kvtui.app import KvtuiApp
from kvtui.packaged import packaged_folder
from kvtui.sources.recorded import RecordingSource


def lines_of_text(app: KvtuiApp) -> int:
    """Of prompt and output, as they are on screen."""
    app.screen._compositor_refresh()
    region = app.main.inspector.region
    strips = app.screen._compositor.render_strips()[region.y + 1 : region.bottom - 1]
    rows = [strip.text[region.x + 2 : region.right - 1] for strip in strips]
    first = next(at for at, row in enumerate(rows) if row.startswith(("prompt", "output")))
    return len(rows) - first


@pytest.mark.parametrize("size", [(200, 50), (80, 24)])
async def test_the_border_says_how_much_of_a_text_is_in_sight_and_how_to_see_more(size) -> None:
    with Recording.open(packaged_folder("recordings") / "shared-prefix.mcap") as recording:
        source = RecordingSource(recording, 60)
        source.pause()
        app = KvtuiApp(source)
        async with app.run_test(size=size) as pilot:
            app.select(0, None)
            for _ in range(5):
                app.hurry()
                await pilot.pause(0.1)
            told = re.search(r"(\d+) of (\d+) lines of text · 5, then j k", foot(app))
            assert told is not None, foot(app)
            assert int(told[1]) == lines_of_text(app)
            assert int(told[2]) > int(told[1])
            count = told[2]
            await pilot.press("5")
            await pilot.pause(0.1)
            end = re.search(r"lines (\d+) to (\d+) of (\d+) · wheel, or j k", foot(app))
            assert end is not None, foot(app)
            assert end[2] == end[3]
            await pilot.press("k", "k")
            await pilot.pause(0.1)
            back = re.search(r"lines (\d+) to (\d+) of (\d+)", foot(app))
            assert back is not None, foot(app)
            assert [int(back[i]) for i in (1, 2, 3)] == [int(end[1]) - 2, int(end[2]) - 2, int(end[3])]
            assert size == (80, 24) or end[3] == count


async def test_a_text_that_is_in_sight_whole_leaves_the_border_alone() -> None:
    with Recording.open(packaged_folder("recordings") / "under-pressure.mcap") as recording:
        source = RecordingSource(recording, 3)
        source.pause()
        app = KvtuiApp(source)
        async with app.run_test(size=(200, 60)) as pilot:
            app.select(0, None)
            await pilot.press("5")
            for _ in range(3):
                app.hurry()
                await pilot.pause(0.1)
            assert "line" not in foot(app)
