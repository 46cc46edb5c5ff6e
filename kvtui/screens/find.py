"""Find a request or a block by what is typed."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from textual.binding import Binding
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Input, Static

if TYPE_CHECKING:
    from textual.app import ComposeResult
    from textual.binding import BindingType

    from engine.trace.state import PoolState

_BLOCK = re.compile(r"b(?:lock)?\s*(\d[\d,_]{0,12})", re.IGNORECASE)
_REQUEST = re.compile(r"(?:#|r(?:equest)?\s*)(\d{1,9})", re.IGNORECASE)


class Found(NamedTuple):
    """What was found; both None where nothing was, and why, where that can be said."""

    request: int | None = None
    block: int | None = None
    problem: str | None = None


def find(state: PoolState, query: str) -> Found:
    """What a query means: `b44` a block, `#7` a request, a number either, other text a name or a part of a text.

    Of several requests the newest is found.
    """
    query = query.strip()
    block = _BLOCK.fullmatch(query)
    if block is not None:
        number, num_blocks = int(re.sub("[,_]", "", block[1])), state.header.num_blocks
        if number < num_blocks:
            return Found(block=number)
        return Found(problem=f"there is no block {number:,}: the pool has {num_blocks:,}, from 0 to {num_blocks - 1:,}")
    request = _REQUEST.fullmatch(query)
    number = int(request[1]) if request is not None else int(query) if query.isdecimal() and len(query) < 10 else -1
    if number in state.requests:
        return Found(request=number)
    if query.isdecimal() and 0 <= number < state.header.num_blocks:
        return Found(block=number)
    if not query or request is not None:
        return Found()
    wanted = query.casefold()
    for candidate in reversed(state.requests.values()):
        if wanted in candidate.name.casefold():
            return Found(request=candidate.request)
    for candidate in reversed(state.requests.values()):
        if wanted in "".join(candidate.pieces).casefold():
            return Found(request=candidate.request)
    return Found()


class FindScreen(ModalScreen[str]):
    """One line of input over the dashboard; its answer is what was typed, or nothing."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "cancel", "close", id="find.close")]

    DEFAULT_CSS = """
    FindScreen { align: center bottom; background: transparent; }
    FindScreen > Vertical { width: 100%; height: 2; background: $panel; padding: 0 1; }
    FindScreen Input { border: none; height: 1; padding: 0; background: $panel; }
    FindScreen Input:focus { border: none; background-tint: transparent; }
    FindScreen Static { height: 1; color: $foreground 70%; }
    FindScreen > ToastRack { margin-bottom: 2; }
    """

    def compose(self) -> ComposeResult:
        """The question above the line to type in."""
        with Vertical():
            yield Static("Find a request by number, name or text; or a block: b44", markup=False)
            line = Input(placeholder="enter finds, esc closes", max_length=200, select_on_focus=False)
            # A blinking cursor would write to the terminal for ever.
            line.cursor_blink = False
            yield line

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Answer with what was typed."""
        self.dismiss(event.value)

    def action_cancel(self) -> None:
        """Answer with nothing."""
        self.dismiss("")
