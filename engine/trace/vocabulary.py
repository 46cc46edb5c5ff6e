"""The (token id, text) pairs of a recording, numbered in the order in which they first occur.

A token's text depends on more than its id (half a character has none), so pairs are numbered. Frequent ones come early
and have small numbers, and each text is in the file once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from engine.trace.columns import Column

MAX_VOCABULARY = 1 << 22
"""Entries of a recording's vocabulary at most."""


def encodable(text: str) -> str:
    """The text with a question mark for what UTF-8 cannot hold: lone surrogates, which files and JSON can bring in."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


class VocabularyWriter:
    """Numbers (token id, text) pairs in the order in which they first occur."""

    def __init__(self) -> None:
        self.entries: dict[tuple[int, str], int] = {}
        self.ids: list[int] = []
        self.texts: list[str] = []

    def entry(self, token_id: int, text: str) -> int:
        """The number of a pair, a new one where it has none."""
        pair = (token_id, text)
        entry = self.entries.get(pair)
        if entry is None:
            entry = self.entries[pair] = len(self.ids)
            self.ids.append(token_id)
            self.texts.append(encodable(text))
        return entry


class Vocabulary:
    """The pairs by number, for reading."""

    def __init__(self) -> None:
        self.ids: Column = np.zeros(0, np.int64)
        self.texts: list[str] = []
        self._text_array: npt.NDArray[np.object_] | None = None

    def extend(self, start: int, ids: Column, texts: list[str]) -> None:
        """Take in new entries.

        Raises:
            ValueError: they do not continue it, or are too many.
        """
        if start != len(self.texts) or len(ids) != len(texts) or start + len(texts) > MAX_VOCABULARY:
            raise ValueError(f"{len(texts)} vocabulary entries from {start} on do not continue {len(self.texts)}")
        self.ids = np.concatenate((self.ids, ids))
        self.texts.extend(texts)
        self._text_array = None

    def skip_to(self, start: int) -> None:
        """Take in unknown entries up to a number.

        Raises:
            ValueError: that are too many.
        """
        if start > MAX_VOCABULARY:
            raise ValueError(f"a vocabulary of {start} entries is not possible")
        missing = max(start - len(self.texts), 0)
        self.extend(len(self.texts), np.full(missing, -1), ["\ufffd"] * missing)

    def check(self, entries: Column) -> None:
        """Make sure that entries are in it.

        Raises:
            ValueError: one of them is not.
        """
        if len(entries) and not (entries.min() >= 0 and entries.max() < len(self.texts)):
            raise ValueError(f"an entry is not in the vocabulary of {len(self.texts)}")

    def look_up(self, entries: Column) -> tuple[list[int], list[str]]:
        """Token ids and texts of entries.

        Raises:
            ValueError: one of them is not in it.
        """
        self.check(entries)
        if self._text_array is None:
            self._text_array = np.array(self.texts, np.object_)
        return self.ids[entries].tolist(), self._text_array[entries].tolist()
