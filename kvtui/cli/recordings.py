"""`kvtui recordings`: what there is to play."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvtui.cli.errors import UsageError, say

if TYPE_CHECKING:
    from engine.trace.reader import Recording

_SUFFIX = ".mcap"


@dataclass(frozen=True, slots=True)
class Listed:
    """A recording in a list.

    Attributes:
        name: What `play` takes.
        duration_s: From the first step to the end of the last.
        size_bytes: Of the file.
        complete: Whether it was finished; one that was cut off is played as far as it goes.
    """

    name: str
    title: str
    description: str
    model: str
    steps: int
    duration_s: float
    size_bytes: int
    path: Path
    complete: bool = True


def recordings_command(
    folder: Annotated[
        Path | None,
        typer.Argument(metavar="FOLDER", help="List the recordings in a folder instead.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """List the packaged recordings.

    Example: kvtui recordings --json
    """
    if folder is not None and not folder.is_dir():
        raise UsageError(f"{folder} is not a folder; kvtui inspect reports on one recording")
    listed = packaged_recordings(folder)
    if as_json:
        print(json.dumps([asdict(one) | {"path": str(one.path)} for one in listed], indent=2))
    elif listed:
        print(listing(listed))
    else:
        say(f"there are no recordings in {folder}" if folder else "no recordings are packaged here")


def packaged_recordings(folder: Path | None = None) -> list[Listed]:
    """The recordings in a folder, the packaged ones by default; those that cannot be read are named on stderr."""
    from engine.trace.file_format import RecordingError
    from engine.trace.reader import Recording
    from kvtui.packaged import packaged_folder

    listed = []
    for path in sorted((folder or packaged_folder("recordings")).glob(f"*{_SUFFIX}")):
        try:
            with Recording.open(path) as recording:
                listed.append(_listed(recording))
        except RecordingError as error:
            say(str(error))
    return listed


def _listed(recording: Recording) -> Listed:
    header = recording.header
    return Listed(
        name=recording.path.stem,
        title=_line(header.title),
        description=_line(header.description),
        model=_line(header.model.name),
        steps=recording.num_steps,
        duration_s=round(recording.duration_ns / 1e9, 3),
        size_bytes=recording.size,
        path=recording.path,
        complete=recording.complete,
    )


def find_recording(reference: str) -> Path:
    """The file behind a name or a path.

    Raises:
        UsageError: there is none.
    """
    from kvtui.packaged import packaged_folder

    path = Path(reference).expanduser()
    if path.is_file():
        return path
    if path.is_dir():
        raise UsageError(f"{path} is a folder; name a recording in it (kvtui recordings {path})")
    folder = packaged_folder("recordings")
    if path.name == reference and (folder / f"{reference}{_SUFFIX}").is_file():
        return folder / f"{reference}{_SUFFIX}"
    names = ", ".join(sorted(file.stem for file in folder.glob(f"*{_SUFFIX}")))
    raise UsageError(f"no recording {reference!r}: it is neither a file nor packaged ({names or 'none is'})")


def listing(recordings: list[Listed]) -> str:
    """A table for people."""
    rows = [("name", "steps", "duration", "size", "title")]
    rows += [
        (r.name, f"{r.steps:,}", f"{r.duration_s:.0f} s", f"{r.size_bytes / 1024:,.0f} KiB", _told(r))
        for r in recordings
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return "\n".join(
        "  ".join(
            (
                row[0].ljust(widths[0]),
                *(cell.rjust(width) for cell, width in zip(row[1:4], widths[1:], strict=True)),
                row[4],
            )
        ).rstrip()
        for row in rows
    )


def _told(listed: Listed) -> str:
    if listed.complete:
        return listed.title
    cut = f"(cut off after {listed.steps:,} step{'' if listed.steps == 1 else 's'})"
    return f"{listed.title} {cut}".strip()


def _line(text: str) -> str:
    from kvtui.safe_text import clean

    return clean(text, limit=200)
