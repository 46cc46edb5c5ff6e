"""The formulas behind the figures, with the live numbers put in."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, NamedTuple

from kvtui.formulas import Formula, formulas_of
from kvtui.safe_text import width as cells_of
from kvtui.waste import waste_of
from kvtui.widgets.line import Line
from kvtui.widgets.line_panel import LinePanel
from kvtui.widgets.wheel import WheelScrolled

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from textual.strip import Strip

    from engine.trace.events import StepTrace
    from kvtui.view import View

_NAME = 15
_INDENT = 3
_NARROW = 70
_BOUNDS = ("≤", "at most")


class Row(NamedTuple):
    """A line: words in front, then pieces that are muted or stand out."""

    name: str
    indent: int
    pieces: tuple[tuple[str, str], ...]


class FormulaSheet(WheelScrolled, LinePanel):
    """Name, formula, the same in numbers, and what comes out; below it what the letters mean. It scrolls."""

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:  # noqa: A002
        super().__init__(id=id, classes=classes)
        self._formulas: list[Formula] = []
        self._top = 0

    def follow(self, view: View, steps: Sequence[StepTrace], reset: bool) -> None:
        """Work the formulas out once for each frame that brought steps."""
        if steps or reset or not self._formulas:
            found = formulas_of(view.state, view.history, waste_of(view.state))
            self._formulas = [formula.in_ascii() for formula in found] if view.glyphs.ascii else found
        self.set_title("Formulas", f"{view.glyphs.horizontal} with the numbers of step {view.state.step:,}")

    def rows(self, view: View, width: int, height: int) -> Sequence[Hashable]:
        """The lines of the window."""
        if view.state.step < 0:
            return ["", "No step yet: the numbers come with the first one."]
        lines: list[Row] = []
        for formula in self._formulas:
            lines += laid_out(formula, width)
        self._top = max(0, min(self._top, len(lines) - height))
        return lines[self._top : self._top + height]

    def draw(self, view: View, key: Hashable, width: int) -> Strip:
        """One line."""
        assert isinstance(key, Row)
        palette = view.palette
        styles = {"": palette.muted, "text": palette.text, "value": palette.strong, "faint": palette.faint}
        line = Line(width, palette.blank).gap().add(key.name, palette.accent).to(key.indent)
        for text, look in key.pieces:
            line.add(text, styles[look])
        return line.strip()

    def scroll_rows(self, rows: int) -> None:
        """Move the window."""
        self._top += rows
        self.redraw()


def laid_out(formula: Formula, width: int) -> list[Row]:
    """A formula on as few lines as it fits on, and its note."""
    indent = _NAME if width >= _NARROW else _INDENT
    equals: tuple[str, str] = (" = ", "")
    joint = (" ", "") if formula.value.startswith(_BOUNDS) else equals
    numbers: tuple[tuple[str, str], ...] = ((formula.numbers, "text"), joint) if formula.numbers else ()
    result = (*numbers, (formula.value, "value"))
    whole = ((formula.symbols, ""), equals, *result)
    if indent + sum(cells_of(text) for text, _ in whole) < width:
        rows = [Row(formula.name, indent if indent == _NAME else len(formula.name) + 2, whole)]
        if indent == _INDENT and len(formula.name) + 2 + sum(cells_of(text) for text, _ in whole) >= width:
            rows = [Row(formula.name, 0, ()), Row("", indent, whole)]
    else:
        rows = [Row(formula.name, max(indent, len(formula.name) + 2), ((formula.symbols, ""),))]
        rows.append(Row("", indent, (("= ", ""), *result)))
    # Between words alone: no letter is lost where a word is longer than the line.
    notes = textwrap.wrap(formula.note, max(1, width - indent - 1), break_long_words=False, break_on_hyphens=False) or [
        ""
    ]
    return rows + [Row("", indent, ((words, "faint"),)) for words in notes]
