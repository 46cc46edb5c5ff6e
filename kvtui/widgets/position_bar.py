"""The bar that shows where in a trace one is: which step lies in which of its cells, and what is drawn there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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

    def runs(self, glyphs: Glyphs) -> list[tuple[str, str]]:
        """What is drawn, as pieces of text and the role of each: `done`, `head` or `ahead`."""
        if self.cells < 1:
            return []
        head = self.cell_of(self.position)
        pieces = [
            (glyphs.bar * head, "done"),
            ("O" if glyphs.ascii else glyphs.live, "head"),
            (glyphs.bar_empty * (self.cells - head - 1), "ahead"),
        ]
        return [piece for piece in pieces if piece[0]]
