"""A request's output text as it may be shown: whole characters, and nothing that may yet be a stop string."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.runner import TextStream


class OutputText:
    """Turns the tokens of one request into text that is safe to hand out.

    Attributes:
        stopped: Whether a stop string came; nothing is handed out from it on.
    """

    __slots__ = ("_finished", "_held", "_stop", "_stream", "stopped")

    def __init__(self, stream: TextStream, stop: tuple[str, ...]) -> None:
        self._stream = stream
        self._stop = stop
        self._held = ""
        self._finished = False
        self.stopped = False

    def push(self, token_id: int) -> tuple[str, str]:
        """Take in a token.

        Returns:
            The text that it completed, stop strings and all, and the text that may be handed out now.
        """
        piece = self._stream.push(token_id)
        return piece, self._release(piece)

    def finish(self) -> tuple[str, str]:
        """End the output: what the stream still held, and all text not handed out yet, up to a stop string.

        A second call brings nothing.
        """
        if self._finished:
            return "", ""
        self._finished = True
        piece = self._stream.flush()
        shown = self._release(piece) + self._held
        self._held = ""
        return piece, shown

    def _release(self, piece: str) -> str:
        """Add to the held text and take from it what cannot belong to a stop string any more."""
        if self.stopped:
            return ""
        if not self._stop:
            return piece
        text = self._held + piece
        found = min((at for at in map(text.find, self._stop) if at >= 0), default=-1)
        if found >= 0:
            self.stopped = True
            self._held = ""
            return text[:found]
        keep = max(_overlap(text, stop) for stop in self._stop)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of the text that begins the stop string without completing it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
