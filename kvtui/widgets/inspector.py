"""One request or block in words: what it is, why it waits, and its text as it streams in.

Nothing needs to be selected: the panel follows a request that is being worked on, so that a newcomer sees text grow.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from textual.binding import Binding

from engine.request import RequestStatus
from engine.trace import explain
from kvtui.safe_text import SPECIAL, clean, fit, wrap
from kvtui.safe_text import width as cells_of
from kvtui.widgets.line import Line
from kvtui.widgets.line_panel import LinePanel
from kvtui.widgets.marks import word_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from textual.binding import BindingType
    from textual.strip import Strip

    from engine.trace.events import StepTrace
    from engine.trace.state import PoolState, RequestState
    from kvtui.view import View

Span = tuple[str, str | int]
"""Safe text and what it is drawn in: the name of a palette style, or a request for its hue."""

Row = tuple[Span, ...]

LINGER_SECONDS = 2.5
"""How long a request that has ended stays, so that its end can be read, before another one is followed."""

LABEL = 8
"""Cells in front of the text for `prompt` and `output`."""

MAX_CHARACTERS = 6000
"""The last so many characters of a prompt and of an output are shown."""

_WRAPS_FROM_HEIGHT = 5
_ONE_LINE = 1000

MOST_LINES = 6
"""Of one reason, or of one enumeration."""


class Inspector(LinePanel):
    """What the selection is; or, without one, the request that is followed."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "scroll_text(-1)", "earlier text", show=False, id="inspector.up"),
        Binding("down,j", "scroll_text(1)", "later text", show=False, id="inspector.down"),
        Binding("pageup", "scroll_text(-10)", "earlier text", show=False, id="inspector.page-up"),
        Binding("pagedown", "scroll_text(10)", "later text", show=False, id="inspector.page-down"),
    ]

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(id="inspector", classes="framed")
        self._clock = clock
        self.followed: int | None = None
        self._ended_at: float | None = None
        self._back = 0
        """Lines that the text is scrolled back from its end."""
        self._subject: tuple[int | None, int | None] = (None, None)
        self._wrapped: dict[str, tuple[object, list[str]]] = {}

    def follow(self, view: View, steps: Sequence[StepTrace], reset: bool) -> None:
        """Choose whom to follow, and put the name of the subject into the title."""
        self._choose(view)
        subject = (self.subject(view), view.selected_block)
        if subject != self._subject or reset:
            self._subject, self._back = subject, 0
            self._wrapped.clear()
        request, block = subject
        what = [] if block is None else [f"block {block}"]
        if request is not None:
            name = called(view, request)
            what.append(name if view.selected_request is not None else f"following {name}")
        self.set_title(" ".join(["Inspector", *(f"{view.glyphs.dot} {words}" for words in what)]))

    def subject(self, view: View) -> int | None:
        """The request shown."""
        return view.selected_request if view.selected_request is not None else self.followed

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

    def rows(self, view: View, width: int, height: int) -> list[Row]:
        """The facts on top, the text below them, its end in sight."""
        if view.selected_block is None and self.subject(view) is None:
            return [(("Nothing to inspect yet.", "muted"),)]
        facts: list[Row] = []
        if view.selected_block is not None:
            facts.extend(block_rows(view, view.selected_block, width))
        subject = self.subject(view)
        request = view.state.requests.get(subject) if subject is not None else None
        if request is not None:
            # Text that grows is worth more than facts on a second line; a reason is worth more than either.
            wrapping = height >= _WRAPS_FROM_HEIGHT or request.waiting_for is not None or bool(request.message)
            facts.extend(request_rows(view, request, width if wrapping else max(width, _ONE_LINE)))
            return [*facts[:height], *self._text_rows(view, request, width, max(0, height - len(facts)))]
        return facts[:height]

    def _text_rows(self, view: View, request: RequestState, width: int, room: int) -> list[Row]:
        """The lines of prompt and output that are in sight, each kind with its label on the first of them."""
        ascii_only = view.glyphs.ascii
        n = request.num_prompt_tokens
        cells = max(1, width - LABEL)
        key = (request.request, width, n)
        prompt = self._wrap("prompt", key, request.pieces[:n], cells, ascii_only)
        output = self._wrap("output", (*key, len(request.pieces)), request.pieces[n:], cells, ascii_only)
        if not self.has_focus and len(prompt) + len(output) > room:
            # Nobody scrolls here: show the end of both, and of the output most.
            most = max(room // 3 if output else 1, room - len(output), 0)
            prompt = _ending(prompt, most, cells, view)
            output = output[max(0, len(output) - room + len(prompt)) :]
        self._back = max(0, min(self._back, len(prompt) + len(output) - room))
        stop = len(prompt) + len(output) - self._back
        lines = [("prompt", line) for line in prompt] + [("output", line) for line in output]
        rows: list[Row] = []
        labelled = ""
        for kind, line in lines[max(0, stop - room) : stop]:
            label = f"{kind if kind != labelled else '':<{LABEL}}"
            looks: tuple[str | int, str] = ("muted", "muted") if kind == "prompt" else (request.request, "text")
            rows.append(((label, looks[0]), (line, looks[1])))
            labelled = kind
        return rows

    def _wrap(self, name: str, key: object, pieces: list[str], cells: int, ascii_only: bool) -> list[str]:
        known = self._wrapped.get(name)
        if known is not None and known[0] == key:
            return known[1]
        text = "".join(_tail(pieces, MAX_CHARACTERS)).strip()
        lines = wrap(text, cells, MAX_CHARACTERS, ascii_only=ascii_only) if text else []
        self._wrapped[name] = (key, lines)
        return lines

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

    def action_scroll_text(self, by: int) -> None:
        """Scroll the text; the end stays in sight until one scrolls back."""
        self._back = max(0, self._back - by)
        self.redraw()

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


def _tail(pieces: list[str], most: int) -> list[str]:
    """The last pieces that come to at most so many characters."""
    size = 0
    for i in range(len(pieces) - 1, -1, -1):
        size += len(pieces[i])
        if size > most:
            return pieces[i + 1 :]
    return pieces


def called(view: View, request: int) -> str:
    """What a request is called, safe to draw."""
    return clean(view.names.of(request), ascii_only=view.glyphs.ascii)


def told(label: str, text: str, look: str, width: int, *, ascii_only: bool) -> list[Row]:
    """Words behind a label, wrapped.

    Args:
        label: Of the first line; the others begin below its text.
        text: Untrusted.
        look: Name of a palette style.
        width: Cells of the panel.
        ascii_only: Use no character outside printable ASCII.
    """
    lines = wrap(text, max(1, width - LABEL), MOST_LINES, ascii_only=ascii_only)
    return [((f"{label if i == 0 else '':<{LABEL}}", "muted"), (line, look)) for i, line in enumerate(lines)]


def flowing(groups: Iterable[Row], joint: Span | None, width: int, label: str = "") -> list[Row]:
    """Groups of spans on as many lines as they need, never broken within a group.

    Args:
        groups: What belongs together.
        joint: Stands between two of them on one line.
        width: Cells of the panel.
        label: Of the first line; the others are indented alike.
    """
    rows: list[Row] = []
    start: Row = ((f"{label:<{LABEL}}", "muted"),) if label else ()
    line, used = list(start), LABEL if label else 0
    empty = True
    for group in groups:
        size = sum(cells_of(text) for text, _ in group)
        between = cells_of(joint[0]) if joint is not None and not empty else 0
        if not empty and used + between + size > width:
            rows.append(tuple(line))
            if len(rows) == MOST_LINES:
                # Too long now, so that its end says that more follows.
                rows[-1] += ((" " * width, "muted"),)
                return rows
            line, used, between = [(" " * LABEL, "muted")], LABEL, 0
        if between and joint is not None:
            line.append(joint)
        line.extend(group)
        used += between + size
        empty = False
    if not empty:
        rows.append(tuple(line))
    return rows


def _groups(spans: list[Span], joint: Span) -> list[Row]:
    """Spans between joints, as groups."""
    groups: list[list[Span]] = [[]]
    for span in spans:
        if span is joint:
            groups.append([])
        else:
            groups[-1].append(span)
    return [tuple(group) for group in groups if group]


def request_rows(view: View, request: RequestState, width: int) -> list[Row]:
    """What a request is doing, why it waits or how it ended, and where its blocks are."""
    ascii_only = view.glyphs.ascii
    separator: Span = (f" {view.glyphs.dot} ", "faint")
    name = clean(view.names.full(request.request), ascii_only=ascii_only)
    facts: list[Span] = [(name, request.request), separator, (word_of(request), "strong")]
    total = min(request.num_prompt_tokens + request.max_tokens, view.state.header.max_model_len)
    facts.extend([separator, (f"{request.num_computed}/{request.num_tokens}", "text"), (" tokens computed", "muted")])
    if not request.status.is_finished:
        facts.append((f", at most {total}", "muted"))
    if request.num_cached:
        facts.extend([separator, (f"{request.num_cached}", "good"), (" from the cache", "muted")])
    if request.preemptions:
        facts.extend([separator, (f"preempted {request.preemptions}{view.glyphs.times}", "warning")])
    if request.parent >= 0:
        facts.extend([separator, ("forked from ", "muted"), (called(view, request.parent), request.parent)])
    swapped = int(np.count_nonzero(view.state.cpu_owner == request.request))
    if swapped:
        noun = "block" if swapped == 1 else "blocks"
        facts.extend([separator, (f"{swapped} {noun} swapped out", "warning")])
    rows = flowing(_groups(facts, separator), separator, width)
    if request.waiting_for is not None and not request.status.is_finished:
        rows.extend(
            told("why", explain.long(request.waiting_for, view.names.of), "warning", width, ascii_only=ascii_only)
        )
    if request.message:
        rows.extend(told("ended", request.message, "error", width, ascii_only=ascii_only))
    if request.table:
        room = width - LABEL
        blocks = fit(" ".join(map(str, request.table[:room])), max(1, room), ascii_only=ascii_only)
        rows.append(((f"{'blocks':<{LABEL}}", "muted"), (blocks, request.request)))
    return rows


def block_rows(view: View, block: int, width: int) -> list[Row]:
    """What a block holds, for whom, and the text of its tokens."""
    state, dot = view.state, view.glyphs.dot
    if not 0 <= block < state.header.num_blocks:
        return []
    separator: Span = (f" {dot} ", "faint")
    refs, key, owner = int(state.refs[block]), int(state.key[block]), int(state.owner[block])
    filled, size = int(state.filled[block]), state.header.block_size
    facts: list[Span] = [(f"block {block}", "strong"), separator]
    if refs:
        facts.extend([("owner ", "muted"), (called(view, owner), owner)])
        facts.extend([separator, (f"place {int(state.logical[block])} of its table", "text")])
        facts.extend([separator, (f"{filled}/{size}", "text"), (" slots filled", "muted")])
        if refs > 1:
            facts.extend([separator, (f"{refs} references", "strong")])
    elif key:
        facts.append(("cached: nobody holds it, its content can still be found", "text"))
    else:
        facts.append(("free", "text"))
    if key:
        facts.extend([separator, (f"hash {key & 0xFFFFFFFFFFFFFFFF:016x}"[:13] + view.glyphs.ellipsis, "muted")])
    elif refs:
        facts.extend([separator, ("not hashed: not full yet" if filled < size else "not hashed", "muted")])
    rows = flowing(_groups(facts, separator), separator, width)
    if refs > 1:
        holders: list[Row] = [((called(view, request), request),) for request in _holders(state, block)]
        rows.extend(flowing(holders, (" ", "muted"), width, "shared"))
    pieces = state.block_text(block)
    if pieces:
        rows.extend(flowing([(span,) for span in _token_spans(pieces, view)], None, width, "tokens"))
    return rows


def _holders(state: PoolState, block: int) -> Iterable[int]:
    """The live requests with this block in their table."""
    for number, request in state.requests.items():
        if request.status in (RequestStatus.RUNNING, RequestStatus.WAITING) and block in request.table:
            yield number


def _token_spans(pieces: Sequence[str], view: View) -> list[Span]:
    """Tokens one after the other in two alternating styles, so that their borders can be seen."""
    spans: list[Span] = []
    for i, piece in enumerate(pieces):
        text = clean(piece, ascii_only=view.glyphs.ascii, limit=64)
        spans.append(
            (text.replace(" ", "_") if view.glyphs.ascii else text.replace(" ", "␣"), ("text", "accent")[i % 2])
        )
    return spans
