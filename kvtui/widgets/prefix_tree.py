"""The prefix cache as a tree: what is kept, who uses it now, and how often it was found."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from textual.binding import Binding

from engine.sizes import counted
from kvtui.prefix_tree import Place, PrefixTree
from kvtui.safe_text import clean
from kvtui.view import Prefix, PrefixSelected, RequestSelected
from kvtui.widgets.line_panel import LinePanel
from kvtui.widgets.prefix_row import Look, Row, draw_heading, draw_row, row_of, told_apart, uses
from kvtui.widgets.wheel import WheelScrolled

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from textual import events
    from textual.binding import BindingType
    from textual.strip import Strip

    from engine.trace.events import StepTrace
    from engine.trace.state import PoolState
    from kvtui.prefix_tree import Node, Run
    from kvtui.view import View

_BUDGET_S = 0.02
"""Longest that one frame reads the cache for."""
_HEADING = ("heading",)


class PrefixPanel(WheelScrolled, LinePanel):
    """Runs of blocks without a branching between them, a line each; the most hit first.

    Moving the cursor lights a run's blocks in the grid (`PrefixSelected`). Enter goes to the requests that use it, one
    after the other (`RequestSelected`). Only the lines in sight are worked out.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "go_to_request", "go to a request that uses it", show=False, id="prefixes.request"),
        Binding("minus", "fold(True)", "fold", show=False, id="prefixes.fold"),
        Binding("plus,equals_sign", "fold(False)", "unfold", show=False, id="prefixes.unfold"),
    ]

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:  # noqa: A002
        super().__init__(id=id, classes=classes)
        self.prefixes: PrefixTree | None = None
        self.behind = False
        """Whether a part of a large cache is still to be read: the next frame goes on with it."""
        self._of: PoolState | None = None
        self._folded: set[int] = set()
        self._top: int | None = None
        """Key of the first line; the lines are known by keys, since runs come and go."""
        self._cursor: int | None = None
        self._shown: list[int] = []
        self._lit: Prefix | None = None

    # -- following -----------------------------------------------------------------------------------------------

    def follow(self, view: View, steps: Sequence[StepTrace], reset: bool) -> None:
        """Bring the tree up to date; the state is ahead of all that was told before."""
        state = view.state
        if self.prefixes is None or self._of is None or self._of.header is not state.header:
            self.prefixes = PrefixTree(state.header)
            reset = True
        if reset or self._of is not state or self.behind:
            self.behind = not self.prefixes.jump(state, _BUDGET_S)
        else:
            self.prefixes.follow(state, steps)
        self._of = state
        if self._folded:
            self._folded = {key for key in self._folded if key in self.prefixes.nodes}
        self._light(view)
        self._title_of(view, self.prefixes)

    def _title_of(self, view: View, tree: PrefixTree) -> None:
        glyphs, counts = view.glyphs, tree.counts
        parts = [f"reading the cache {glyphs.ellipsis}"] if self.behind else []
        parts += [f"{counts[Place.USED]:,} in use", f"{counts[Place.CACHED]:,} cached"]
        if view.state.header.num_cpu_blocks:
            parts.append(f"{counts[Place.CPU]:,} on the CPU")
        rate = view.history.prefix_hit_rate
        if rate is not None:
            parts.append(f"hit rate {rate:.0%}")
        first = f"Prefix tree {glyphs.horizontal} {counted(sum(counts), 'block')}"
        self.set_title(first, *parts, separator=f" {glyphs.dot} ")

    def _light(self, view: View) -> None:
        """Tell which blocks the selected run has now, where it has grown or shrunk."""
        key = view.selected_prefix
        if key is None or self.prefixes is None:
            self._lit = None
            return
        run = self._run(key)
        if run is None:
            # While a large cache is still being read, it may be on its way.
            if not self.behind:
                self.post_message(PrefixSelected(None))
            return
        lit = _prefix_of(key, run)
        if lit.blocks != view.selected_blocks and lit != self._lit:
            self._lit = lit
            self.post_message(PrefixSelected(lit))

    # -- the window ----------------------------------------------------------------------------------------------

    def _run(self, key: int | None) -> Run | None:
        node = self.prefixes.nodes.get(key) if self.prefixes is not None and key is not None else None
        return node.run if node is not None else None

    def _nearest(self, key: int | None) -> Run | None:
        """The run of a key or, where that is gone, one that stood near it."""
        run = self._run(key)
        if run is None and key in self._shown:
            at = self._shown.index(key)
            near = [*self._shown[at:], *self._shown[:at][::-1]]
            run = next((there for k in near if (there := self._run(k)) is not None), None)
        return run

    def _window(self, height: int) -> list[Run]:
        """The runs in sight, from the first one on; at the end of the tree the window is filled from above."""
        assert self.prefixes is not None
        run = self._nearest(self._top) or self.prefixes.after(self.prefixes.top, self._folded)
        runs: list[Run] = []
        while run is not None and len(runs) < height:
            runs.append(run)
            run = self.prefixes.after(run, self._folded)
        while runs and len(runs) < height and (run := self.prefixes.before(runs[0], self._folded)) is not None:
            runs.insert(0, run)
        self._top = runs[0].nodes[0].key if runs else None
        return runs

    @property
    def _heading(self) -> int:
        return 1 if self.size.height >= 3 else 0

    def rows(self, view: View, width: int, height: int) -> Sequence[Hashable]:
        """The heading and the runs in sight."""
        if self.prefixes is None or not self.prefixes.nodes:
            return _empty_state(view)
        cursor = self._nearest(self._cursor)
        window = max(1, height - self._heading)
        runs = self._window(window)
        if cursor is not None and cursor not in runs and self._cursor in self._shown:
            # It was in sight, and something that came in above it has pushed it out.
            self._top = self._back_from(cursor, window - 1)
            runs = self._window(window)
        if cursor is not None and self._cursor != cursor.nodes[0].key:
            self._cursor = cursor.nodes[0].key
        self._shown = [run.nodes[0].key for run in runs]
        selected = self._run(view.selected_prefix)
        marked = (cursor or runs[0]) if self.has_focus else None
        keys: list[Hashable] = [_HEADING] if self._heading else []
        tree, folded = self.prefixes, self._folded
        drawn = [
            row_of(view, tree, run, Look(run is marked, run.nodes[0].key in folded, selected, width)) for run in runs
        ]
        keys += told_apart(drawn, runs, view.glyphs)
        return keys

    # -- drawing -------------------------------------------------------------------------------------------------

    def draw(self, view: View, key: Hashable, width: int) -> Strip:
        """The heading or one run."""
        return draw_row(view, key, width) if isinstance(key, Row) else draw_heading(view, width)

    # -- acting --------------------------------------------------------------------------------------------------

    def _back_from(self, run: Run, lines: int) -> int:
        """Key of the run so many lines above, or of the first one."""
        for _ in range(lines):
            above = self.prefixes.before(run, self._folded) if self.prefixes is not None else None
            if above is None:
                break
            run = above
        return run.nodes[0].key

    def _put_cursor(self, run: Run | None) -> None:
        """Put the cursor on a run, bring it into sight, and select it."""
        if run is None or self.prefixes is None:
            return
        key = run.nodes[0].key
        if key not in self._shown:
            window = max(1, self.size.height - self._heading)
            first = self._run(self._shown[0]) if self._shown else None
            if first is not None and self.prefixes.before(first, self._folded) is run:
                self._top = key
            else:
                self._top = self._back_from(run, window - 1)
        self._cursor = key
        self.redraw()
        self.post_message(PrefixSelected(_prefix_of(key, run)))

    def _move(self, rows: int) -> None:
        if self.prefixes is None or not self.prefixes.nodes:
            return
        if self._cursor is None:
            self._put_cursor(self._run(self._shown[0]) if self._shown else self.prefixes.after(self.prefixes.top))
            return
        run = self._nearest(self._cursor)
        for _ in range(abs(rows)):
            if run is None:
                break
            beside = (self.prefixes.after if rows > 0 else self.prefixes.before)(run, self._folded)
            if beside is None:
                break
            run = beside
        self._put_cursor(run)

    def action_scroll_up(self) -> None:
        """Select the run above."""
        self._move(-1)

    def action_scroll_down(self) -> None:
        """Select the run below."""
        self._move(1)

    def action_page_up(self) -> None:
        """Go up by a window."""
        self._move(-max(1, self.size.height - self._heading))

    def action_page_down(self) -> None:
        """Go down by a window."""
        self._move(max(1, self.size.height - self._heading))

    def action_fold(self, fold: bool) -> None:
        """Hide or show what branches off from the run under the cursor."""
        run = self._nearest(self._cursor)
        if run is not None and run.below:
            (self._folded.add if fold else self._folded.discard)(run.nodes[0].key)
            self.redraw()

    def action_go_to_request(self) -> None:
        """Select a request that uses the run under the cursor; the next one each time."""
        view, run = self.view, self._nearest(self._cursor)
        if view is None:
            return
        if run is None:
            self._move(0)
            return
        users = _users(view.state, run.nodes[0])
        if not users:
            self.app.notify("no request uses this prefix now", timeout=2, markup=False)
            return
        at = users.index(view.selected_request) + 1 if view.selected_request in users else 0
        self.post_message(RequestSelected(users[at % len(users)], jump=True))

    def on_click(self, event: events.Click) -> None:
        """Select the run that was clicked."""
        offset = event.get_content_offset(self)
        if offset is not None and 0 <= offset.y - self._heading < len(self._shown):
            self._put_cursor(self._run(self._shown[offset.y - self._heading]))

    def scroll_rows(self, rows: int) -> None:
        """Move the window; the cursor stays where it is."""
        run = self._run(self._top)
        for _ in range(abs(rows)):
            if run is None or self.prefixes is None:
                return
            run = (self.prefixes.after if rows > 0 else self.prefixes.before)(run, self._folded) or run
        if run is not None:
            self._top = run.nodes[0].key
            self.redraw()

    def on_focus(self) -> None:
        """Show the cursor."""
        self.redraw()

    def on_blur(self) -> None:
        """Hide the cursor."""
        self.redraw()


def _prefix_of(key: int, run: Run) -> Prefix:
    held = [(block, node.key) for node in run.nodes for block in node.blocks]
    return Prefix(key, tuple(block for block, _ in held), tuple(content for _, content in held))


def _users(state: PoolState, node: Node) -> list[int]:
    return [number for number, request in state.requests.items() if request.table and uses(state, number, node)]


def _empty_state(view: View) -> list[Hashable]:
    header = view.state.header
    if not header.prefix_caching:
        why = "--no-prefix-caching" if header.policy == "paged" else f"--policy {clean(header.policy, limit=20)}"
        return ["", "Prefix caching is off in this session, so no prefix is kept.", f"It was started with {why}."]
    lines: list[Hashable] = ["", "No prefix yet."]
    lines.append(f"One appears once a request has computed its first {counted(header.block_size, 'token')}, a block.")
    if view.source.live:
        url = clean(view.listen_url, ascii_only=view.glyphs.ascii, limit=100) if view.listen_url else None
        to = f"kvtui inject --url {url}" if url else "kvtui run"
        lines += ["Questions about one document show it best:", f"  {to} --workload rag"]
    else:
        lines.append(f"Go on with {view.glyphs.arrow_right} or the space bar.")
    return lines
