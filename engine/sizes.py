"""Amounts as people read them."""

from __future__ import annotations


def in_bytes(count: int) -> str:
    """Such as `512 B`, `1.5 MiB` or `112 MiB`."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:,.1f} TiB"


def counted(number: int, noun: str) -> str:
    """Such as `1 block` or `1,040 tokens`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
