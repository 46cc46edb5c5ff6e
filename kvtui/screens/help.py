"""The help screen: what one sees, what the glyphs mean, and the keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from rich.table import Table
from rich.text import Text
from textual.binding import Binding
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Static

from kvtui.screens.panel_help import PANEL_HELP

if TYPE_CHECKING:
    from collections.abc import Sequence

    from textual.app import ComposeResult
    from textual.binding import BindingType

    from kvtui.glyphs import Glyphs
    from kvtui.palette import Palette

ABOUT = (
    """A language model keeps keys and values of every token it has seen: the KV cache. PagedAttention stores them in
    blocks of a fixed number of tokens, taken from one pool as a text grows, like pages of memory. A request's block
    table says where its tokens lie, in order; the blocks themselves can lie anywhere.""",
    """Requests that begin with the same tokens share blocks. A block that nobody holds any more stays cached until the
    pool needs it again: then its content is evicted. When even that is not enough, the youngest request is
    preempted: it gives its blocks up and computes them again later.""",
)

KEYS = (
    ("space", "pause and resume: the engine where there is one, else the playing"),
    (
        "{left} {right}",
        (
            "one step back, one on; ten with shift. In a live session {left} looks back, while the engine goes on; "
            "{right} at its newest step pauses it and lets it do one more"
        ),
    ),
    ("w", "hold the requests that come by themselves in a live session, or let them come: --workload"),
    ("home end", "the first and the last step; so does a press on the bar at the bottom"),
    ("L", "back to the present of a live session, as end"),
    ("r", "play from the step that one looks back at, and hold it again"),
    (", .", "the mark before and the next one on the bar at the bottom"),
    ("m", "marks of all kinds, or of one: a press on its number beside the bar does the same"),
    ("a b", "a window from, or to, the step shown: it is played again and again; c clears it"),
    ("[ ]", "slower, faster"),
    ("tab 1-9", "go to a panel: blocks, requests, pool, batch, inspector, log, prefix tree, old way, formulas"),
    ("", "in the prefix tree: enter goes to the requests that use the prefix, + and - unfold and fold"),
    ("F", "the formulas behind the figures, with the live numbers; again: back to the pool"),
    ("h j k l", "move the cursor over the blocks; a click does the same, and h or l from another panel"),
    ("up down", "move within the panel that has the focus; so do k and j"),
    ("+ -", "zoom the blocks in and out about the cursor; ctrl and the wheel do so about the pointer"),
    ("J K", "pan; so do page up, page down, the wheel, and a click on the map of the pool"),
    ("0", "the whole pool again"),
    ("o", "order the blocks by address, owner or last use"),
    ("e", "mark the blocks that are taken next, and those among them whose cached content is evicted then"),
    ("p", "two pixels a cell, where a cell stands for many blocks; again: one glyph"),
    ("n N", "the next and the previous block of the selected request"),
    ("enter", "inspect: read about what is selected, or what the cursor is on"),
    ("esc", "back from there; then select nothing, to follow a running request again"),
    ("/", "find a request by number, name or text, or a block: b44"),
    (
        "v",
        "another page of the inspector: what happened to a block, why a request waited, the step, who is evicted next",
    ),
    (
        "",
        (
            "in the requests: texts instead of block tables, where there is no room for both; home and end go to their "
            "first and last row there"
        ),
    ),
    ("enter o", "in the inspector's lists: go to that moment or block; look further back"),
    ("y", "copy what the inspector shows"),
    ("t", "next theme"),
    ("s", "save what is shown as an SVG picture"),
    ("ctrl+p", "every command by name"),
    ("q ctrl+q", "quit"),
)


MARKS = (
    "a request was preempted",
    "cached content was evicted",
    "a request was refused, or failed",
    "a block was copied on write, or swapped with the CPU",
    "a request ended",
)
"""What the marks on the position bar say, in the order of `MarkKind`."""


def help_text(palette: Palette, glyphs: Glyphs, block_size: int, panel: str | None = None) -> Text:
    """The whole page as styled text, the panel that it was opened from first; nothing in it is markup."""
    text = Text(style=palette.text)

    def heading(words: str) -> None:
        text.append(f"{words}\n", palette.accent)

    if panel in PANEL_HELP:
        heading(PANEL_HELP[panel].title)
        text.append(f"{' '.join(PANEL_HELP[panel].words.split())}\n\n", palette.text)
    heading("What you see")
    for paragraph in ABOUT:
        text.append(f"{' '.join(paragraph.split())}\n\n", palette.text)
    text.append(
        f"Here a block holds {block_size} token{'' if block_size == 1 else 's'}. Hue says who: a request has the same "
        "colour in every panel. Glyph says what:\n\n",
        palette.text,
    )
    for glyph, style, words in (
        (glyphs.free, palette.faint, "free"),
        (glyphs.cached, palette.cached, "cached: no holder, content can still be found"),
        (f"{glyphs.levels[0]}{glyphs.levels[3]}{glyphs.levels[-1]}", palette.hue(0), "in use, filled so far"),
        (f"2 9 {glyphs.many}", palette.badge(palette.hue(1)), "shared by so many requests"),
        (glyphs.levels[4], palette.lit(palette.hue(0)), "lit up: just changed hands (stays lit while paused)"),
        (glyphs.evicted, palette.warning, "its cached content was just evicted"),
        (glyphs.swapped, palette.warning, "just swapped out to, or in from, the CPU"),
        (glyphs.next_free, palette.accent, "marked with e: taken next"),
        (glyphs.next_cached, palette.warning, "marked with e: taken next, and its cached content evicted"),
        (glyphs.marked, palette.cursor, "the selected block"),
        (
            glyphs.levels[3],
            palette.over_cached(palette.hue(0)),
            "zoomed out: the share in use and who has most of it;",
        ),
        ("", palette.text, "tinted where most of the rest is cached"),
    ):
        text.append("  ")
        text.append(glyph, style)
        text.append(f"{' ' * (8 - len(glyph))}{words}\n", palette.text)
    text.append(
        "\nOn the bar at the bottom, the steps in which it happened; the numbers beside it count such steps:\n\n",
        palette.text,
    )
    for kind, words in enumerate(MARKS):
        text.append("  ")
        text.append(glyphs.step_marks[kind], palette.mark(kind))
        text.append(f"       {words}\n", palette.text)
    text.append(
        "\nIn the pool's chart the digits below count what pressure did in the steps of a column: preemptions and "
        "evictions, each in a row of its own where there is room.\n\n",
        palette.text,
    )
    heading("Keys")
    text.rstrip()
    return text


def help_keys(
    palette: Palette,
    glyphs: Glyphs,
    own: Sequence[tuple[str, str]] = (),
    keys: Sequence[tuple[str, str]] = KEYS,
) -> Table:
    """The keys and what they do, each in a column of its own, so that a long line goes on under its words.

    Args:
        palette: The colours.
        glyphs: The arrows as they are drawn.
        own: Keys that the user's settings give to actions, and what these do; they come first.
        keys: All others, and what they do.
    """
    table = Table.grid(padding=(0, 0, 0, 2), pad_edge=True)
    table.add_column(no_wrap=True)
    table.add_column(ratio=1)
    arrows = {"left": glyphs.arrow_left, "right": glyphs.arrow_right}
    if own:
        table.add_row("", Text("first your own, from the settings: they replace those below", palette.accent))
    for key, words in own:
        table.add_row(Text(key, palette.strong), Text(words, palette.text))
    for key, words in keys:
        table.add_row(Text(key.format(**arrows), palette.strong), Text(words.format(**arrows), palette.text))
    return table


class HelpScreen(ModalScreen[None]):
    """A page over the panels; any of its keys closes it.

    Args:
        text: What one sees, as `help_text` says it.
        keys: What the keys do, as `help_keys` lists them.
        palette: The colours of its frame.
        glyphs: The set in use.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,question_mark,q,enter,space", "dismiss", "close", id="help.close"),
        Binding("j", "scroll(1)", "down", show=False, id="help.down"),
        Binding("k", "scroll(-1)", "up", show=False, id="help.up"),
    ]

    DEFAULT_CSS = """
    HelpScreen { align: center middle; }
    HelpScreen > VerticalScroll { width: 84; max-width: 100%; max-height: 100%; height: auto; padding: 0 2;
        scrollbar-size-vertical: 1; }
    HelpScreen Static { height: auto; }
    """

    def __init__(self, text: Text, keys: Table, palette: Palette, glyphs: Glyphs) -> None:
        super().__init__()
        self._text = text
        self._keys = keys
        self._dot = glyphs.dot
        self._border = "ascii" if glyphs.ascii else "round"
        self._color = None if palette.ansi or palette.mono else palette.colors["focus"]

    def compose(self) -> ComposeResult:
        """The page in a frame."""
        with VerticalScroll() as frame:
            frame.styles.border = (self._border, self._color or "ansi_default")  # type: ignore[assignment]
            frame.border_title = " Help "
            frame.border_subtitle = f" up/down scrolls {self._dot} esc closes "
            yield Static(self._text)
            yield Static(self._keys)

    def on_mount(self) -> None:
        """Let the arrow keys scroll the page."""
        self.query_one(VerticalScroll).focus()

    def action_scroll(self, by: int) -> None:
        """Scroll by lines."""
        self.query_one(VerticalScroll).scroll_relative(y=by, animate=False)
