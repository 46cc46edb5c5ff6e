"""One line on top: what runs, where the numbers come from, how far it is and how fast."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from rich.color import Color
from rich.style import Style

from engine.sizes import counted
from kvtui.advisor import advice_brief, advise_now
from kvtui.safe_text import clean
from kvtui.safe_text import width as cells_of
from kvtui.widgets.line import Line
from kvtui.widgets.line_panel import LinePanel

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from textual.strip import Strip

    from engine.trace.events import ModelInfo, StepTrace
    from kvtui.view import View

_LONGEST_NAME = 40
_ADVISE_SECONDS = 0.5
_WORTH_MORE_THAN_WORDS = 4
"""Parts up to this rank are not left out for a longer form of the advice."""


class Part(NamedTuple):
    """A piece of the header.

    Attributes:
        rank: Parts of the highest rank are left out first.
        text: What it says.
        role: Its style: a role of the palette, or `strong`.
        right: Whether it stands at the right edge.
    """

    rank: int
    text: str
    role: str
    right: bool = False


class HeaderBar(LinePanel, can_focus=False):
    """The header; parts that do not fit are left out whole, the least important first.

    Attributes:
        url: Where the session listens, if it does.
    """

    DEFAULT_CSS = """
    HeaderBar { height: 1; }
    """

    url: str | None = None

    def __init__(self, *, id: str | None = None) -> None:  # noqa: A002
        super().__init__(id=id)
        self._advice: list[str] = []
        self._advised_at = float("-inf")

    def follow(self, view: View, steps: Sequence[StepTrace], reset: bool) -> None:
        """Look now and then what holds requests up."""
        now = time.monotonic()
        if reset or view.source.paused or now - self._advised_at >= _ADVISE_SECONDS:
            self._advised_at = now
            advice = advise_now(view.history, view.state)
            self._advice = [] if advice is None else advice_brief(advice)

    def rows(self, view: View, width: int, height: int) -> Sequence[Hashable]:
        """The parts that fit; the advice in the longest form that costs no part of more weight than the pool's size."""
        shown = fitting(parts_of(view, self.url), width)
        weighty: set[str] = set()
        for form in reversed(self._advice):
            kept = fitting(parts_of(view, self.url, form), width)
            if form in {part.text for part in kept} and weighty <= {part.text for part in kept}:
                shown = kept
                weighty = {part.text for part in kept if part.rank <= _WORTH_MORE_THAN_WORDS and part.text != form}
        return [tuple(shown)]

    def draw(self, view: View, key: Hashable, width: int) -> Strip:
        """Left parts, space, right parts."""
        assert isinstance(key, tuple)
        palette = view.palette
        raised = Style() if palette.mono else Style(bgcolor=Color.parse(palette.colors["raised"]))
        line = Line(width, palette.blank).gap()
        right: list[tuple[str, Style]] = []
        for part in key:
            style = palette.strong if part.role == "strong" else palette.role(part.role)
            style += Style(bold=True) if part.rank == 0 else Style()
            if part.right:
                right += [("  ", palette.blank), (part.text, style)]
            else:
                line.add(part.text, style).gap(2)
        line.right([*right[1:], (" ", palette.blank)])
        return line.strip(raised)


