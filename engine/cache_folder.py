"""Where things are kept that would take long to make again: converted models, compiled workers."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs


def cache_folder() -> Path:
    """The folder that `KVTUI_CACHE` names, or the platform's place for a user's caches."""
    chosen = os.environ.get("KVTUI_CACHE")
    return Path(chosen).expanduser() if chosen else Path(platformdirs.user_cache_dir("kvtui", appauthor=False))
