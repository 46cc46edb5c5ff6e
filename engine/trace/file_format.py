"""What a recording is made of, known to those who write it and those who read it; `docs/trace.md` describes it."""

from __future__ import annotations

import msgspec

from engine.trace.container import DamagedError

PROFILE = "kvtui"
"""The MCAP profile of recordings."""
HEADER_TOPIC, SEGMENT_TOPIC, KEYFRAME_TOPIC = "header", "segment", "keyframe"
INDEX_NAME, VOCABULARY_NAME, MARKS_NAME = "index", "vocabulary", "marks"
MAX_BLOCKS = 1 << 22
"""Blocks of a pool that a recording may have: the state of one takes 60 bytes."""

DAMAGE = (DamagedError, OSError, ValueError, TypeError, KeyError, IndexError, OverflowError, msgspec.MsgspecError)
"""What reading a damaged or hostile part can raise."""


class RecordingError(Exception):
    """A recording that cannot be written or read. Its text is one line: what, to which file, and what to do next.

    Attributes:
        steps: The first and the last of the steps that cannot be read, where it is only about these.
    """

    def __init__(self, message: str, steps: tuple[int, int] | None = None) -> None:
        super().__init__(message)
        self.steps = steps


class Index(msgspec.Struct, frozen=True):
    """Where everything is, at the end of a complete recording; columns as `engine.trace.columns.pack` makes them.

    Attributes:
        duration_ns: End of the last step, since the trace began.
        num_requests: How many arrived.
        num_segments: Rows of `segments`: first step, steps, offset and length of the chunk's content, arrivals in it;
            the first and the offset less the row before.
        num_keyframes: Rows of `keyframes`: step, offset and length of the chunk's content; all but the length less
            the row before.
    """

    num_steps: int
    duration_ns: int
    num_requests: int
    num_segments: int
    segments: list[bytes]
    num_keyframes: int
    keyframes: list[bytes]


class VocabularyTable(msgspec.Struct, frozen=True):
    """The whole vocabulary, at the end of a long recording: token ids as a column, and their texts."""

    ids: bytes
    texts: list[str]


def one_line(error: Exception) -> str:
    """What an exception says, in one line."""
    return " ".join(str(error).split())[:200]
