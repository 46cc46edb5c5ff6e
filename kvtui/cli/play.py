"""`kvtui play`: a recording on screen."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from kvtui.cli.errors import UsageError, say


def play_command(
    recording: Annotated[
        str | None,
        typer.Argument(metavar="NAME|FILE", help="A packaged recording, or a file.", show_default=False),
    ] = None,
    speed: Annotated[float, typer.Option(min=0.25, max=16.0, help="Times the recorded speed.")] = 1.0,
    start: Annotated[int, typer.Option(min=0, help="The step to begin at.")] = 0,
    paused: Annotated[bool, typer.Option("--paused", help="Begin paused.")] = False,
    theme: Annotated[str | None, typer.Option(help="Name of a theme.")] = None,
    ascii_only: Annotated[bool, typer.Option("--ascii", help="Draw with ASCII characters alone.")] = False,
) -> None:
    """Play a recording. It needs no model and no torch.

    Without a name, the packaged recordings are listed and the first one is played.

    Example: kvtui play session.mcap --speed 4 --start 200
    """
    from kvtui.cli.own_settings import settings_for
    from kvtui.cli.recordings import find_recording, listing, packaged_recordings
    from kvtui.terminal import terminal_problem

    settings = settings_for(theme)
    if recording is None:
        packaged = packaged_recordings()
        if not packaged:
            raise UsageError("no recordings are packaged here: name a file (kvtui run --record FILE makes one)")
        print(listing(packaged), file=sys.stderr)
        path = packaged[0].path
    else:
        path = find_recording(recording)
    from engine.trace.reader import Recording

    opened = Recording.open(path)
    if not opened.complete:
        say(f"{path} was cut off; the {opened.num_steps} steps that it still has are played")
    if start >= max(1, opened.num_steps):
        raise UsageError(f"--start {start} is behind the end: {path} has steps 0 to {opened.num_steps - 1}")
    problem = terminal_problem()
    if problem is not None:
        raise UsageError(problem)
    from kvtui.app import run_app
    from kvtui.sources.recorded import RecordingSource

    source = RecordingSource(opened, start if start else -1)
    source.set_speed(speed)
    if paused:
        source.pause()
    code = run_app(source, theme=theme, ascii=ascii_only, settings=settings)
    if code:
        raise typer.Exit(code)
