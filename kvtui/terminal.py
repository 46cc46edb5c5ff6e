"""The terminal that the dashboard is drawn on: whether it can, and a driver that keeps hold of it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import sys
from typing import TYPE_CHECKING, Any, TextIO

from kvtui.unheard_keys import drop_typed

if TYPE_CHECKING:
    from collections.abc import Callable

    from textual.app import App
    from textual.driver import Driver

MIN_WIDTH, MIN_HEIGHT = 60, 16
"""Below this there is only a line that says how much room is needed."""

WIDE = 110
"""From this width on all panels are on screen together."""


def served() -> bool:
    """Whether `textual serve` runs this process, and carries its screen to a browser over standard input and output."""
    return bool(os.environ.get("TEXTUAL_DRIVER"))


def terminal_problem() -> str | None:
    """Why the dashboard cannot be drawn here, in one line that says what to do; None where it can."""
    instead = "kvtui run --headless prints plain lines, and kvtui inspect reports on a recording"
    if served():
        return None
    if os.environ.get("TERM") in ("dumb", "unknown"):
        return f"TERM={os.environ['TERM']} cannot draw a dashboard: use another terminal; {instead}"
    if not sys.__stdin__ or not sys.__stdin__.isatty():
        return f"standard input is not a terminal, so no key would arrive: run kvtui in a terminal; {instead}"
    if not (os.isatty(2) or os.isatty(1)):
        return f"the output is not a terminal: run kvtui in a terminal; {instead}"
    return None


def forget_told_size() -> None:
    """Measure the terminal, whatever `COLUMNS` and `LINES` say: a shell that exports them tells of a past size."""
    if not served():
        for name in ("COLUMNS", "LINES"):
            os.environ.pop(name, None)


def hung_up() -> bool:
    """Whether the terminal that keys come from is gone, which not every process is told by a signal."""
    poll = select.poll()
    poll.register(0, 0)
    return any(events & select.POLLHUP for _, events in poll.poll(0))


class _LastingFile:
    """A terminal that takes what is written even when it is gone.

    The thread that writes would end with the first error, and whoever draws next would wait for it for ever.
    """

    def __init__(self, terminal: TextIO) -> None:
        self._terminal = terminal

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._terminal.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._terminal.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._terminal, name)


def driver_for(terminal: TextIO, on_leave: Callable[[], None]) -> type[Driver]:
    """Textual's driver on a terminal of our own, since 1 and 2 are pipes by now.

    Args:
        terminal: Where to draw.
        on_leave: Called once the screen belongs to the shell again.
    """
    from textual.drivers.linux_driver import LinuxDriver

    class TerminalDriver(LinuxDriver):
        """Writes to, and measures, the saved terminal."""

        def __init__(self, app: App[Any], **settings: Any) -> None:
            super().__init__(app, **settings)
            self._started = False
            self._file = _LastingFile(terminal)  # type: ignore[assignment]
            # Textual's own handlers write in the middle of whatever they interrupt: where that was a write, they would
            # wait for ever for the queue that it holds.
            loop = asyncio.get_running_loop()
            loop.add_signal_handler(signal.SIGTSTP, self._sigtstp_application)
            loop.add_signal_handler(signal.SIGCONT, self._sigcont_application)

        def start_application_mode(self) -> None:
            if not self._started:
                # What was typed before there was anything to see was not meant for what is seen now.
                self._started = True
                drop_typed()
            super().start_application_mode()  # type: ignore[no-untyped-call]

        def _get_terminal_size(self) -> tuple[int, int]:
            try:
                size = os.get_terminal_size(terminal.fileno())
            except OSError:
                return super()._get_terminal_size()
            return (size.columns or 80, size.lines or 25)

        def resume_application_mode(self) -> None:
            # Stopped by SIGSTOP, nothing was suspended: starting on top of that would take the terminal as it is now
            # for the shell's, and leave a second set of threads behind.
            if self._key_thread is not None and self._key_thread.is_alive():
                self.suspend_application_mode()
            super().resume_application_mode()
            # The terminal's other screen is empty now, and one of the same size makes nobody draw.
            self._app.screen.refresh()

        def stop_application_mode(self) -> None:
            # A terminal that has grown meanwhile may move the last frame into what can be scrolled back to.
            self.write("\x1b[2J\x1b[H")
            super().stop_application_mode()
            on_leave()

    return TerminalDriver


def pending_writes(driver: Driver | None) -> int:
    """How many pieces of output the terminal has not taken yet; 0 where that cannot be known."""
    queue = getattr(getattr(driver, "_writer_thread", None), "_queue", None)
    return queue.qsize() if queue is not None else 0


def drop_pending_writes(driver: Driver | None) -> None:
    """Throw away frames that a slow terminal has not taken yet: they are stale, and quitting should not wait."""
    queue = getattr(getattr(driver, "_writer_thread", None), "_queue", None)
    if queue is not None:
        with queue.mutex:
            queue.queue.clear()
            queue.not_full.notify_all()
