"""Folders of compiled workers, one for each state of their sources: used ones are kept, stale ones removed.

Any number of processes and checkouts share the folders. Each says when it uses one; what nobody has used for long is
removed, and at worst compiled again. Nothing that the file system does stops anybody.
"""

from __future__ import annotations

import functools
import os
import re
import time
from contextlib import suppress
from pathlib import Path

KEPT_FOR = 30 * 86400.0
"""Seconds after its last use in which a folder is kept."""

MOST = 64
"""Folders kept: of more, those that were used last. A version of the engine has about six."""

RECENT = 86400.0
"""Seconds after its last use in which a folder is kept however many there are."""

_NAME = re.compile(r"[0-9a-f]{12}")
_INDEX, _WRITTEN = re.compile(r".*\.nbi"), re.compile(r".*\.(nbi|nbc)(\.tmp\..*)?")
"""Files that Numba writes; those that name the others are removed first, so that a reader finds all or nothing."""


def use(folder: Path) -> None:
    """Say that a folder is used now, and remove what nobody has used for long beside it, once for each process."""
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        os.utime(folder)
    _remove_stale(folder.parent)


@functools.cache
def _remove_stale(root: Path) -> None:
    with suppress(OSError):
        for folder in stale(root, time.time()):
            _remove(folder)


def stale(root: Path, now: float) -> list[Path]:
    """Folders that may go, the longest unused first.

    Args:
        root: What holds them.
        now: Seconds since the epoch.
    """
    used: list[tuple[float, Path]] = []
    with os.scandir(root) as entries:
        for entry in entries:
            with suppress(OSError):
                if _NAME.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                    used.append((entry.stat(follow_symlinks=False).st_mtime, Path(entry.path)))
    used.sort()
    limits = [RECENT if left > MOST else KEPT_FOR for left in range(len(used), 0, -1)]
    return [folder for (when, folder), limit in zip(used, limits, strict=True) if now - when > limit]


def _remove(folder: Path) -> None:
    """Remove what Numba wrote, and folders that are empty then."""
    for kind in (_INDEX, _WRITTEN):
        for path, _, names in os.walk(folder, topdown=False):
            for name in filter(kind.fullmatch, names):
                with suppress(OSError):
                    os.unlink(os.path.join(path, name))  # noqa: PTH108, PTH118
            if kind is _WRITTEN:
                with suppress(OSError):
                    os.rmdir(path)  # noqa: PTH106
