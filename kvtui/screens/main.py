"""The dashboard's layout: all panels together where there is room, one at a time where there is not."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from textual.containers import Container, Vertical
from textual.content import Content
from textual.screen import Screen
from textual.widgets import Static

from kvtui.block_order import ADDRESS
from kvtui.paint import show_title
from kvtui.screens.turns import Turns
from kvtui.terminal import MIN_HEIGHT, MIN_WIDTH, WIDE
from kvtui.view import Panel
from kvtui.widgets.batch_timeline import BatchTimeline
from kvtui.widgets.block_moves import MovableGrid
from kvtui.widgets.cpu_grid import CpuGrid
from kvtui.widgets.footer_bar import FooterBar
from kvtui.widgets.formula_sheet import FormulaSheet
from kvtui.widgets.free_pool import FreePool
from kvtui.widgets.header_bar import HeaderBar
from kvtui.widgets.inspector import Inspector
from kvtui.widgets.legend import Legend
from kvtui.widgets.log_panel import LogPanel
from kvtui.widgets.old_way import OldWay
from kvtui.widgets.prefix_tree import PrefixPanel
from kvtui.widgets.request_table import RequestTable
from kvtui.widgets.tab_bar import TABS, TabBar
from kvtui.widgets.transport import Transport

if TYPE_CHECKING:
    from collections.abc import Container as Holding
    from collections.abc import Sequence

    from textual.app import ComposeResult
    from textual.widget import Widget

    from engine.trace.events import StepTrace
    from kvtui.screens.turns import Later
    from kvtui.view import View

LOG = TABS.index("Log")
INSPECTOR = TABS.index("Inspector")
_SHOWN_IN_TAB = (
    ("blocks-frame", "inspector"),
    ("requests",),
    ("pool",),
    ("batch",),
    ("inspector",),
    ("log",),
    ("prefixes",),
    ("old-way",),
    ("formulas",),
)
_FOCUS_OF_TAB = ("blocks", "requests", "pool", "batch", "inspector", "log", "prefixes", "old-way", "formulas")
_PLACES = (("requests", "prefixes"), ("pool", "old-way", "formulas"))
"""Panels that share a place where all are shown together: the one that was opened last is there."""
_LEFT = frozenset({"blocks-frame", "inspector", "pool", "old-way", "formulas"})

_BORDER_AROUND_TITLE = 6

_TITLE_SECONDS = 0.16
"""How often the counts in the title of the blocks are drawn while steps stream by."""


class MainScreen(Screen[None]):
    """The panels, and which of them are in sight.

    The first `update` draws everything; panels out of sight are left alone until they are shown.

    Args:
        num_cpu_blocks: Of the engine's CPU pool.
        hidden: Ids of panels that are left out where all are shown together, until they are asked for.
    """

    SCOPED_CSS = False
    DEFAULT_CSS = """
    MainScreen { layout: vertical; background: $background; }
    #body { layout: horizontal; height: 1fr; }
    #left, #right { height: 100%; }
    #left { width: 54%; } #right { width: 1fr; }
    #blocks-frame { height: 21fr; padding: 0 1; }
    #blocks { height: 1fr; }
    #inspector { height: 12fr; min-height: 7; padding: 0 1; }
    #pool, #old-way, #formulas { height: 11fr; min-height: 6; }
    #requests, #prefixes { height: 1fr; } #batch { height: 1fr; }
    #log { height: 9; }
    #too-small { display: none; width: 100%; height: 100%; content-align: center middle; text-align: center; }

    .framed {
        border: round $kv-border;
        border-title-color: $foreground; border-title-background: $background;
        border-subtitle-color: $foreground; border-subtitle-background: $background;
    }
    .framed:focus, .framed:focus-within { border: round $kv-focus; }
    MainScreen.-ascii .framed { border: ascii $kv-border; }
    MainScreen.-ascii .framed:focus, MainScreen.-ascii .framed:focus-within { border: ascii $kv-focus; }

    #tabs { display: none; }
    MainScreen.-narrow {
        #tabs { display: block; }
        #body { layout: vertical; }
        #left, #right { width: 100%; }
        #pool, #old-way, #formulas, #requests, #prefixes, #batch, #log, #inspector { height: 1fr; }
    }
    MainScreen.-narrow.-blocks-tab #inspector { height: 38%; min-height: 5; }
    MainScreen > ToastRack { margin-bottom: 2; }
    MainScreen.-narrow > ToastRack { dock: top; align: right top; margin: 2 0 0 0; }
    MainScreen.-narrow Toast { width: 100%; max-width: 100%; padding: 0 1; margin: 0; }
    MainScreen.-tiny {
        #body, #header, #footer, #tabs, #transport { display: none; }
        #too-small { display: block; }
    }
    """

    def __init__(self, hidden: frozenset[str] = frozenset(), num_cpu_blocks: int = 0) -> None:
        super().__init__()
        self.header = HeaderBar(id="header")
        self.tabs = TabBar()
        self.footer = FooterBar()
        self.grid = MovableGrid()
        self.legend = Legend(lambda: self.grid.scale)
        self.inspector = Inspector()
        self.log_panel = LogPanel(id="log", classes="framed")
        self.requests = RequestTable(id="requests", classes="framed")
        self.prefixes = PrefixPanel(id="prefixes", classes="framed")
        self.transport = Transport(id="transport")
        self.tab = 0
        self.wide = True
        self.tiny = False
        self._had_focus: Widget | None = None
        self.log_open = False
        self.in_place = {place[0] for place in _PLACES}
        """Of the panels that share a place, those that have it."""
        self._hidden = hidden
        self._cpu_grid = CpuGrid(num_cpu_blocks) if num_cpu_blocks else None
        self._inspected_from: int | None = None
        self._panels: list[Panel] = []
        self._stale: set[Panel] = set()
        self.turns = Turns({})
        self._view: View | None = None
        self._title = ""
        self._title_due = 0.0

    def compose(self) -> ComposeResult:
        """Every panel once; the layout decides where, and whether, it is seen."""
        yield self.header
        yield self.tabs
        with Container(id="body"):
            with Vertical(id="left"):
                with Vertical(id="blocks-frame", classes="framed"):
                    yield self.grid
                    if self._cpu_grid is not None:
                        yield self._cpu_grid
                    yield self.legend
                yield self.inspector
                yield FreePool(id="pool", classes="framed")
                yield OldWay(id="old-way", classes="framed")
                yield FormulaSheet(id="formulas", classes="framed")
            with Vertical(id="right"):
                yield self.requests
                yield self.prefixes
                yield BatchTimeline(id="batch", classes="framed")
                yield self.log_panel
        yield self.transport
        yield self.footer
        yield Static("", id="too-small", markup=False)

    def on_mount(self) -> None:
        """Start with the blocks in focus."""
        self._panels = list(self.query(Panel))
        self._stale.update(self._panels)
        self.turns = Turns({panel.id: panel for panel in self._panels if panel.id is not None})
        self.place_panels()
        self.grid.focus()

    @property
    def settling(self) -> bool:
        """Whether a new layout is on its way, so that places on screen are not to be relied on."""
        return self._layout_required or not self._compositor.size

    @property
    def behind(self) -> bool:
        """Whether a panel has not been told of the last steps yet, or one in sight still reads the cache."""
        return self.turns.behind or (self.prefixes.behind and self.prefixes.is_on_screen)

    @property
    def flashing(self) -> bool:
        """Whether a block in sight is lit up, and has to be put out although nothing happens."""
        grids = [grid for grid in (self.grid, self._cpu_grid) if grid is not None]
        return any(grid.flashing and grid.is_on_screen for grid in grids)

    def hurry(self) -> None:
        """Have all panels drawn in the next frame."""
        self.turns.hurry()

    def on_resize(self) -> None:
        """Choose the layout that fits."""
        self.place_panels()

    def place_panels(self) -> None:
        """Put every panel where it belongs at this size."""
        width, height = self.app.size
        was_tiny = self.tiny
        self.tiny = width < MIN_WIDTH or height < MIN_HEIGHT
        if self.tiny and not was_tiny:
            self._had_focus = self.focused
        self.wide = not self.tiny and width >= WIDE and height >= 30
        self.set_class(self.tiny, "-tiny")
        self.set_class(not self.wide, "-narrow")
        self.transport.set_class(self.wide, "-roomy")
        self.set_class(not self.wide and self.tab == 0, "-blocks-tab")
        if self.tiny:
            self.query_one("#too-small", Static).update(
                Content(f"kvtui needs {MIN_WIDTH} x {MIN_HEIGHT}; this is {width} x {height}. q quits.")
            )
        shown = set(_SHOWN_IN_TAB[self.tab])
        sharing = {name for place in _PLACES for name in place}
        away = (sharing - self.in_place) | (set() if self.log_open else {"log"}) | self._hidden
        for name in (*_LEFT, "requests", "prefixes", "batch", "log"):
            self.query_one(f"#{name}").display = name not in away if self.wide else name in shown
        self.query_one("#left").display = self.wide or bool(shown & _LEFT)
        self.query_one("#right").display = self.wide or not shown & _LEFT
        self.inspector.styles.height = None
        self.tabs.current = self.tab
        # A panel that comes into sight has its size only after the next layout.
        self.call_after_refresh(self._catch_up)
        if was_tiny and not self.tiny:
            self.call_after_refresh(self._focus_again)

    def _focus_again(self) -> None:
        """What had the focus lost it when there was no room for it."""
        widget = self._had_focus
        if widget is None or not widget.is_on_screen:
            widget = self.query_one(f"#{_FOCUS_OF_TAB[self.tab]}")
        if self.focused is None:
            widget.focus()

    def inspect(self) -> None:
        """Go to the inspector, and remember from where."""
        origin = self._focused_tab()
        if origin != INSPECTOR:
            self.open_tab(INSPECTOR)
            self._inspected_from = origin
            self._show_way_back()

    def go_back(self) -> bool:
        """Return to the panel that the inspector was opened from; whether there was one."""
        origin, self._inspected_from = self._inspected_from, None
        if origin is None or self._focused_tab() != INSPECTOR:
            return False
        if self.wide and origin == LOG:
            self.tab = LOG
            self.log_panel.focus()
            self._show_way_back()
        else:
            self.open_tab(origin)
        return True

    def _focused_tab(self) -> int:
        """The open tab; where all panels are in sight, that of the one with the focus."""
        if not self.wide:
            return self.tab
        focused = self.focused.id if self.focused is not None else None
        return _FOCUS_OF_TAB.index(focused) if focused in _FOCUS_OF_TAB else self.tab

    @property
    def panel_in_focus(self) -> str:
        """The id of the panel that keys go to."""
        return _FOCUS_OF_TAB[self._focused_tab()]

    def on_descendant_focus(self) -> None:
        """Say where escape leads to."""
        self._show_way_back()

    def _show_way_back(self) -> None:
        self.footer.panel = self.panel_in_focus
        self.footer.goes_back = self._inspected_from is not None and self._focused_tab() == INSPECTOR
        self.footer.redraw()

    def open_tab(self, tab: int) -> None:
        """Show a panel and give it the focus."""
        self.tab = tab
        self._inspected_from = None
        self._show_way_back()
        if self.wide and tab == LOG:
            self.log_open = not self.log_open
        for place in _PLACES:
            if _FOCUS_OF_TAB[tab] in place:
                self.in_place = self.in_place - set(place) | {_FOCUS_OF_TAB[tab]}
        self._hidden -= {_FOCUS_OF_TAB[tab]}
        self.place_panels()
        target = self.query_one(f"#{_FOCUS_OF_TAB[tab]}")
        if target.display:
            target.focus()
        else:
            self.tab = 0
            self.grid.focus()

    def open_panel(self, name: str) -> None:
        """Show a panel by its id and give it the focus."""
        self.open_tab(_FOCUS_OF_TAB.index(name))

    def next_panel(self, by: int) -> None:
        """Go around the panels."""
        order = [tab for tab in range(len(TABS)) if not self.wide or tab != LOG or self.log_open]
        self.tab = self._focused_tab()
        place = order.index(self.tab) if self.tab in order else 0
        tab = order[(place + by) % len(order)]
        if self.wide and tab == LOG:
            self.log_panel.focus()
            self.tab = tab
        else:
            self.open_tab(tab)

    def _blocks_title(self, view: View, room: int) -> str:
        """What the blocks are ordered by, and as many of their counts as fit."""
        state, glyphs = view.state, view.glyphs
        order = "" if self.grid.order == ADDRESS else f" by {self.grid.order}"
        counts = [
            f"{state.used:,} used",
            f"{state.cached:,} cached",
            f"{state.free:,} free of {state.header.num_blocks:,}",
        ]
        while True:
            told = f" {glyphs.horizontal} " + f" {glyphs.dot} ".join(counts) if counts else ""
            title = f"Physical blocks{order}{told}"
            if len(title) <= room or not counts:
                return title
            counts.pop()

    def update(self, view: View, steps: Sequence[StepTrace], reset: bool) -> None:
        """Hand a new view to the panels in sight whose turn it is; the others are told of it later, or when shown."""
        self._view = view
        self.header.url = view.listen_url
        now = time.monotonic()
        at_once = reset or view.source.paused or not steps
        self._show_title(view, now, at_once)
        waiting = []
        visible = self._compositor.visible_widgets
        for panel in self._panels:
            if not self._in_sight(panel, visible):
                continue
            later = self.turns.later(panel)
            if panel in self._stale:
                self._stale.discard(panel)
                panel.update_view(view, steps, True)
            elif later is None:
                panel.update_view(view, steps, reset)
            else:
                later.steps.extend(steps)
                waiting.append(later)
        self._tell(self.turns.take(waiting, now, at_once), reset)

    def _show_title(self, view: View, now: float, at_once: bool) -> None:
        """Bring the counts above the blocks up to date, where it is time for that."""
        if at_once or now >= self._title_due:
            self._title_due = now + _TITLE_SECONDS * self.turns.slowness
            frame = self.query_one("#blocks-frame")
            title = self._blocks_title(view, frame.outer_size.width - _BORDER_AROUND_TITLE)
            if title != self._title:
                self._title = title
                show_title(frame, Content(title))

    def _in_sight(self, panel: Panel, visible: Holding[Widget]) -> bool:
        """Whether a panel can be seen; one that cannot is told everything when it can."""
        if panel in visible and panel.outer_size.width:
            return True
        self._stale.add(panel)
        self.turns.forget(panel)
        return False

    def _tell(self, waiting: Sequence[Later], reset: bool) -> None:
        """Tell panels of the steps that they have not been told of."""
        assert self._view is not None
        for later in waiting:
            steps, later.steps = later.steps, []
            later.panel.update_view(self._view, steps, reset)

    def update_unfinished(self, view: View) -> None:
        """Hand a view to the panels that have something left to show; no step was taken since the last one."""
        self._view = view
        now = time.monotonic()
        visible = self._compositor.visible_widgets
        for grid in (self.grid, self._cpu_grid):
            if grid is not None and grid.flashing and grid not in self._stale and self._in_sight(grid, visible):
                grid.update_view(view, (), False)
        waiting = []
        for panel in self._panels:
            later = self.turns.later(panel)
            reading = panel is self.prefixes and self.prefixes.behind
            if later is None or not (later.steps or reading) or panel in self._stale:
                continue
            if self._in_sight(panel, visible):
                waiting.append(later)
        self._show_title(view, now, False)
        self._tell(self.turns.take(waiting, now, view.source.paused), False)

    def update_bars(self, view: View) -> None:
        """Hand a view to the lines that say how far the session is; nothing else has changed."""
        self._view = view
        for bar in (self.header, self.transport):
            if bar.is_on_screen and bar not in self._stale:
                bar.update_view(view, (), False)

    def on_block_grid_rescaled(self) -> None:
        """Say what the grid's scale and order are now."""
        self._catch_up()

    def _catch_up(self) -> None:
        """Draw panels that have just come into sight."""
        if self._view is not None:
            self.update(self._view, (), False)
