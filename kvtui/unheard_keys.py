"""Keys that are typed while something loads: nobody hears them, so they are neither echoed nor kept for later."""

from __future__ import annotations

import contextlib
import os
import signal
import termios
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

_KEYBOARD = 0
_LFLAG = 3
"""Place of the local modes among a terminal's attributes."""
_ENDS = (signal.SIGTERM, signal.SIGQUIT)
"""Signals that end a process on the spot; ctrl+c raises an exception instead."""


def drop_typed() -> None:
    """Forget what has been typed and not been read yet."""
    with contextlib.suppress(OSError, termios.error):
        if _in_front():
            termios.tcflush(_KEYBOARD, termios.TCIFLUSH)


@contextlib.contextmanager
def unheard_keys() -> Iterator[None]:
    """Switch the terminal's echo off meanwhile, and drop at the end what was typed.

    ctrl+c, ctrl+backslash and ctrl+z do what they always do. The terminal is as it was before whatever ends this: the
    end of the block, an exception, a signal; and also while the process is stopped. Nothing is done where standard
    input is no terminal, or is another process's at present.
    """
    echo = _Echo()
    echo.off()

    def end(number: int, frame: FrameType | None) -> None:
        echo.restore()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def stop(number: int, frame: FrameType | None) -> None:
        echo.restore()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        # Here it goes on, when somebody continues it.
        signal.signal(number, stop)
        echo.off()

    before: dict[int, Any] = {}
    if echo.is_off:
        before = {number: signal.signal(number, end) for number in _ENDS}
        before[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, stop)
    try:
        yield
    finally:
        drop_typed()
        echo.restore()
        for number, handler in before.items():
            signal.signal(number, handler)


class _Echo:
    """The echo of the terminal that keys come from."""

    def __init__(self) -> None:
        self._before: list[Any] | None = None

    @property
    def is_off(self) -> bool:
        """Whether it was switched off here."""
        return self._before is not None

    def off(self) -> None:
        """Switch it off, where the terminal is ours to switch."""
        with contextlib.suppress(OSError, termios.error):
            if self.is_off or not _in_front():
                return
            before = termios.tcgetattr(_KEYBOARD)
            silent = [*before]
            silent[_LFLAG] &= ~termios.ECHO
            # First of all what it is put back to: a signal may come before the next line.
            self._before = before
            termios.tcsetattr(_KEYBOARD, termios.TCSANOW, silent)

    def restore(self) -> None:
        """Have the terminal as it was."""
        before, self._before = self._before, None
        if before is not None:
            with contextlib.suppress(OSError, termios.error):
                termios.tcsetattr(_KEYBOARD, termios.TCSANOW, before)


def _in_front() -> bool:
    """Whether keys come from a terminal and go to this process; who changes it from behind is stopped."""
    return os.isatty(_KEYBOARD) and os.tcgetpgrp(_KEYBOARD) == os.getpgrp()
