"""The short way from a panel's dirty lines to the terminal.

Textual's compositor asks every widget on screen for all its lines, cuts them where widgets begin and end, and wraps
each in styles; that is more than the drawing itself costs here. Panels do not overlap, so while nothing lies over the
dashboard a dirty line can be written where it belongs, as the same strip that the compositor would have shown. The
styles cache is told that the line changed, so that the compositor draws the same when it is asked next.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from textual.geometry import Region

from kvtui.view import Panel

if TYPE_CHECKING:
    from textual.app import App
    from textual.content import Content
    from textual.strip import Strip
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

    def begin(self, allowed: bool) -> None:
        """Start a frame; `allowed` says whether nothing lies over the dashboard."""
        self._open = allowed
        self._lines.clear()

    def take(self, widget: Widget, y: int, count: int = 1) -> bool:
        """Note lines of a widget as dirty, y counted from its top border; False where they have to go the long way."""
        if not self._open:
            return False
        lines = self._lines.get(widget)
        if lines is None:
            lines = self._lines[widget] = set()
        lines.update(range(y, y + count))
        return True

    def flush(self) -> None:
        """Write what was noted."""
        self._open = False
        if not self._lines:
            return
        screen = self._app.screen
        visible = screen._compositor.visible_widgets
        out: list[str] = []
        for widget, lines in self._lines.items():
            place = visible.get(widget)
            if place is None:
                widget.refresh()
                continue
            region, clip = place
            if not clip.contains_region(region) or region.size != widget.outer_size:
                widget.refresh()
                continue
            for y in sorted(lines):
                if 0 <= y < region.height:
                    x, strip = self._line(widget, y, region.width)
                    out.append(f"\x1b[{region.y + y + 1};{region.x + x + 1}H")
                    out.append(strip.render(self._app.console))
        self._lines.clear()
        driver = self._app._driver
        if out and driver is not None:
            if self._app._sync_available:
                out.insert(0, _SYNC_BEGIN)
                out.append(_SYNC_END)
            driver.write("".join(out))
            driver.flush()

    def _line(self, widget: Widget, y: int, width: int) -> tuple[int, Strip]:
        """One line and where it begins: the content alone, or the whole line where it belongs to the frame."""
        line = Region(0, y, width, 1)
        widget._styles_cache.set_dirty(line)
        frame = widget.gutter
        if not isinstance(widget, Panel) or not frame.top <= y < widget.outer_size.height - frame.bottom:
            return 0, widget.render_lines(line)[0]
        strip = widget.render_line(y - frame.top)
        for line_filter in widget.get_line_filters():
            strip = strip.apply_filter(line_filter, widget.background_colors[1])
        return frame.left, strip


def show_title(widget: Widget, title: Content) -> None:
    """Put a title into a widget's border by the short way where it is open: it is one line, not the whole widget."""
    painter = getattr(widget.app, "painter", None)
    if isinstance(painter, Painter) and painter.take(widget, 0):
        widget._border_title = title
    else:
        widget.border_title = title
