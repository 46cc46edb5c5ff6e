"""The short way from a panel's dirty lines to the terminal.

Textual's compositor asks every widget on screen for all its lines, cuts them where widgets begin and end, and wraps
each in styles; that is more than the drawing itself costs here. Panels do not overlap, so while nothing lies over the
dashboard a dirty line can be written where it belongs, as the same strip that the compositor would have shown. The
styles cache is told that the line changed, so that the compositor draws the same when it is asked next.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from textual.geometry import Offset, Region

from kvtui.view import Panel

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from textual.app import App
    from textual.content import Content
    from textual.widget import Widget

_SYNC_BEGIN, _SYNC_END = "\x1b[?2026h", "\x1b[?2026l"


class Painter:
    """Collects dirty lines while panels take a view, and writes them all at once.

    Outside of `begin` and `flush`, or while something lies over the dashboard, `take` refuses, and the caller goes the
    long way (`Widget.refresh`).
    """

    def __init__(self, app: App[None]) -> None:
        self._app = app
        self._open = False
        self._lines: dict[Widget, set[int]] = {}
        self._written: list[str] = []
        self._visible: Mapping[Widget, tuple[Region, Region]] = {}
        """What the compositor last said is where; another one after each new layout."""
        self._origins: dict[Panel, Offset] = {}
        """Where panels' contents begin in it."""

    def begin(self, allowed: bool) -> None:
        """Start a frame; `allowed` says whether nothing lies over the dashboard."""
        self._open = allowed
        self._lines.clear()
        self._written.clear()
        visible = self._app.screen._compositor.visible_widgets if allowed else {}
        if visible is not self._visible:
            self._visible = visible
            self._origins.clear()

    def place_of(self, panel: Panel) -> Offset | None:
        """Where on the terminal a panel's content begins; None where what changes in it has to go the long way."""
        place = self._place(panel) if self._open else None
        if place is None:
            return None
        origin = self._origins.get(panel)
        if origin is None:
            gutter = panel.gutter
            origin = self._origins[panel] = Offset(place.x + gutter.left, place.y + gutter.top)
        return origin

    def write(self, panel: Panel, lines: tuple[int, int], text: str) -> None:
        """Write text that goes to its places by itself.

        Args:
            panel: Whose lines these are; `place_of` has just said where.
            lines: The first and the last that change, counted from the top of the panel's content.
            text: For the terminal.
        """
        first, last = lines
        top = self._origins[panel].y - self._visible[panel][0].y
        panel._styles_cache.set_dirty(Region(0, top + first, 1, last + 1 - first))
        self._written.append(text)

    def _place(self, widget: Widget) -> Region | None:
        """Where a widget is, if all of it can be seen and has the size that it thinks it has."""
        place = self._visible.get(widget)
        if place is None:
            return None
        region, clip = place
        return region if clip.contains_region(region) and region.size == widget.outer_size else None

    def take(self, widget: Widget, lines: Iterable[int]) -> bool:
        """Note lines of a widget as dirty, counted from its top border; False where they have to go the long way."""
        if not self._open:
            return False
        self._lines.setdefault(widget, set()).update(lines)
        return True

    def flush(self) -> None:
        """Write what was noted."""
        self._open = False
        out, self._written = self._written, []
        for widget, lines in self._lines.items():
            region = self._place(widget)
            if region is None:
                widget.refresh()
            else:
                out.extend(self._drawn(widget, region, sorted(y for y in lines if 0 <= y < region.height)))
        self._lines.clear()
        driver = self._app._driver
        if out and driver is not None:
            if self._app._sync_available:
                out.insert(0, _SYNC_BEGIN)
                out.append(_SYNC_END)
            driver.write("".join(out))
            driver.flush()

    def _drawn(self, widget: Widget, region: Region, lines: list[int]) -> Iterator[str]:
        """Lines of a widget where they belong: the content alone, or the whole line where it is part of the frame."""
        widget._styles_cache.set_dirty(*(Region(0, y, region.width, 1) for y in lines))
        console, frame = self._app.console, widget.gutter
        content = range(frame.top, region.height - frame.bottom) if isinstance(widget, Panel) else range(0)
        filters = widget.get_line_filters()
        for y in lines:
            if y in content:
                x, strip = frame.left, widget.render_line(y - frame.top)
                for line_filter in filters:
                    strip = strip.apply_filter(line_filter, widget.background_colors[1])
            else:
                x, strip = 0, widget.render_lines(Region(0, y, region.width, 1))[0]
            yield f"\x1b[{region.y + y + 1};{region.x + x + 1}H{strip.render(console)}"


def show_title(widget: Widget, title: Content) -> None:
    """Put a title into a widget's border by the short way where it is open: it is one line, not the whole widget."""
    painter = getattr(widget.app, "painter", None)
    if isinstance(painter, Painter) and painter.take(widget, (0,)):
        widget._border_title = title
    else:
        widget.border_title = title


def show_subtitle(widget: Widget, words: Content) -> None:
    """Put words into a widget's lower border, as `show_title` does with its title."""
    painter = getattr(widget.app, "painter", None)
    if isinstance(painter, Painter) and painter.take(widget, (widget.outer_size.height - 1,)):
        widget._border_subtitle = words
    else:
        widget.border_subtitle = words
