"""Glyph says what: the characters of every panel, in Unicode and in ASCII.

Every character here is one cell wide in either set, so a panel lays out the same with both; only the sign for paused,
which stands in words, has two in ASCII.
"""

from __future__ import annotations

import locale
import os
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Glyphs:
    """One set of characters.

    Attributes:
        levels: From nearly empty to full; `level` picks one.
        next_free: A free block that is taken next.
        next_cached: A cached one: its content is evicted then.
        trace: On the pool's chart: something cached, less than half a cell of it.
        marked: A block in use under the cursor, where a full cell would hide the cursor's background.
        many: Stands for a number above 9.
        history: From 0 to full, for curves over time.
        step_marks: On the position bar, in the order of `MarkKind`: preempted, evicted, refused, copied, finished.
        window: The first and the last step of a window, on the position bar.
    """

    ascii: bool
    free: str
    cached: str
    next_free: str
    next_cached: str
    trace: str
    levels: str
    many: str
    evicted: str
    swapped: str
    prefill: str
    decode: str
    recompute: str
    history: str
    cursor: str
    marked: str
    ellipsis: str
    dot: str
    bar: str
    bar_empty: str
    playing: str
    paused: str
    live: str
    separator: str
    times: str
    arrow_left: str
    arrow_right: str
    horizontal: str
    vertical: str
    step_marks: str
    window: str

    def level(self, filled: int, size: int) -> str:
        """The level of a block in use with `filled` of `size` slots holding keys and values."""
        n = len(self.levels)
        return self.levels[min(n - 1, max(0, (filled * n + size - 1) // size - 1))]


UNICODE = Glyphs(
    ascii=False,
    free="·",
    cached="░",
    next_free="◦",
    next_cached="▚",
    trace="┈",
    levels="▁▂▃▄▅▆▇█",
    many="+",
    evicted="×",
    swapped="⇄",
    prefill="▒",
    decode="▪",
    recompute="◇",
    history=" ▁▂▃▄▅▆▇█",
    cursor="▸",
    marked="◆",
    ellipsis="…",
    dot="·",
    bar="━",
    bar_empty="─",
    playing="▶",
    paused="‖",
    live="●",
    separator="│",
    times="×",
    arrow_left="←",
    arrow_right="→",
    horizontal="─",
    vertical="│",
    step_marks="▼×!⇄▌",
    window="[]",
)

ASCII = Glyphs(
    ascii=True,
    free=".",
    cached=":",
    next_free=",",
    next_cached=";",
    trace=".",
    levels="_-~=oO&#",
    many="+",
    evicted="x",
    swapped="%",
    prefill="P",
    decode="d",
    recompute="R",
    history=" .:-=+*%#",
    cursor=">",
    marked="@",
    ellipsis="~",
    dot="-",
    bar="=",
    bar_empty="-",
    playing=">",
    paused="||",
    live="*",
    separator="|",
    times="x",
    arrow_left="<",
    arrow_right=">",
    horizontal="-",
    vertical="|",
    step_marks="vx!%|",
    window="[]",
)


def terminal_speaks_unicode() -> bool:
    """Whether the locale's encoding can carry the Unicode set (`LC_ALL=C` cannot).

    The environment is asked before Python's own setting, because Python coerces the C locale to UTF-8 for itself,
    which does not teach the terminal anything.
    """
    for name in ("LC_ALL", "LC_CTYPE", "LANG"):
        value = os.environ.get(name)
        if value:
            return "utf" in value.lower()
    return "utf" in locale.getpreferredencoding(False).lower()


def choose_glyphs(ascii_only: bool = False) -> Glyphs:
    """The ASCII set where asked for or where the locale knows no better, else the Unicode set."""
    return ASCII if ascii_only or not terminal_speaks_unicode() else UNICODE
