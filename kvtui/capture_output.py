"""Whatever the process prints while the dashboard is on screen: caught line by line, never drawn over the picture.

Python's own prints, warnings and log records, and what native libraries write, all end in file descriptors 1 and 2.
Both are turned into pipes, which a thread reads; a duplicate of the old descriptor still reaches the terminal.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import sys
from collections import deque
from threading import Thread
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_LINES = 2000
"""Lines kept, the newest."""

MAX_LINE_CHARACTERS = 4096
"""A longer line is cut in lines of this length."""

_JOIN_SECONDS = 0.5


class LineAssembler:
    """Turns pieces of text into lines; of what a carriage return overwrites only the last stays."""

    def __init__(self) -> None:
        self._rest = ""

    def feed(self, text: str) -> Iterator[str]:
        """The lines that this piece completes."""
        self._rest += text.replace("\r\n", "\n")
        *lines, self._rest = self._rest.split("\n")
        # A bar redrawn in place never ends its line: keep what it shows now, and hold a final \r, which \n may follow.
        body, held = (self._rest[:-1], "\r") if self._rest.endswith("\r") else (self._rest, "")
        self._rest = body.rpartition("\r")[2] + held
        for line in lines:
            yield from _cut(line.rstrip("\r").rpartition("\r")[2])
        while len(self._rest) > MAX_LINE_CHARACTERS:
            yield self._rest[:MAX_LINE_CHARACTERS]
            self._rest = self._rest[MAX_LINE_CHARACTERS:]

    def flush(self) -> str:
        """The unfinished line, which is then forgotten."""
        rest, self._rest = self._rest.rstrip("\r").rpartition("\r")[2], ""
        return rest


def _cut(line: str) -> Iterator[str]:
    for start in range(0, max(1, len(line)), MAX_LINE_CHARACTERS):
        yield line[start : start + MAX_LINE_CHARACTERS]


class OutputCapture:
    """Catches file descriptors 1 and 2 between `start` and `stop`.

    A descriptor that is not a terminal stays as it is: where the user sent it, the output still goes.

    Attributes:
        lines: The newest lines, for the log panel; appended by the reading thread.
        num_lines: How many there have been.
    """

    def __init__(self) -> None:
        self.lines: deque[str] = deque(maxlen=MAX_LINES)
        self.num_lines = 0
        self._terminal: TextIO | None = None
        self._saved: dict[int, int] = {}
        self._threads: list[Thread] = []
        self._marked: int | None = None

    @property
    def terminal(self) -> TextIO:
        """The real terminal, whatever 1 and 2 are now."""
        assert self._terminal is not None, "capture has not started"
        return self._terminal

    def start(self) -> None:
        """Turn 1 and 2 into pipes where they are terminals."""
        sys.stdout.flush()
        sys.stderr.flush()
        on_terminal = [fd for fd in (2, 1) if os.isatty(fd)]
        self._terminal = os.fdopen(
            os.dup(on_terminal[0] if on_terminal else 2), "w", encoding="utf-8", errors="replace", newline=""
        )
        for fd in on_terminal:
            self._saved[fd] = os.dup(fd)
            read_end, write_end = os.pipe()
            os.dup2(write_end, fd)
            os.close(write_end)
            thread = Thread(target=self._read, args=(read_end,), name=f"kvtui-output-{fd}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def stop(self) -> None:
        """Give 1 and 2 back to the terminal and take in what is still in the pipes."""
        sys.stdout.flush()
        sys.stderr.flush()
        for fd, saved in self._saved.items():
            os.dup2(saved, fd)
            os.close(saved)
        self._saved.clear()
        for thread in self._threads:
            # A child process may hold the pipe's other end open: what it writes from now on is lost.
            thread.join(_JOIN_SECONDS)
        self._threads.clear()
        if self._terminal is not None:
            # A terminal that has hung up takes nothing any more.
            with contextlib.suppress(OSError):
                self._terminal.close()
            self._terminal = None

    def mark(self) -> None:
        """From here on the lines are meant for the terminal (the dashboard has left the screen)."""
        sys.stdout.flush()
        sys.stderr.flush()
        self._marked = self.num_lines

    def since_mark(self) -> list[str]:
        """The lines caught after `mark`."""
        return self.tail(self.num_lines - self._marked) if self._marked is not None else []

    def tail(self, count: int) -> list[str]:
        """The newest lines."""
        return list(self.lines)[-count:] if count > 0 else []

    def add(self, line: str) -> None:
        """Put a line of kvtui's own into the log."""
        self.lines.append(line)
        self.num_lines += 1

    def _read(self, fd: int) -> None:
        decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        assembler = LineAssembler()
        while True:
            try:
                data = os.read(fd, 65536)
            except OSError:
                break
            if not data:
                break
            for line in assembler.feed(decode(data)):
                self.add(line)
        rest = assembler.flush()
        if rest:
            self.add(rest)
        os.close(fd)
