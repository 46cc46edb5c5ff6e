"""A recording as a source."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kvtui.sources.playback import Playback

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.trace.events import Header
    from engine.trace.reader import Recording


class RecordingSource(Playback):
    """What a screen draws while a recording plays; see `Source` for the attributes.

    Args:
        recording: Open.
        start: The step to begin at.
        clock: Nanoseconds that only grow; tests bring their own.
    """

    live = False
    num_arrived = 0
    looking_back = False
    engine_paused = False
    first = 0

    def __init__(self, recording: Recording, start: int = -1, clock: Callable[[], int] = time.monotonic_ns) -> None:
        super().__init__(recording, start, clock)
        self.recording = recording
        self.header: Header = recording.header
        self.length = recording.num_steps
        self.cut_off = not recording.complete

    def play(self) -> None:
        """Play on: in a recording there is nothing but the past."""
        self.resume()

    def hold(self) -> None:
        """Stop playing."""
        self.pause()

    def follow(self) -> None:
        """Go to the last step."""
        self.seek(self.length - 1)

    def close(self, timeout: float) -> bool:
        """Close the file."""
        self.recording.close()
        return True
