"""A device's queue on machines without a device: what is launched is computed later, in order."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class DeferredStep:
    """A launched step whose work is done when somebody waits for it, after the work of all that were launched before.

    Args:
        work: Gives the step's tokens, or raises what is wrong.
        before: The step launched before it.
    """

    def __init__(self, work: Callable[[], list[int | None]], before: DeferredStep | None) -> None:
        self._work: Callable[[], list[int | None]] | None = work
        self._before = before
        self._tokens: list[int | None] = []
        self._error: Exception | None = None

    def run(self) -> None:
        """Do the work, unless that was done; what it raises is kept for `wait`."""
        before, self._before = self._before, None
        if before is not None:
            before.run()
        work, self._work = self._work, None
        if work is not None:
            try:
                self._tokens = work()
            except Exception as error:
                self._error = error

    def wait(self) -> list[int | None]:
        """See `LaunchedStep.wait`."""
        self.run()
        if self._error is not None:
            raise self._error
        return self._tokens
