"""Text that grows at its end, kept wrapped: what was added wraps again no more than the last line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtui.safe_text import wrap_from

if TYPE_CHECKING:
    from collections.abc import Sequence


class GrowingText:
    """Untrusted text as safe lines, those that `kvtui.safe_text.wrap` makes of all of it without the space around it.

    Empty lines at the end are left out.

    Args:
        cells: Of each line, at least 2: then no character is left out for its width.
        most: Characters that are kept at least; of a text with twice as many the first half is let go.
        ascii_only: Use no character outside printable ASCII.
    """

    def __init__(self, cells: int, most: int, *, ascii_only: bool) -> None:
        self._cells, self._most, self._ascii_only = cells, most, ascii_only
        self._num_pieces = 0
        self._num_characters = 0
        self._settled: list[str] = []
        """Lines that nothing added later can change."""
        self._open = ""
        """The text behind them."""

    def follow(self, pieces: Sequence[str], start: int = 0) -> list[str]:
        """The lines of some pieces of text, those of the last call and perhaps more behind them.

        Args:
            pieces: All of them, and what stands before them.
            start: How many stand before them.
        """
        again = len(pieces) - start < self._num_pieces
        new = pieces[start + self._num_pieces :]
        size = sum(map(len, new))
        if again or self._num_characters + size > 2 * self._most:
            new, size = _ending(pieces[start:], self._most)
            self._settled, self._open, self._num_characters = [], "", 0
        self._num_pieces = len(pieces) - start
        self._num_characters += size
        if new:
            self._add("".join(new))
        return self._lines()

    def _add(self, text: str) -> None:
        text = self._open + text
        if not self._settled:
            text = text.lstrip()
        # Space at the end is not shown unless something follows; and a line break may have come in half.
        body = text.rstrip()
        *closed, last = body.replace("\r\n", "\n").split("\n")
        for paragraph in closed:
            self._settled += wrap_from(paragraph, self._cells, ascii_only=self._ascii_only)[0]
        lines, self._open = wrap_from(last, self._cells, ascii_only=self._ascii_only)
        self._settled += lines[:-1]
        self._open += text[len(body) :]

    def _lines(self) -> list[str]:
        rest = self._open.rstrip()
        lines = self._settled + (wrap_from(rest, self._cells, ascii_only=self._ascii_only)[0] if rest else [])
        while lines and lines[-1].isspace():
            lines.pop()
        return lines


def _ending(pieces: Sequence[str], most: int) -> tuple[Sequence[str], int]:
    """The last pieces that come to at most so many characters, and how many these are."""
    size = 0
    for i in range(len(pieces) - 1, -1, -1):
        if size + len(pieces[i]) > most:
            return pieces[i + 1 :], size
        size += len(pieces[i])
    return pieces, size
