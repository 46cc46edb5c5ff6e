"""A panel whose rows are described by keys: what looks the same is drawn once, what did not change is not refreshed."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from rich.segment import Segment
from textual.content import Content
from textual.strip import Strip

from kvtui.paint import show_title
from kvtui.safe_text import width as cells_of
from kvtui.view import Panel
from kvtui.widgets.line import Line

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from textual import events

    from engine.trace.events import StepTrace
    from kvtui.view import View

_MOST_STRIPS = 2048
_BORDER_AROUND_TITLE = 6


class LinePanel(Panel):
    """Base of the panels that are lines of text.

    A subclass says in `rows` what each line of its window shows, as a key that is equal only where the line looks
    equal, and draws a key in `draw`. It moves its own window; Textual's scrolling is off.
    """

    DEFAULT_CSS = """
    LinePanel { overflow: hidden hidden; }
    """

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:  # noqa: A002
        super().__init__(id=id, classes=classes)
        self._keys: list[Hashable] = []
        self._strips: dict[Hashable, Strip] = {}
        self._drawn_for = (0, 0)
        self._title = ""

    @abstractmethod
    def rows(self, view: View, width: int, height: int) -> Sequence[Hashable]:
        """One key for each line of the window, at most `height`; a string is drawn as muted text."""

    @abstractmethod
    def draw(self, view: View, key: Hashable, width: int) -> Strip:
        """Draw one line, exactly `width` cells wide."""

    def follow(self, view: View, steps: Sequence[StepTrace], reset: bool) -> None:
        """Take in what changed, before the rows are asked for."""

    def update_view(self, view: View, steps: Sequence[StepTrace], reset: bool) -> None:
        """Take a new view; see `Panel.update_view`."""
        self.view = view
        if reset:
            self._strips.clear()
        self.follow(view, steps, reset)
        self.redraw(everything=reset)

    def redraw(self, everything: bool = False) -> None:
        """Work out the rows again and refresh those that look different."""
        before = self._keys
        if self._lay_out() or everything:
            self.refresh()
            return
        now = self._keys
        rows = [y for y, (old, new) in enumerate(zip(before, now, strict=False)) if old != new]
        rows.extend(range(min(len(before), len(now)), max(len(before), len(now))))
        if rows:
            self.refresh_rows(rows)

    def _lay_out(self) -> bool:
        """Work out the rows; whether the window has another size than before, so that nothing drawn is of use."""
        width, height = self.size
        size = (width, height)
        resized = size != self._drawn_for
        if resized:
            self._drawn_for = size
            self._strips.clear()
        drawable = self.view is not None and min(size) > 0
        self._keys = list(self.rows(self.view, *size))[: size[1]] if drawable and self.view is not None else []
        return resized

    def render_line(self, y: int) -> Strip:
        """One line of the window; cheap where nothing changed."""
        size = self.size
        width = size.width
        if self.view is None:
            return Strip.blank(width, self.rich_style)
        if self._drawn_for != (width, size.height):
            self._lay_out()
        if not 0 <= y < len(self._keys):
            return Strip([Segment(" " * width, self.view.palette.blank)], width)
        key = self._keys[y]
        strip = self._strips.get(key)
        if strip is None:
            if len(self._strips) >= _MOST_STRIPS:
                self._strips.clear()
            strip = self._strips[key] = self._note(key) if isinstance(key, str) else self.draw(self.view, key, width)
        return strip

    def _note(self, text: str) -> Strip:
        assert self.view is not None
        palette = self.view.palette
        return Line(self.size.width, palette.blank).gap().add(text, palette.muted).strip()

    def set_title(self, *parts: str, separator: str = " ") -> None:
        """Put a title into the border, as plain text; nothing happens where it is there already.

        Args:
            parts: The first always shows; of the others as many as fit.
            separator: Stands between the parts.
        """
        room = self.outer_size.width - _BORDER_AROUND_TITLE
        count = len(parts)
        while count > 1 and cells_of(separator.join(parts[:count])) > room > 0:
            count -= 1
        title = separator.join(parts[:count])
        if title != self._title:
            self._title = title
            show_title(self, Content(title))

    def on_resize(self, event: events.Resize) -> None:
        """Lay out anew for the new size."""
        self.redraw(everything=True)

    def notify_style_update(self) -> None:
        """Forget what was drawn in the old style."""
        super().notify_style_update()
        self._strips.clear()
