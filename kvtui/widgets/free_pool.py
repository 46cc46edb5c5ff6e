"""The level of the pool over the steps, what was lost to pressure, and how much of the memory in use is of use."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np
from textual.binding import Binding

from engine.sizes import in_bytes
from kvtui.advisor import advice_words, advise_now
from kvtui.safe_text import clean
from kvtui.safe_text import width as cells_of
from kvtui.waste import Waste, waste_of
from kvtui.widgets.level_chart import CACHED, EIGHTHS, SCALES, TRACE, cells, gather
from kvtui.widgets.line import Line
from kvtui.widgets.line_panel import LinePanel

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from rich.style import Style
    from textual.binding import BindingType
    from textual.strip import Strip

    from engine.trace.events import Header, StepTrace
    from kvtui.glyphs import Glyphs
    from kvtui.view import View

_WIDE = 48
_COUNTS = " 123456789"


class FreePool(LinePanel):
    """Used, cached and free blocks as a stacked area; preemptions and evictions below; the bottleneck and the waste."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("plus,equals_sign", "zoom(-1)", "fewer steps a column", show=False, id="pool.zoom-in"),
        Binding("minus", "zoom(1)", "more steps a column", show=False, id="pool.zoom-out"),
    ]

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:  # noqa: A002
        super().__init__(id=id, classes=classes)
        self._waste: Waste | None = None
        self._advice: list[str] = []
        self._per_column = 0
        self._per_column_now = 1

    def follow(self, view: View, steps: Sequence[StepTrace], reset: bool) -> None:
        """Measure the memory once for each frame that brought steps."""
        if steps or reset or self._waste is None:
            self._waste = waste_of(view.state)
            advice = advise_now(view.history, view.state)
            self._advice = []
            if advice is not None:
                words = advice_words(advice, view.names.of)
                self._advice = [clean(form, ascii_only=view.glyphs.ascii, limit=400) for form in words]
        self.set_title("Pool")

    def rows(self, view: View, width: int, height: int) -> Sequence[Hashable]:
        """From top to bottom: levels, chart, events, axis, words; the chart is given up last."""
        state, header = view.state, view.state.header
        gutter = self._gutter(header.num_blocks, width)
        gathered = gather(view.history, width - gutter - 1, self._per_column)
        if gathered is None or self._waste is None:
            nothing = ("levels", state.used, state.cached, state.free, state.cpu_used, None)
            return [nothing, "", "No step yet: the pool's level is drawn from the first one on."]
        self._per_column_now = gathered.steps_per_column
        words: list[Hashable] = [("limit", tuple(self._advice)), ("waste", self._waste), ("bytes", self._waste)]
        words = words if height >= 10 else words[:2] if height >= 8 else words[:1] if height >= 6 else []
        merged = 6 <= height < 11
        axis: list[Hashable] = [("axis", gathered.first, gathered.stop, gathered.steps_per_column, merged)]
        axis = axis if height >= 4 else []
        events: list[Hashable] = []
        if height >= 11:
            events = [
                ("events", "preempted", gathered.preemptions.tobytes()),
                ("events", "evicted", gathered.evictions.tobytes()),
            ]
        elif height >= 6:
            events = [("events", "pressure", (gathered.preemptions + gathered.evictions).tobytes())]
        rows = height - 1 - len(words) - len(axis) - len(events)
        chart: list[Hashable] = []
        if rows > 0:
            codes = cells(gathered, header.num_blocks, rows)
            for y in range(rows):
                label = f"{header.num_blocks:,}" if y == 0 else "0" if y == rows - 1 else ""
                chart.append(("chart", label, codes[y].tobytes()))
        waste = None if len(words) > 1 else self._waste
        levels = ("levels", state.used, state.cached, state.free, state.cpu_used, waste)
        return [levels, *chart, *events, *axis, *words]

    @staticmethod
    def _gutter(num_blocks: int, width: int) -> int:
        return max(len(f"{num_blocks:,}"), 10 if width >= _WIDE else 4) + 1

    # -- drawing -------------------------------------------------------------------------------------------------

    def draw(self, view: View, key: Hashable, width: int) -> Strip:
        """One line, by its kind."""
        assert isinstance(key, tuple)
        line = Line(width, view.palette.blank)
        gutter = self._gutter(view.state.header.num_blocks, width)
        kind, *values = key
        if kind == "levels":
            _draw_levels(line, view, *values)
        elif kind == "chart":
            _draw_chart(line, view, gutter, *values)
        elif kind == "events":
            _draw_events(line, view, gutter, *values)
        elif kind == "axis":
            _draw_axis(line, view, gutter, *values)
        elif kind == "limit":
            _draw_limit(line, view, *values)
        elif kind == "waste":
            _draw_words(line, view, waste_words(values[0], view.state.header.block_size, view.glyphs))
        elif kind == "bytes":
            _draw_words(line, view, byte_words(values[0], view.state.header, view.glyphs))
        return line.strip()

    def action_zoom(self, direction: int) -> None:
        """Gather fewer (-1) or more (1) steps into a column."""
        place = min(range(len(SCALES)), key=lambda i: abs(SCALES[i] - self._per_column_now)) + direction
        self._per_column = SCALES[max(0, min(len(SCALES) - 1, place))]
        self.redraw()


