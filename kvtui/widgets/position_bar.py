"""The bar that shows where in a trace one is: which step lies in which of its cells, and what is drawn there."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from kvtui.glyphs import Glyphs


@dataclass(frozen=True, slots=True)
class PositionBar:
    """A bar of `cells` cells over the steps `first` to `last`.

    Attributes:
        first: Drawn in the first cell; the place before it is there as well.
        last: Drawn in the last cell.
        position: The step shown; one before `first` stands at the start.
    """

    cells: int
    first: int
    last: int
    position: int

    def cell_of(self, step: int) -> int:
        """The cell that a step lies in."""
        span = self.last - self.first
        if span <= 0 or self.cells < 2:
            return max(0, self.cells - 1) if step >= self.last and self.position >= self.first else 0
        return round(min(max(0, step - self.first), span) / span * (self.cells - 1))

    def step_of(self, cell: int) -> int:
        """The step that a cell stands for: the middle one of those that lie in it."""
        if self.cells < 2:
            return self.last
        at = min(max(0, cell), self.cells - 1)
        return self.first + round(at / (self.cells - 1) * (self.last - self.first))

    def runs(
        self, glyphs: Glyphs, marks: Sequence[int] = (), window: tuple[int, int] | None = None
    ) -> list[tuple[str, str]]:
        """What is drawn, as pieces of text and the role of each.

        Args:
            glyphs: The set in use.
            marks: For each cell the kind of the mark in it, or -1; empty where there is none at all.
            window: Its first and last step.

        Returns:
            The roles are `done`, `head`, `ahead`, `window`, and `mark` with the number of a kind: `past` with it where
            the mark lies in front of the head, so that one sees how far it is where there is a mark in every cell.
        """
        if self.cells < 1:
            return []
        head = self.cell_of(self.position)
        chars = [glyphs.bar] * head + [glyphs.bar_empty] * (self.cells - head)
        roles = ["done"] * head + ["ahead"] * (self.cells - head)
        for cell, kind in enumerate(marks):
            if kind >= 0:
                chars[cell], roles[cell] = glyphs.step_marks[kind], f"{'past' if cell < head else 'mark'}{kind}"
        if window is not None:
            for step, char in zip(window, glyphs.window, strict=True):
                cell = self.cell_of(min(max(step, self.first), self.last))
                chars[cell], roles[cell] = char, "window"
        chars[head], roles[head] = "O" if glyphs.ascii else glyphs.live, "head"
        return _pieces(chars, roles)

    def marks_alone(self, glyphs: Glyphs, marks: Sequence[int]) -> list[tuple[str, str]]:
        """The marks as a row of their own, to stand above the bar; `none` is the role of what lies between them."""
        chars = [glyphs.step_marks[kind] if kind >= 0 else " " for kind in marks]
        return _pieces(chars, [f"mark{kind}" if kind >= 0 else "none" for kind in marks])


def _pieces(chars: list[str], roles: list[str]) -> list[tuple[str, str]]:
    pieces: list[tuple[str, str]] = []
    for role, cells in groupby(range(len(chars)), roles.__getitem__):
        pieces.append(("".join(chars[cell] for cell in cells), role))
    return pieces


def rarest(flags: npt.NDArray[np.uint8], kinds: int, counts: Sequence[int]) -> list[int]:
    """Each cell's kind of mark to draw: of those in it and among `kinds` (bits) the rarest in the trace; or -1."""
    chosen = np.full(len(flags), -1, np.int8)
    for kind in sorted(range(len(counts)), key=lambda kind: -counts[kind]):
        if kinds >> kind & 1:
            chosen[flags >> kind & 1 == 1] = kind
    return chosen.tolist()
