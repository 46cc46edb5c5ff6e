"""Notices where there is little room: what is read below them stays readable."""

from __future__ import annotations

import pytest
from screen_text import screen_lines

from engine.trace.reader import Recording
from kvtui.app import KvtuiApp
from kvtui.packaged import packaged_folder
from kvtui.sources.recorded import RecordingSource

MESSAGE = "segment 12 of the recording is damaged: steps 3,072 to 3,327 cannot be shown, and what follows may be short"


@pytest.mark.parametrize("size", [(80, 24), (60, 16), (100, 28)])
async def test_an_error_leaves_the_inspector_below_the_blocks_readable(size) -> None:
    with Recording.open(packaged_folder("recordings") / "under-pressure.mcap") as recording:
        source = RecordingSource(recording, 400)
        source.pause()
        app = KvtuiApp(source)
        async with app.run_test(size=size, notifications=True) as pilot:
            app.hurry()
            await pilot.pause(0.2)
            region = app.main.inspector.region
            before = screen_lines(app)
            app._report(MESSAGE)
            await pilot.pause(0.5)
            after = screen_lines(app)
            told = " ".join(" ".join(line.strip("▌▐│┃ ") for line in after).split())
            assert "segment 12 of the recording is damaged" in told
            assert after[region.y : region.bottom] == before[region.y : region.bottom]
            covered = [y for y in range(size[1]) if after[y] != before[y]]
            assert len(covered) <= 3, "a notice takes no more lines than its words need"


@pytest.mark.parametrize("size", [(60, 16), (80, 24), (200, 50)])
async def test_a_notice_leaves_the_line_that_one_types_in_readable(size) -> None:
    with Recording.open(packaged_folder("recordings") / "under-pressure.mcap") as recording:
        source = RecordingSource(recording, 400)
        source.pause()
        app = KvtuiApp(source)
        async with app.run_test(size=size, notifications=True) as pilot:
            await pilot.press("slash")
            await pilot.pause(0.2)
            app.notify(MESSAGE)
            await pilot.pause(0.5)
            screen = screen_lines(app)
            assert "segment 12" in "".join(screen)
            assert screen[-2].strip() == "Find a request by number, name or text; or a block: b44"
            assert screen[-1].strip() == "enter finds, esc closes"
