"""How to start kvtui again from another terminal: by its path where the name alone will not do."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

DEFAULT_URL = "http://127.0.0.1:8077"
"""Where `inject` sends to by itself."""


def own_command(started_as: str | None = None) -> str:
    """The command that people can type: `kvtui`, or its path where the shell would not find it by its name.

    Args:
        started_as: By default, what this process was started as.
    """
    path = Path(sys.argv[0] if started_as is None else started_as)
    if path.name != "kvtui" or os.sep not in str(path):
        return "kvtui"
    found = shutil.which("kvtui")
    if found is not None and Path(found).resolve() == path.resolve():
        return "kvtui"
    if path.is_absolute() and path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    return shlex.quote(str(path))


def inject_command(listen_url: str, what: str) -> str:
    """The command that sends requests to a session.

    Args:
        listen_url: Where it listens, with what callers have to give besides.
        what: What to send, as options.
    """
    where = "" if listen_url == DEFAULT_URL else f" --url {listen_url}"
    return f"{own_command()} inject{where} {what}"