def _draw_levels(line: Line, view: View, used: int, cached: int, free: int, cpu_used: int, waste: Waste | None) -> None:
    palette, glyphs = view.palette, view.glyphs
    total = used + cached + free
    low = total > 0 and cached + free <= total // 20
    line.gap()
    for glyph, word, count, style in (
        (glyphs.levels[-1], "used", used, palette.role("focus")),
        (glyphs.cached, "cached", cached, palette.cached),
        (" ", "free", free, palette.blank),
    ):
        if glyph != " ":
            line.add(glyph, style).gap()
        line.add(word, palette.muted).gap()
        line.add(f"{count:,}", palette.warning if low and word == "free" else palette.strong).gap(2)
    num_cpu_blocks = view.state.header.num_cpu_blocks
    if num_cpu_blocks:
        line.add("cpu", palette.muted).gap().add(f"{cpu_used:,}/{num_cpu_blocks:,}", palette.strong).gap(2)
    if low and line.room > 12:
        line.add("nearly full" if cached + free else "full", palette.warning).gap(2)
    if waste is not None:
        styles = {"": palette.muted, "strong": palette.strong}
        for variant in waste_words(waste, view.state.header.block_size, glyphs):
            pieces = [(text, styles[role]) for text, role in variant]
            if sum(cells_of(text) for text, _ in pieces) + 1 < line.room:
                line.right([*pieces, (" ", palette.blank)])
                return
    else:
        line.right([(f"of {total:,} blocks ", palette.muted)])


def _draw_chart(line: Line, view: View, gutter: int, label: str, codes: bytes) -> None:
    palette = view.palette
    line.add(label.rjust(gutter - 1), palette.faint).gap()
    line.to(line.cells - 1 - len(codes))
    runs = np.frombuffer(codes, np.uint8)
    starts = np.flatnonzero(np.diff(runs, prepend=np.uint8(255)))
    stops = np.append(starts[1:], len(runs))
    for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
        code = codes[start]
        glyph, style = _cell(code, view, palette.role("focus"))
        line.add(glyph * (stop - start), style)


def _cell(code: int, view: View, used: Style) -> tuple[str, Style]:
    glyphs, palette = view.glyphs, view.palette
    if code == CACHED:
        return glyphs.cached, palette.cached
    if code == TRACE:
        return glyphs.trace, palette.cached
    if code == 0:
        return " ", palette.blank
    if glyphs.ascii:  # in ASCII nothing fills a part of a cell from below
        return (glyphs.levels[-1], used) if code * 2 >= EIGHTHS else ("_", used)
    return glyphs.history[code], used


def _draw_events(line: Line, view: View, gutter: int, word: str, counts: bytes) -> None:
    palette = view.palette
    values = np.frombuffer(counts, np.int64)
    style = palette.warning if word != "evicted" else palette.cached
    line.add(word[: gutter - 1].rjust(gutter - 1), palette.faint).gap().to(line.cells - 1 - len(values))
    line.add("".join(_COUNTS[v] if v < 10 else view.glyphs.many for v in values.tolist()), style)


