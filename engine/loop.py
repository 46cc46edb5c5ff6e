"""The engine's own thread: steps while there is work, sleeps while there is none, and can be slowed or stopped."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.engine import PagedEngine

logger = logging.getLogger("engine")

ErrorCallback = Callable[[BaseException], None]


class EngineLoop:
    """Runs `PagedEngine.step()` in a background thread. All methods may be called from any thread.

    Attributes:
        engine: The engine; nobody else may step it while the loop runs.
        error: What ended the thread, or None while all is well.
    """

    def __init__(self, engine: PagedEngine, on_error: ErrorCallback | None = None) -> None:
        """Make a loop; `start` starts it.

        Args:
            engine: The engine to run.
            on_error: Called once, in the loop's thread, with the exception that ends it.
        """
        self.engine = engine
        self.error: BaseException | None = None
        self._on_error = on_error
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._paused = False
        self._single_steps = 0
        self._speed: float | None = None

    def start(self) -> None:
        """Start the thread.

        Raises:
            RuntimeError: it was started before.
        """
        if self._thread is not None:
            raise RuntimeError("the loop was started before: make a new one")
        self.engine.on_work = self._notify
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def stop(self, timeout: float = 0.5) -> bool:
        """Ask the thread to end and wait for it, but not longer than the timeout: a step may take its time.

        Args:
            timeout: In seconds. The thread is a daemon, so a process may end in the middle of a step.

        Returns:
            Whether it has ended.
        """
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        thread = self._thread
        if thread is None:
            return True
        if thread is not threading.current_thread():
            thread.join(timeout)
        return not thread.is_alive()

    def pause(self) -> None:
        """Make no further step after the one under way. Requests are taken in and wait."""
        with self._changed:
            self._paused = True

    def resume(self) -> None:
        """Go on after a pause."""
        with self._changed:
            self._paused = False
            self._single_steps = 0
            self._changed.notify_all()

    def step_once(self) -> None:
        """While paused: make one more step, if there is work for one."""
        with self._changed:
            if self._paused and self.engine.has_work:
                self._single_steps += 1
                self._changed.notify_all()

    def set_speed(self, steps_per_second: float | None) -> None:
        """Make at most so many steps a second; None is as fast as it goes.

        Raises:
            ValueError: not a positive number.
        """
        if steps_per_second is not None and not steps_per_second > 0:
            raise ValueError(
                f"{steps_per_second} steps a second is not possible: use more than 0, or None for no limit"
            )
        with self._changed:
            self._speed = steps_per_second
            self._changed.notify_all()

    @property
    def paused(self) -> bool:
        """Whether it is paused."""
        return self._paused

    @property
    def speed(self) -> float | None:
        """Most steps a second, or None."""
        return self._speed

    @property
    def running(self) -> bool:
        """Whether the thread is alive."""
        return self._thread is not None and self._thread.is_alive()

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _run(self) -> None:
        try:
            began = -float("inf")
            while self._wait_for_turn(began):
                began = time.monotonic()
                self.engine.step()
        except BaseException as error:
            logger.exception("the engine's thread ended")
            self.error = error
            if self._on_error is not None:
                self._on_error(error)

    def _wait_for_turn(self, last_began: float) -> bool:
        """Sleep until a step is due; False when it is time to end."""
        with self._changed:
            while not self._stopping:
                if not self.engine.has_work:
                    self._single_steps = 0
                    self._changed.wait()
                elif self._paused and not self._single_steps:
                    self._changed.wait()
                else:
                    early = (
                        0.0 if self._paused or self._speed is None else last_began + 1 / self._speed - time.monotonic()
                    )
                    if early <= 0:
                        self._single_steps = max(0, self._single_steps - 1)
                        return True
                    self._changed.wait(early)
            return False
