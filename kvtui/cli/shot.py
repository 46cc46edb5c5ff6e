"""`kvtui shot`: a picture of a recording at one step."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path  # noqa: TC003 - Typer reads it
from typing import TYPE_CHECKING, Annotated

import typer

from kvtui.cli.errors import UsageError, say

if TYPE_CHECKING:
    from engine.trace.reader import Recording

_LARGEST = (400, 200)
_SETTLE_S = 0.6


def shot_command(
    recording: Annotated[str, typer.Argument(metavar="NAME|FILE", help="A packaged recording, or a file.")],
    out: Annotated[Path, typer.Option("-o", "--out", metavar="FILE.svg", help="The picture.", show_default=False)],
    step: Annotated[int | None, typer.Option(min=0, help="After this step; the last one by default.")] = None,
    size: Annotated[str, typer.Option(metavar="COLUMNSxROWS", help="Of the terminal.")] = "160x45",
    theme: Annotated[str | None, typer.Option(help="Name of a theme.")] = None,
    ascii_only: Annotated[bool, typer.Option("--ascii", help="Draw with ASCII characters alone.")] = False,
) -> None:
    """Draw a recording at one step into an SVG file.

    It needs no terminal, no model and no torch.

    Example: kvtui shot shared-prefix --step 60 -o picture.svg
    """
    match = re.fullmatch(r"(\d{1,3})x(\d{1,3})", size)
    columns, rows = (int(n) for n in match.groups()) if match else (0, 0)
    if not (20 <= columns <= _LARGEST[0] and 5 <= rows <= _LARGEST[1]):
        raise UsageError(f"--size {size} is not possible: give columns x rows, 20x5 to {_LARGEST[0]}x{_LARGEST[1]}")
    if not out.parent.is_dir():
        raise UsageError(f"{out.parent} is no folder: make it first, or write the picture elsewhere")
    from engine.trace.reader import Recording
    from kvtui.cli.recordings import find_recording

    path = find_recording(recording)
    opened = Recording.open(path)
    if opened.num_steps == 0:
        raise UsageError(f"{path} has no steps: there is nothing to draw")
    last = opened.num_steps - 1
    shown = last if step is None else step
    if shown > last:
        raise UsageError(f"--step {step} is behind the end: {path} has steps 0 to {last}")
    out.write_text(asyncio.run(_draw(opened, shown, columns, rows, theme, ascii_only)), encoding="utf-8")
    say(f"drew step {shown} of {path} into {out}")


async def _draw(opened: Recording, step: int, columns: int, rows: int, theme: str | None, ascii_only: bool) -> str:
    from kvtui.app import KvtuiApp
    from kvtui.sources.recorded import RecordingSource

    source = RecordingSource(opened, step)
    source.pause()
    app = KvtuiApp(source, theme=theme, ascii_only=ascii_only)
    async with app.run_test(size=(columns, rows)) as pilot:
        await pilot.pause(_SETTLE_S)
        return app.export_screenshot(title="kvtui")
