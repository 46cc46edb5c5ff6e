"""How a command ends badly: one clear line on stderr, and an exit code that says whose fault it was."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from collections.abc import Iterator

FAILED = 1
"""Exit code: the command was right and did not succeed."""
USED_WRONGLY = 2
"""Exit code: an argument, a file or the surroundings cannot work."""
INTERRUPTED = 130
"""Exit code: ended by ctrl+c."""

_USED_WRONGLY = frozenset(
    {
        "ConfigError",
        "RecordingError",
        "WorkloadError",
        "ServerError",
        "UsageError",
        "RequestError",
        "SettingsError",
        "ThemeError",
    }
)
"""Exceptions, by name so that nothing is imported for it, that say what the user can change. Their text is one line."""


class UsageError(Exception):
    """A command that cannot work as it was given. Its text is one line that says what to do."""


@contextmanager
def reported() -> Iterator[None]:
    """Turn exceptions into a line on stderr and an exit code; with KVTUI_DEBUG=1 they come with their traceback.

    Raises:
        typer.Exit: with the code.
    """
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except (typer.Exit, typer.Abort, BrokenPipeError):
        raise
    except Exception as error:
        names = {kind.__name__ for kind in type(error).__mro__}
        if "ClickException" in names or os.environ.get("KVTUI_DEBUG") == "1":
            raise
        if names & _USED_WRONGLY:
            say(str(error))
            raise typer.Exit(USED_WRONGLY) from None
        say(f"failed: {type(error).__name__}: {error} (KVTUI_DEBUG=1 shows where)")
        raise typer.Exit(FAILED) from None


def say(line: str) -> None:
    """A line for people, on stderr."""
    text = " ".join(line.split())
    print("kvtui: " + "".join(c if c.isprintable() else "\ufffd" for c in text), file=sys.stderr, flush=True)
