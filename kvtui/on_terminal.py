"""An app on the terminal, which is given back whatever happens. All of kvtui's screens run in here."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING

from kvtui.capture_output import OutputCapture
from kvtui.terminal import driver_for, served

if TYPE_CHECKING:
    from collections.abc import Callable

    from textual.driver import Driver

    from kvtui.themed_app import ThemedApp


def run_on_terminal(make: Callable[[OutputCapture | None, type[Driver] | None], ThemedApp]) -> int:
    """Run an app until it ends; then say why, and what the process printed that the terminal was meant to get.

    Args:
        make: Makes the app, of what keeps output off the screen and of the driver, both of which it hands on. What it
            raises is raised here, the terminal as it was.

    Returns:
        The app's exit code: 128 + n after signal n, which is SIGHUP also where the terminal went away without a word.
    """
    if served():
        # To a browser the standard streams carry the screen itself.
        app = make(None, None)
        app.run()
    else:
        capture = OutputCapture()
        capture.start()
        try:
            app = make(capture, driver_for(capture.terminal, capture.mark))
            app.run()
        finally:
            capture.stop()
        failed = app.return_code == 1
        for line in capture.since_mark() if app.exit_reason is None else capture.tail(20 if failed else 0):
            _say(line)
    if app.exit_reason is not None:
        _say(f"kvtui: {app.exit_reason}")
    return app.return_code or 0


def _say(line: str) -> None:
    # Where the terminal is gone there is nobody to tell.
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr)
