"""The whole screen as SVG, compared with pictures that were looked at: every panel, three sizes, three looks.

`make snapshots` draws them again; look at what changed before it is committed.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from engine.trace.reader import Recording
from kvtui.app import KvtuiApp
from kvtui.packaged import packaged_folder
from kvtui.sources.recorded import RecordingSource
from kvtui.widgets.tab_bar import TABS

FOLDER = Path(__file__).parent / "pictures"
REDRAW = os.environ.get("KVTUI_REDRAW_PICTURES") == "1"
LOOKS = ("dark", "light", "no-color")
STEP = 260
WIDE = ((200, 50), (120, 36))
CASES = [
    *((size, look, "all") for size in WIDE for look in LOOKS),
    *(((80, 24), look, tab) for look in LOOKS for tab in TABS),
    *(((200, 50), "dark", tab) for tab in TABS[5:]),
    ((200, 50), "dark", "ascii"),
]


async def picture(size: tuple[int, int], look: str, panel: str) -> str:
    source = RecordingSource(Recording.open(packaged_folder("recordings") / "under-pressure.mcap"), STEP)
    source.pause()
    app = KvtuiApp(source, theme=None if look == "no-color" else look, ascii_only=panel == "ascii")
    async with app.run_test(size=size) as pilot:
        if panel in TABS:
            await pilot.press(str(TABS.index(panel) + 1))
        for _ in range(3):  # unhurried panels wait their time
            app.main.hurry()
            app.hurry()
            await pilot.pause(0.1)
        app.redraw()
        await pilot.pause(0.1)
        svg = app.export_screenshot(title="kvtui")
    # Rich names its styles after a hash of all that is in the picture: one change would change every line.
    return re.sub(r"terminal-\d+", "terminal", svg).replace("><", ">\n<")


@pytest.mark.parametrize(
    ("size", "look", "panel"), CASES, ids=[f"{w}x{h}-{look}-{panel}" for (w, h), look, panel in CASES]
)
async def test_the_screen_looks_as_it_did(
    size: tuple[int, int], look: str, panel: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    if look == "no-color":
        monkeypatch.setenv("NO_COLOR", "1")
    name = f"{size[0]}x{size[1]}-{look}-{panel.lower().replace(' ', '-')}.svg"
    drawn = await picture(size, look, panel)
    if REDRAW:
        FOLDER.mkdir(exist_ok=True)
        (FOLDER / name).write_text(drawn, encoding="utf-8")
    expected = (FOLDER / name).read_text(encoding="utf-8")
    if drawn != expected:
        (tmp_path / name).write_text(drawn, encoding="utf-8")
        pairs = zip(words(expected), words(drawn), strict=False)
        different = next((pair for pair in pairs if pair[0] != pair[1]), ("the same words", "other colours or places"))
        pytest.fail(f"{name} differs, first in {different[0]!r}: now {different[1]!r}; drawn into {tmp_path / name}")


def words(svg: str) -> list[str]:
    """The pieces of text in a picture, in order."""
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg)
