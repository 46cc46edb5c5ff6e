"""Reading recordings: opened by their index, any step reached from the keyframe before it.

Files may be cut off, damaged or made up. Whatever is in them, reading takes bounded memory and raises nothing but
`RecordingError`; a file whose writer was killed is read up to its last whole segment.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from engine.trace.file_format import DAMAGE, RecordingError, one_line
from engine.trace.layout import Layout
from engine.trace.trace_reader import TraceReader

if TYPE_CHECKING:
    from types import TracebackType

    from engine.trace.marks import Marks


class Recording(TraceReader):
    """A recording opened for reading; also a context manager.

    Attributes:
        path: The file.
        header: Of the trace.
        num_steps: Steps that can be read: 0 to num_steps - 1.
        num_requests: Requests that arrived in it.
        duration_ns: End of the last step, since the trace began.
        complete: Whether it was closed properly; False where its writer was killed or the file was cut off.
        size: Bytes of the file.
        unread: Bytes behind the last step of one that is not complete: cut off in the middle of something, or damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = path.open("rb")
        except FileNotFoundError:
            raise RecordingError(
                f"there is no recording at {path}: `kvtui recordings` lists those that came along"
            ) from None
        except OSError as error:
            raise RecordingError(f"cannot read {path}: {error.strerror or error}") from None
        try:
            self._layout: Layout = Layout(path, self._file)
        except RecordingError:
            self._file.close()
            raise
        except OSError as error:
            self._file.close()
            raise RecordingError(f"cannot read {path}: {error.strerror or error}") from None
        except DAMAGE as error:
            self._file.close()
            raise RecordingError(f"{path} is damaged beyond use: {one_line(error)}") from None
        super().__init__(str(path), self._layout)
        self.num_requests = self._layout.num_requests
        self.duration_ns = self._layout.duration_ns
        self.complete = self._layout.complete
        self.size = self._layout.size
        self.unread = self._layout.unread

    @staticmethod
    def open(path: str | Path) -> Recording:
        """Open a recording.

        Raises:
            RecordingError: it is none, or empty, or cut off before its first step could be, or of a newer schema.
        """
        return Recording(Path(path))

    @cached_property
    def marks(self) -> Marks:
        """The marks of its steps; read when they are asked for first."""
        return self._layout.marks()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Recording:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