def _draw_axis(line: Line, view: View, gutter: int, first: int, stop: int, per_column: int, merged: bool) -> None:
    palette = view.palette
    left, right = f"{first:,}", f"{stop - 1:,}"
    columns = (stop - 1) // per_column - first // per_column + 1
    start = line.cells - 1 - columns
    line.add("step".rjust(gutter - 1), palette.faint).gap()
    scale = f"{per_column} steps a column" if per_column > 1 else "1 step a column"
    space = line.cells - 1 - start - len(left) - len(right)
    if space > 1:
        line.to(start).add(left, palette.muted)
        explained = f"{scale}; pressure: preempted + evicted" if merged else scale
        if space > len(explained) + 4:
            scale = explained
        if space > len(scale) + 4:
            line.gap((space - len(scale)) // 2).add(scale, palette.faint)
    line.to(line.cells - 1 - len(right)).add(right, palette.muted)


def _draw_limit(line: Line, view: View, forms: tuple[str, ...]) -> None:
    """What holds the session up, in the longest form that fits."""
    palette = view.palette
    label = "held up by "
    room = line.cells - 2 - len(label)
    text = next((form for form in forms if cells_of(form) <= room), forms[-1] if forms else "")
    nothing = text.startswith(("nothing", "hardly"))
    line.gap().add(label, palette.muted).add(text, palette.muted if nothing else palette.warning)


def _draw_words(line: Line, view: View, variants: list[list[tuple[str, str]]]) -> None:
    """The first variant that fits, else the last one cut."""
    palette = view.palette
    styles = {"": palette.muted, "strong": palette.strong}
    chosen = next((v for v in variants if sum(cells_of(text) for text, _ in v) < line.cells - 1), variants[-1])
    line.gap()
    for text, role in chosen:
        line.add(text, styles[role])


def waste_words(waste: Waste, block_size: int, glyphs: Glyphs) -> list[list[tuple[str, str]]]:
    """The waste and its formula, from the longest form to the shortest; pieces of text and their weight."""
    dot, minus = ("*", "-") if glyphs.ascii else ("·", "−")
    if not waste.used_blocks:
        return [[("waste: no block is in use", "")]]
    now, then = f"{waste.waste:.1%}", f"{waste.reserved_waste:.0%}"
    formula = f" = 1 {minus} {waste.held_tokens:,}/({waste.used_blocks:,}{dot}{block_size})"
    reserved = f" = 1 {minus} {waste.held_tokens:,}/{waste.reserved_slots:,}"
    versus = [("   versus ", ""), (then, "strong"), (reserved, "")]
    return [
        [("waste ", ""), (now, "strong"), (formula, ""), *versus, (f"{_IF_RESERVED[0]} for itself", "")],
        [("waste ", ""), (now, "strong"), (formula, ""), ("   versus ", ""), (then, "strong"), _IF_RESERVED],
        [
            ("waste ", ""),
            (now, "strong"),
            (formula, ""),
            ("   vs ", ""),
            (then, "strong"),
            (" if each reserved its maximum", ""),
        ],
        [("waste ", ""), (now, "strong"), (formula, ""), ("   vs ", ""), (then, "strong"), (" reserved", "")],
        [("waste ", ""), (now, "strong"), (" vs ", ""), (then, "strong"), (" reserved at maximum", "")],
        [("waste ", ""), (now, "strong"), (" vs ", ""), (then, "strong"), (" reserved", "")],
        [("waste ", ""), (now, "strong")],
    ]


_IF_RESERVED = (" if each request had reserved its maximum", "")


def byte_words(waste: Waste, header: Header, glyphs: Glyphs) -> list[list[tuple[str, str]]]:
    """The bytes held and their formula, from the longest form to the shortest."""
    dot = "*" if glyphs.ascii else "·"
    model = header.model
    heads = 2 * model.num_layers * model.num_kv_heads
    per_head = model.kv_bytes_per_token / heads - model.kv_scale_bytes if heads else 0
    element = f"{per_head / model.head_dim if model.head_dim else 0:g} B"
    shape = f"2{dot}{model.num_layers} layers{dot}{model.num_kv_heads} kv heads"
    tokens = f"{waste.held_tokens:,} tokens"
    formula = f"{shape}{dot}{model.head_dim}{dot}{tokens}{dot}{element}"
    if model.kv_scale_bytes:
        formula = f"{shape}{dot}{tokens}{dot}({model.head_dim}{dot}{element} + {model.kv_scale_bytes} B scale)"
    held = in_bytes(waste.bytes)
    pool = f" of {in_bytes(header.num_blocks * header.block_size * model.kv_bytes_per_token)}"
    return [
        [("holds ", ""), (held, "strong"), (pool, ""), (f" = {formula}", "")],
        [("holds ", ""), (held, "strong"), (f" = {formula}", "")],
        [("holds ", ""), (held, "strong"), (pool, "")],
    ]
