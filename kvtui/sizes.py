"""Amounts of memory in the unit that people read."""

from __future__ import annotations


def in_bytes(count: int) -> str:
    """Such as `512 B`, `1.5 MiB` or `112 MiB`."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:,.1f} TiB"
