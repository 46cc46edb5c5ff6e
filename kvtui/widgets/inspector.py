"""One request, block or step in words: what it is, what happened to it, why, and its text as it streams in.

Nothing needs to be selected: the panel follows a request that is being worked on, so that a newcomer sees text grow.
It has pages; `v` goes around those that the selection has. Lines of a list lead to a moment or a block.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, ClassVar

from textual.binding import Binding
from textual.content import Content

from kvtui.growing_text import GrowingText
from kvtui.own_command import inject_command
from kvtui.paint import show_subtitle
from kvtui.queue_head import QueueHead
from kvtui.safe_text import SPECIAL, clean, fit
from kvtui.safe_text import width as cells_of
from kvtui.view import BlockSelected
from kvtui.widgets.block_facts import block_rows
from kvtui.widgets.inspector_lists import BlockLife, RequestDecisions, Search, older
from kvtui.widgets.line import Line
from kvtui.widgets.line_panel import LinePanel
from kvtui.widgets.request_facts import latency_rows, request_rows
from kvtui.widgets.spans import LABEL, Entry, Row, called
from kvtui.widgets.step_facts import QUEUE, queue_entries, queue_heading, step_rows
from kvtui.widgets.transport import SeekRequested
from kvtui.widgets.wheel import WheelScrolled

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from textual import events
    from textual.binding import BindingType
    from textual.strip import Strip

    from engine.trace.events import StepTrace
    from engine.trace.state import RequestState
    from kvtui.view import View

LINGER_SECONDS = 2.5
"""How long a request that has ended stays, so that its end can be read, before another one is followed."""

MAX_CHARACTERS = 6000
"""The last so many characters of a prompt and of an output are shown."""

LIFE, TEXT, DECISIONS, STEP, NEXT = "life", "text", "decisions", "step", "next"
"""Pages: what happened to the block; the request and its text; what was decided about it; what was decided in the step;
the blocks that are taken next."""

_LISTS = (LIFE, DECISIONS, STEP, NEXT)
_WRAPS_FROM_HEIGHT = 5
_STEP_FROM_HEIGHT = 9
_ONE_LINE = 1000
_BORDER_AROUND_WORDS = 6


class Inspector(WheelScrolled, LinePanel):
    """What the selection is; or, without one, the request that is followed and the step."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "scroll_text(-1)", "earlier text", show=False, id="inspector.up"),
        Binding("down,j", "scroll_text(1)", "later text", show=False, id="inspector.down"),
        Binding("pageup", "scroll_text(-10)", "earlier text", show=False, id="inspector.page-up"),
        Binding("pagedown", "scroll_text(10)", "later text", show=False, id="inspector.page-down"),
        Binding("enter", "go_there", "go to the moment or the block of the line", show=False, id="inspector.go"),
        Binding("o", "older", "look further back", show=False, id="inspector.older"),
    ]

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(id="inspector", classes="framed")
        self._clock = clock
        self.followed: int | None = None
        self._ended_at: float | None = None
        self._back = 0
        """Lines that the text is scrolled back from its end."""
        self._subject: tuple[int | None, int | None] = (None, None)
        self._wrapped: tuple[object, GrowingText, GrowingText] | None = None
        """Prompt and output of the request shown, and for which one and which width."""
        self._page: str | None = None
        """The page asked for; None shows the first one that the selection has."""
        self._life: BlockLife | None = None
        self._decisions: RequestDecisions | None = None
        self._entries: list[Entry] = []
        self._cursor = 0
        self._top = 0
        self._what_follows = ""
        self._text_seen = (0, 0, 0)
        """The first line of the text in sight, the one behind the last, and how many it has; without the focus, of what
        is left of it."""
        self._list_at = 0
        """Lines in front of the list."""
        self._list_room = 0
        self._comes_back = False
        self._queue = QueueHead()

    # -- whom it is about ----------------------------------------------------------------------------------------

    def follow(self, view: View, steps: Sequence[StepTrace], reset: bool) -> None:
        """Choose whom to follow, bring its lists up to date, and put the name of the subject into the title."""
        self._choose(view)
        request, block = subject = (self.subject(view), view.selected_block)
        if subject != self._subject or reset:
            self._back = 0
            self._wrapped = None
        if block != self._subject[1] or reset:
            if block is not None and block != self._subject[1]:
                self._page = None  # Who picks a block wants to see its life.
            self._life = None
            self._cursor = self._top = 0
        if request != self._subject[0] or reset:
            self._decisions = None
            if block is None:
                self._cursor = self._top = 0
        self._subject = subject
        for search in (self._life, self._decisions):
            if search is not None:
                search.view = view
                search.extend(steps)
        self._title_of(view)

    def _title_of(self, view: View) -> None:
        request, block = self._subject
        what = [] if block is None else [f"block {block}"]
        page = self.page(view)
        if request is not None and (view.selected_request is not None or block is None or page == TEXT):
            name = called(view, request)
            following = view.selected_request is None and block is None
            what.append(f"following {name}" if following else name)
        dot, pages = view.glyphs.dot, self.pages(view)
        parts = [f"{dot} {words}" for words in what]
        parts.append(f"{dot} {page} {pages.index(page) + 1}/{len(pages)}, v: more")
        self.set_title("Inspector", *parts)

    def pages(self, view: View) -> tuple[str, ...]:
        """The pages of the selection, the first one first."""
        if view.selected_block is not None:
            return (LIFE, TEXT, STEP, NEXT)
        if view.selected_request is not None:
            return (TEXT, DECISIONS, STEP, NEXT)
        return (TEXT, STEP, NEXT)

    def page(self, view: View) -> str:
        """The page shown."""
        pages = self.pages(view)
        return self._page if self._page in pages else pages[0]

    def next_page(self) -> None:
        """Go around the pages."""
        if self.view is None:
            return
        pages = self.pages(self.view)
        self._page = pages[(pages.index(self.page(self.view)) + 1) % len(pages)]
        self._cursor = self._top = self._back = 0
        self._title_of(self.view)
        self.redraw()

    def subject(self, view: View) -> int | None:
        """The request shown; of a block whose request is not selected, the one that holds it, or held it last."""
        block, state = view.selected_block, view.state
        if view.selected_request is not None:
            return view.selected_request
        if block is None or not 0 <= block < state.header.num_blocks:
            return self.followed
        holder = int(state.owner[block] if state.refs[block] else state.last_owner[block])
        return holder if holder in state.requests else None

    def _choose(self, view: View) -> None:
        """Follow the newest running request, and stay with it to its end and a moment longer."""
        requests = view.state.requests
        if self.followed not in requests:
            self.followed, self._ended_at = None, None
        now = self._clock()
        if self.followed is not None:
            if not requests[self.followed].status.is_finished:
                self._ended_at = None
                if self.followed in view.running or not view.running:
                    return
            elif self._ended_at is None:
                self._ended_at = now
            if self._ended_at is not None and now - self._ended_at < LINGER_SECONDS:
                return
        if view.running:
            self.followed, self._ended_at = max(view.running), None
        elif self.followed is None and requests:
            self.followed = next(reversed(requests))

    # -- rows ----------------------------------------------------------------------------------------------------

    def rows(self, view: View, width: int, height: int) -> list[Row]:
        """The page shown."""
        self._entries = []
        self._text_seen = (0, 0, 0)
        rows = self._page_rows(view, self.page(view), width, height)
        self._say_what_follows(view)
        return rows

    def _page_rows(self, view: View, page: str, width: int, height: int) -> list[Row]:
        if page == STEP:
            decided = step_rows(view, width)
            if len(decided) <= height:
                return decided
            return self._list_rows(view, [], [Entry(row) for row in step_rows(view, width - 1)], height)
        if page == NEXT:
            queue = self._queue.first(view.state, QUEUE)
            return self._list_rows(view, queue_heading(view, width), queue_entries(view, queue), height)
        if page == LIFE and view.selected_block is not None:
            return self._life_rows(view, view.selected_block, width, height)
        subject = self.subject(view)
        request = view.state.requests.get(subject) if subject is not None else None
        if page == DECISIONS and request is not None:
            return self._decision_rows(view, request, width, height)
        return self._request_page(view, request, width, height)

    def _request_page(self, view: View, request: RequestState | None, width: int, height: int) -> list[Row]:
        """The facts on top, the text below them, its end in sight."""
        nothing = view.selected_request is None and view.selected_block is None
        facts: list[Row] = []
        if nothing and height >= _STEP_FROM_HEIGHT and view.state.last_step is not None:
            facts.extend(step_rows(view, width, brief=True))
        if request is None and view.selected_block is not None:
            unheld: Row = (("No request holds this block, and none that is still known has held it.", "muted"),)
            return [unheld][:height]
        if request is None:
            return facts[:height] if facts else _nothing_yet(view)
        # Text that grows is worth more than facts on a second line; a reason is worth more than either.
        wrapping = height >= _WRAPS_FROM_HEIGHT or request.waiting_for is not None or bool(request.message)
        facts.extend(request_rows(view, request, width if wrapping else max(width, _ONE_LINE)))
        if not nothing:
            facts.extend(latency_rows(view, request, width))
        elif height >= _STEP_FROM_HEIGHT:
            facts.extend(latency_rows(view, request, width)[:1])  # Who only watches wants to see text grow.
        return [*facts[:height], *self._text_rows(view, request, width, max(0, height - len(facts)))]

    def _life_rows(self, view: View, block: int, width: int, height: int) -> list[Row]:
        if not 0 <= block < view.state.header.num_blocks:
            return []
        if self._life is None:
            self._life = BlockLife(view, block)
        facts = block_rows(view, block, width)
        # Where there is little room, the text of the tokens gives way to what happened.
        facts = facts[: max(1, height - 3)] if height >= 3 else facts[:height]
        nothing: Row = (("Nothing has happened to it yet.", "muted"),)
        return self._searched_rows(view, self._life, facts, nothing, height)

    def _decision_rows(self, view: View, request: RequestState, width: int, height: int) -> list[Row]:
        if self._decisions is None:
            self._decisions = RequestDecisions(view, request.request)
        facts = request_rows(view, request, width)
        if height >= _WRAPS_FROM_HEIGHT:
            facts.extend(latency_rows(view, request, width))
        facts = facts[: max(1, height - 3)]
        nothing: Row = (("Nothing has been decided about it yet.", "muted"),)
        return self._searched_rows(view, self._decisions, facts, nothing, height)

    def _searched_rows(self, view: View, search: Search, facts: list[Row], nothing: Row, height: int) -> list[Row]:
        if search.work() and not self._comes_back:
            # There is more to be looked at: in a moment, so that keys and frames get their turn.
            self._comes_back = True
            self.set_timer(0.02, self._look_on)
        entries = search.entries(view)
        last = older(search, "o" if self.has_focus else "o in this panel")
        if last is not None:
            entries.append(last)
        return self._list_rows(view, facts, entries or [Entry(nothing)], height)

    def _look_on(self) -> None:
        self._comes_back = False
        self.redraw()

    def _list_rows(self, view: View, facts: list[Row], entries: list[Entry], height: int) -> list[Row]:
        """Facts, and a window over a list below them; with the focus, the line under the cursor is marked."""
        self._entries = entries
        self._list_at, self._list_room = len(facts), max(0, height - len(facts))
        self._cursor = max(0, min(self._cursor, len(entries) - 1))
        room = max(1, self._list_room)
        self._top = max(0, min(self._top, self._cursor, len(entries) - room))
        self._top = max(self._top, self._cursor - room + 1)
        rows = list(facts)
        for at, entry in enumerate(entries[self._top : self._top + self._list_room], self._top):
            marked = self.has_focus and at == self._cursor
            rows.append(((view.glyphs.cursor if marked else " ", "accent"), *entry.row))
        return rows

    def _say_what_follows(self, view: View) -> None:
        """Where a list or a text has more lines than are in sight, say on the border which, and how to see more."""
        count, first = len(self._entries), self._top + 1
        words, dot = self._text_words(view.glyphs.dot), view.glyphs.dot
        if count > self._list_room > 0:
            last = min(count, self._top + self._list_room)
            lines = f"{first:,} to {last:,}" if last > first else f"{first:,}"
            where = f"line{'s' * (last > first)} {lines} of {count:,}"
            short = f"{where} {dot} wheel, j k"
            full = f"{where} {dot} wheel, or j k{'' if self.has_focus else ' in this panel'}"
            words = full if cells_of(full) + _BORDER_AROUND_WORDS <= self.outer_size.width else short
        if words != self._what_follows:
            self._what_follows = words
            show_subtitle(self, Content(words))

    def _text_words(self, dot: str) -> str:
        """Which lines of a text are in sight; without the focus that is the end of its prompt and of its output."""
        start, stop, count = self._text_seen
        if stop - start in (0, count):
            return ""
        if self.has_focus:
            lines = f"lines {start + 1:,} to {stop:,}" if stop - start > 1 else f"line {stop:,}"
            return f"{lines} of {count:,} {dot} wheel, or j k"
        key = getattr(self.app, "own_keys", {}).get("panel(5)", "5")
        return f"{stop - start:,} of {count:,} lines of text {dot} {key}, then j k"

    def _text_rows(self, view: View, request: RequestState, width: int, room: int) -> list[Row]:
        """The lines of prompt and output that are in sight, each kind with its label on the first of them."""
        ascii_only = view.glyphs.ascii
        n = request.num_prompt_tokens
        cells = max(2, width - LABEL)
        key = (request.request, width, n)
        known = self._wrapped
        if known is None or known[0] != key:
            texts = [GrowingText(cells, MAX_CHARACTERS, ascii_only=ascii_only) for _ in range(2)]
            known = self._wrapped = (key, texts[0], texts[1])
        prompt, output = known[1].follow(request.pieces[:n]), known[2].follow(request.pieces, n)
        count = len(prompt) + len(output)
        if not self.has_focus and len(prompt) + len(output) > room:
            # Nobody scrolls here: show the end of both, and of the output most.
            most = max(room // 3 if output else 1, room - len(output), 0)
            prompt = _ending(prompt, most, cells, view)
            output = output[max(0, len(output) - room + len(prompt)) :]
        self._back = max(0, min(self._back, len(prompt) + len(output) - room))
        stop = len(prompt) + len(output) - self._back
        lines = [("prompt", line) for line in prompt] + [("output", line) for line in output]
        start = max(0, stop - room)
        self._text_seen = (start, stop, count)
        rows: list[Row] = []
        labelled = ""
        for kind, line in lines[start:stop]:
            label = f"{kind if kind != labelled else '':<{LABEL}}"
            looks: tuple[str | int, str] = ("muted", "muted") if kind == "prompt" else (request.request, "text")
            rows.append(((label, looks[0]), (line, looks[1])))
            labelled = kind
        return rows

    def draw(self, view: View, key: Row, width: int) -> Strip:  # type: ignore[override]
        """One row of spans; where it is cut, an ellipsis says so."""
        palette = view.palette
        line = Line(width, palette.blank)
        cut = sum(cells_of(text) for text, _ in key) > width
        for text, look in key:
            style = palette.hue(look) if isinstance(look, int) else getattr(palette, look)
            if cut and cells_of(text) >= line.room:
                text = fit(text + " " * width, line.room, ascii_only=view.glyphs.ascii)
            line.add(text, style)
        return line.strip()

    # -- acting --------------------------------------------------------------------------------------------------

    @property
    def _in_list(self) -> bool:
        return self.view is not None and bool(self._entries) and self.page(self.view) in _LISTS

    def action_scroll_text(self, by: int) -> None:
        """Move through a list; or scroll the text, whose end stays in sight until one scrolls back."""
        if self._in_list:
            self._cursor = max(0, min(self._cursor + by, len(self._entries) - 1))
        else:
            self._back = max(0, self._back - by)
        self.redraw()

    def scroll_rows(self, rows: int) -> None:
        """Move by some rows: the wheel."""
        self.action_scroll_text(rows)

    def action_go_there(self) -> None:
        """Show the moment, or select the block, that the line under the cursor is about."""
        if self._in_list:
            self._go(self._cursor)

    def action_older(self) -> None:
        """Look further back."""
        for search in (self._life, self._decisions):
            if search is not None:
                search.more()
        self.redraw()

    def on_click(self, event: events.Click) -> None:
        """Go where the line leads."""
        at = event.y - self.gutter.top - self._list_at
        if self._in_list and 0 <= at < self._list_room and self._top + at < len(self._entries):
            self._cursor = self._top + at
            self._go(self._cursor)
            self.redraw()

    def _go(self, at: int) -> None:
        entry = self._entries[at]
        if entry.step >= 0:
            self.post_message(SeekRequested(entry.step))
        elif entry.block >= 0:
            self.post_message(BlockSelected(entry.block))
        elif at == len(self._entries) - 1 and self.view is not None and self.page(self.view) in (LIFE, DECISIONS):
            self.action_older()

    def plain_text(self) -> str:
        """What the panel is about, whole and without layout, to be copied."""
        view = self.view
        request = view.state.requests.get(self.subject(view) or 0) if view is not None else None
        if view is None or request is None:
            return ""
        n = request.num_prompt_tokens
        pieces = request.pieces
        return (
            f"request {request.request} {request.name}\nblock table: {' '.join(map(str, request.table))}\n"
            f"prompt:\n{''.join(pieces[:n])}\noutput:\n{''.join(pieces[n:])}\n"
        )


def _nothing_yet(view: View) -> list[Row]:
    """What to do so that there is something; the one panel that a small terminal shows beside the blocks."""
    nothing: Row = (("Nothing to inspect yet.", "muted"),)
    if not view.source.live or not view.listen_url:
        return [nothing]
    url = clean(view.listen_url, ascii_only=view.glyphs.ascii, limit=100)
    return [
        nothing,
        (("Send requests from another terminal:", "muted"),),
        (("  " + inject_command(url, "--workload chat"), "text"),),
    ]


def _ending(lines: list[str], most: int, cells: int, view: View) -> list[str]:
    """The last lines, the first of them marked where something is missing before it."""
    if len(lines) <= most:
        return lines
    if most == 0:
        return []
    # Whole words, and tokens that are no text as a whole: half of `<|im_start|>` would look like text.
    first = view.glyphs.ellipsis + lines[-most].rstrip()
    if cells_of(first) > cells:
        special = SPECIAL.match(lines[-most])
        rest = lines[-most][special.end() :] if special else lines[-most].partition(" ")[2] or lines[-most][1:]
        first = view.glyphs.ellipsis + rest.rstrip()
    first = fit(first, cells, ascii_only=view.glyphs.ascii)
    return [first, *lines[len(lines) - most + 1 :]]
