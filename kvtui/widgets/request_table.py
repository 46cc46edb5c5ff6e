"""The requests: running ones in the scheduler's order, then waiting ones with their reasons, then those that ended."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from textual.binding import Binding
from textual.content import Content

from engine.request import RequestStatus
from kvtui.own_command import inject_command, own_command
from kvtui.paint import show_subtitle
from kvtui.safe_text import clean
from kvtui.view import RequestSelected
from kvtui.widgets.line import Line
from kvtui.widgets.line_panel import LinePanel
from kvtui.widgets.request_row import columns_for, draw_heading, draw_request, table_pieces
from kvtui.widgets.wheel import WheelScrolled

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from textual import events
    from textual.binding import BindingType
    from textual.strip import Strip

    from engine.trace.events import StepTrace
    from engine.trace.state import RequestState
    from kvtui.view import View

_PEEK_FROM_ROWS = 8


class RequestTable(WheelScrolled, LinePanel):
    """A table with a cursor that stays on its request when the rows move.

    Posts `RequestSelected` for enter, which inspects as well, and for a click, with None where the request was selected
    already. Left without a selection, it shows the live requests again.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "select", "inspect", show=False, id="requests.select"),
        Binding("home", "first_row", "first request", show=False, id="requests.first"),
        Binding("end", "last_row", "last request", show=False, id="requests.last"),
        Binding("v", "toggle_text", "block table or text", show=False, id="requests.text"),
    ]

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:  # noqa: A002
        super().__init__(id=id, classes=classes)
        self._order: list[int] = []
        self._place: dict[int, int] = {}
        self._counts = ["none"]
        self._ended_count: list[str] = []
        self._ordered_for: tuple[object, ...] = ()
        self._cursor: int | None = None
        self._at = 0
        self._top = 0
        self._cursor_leads = True
        self._cursor_lived = False
        self._num_running = 0
        self._num_live = 0
        self._hidden_running = 0
        self._newest = -1
        self._selected: int | None = None
        self._prefer_text = False
        self._feeds = ""

    # -- order ---------------------------------------------------------------------------------------------------

    def follow(self, view: View, steps: Sequence[StepTrace], reset: bool) -> None:
        """Order the requests again where any of them can have moved."""
        state = view.state
        self._newest = next(reversed(state.requests), -1)
        ordered_for = (id(state), state.step, len(state.requests), self._newest)
        if reset or steps or ordered_for != self._ordered_for:
            self._ordered_for = ordered_for
            self._sort(view)
        if view.selected_request != self._selected:
            self._selected = view.selected_request
            if self._selected is not None and self._selected in self._place:
                self._put_cursor(self._place[self._selected])
            elif self._selected is None and not self.has_focus:
                self._cursor, self._top = None, 0
        self._settle()

    def _sort(self, view: View) -> None:
        state = view.state
        turn = {member[0]: i for i, member in enumerate(state.last_step.batch)} if state.last_step else {}
        running: list[RequestState] = []
        waiting: list[RequestState] = []
        ended: list[RequestState] = []
        preempted = 0
        for request in state.requests.values():
            if request.status == RequestStatus.RUNNING:
                running.append(request)
            elif request.status.is_finished:
                ended.append(request)
            else:
                waiting.append(request)
                preempted += request.status == RequestStatus.PREEMPTED
        running.sort(key=lambda r: (turn.get(r.request, len(turn)), r.admitted_ns, r.request))
        waiting.sort(key=lambda r: (r.status != RequestStatus.PREEMPTED, r.request))
        ended.sort(key=lambda r: r.finished_ns, reverse=True)
        self._order = [r.request for group in (running, waiting, ended) for r in group]
        self._num_running, self._num_live = len(running), len(running) + len(waiting)
        self._place = {request: i for i, request in enumerate(self._order)}
        counts = [f"{len(running)} running", f"{len(waiting) - preempted} waiting"]
        if preempted:
            counts.append(f"{preempted} preempted")
        self._counts = counts
        self._ended_count = [f"{len(ended)} ended"] if ended else []

    @property
    def _header_rows(self) -> int:
        return 1 if self.size.height >= 3 else 0

    @property
    def _window(self) -> int:
        return max(1, self.size.height - self._header_rows)

    def _settle(self) -> None:
        """Find the cursor's row again and keep the window inside the table, and the cursor inside the window.

        A cursor follows its request while that lives. When it ends its row moves far down; the window stays, and so
        does the cursor, which takes the request that is there now, unless the one that ended is selected.
        """
        count = len(self._order)
        if self._cursor is not None:
            ended = self._place.get(self._cursor, count) >= self._num_live
            if ended and self._cursor_lived:
                self._cursor_leads = False
                if self._cursor != self._selected:
                    self._cursor = self._order[min(self._at, count - 1)] if count else None
            self._at = self._place.get(self._cursor, min(self._at, count - 1)) if self._cursor is not None else 0
            self._cursor = self._order[self._at] if count else None
            self._cursor_lived = self._at < self._num_live
            if self._cursor_leads:
                self._top = min(max(self._top, self._at - self._window + 1), max(0, self._at))
        self._top = max(0, min(self._top, count - self._window))

    def _put_cursor(self, at: int) -> None:
        """Put the cursor on a row, and the window around it."""
        self._at, self._cursor = at, self._order[at]
        self._cursor_lived = at < self._num_live
        self._cursor_leads = True
        self._settle()

    # -- drawing -------------------------------------------------------------------------------------------------

    def rows(self, view: View, width: int, height: int) -> Sequence[Hashable]:
        """The heading and the requests of the window."""
        first, *others = self._counts
        glyphs = view.glyphs
        places = self._places_shown()
        parts = [*others, *self._position(places), *self._ended_count]
        if view.source.num_arrived and view.source.engine_paused:
            parts.insert(0, f"{view.source.num_arrived} arrived, taken at the next step")
        self.set_title(f"Requests {glyphs.horizontal} {first}", *parts, separator=f" {glyphs.dot} ")
        self._say_what_feeds(view.fed)
        if not self._order:
            return _empty_state(view)
        columns = columns_for(width, self._prefer_text, view.names.longest)
        state, selected = view.state, view.selected_request
        marked_request = self._order[self._marked_place] if self.has_focus else None
        keys: list[Hashable] = [("heading", columns)] if self._header_rows else []
        for place in places:
            request_id = self._order[place] if place >= 0 else -1
            request = state.requests.get(request_id)
            if request is None:
                keys.append(f"{glyphs.ellipsis} {self._hidden_running} more running")
                continue
            marked = request_id == marked_request
            waits = request.waiting_for
            keys.append(
                (
                    request_id,
                    marked,
                    selected,
                    columns,
                    view.names.of(request_id),
                    request.status,
                    request.last_phase,
                    request.num_computed,
                    request.num_tokens,
                    request.num_cached,
                    waits and (waits.reason, tuple(waits.numbers.values())),
                    request.num_blocks,
                    table_pieces(state, request.table, columns.table, view.glyphs),
                )
            )
        return keys

    def _say_what_feeds(self, words: str) -> None:
        """Say on the lower border what brings requests by itself, and the key that holds it."""
        if words != self._feeds:
            self._feeds = words
            show_subtitle(self, Content(words))

    def _position(self, places: Sequence[int]) -> list[str]:
        """Which rows are in sight, where that is not all of them."""
        count = len(self._order)
        if count <= self._window:
            return []
        if -1 in places:
            return [f"{len(places) - 1} of {count} shown"]
        return [f"rows {places[0] + 1}-{places[-1] + 1} of {count}"]

    def _places_shown(self) -> Sequence[int]:
        """Places in the order, a line each; -1 for a line that says how many were left out.

        Why requests wait is what one looks for under pressure, and just then there is no room for them below the
        running ones. So until the cursor is moved the first waiting ones are shown, and some running ones are not.
        """
        window, running, waiting = self._window, self._num_running, self._num_live - self._num_running
        if self._cursor is None and self._top == 0 and waiting and self._num_live > window >= _PEEK_FROM_ROWS:
            peek = min(waiting, max(3, window // 4))
            head = window - 1 - peek
            if running > head:
                self._hidden_running = running - head
                return [*range(head), -1, *range(running, running + peek)]
        return range(self._top, min(self._top + window, len(self._order)))

    def draw(self, view: View, key: Hashable, width: int) -> Strip:
        """One row."""
        assert isinstance(key, tuple)
        if key[0] == "heading":
            return draw_heading(view, key[1], width)
        request = view.state.requests.get(key[0])
        if request is None:
            return Line(width, view.palette.blank).strip()
        return draw_request(view, request, key[3], width, marked=key[1], table=key[-1])

    # -- acting --------------------------------------------------------------------------------------------------

    def _move(self, rows: int) -> None:
        if self._order:
            self._put_cursor(max(0, min(len(self._order) - 1, self._marked_place + rows)))
            self.redraw()

    @property
    def _marked_place(self) -> int:
        """The row of the cursor; the window's first until it was moved."""
        return self._top if self._cursor is None else self._at

    def action_scroll_up(self) -> None:
        """Move the cursor up."""
        self._move(-1)

    def action_scroll_down(self) -> None:
        """Move the cursor down."""
        self._move(1)

    def action_page_up(self) -> None:
        """Move the cursor up by a window."""
        self._move(-self._window)

    def action_page_down(self) -> None:
        """Move the cursor down by a window."""
        self._move(self._window)

    def action_first_row(self) -> None:
        """Move the cursor to the first request."""
        self._move(-len(self._order))

    def action_last_row(self) -> None:
        """Move the cursor to the last request."""
        self._move(len(self._order))

    def action_select(self) -> None:
        """Select the request under the cursor and read about it."""
        if self._order:
            self._put_cursor(self._marked_place)
            self.post_message(RequestSelected(self._order[self._at], inspect=True))

    def action_toggle_text(self) -> None:
        """Show block tables or texts where there is no room for both."""
        self._prefer_text = not self._prefer_text
        self.redraw()

    def _select(self, request: int) -> None:
        self.post_message(RequestSelected(None if request == self._selected else request))

    def on_click(self, event: events.Click) -> None:
        """Select the request that was clicked."""
        offset = event.get_content_offset(self)
        if offset is None:
            return
        row, places = offset.y - self._header_rows, self._places_shown()
        if 0 <= row < len(places) and places[row] >= 0:
            self._put_cursor(places[row])
            self._select(self._order[places[row]])
            self.redraw()

    def scroll_rows(self, rows: int) -> None:
        """Move the window; the cursor stays behind."""
        self._cursor_leads = False
        self._top += rows
        self._settle()
        self.redraw()

    def on_focus(self) -> None:
        """Show the cursor."""
        self.redraw()

    def on_blur(self) -> None:
        """Hide the cursor, and follow the live requests again unless one is selected."""
        if self._cursor != self._selected or self._selected is None:
            self._cursor, self._top = None, 0
            self._settle()
        self.redraw()

    def on_resize(self, event: events.Resize) -> None:
        """Keep the cursor in the window."""
        self._settle()
        super().on_resize(event)


def _empty_state(view: View) -> list[Hashable]:
    if not view.source.live:
        return ["", "No requests yet at this step.", f"Go on with {view.glyphs.arrow_right} or the space bar."]
    if view.listen_url:
        command = inject_command(clean(view.listen_url, ascii_only=view.glyphs.ascii, limit=100), "--workload chat")
        return ["", "No requests yet.", "Send some from another terminal:", f"  {command}"]
    return ["", "No requests yet.", "Start with some:", f"  {own_command()} run --workload chat"]
