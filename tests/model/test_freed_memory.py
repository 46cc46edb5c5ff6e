"""Holes between what is still in use go back to the system."""

from __future__ import annotations

import ctypes
import re
import sys
from pathlib import Path

import pytest

from engine.model import freed_memory


def resident_mib() -> float:
    found = re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text(encoding="ascii"))
    assert found
    return int(found.group(1)) / 1024


@pytest.mark.skipif(
    not sys.platform.startswith("linux") or not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="not glibc on Linux"
)
def test_what_lies_between_things_in_use_is_given_back() -> None:
    pieces = [b"x" * 60_000 for _ in range(1500)]
    kept = pieces[::10]
    del pieces
    before = resident_mib()
    freed_memory.give_back()
    assert resident_mib() < before - 40
    assert kept[-1] == b"x" * 60_000
