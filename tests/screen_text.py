"""What is on a running dashboard's screen, as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.cells import cell_len

if TYPE_CHECKING:
    from textual.app import App
    from textual.pilot import Pilot


async def frame(pilot: Pilot[None]) -> None:
    """Let the dashboard draw one frame, whatever the pace says."""
    await pilot.pause()
    pilot.app.hurry()
    await pilot.pause()


def screen_lines(app: App[None]) -> list[str]:
    """The screen as text; every line is exactly as wide as the screen."""
    app.screen._compositor_refresh()
    lines = [strip.text for strip in app.screen._compositor.render_strips()]
    assert len(lines) == app.size.height
    for y, line in enumerate(lines):
        assert cell_len(line) == app.size.width, f"line {y}: {line!r}"
    return lines


def text_of(app: App[None]) -> str:
    """The lines of `screen_lines` in one text."""
    return "\n".join(screen_lines(app))