def parts_of(view: View, url: str | None, advice: str = "") -> list[Part]:
    """Everything the header could say, in order.

    Args:
        view: The present moment.
        url: Where the session listens.
        advice: What holds requests up; empty where nothing does.
    """
    source, glyphs, header = view.source, view.glyphs, view.source.header
    model = header.model
    damage = source.damage
    if damage is not None:
        badge = Part(0, f"! DAMAGED at step {damage.first:,}", "error")
    elif source.error:
        badge = Part(0, "! STOPPED", "error")
    elif source.looking_back:
        badge = Part(0, f"{glyphs.arrow_left} LOOKING BACK", "warning")
    elif source.live and source.engine_paused:
        badge = Part(0, f"{glyphs.paused} ENGINE PAUSED", "warning")
    elif source.paused and not source.live:
        badge = Part(0, f"{glyphs.paused} PAUSED", "warning")
    elif source.live:
        badge = Part(0, f"{glyphs.live} LIVE", "good")
    else:
        badge = Part(0, f"{glyphs.playing} PLAY", "accent")
    measured = header.provenance == "measured"
    ascii_only = glyphs.ascii
    per_block = header.block_size * model.kv_bytes_per_token / 1024
    rates = view.history.rates()
    counters = view.state.counters
    idle = (
        source.live
        and not source.looking_back
        and not source.engine_paused
        and not counters.running
        and not counters.waiting
    )
    behind = source.length - 1 - source.position
    step = f"step {source.position:,}" if source.position >= 0 else "no step yet"
    if source.position >= 0 and not source.live and source.length:
        step += f"/{source.length - 1:,}"
    name = clean(model.name, ascii_only=ascii_only, limit=_LONGEST_NAME)
    device = "" if model.device == "none" else f"{model.device} "  # A simulated model is on none.
    parts = [Part(7, "kvtui", "strong"), badge]
    if damage is not None:
        parts.append(Part(2, f"{damage.num_readable:,} of {counted(source.length, 'step')} can be read", "error"))
    elif source.cut_off:
        parts.append(Part(2, f"! cut off after {counted(source.length, 'step')}", "error"))
    if source.looking_back and not source.error:
        running = ("the engine is paused", "warning") if source.engine_paused else ("the engine goes on", "good")
        parts.append(Part(1, *running))
    parts += [
        Part(1, clean(header.provenance, ascii_only=ascii_only), "muted" if measured else "warning"),
        Part(4, name if name != header.provenance else "", "text"),
        Part(
            8,
            clean(
                f"{device}{model.weights or model.dtype}{_cache_words(model)}",
                ascii_only=ascii_only,
                limit=_LONGEST_NAME,
            ),
            "muted",
        ),
        Part(6, f"{header.num_blocks:,} block{'' if header.num_blocks == 1 else 's'} of {header.block_size}", "text"),
        Part(10, f"{per_block:,.0f} KiB each" if per_block >= 10 else f"{per_block:,.1f} KiB each", "muted"),
    ]
    if header.num_cpu_blocks:
        parts.append(Part(6, f"cpu {view.state.cpu_used:,}/{header.num_cpu_blocks:,}", "text"))
    if advice:
        parts.append(Part(3, clean(advice, ascii_only=ascii_only), "warning"))
    if url:
        parts.append(Part(5, clean(url, ascii_only=ascii_only, limit=80), "accent"))
    if source.num_arrived and source.engine_paused:
        parts.append(Part(2, f"{source.num_arrived:,} arrived, taken at the next step", "warning"))
    if source.looking_back:
        parts.append(Part(0, f"LIVE +{behind:,} steps", "warning", right=True))
    parts.append(Part(1, step, "strong", right=True))
    if idle:
        parts.append(Part(2, "idle", "muted", right=True))
    elif len(view.history):
        parts.append(Part(9, f"{_rate(rates.steps_per_s)} steps/s", "muted", right=True))
        parts.append(Part(2 if damage is None else 3, f"{_rate(rates.tokens_per_s)} tok/s", "text", right=True))
    return [part for part in parts if part.text]


def _rate(value: float) -> str:
    return f"{value:.1f}" if value < 10 else f"{value:,.0f}"


def fitting(parts: list[Part], cells: int) -> list[Part]:
    """The parts that fit side by side, two cells apart."""
    kept = list(parts)
    while kept and 2 + sum(cells_of(part.text) + 2 for part in kept) > cells:
        worst = max(part.rank for part in kept)
        if worst == 0:
            break
        kept = [part for part in kept if part.rank != worst]
    return kept


def _cache_words(model: ModelInfo) -> str:
    """The element type of the cache, where it is not the model's."""
    return "" if model.kv_dtype in ("", model.dtype) else f" kv {model.kv_dtype.split('_')[0]}"
