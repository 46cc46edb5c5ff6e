"""What the process said: prints, warnings and log records, caught so that they never reach the screen as such."""

from __future__ import annotations

import re
import time
from collections import deque
from typing import TYPE_CHECKING, Literal, NamedTuple

from kvtui.safe_text import clean, fit
from kvtui.widgets.line import Line
from kvtui.widgets.line_panel import LinePanel
from kvtui.widgets.wheel import WheelScrolled

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from textual.strip import Strip

    from kvtui.view import View

Level = Literal["info", "warning", "error"]

_MOST_CHARACTERS = 2000
_ERROR = re.compile(r"(?i:\b(error|critical|fatal|exception|traceback)\b)|[a-z](Error|Exception)\b")
_WARNING = re.compile(r"(?i:\bwarn(ing)?\b)|[a-z]Warning\b")
_SIGN = {"info": " ", "warning": "?", "error": "!"}


class Entry(NamedTuple):
    """A line of the log, and how often it came in a row.

    Attributes:
        number: Counts entries, so that equal lines at different times differ.
        seconds: Local time of the day at which it came last.
    """

    number: int
    seconds: int
    level: Level
    text: str
    repeats: int


def level_of(text: str) -> Level:
    """A guess at how serious a line is, from the words in it."""
    return "error" if _ERROR.search(text) else "warning" if _WARNING.search(text) else "info"


class LogPanel(WheelScrolled, LinePanel):
    """The last lines, newest at the bottom.

    `write` may be called from any thread and never waits; `drain`, called by the app's timer, takes the lines in.
    Memory is bounded on both sides: lines that come faster than they are drained are counted and dropped.
    """

    def __init__(
        self,
        *,
        most_lines: int = 1000,
        clock: Callable[[], float] = time.time,
        id: str | None = None,  # noqa: A002
        classes: str | None = None,
    ) -> None:
        super().__init__(id=id, classes=classes)
        self._incoming: deque[tuple[float, str, Level | None]] = deque(maxlen=most_lines)
        self._written = 0
        self._taken = 0
        self._entries: deque[Entry] = deque(maxlen=most_lines)
        self._number = 0
        self._clock = clock
        self._back = 0
        self.unread = 0

    def write(self, line: str, level: Level | None = None) -> None:
        """Add a line, from any thread.

        Args:
            line: Untrusted; line breaks in it make several lines.
            level: Guessed from the words where it is not given.
        """
        now = self._clock()
        for text in line[: 4 * _MOST_CHARACTERS].splitlines() or [""]:
            self._incoming.append((now, text[:_MOST_CHARACTERS], level))
            self._written += 1

    def drain(self) -> int:
        """Take in what was written since the last call; how many lines that were."""
        taken = 0
        while self._incoming:
            try:
                now, text, level = self._incoming.popleft()
            except IndexError:
                break
            taken += 1
            self._take(now, text, level)
        lost = self._written - self._taken - taken - len(self._incoming)
        self._taken += taken
        if lost > 0:
            self._taken += lost
            self._take(self._clock(), f"{lost} lines came too fast and were dropped", "warning")
        if taken:
            self.unread += taken
            self.redraw()
        return taken

    def _take(self, now: float, text: str, level: Level | None) -> None:
        text = clean(text.rstrip(), limit=_MOST_CHARACTERS)
        if not text:
            return
        local = time.localtime(now)
        seconds = local.tm_hour * 3600 + local.tm_min * 60 + local.tm_sec
        level = level or level_of(text)
        if self._entries and self._entries[-1].text == text and self._entries[-1].level == level:
            last = self._entries.pop()
            self._entries.append(last._replace(seconds=seconds, repeats=last.repeats + 1))
            return
        self._number += 1
        self._entries.append(Entry(self._number, seconds, level, text, 1))
        if self._back:
            self._back = min(self._back + 1, len(self._entries))

    @property
    def lines(self) -> list[str]:
        """The texts that are kept, oldest first."""
        return [entry.text for entry in self._entries]

    # -- drawing -------------------------------------------------------------------------------------------------

    def rows(self, view: View, width: int, height: int) -> Sequence[Hashable]:
        """The entries of the window."""
        count = len(self._entries)
        title = f"Log {view.glyphs.horizontal} {count:,} line{'s' * (count != 1)}"
        self.set_title(title if count else "Log")
        if not self._entries:
            return ["Nothing so far: what the engine prints appears here."]
        self._back = max(0, min(self._back, len(self._entries) - height))
        if not self._back:
            self.unread = 0
        stop = len(self._entries) - self._back
        return [self._entries[i] for i in range(max(0, stop - height), stop)]

    def draw(self, view: View, key: Hashable, width: int) -> Strip:
        """One entry."""
        assert isinstance(key, Entry)
        palette, glyphs = view.palette, view.glyphs
        style = {"info": palette.text, "warning": palette.warning, "error": palette.error}[key.level]
        line = Line(width, palette.blank).gap()
        if width >= 40:
            clock = f"{key.seconds // 3600:02}:{key.seconds // 60 % 60:02}:{key.seconds % 60:02}"
            line.add(clock, palette.faint).gap()
        line.add(_SIGN[key.level], style).gap()
        count = f" {glyphs.times}{key.repeats}" if key.repeats > 1 else ""
        room = max(0, line.room - len(count))
        return line.add(fit(key.text, room, ascii_only=glyphs.ascii), style).add(count, palette.muted).strip()

    # -- acting --------------------------------------------------------------------------------------------------

    def scroll_rows(self, rows: int) -> None:
        """Move the window towards newer rows, older ones where negative."""
        self._back = max(0, self._back - rows)
        self.redraw()
