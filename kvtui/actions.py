"""What a user can do, as actions: each has a key, a name in the command palette, and an id to remap it by."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from textual.app import SystemCommand
from textual.binding import Binding

from kvtui.key_names import shown_keys
from kvtui.time_actions import TIME_BINDINGS, TimeActions

if TYPE_CHECKING:
    from collections.abc import Iterable

    from textual.binding import BindingType
    from textual.screen import Screen

    from kvtui.feed import Feed
    from kvtui.screens.main import MainScreen


class Actions(TimeActions):
    """The keys and commands of the dashboard; `KvtuiApp` is what they act on.

    Attributes:
        marks_next: Whether the blocks that are taken next are marked in the grid.
        feed: What brings requests by itself; None where nothing does.
    """

    marks_next: bool
    feed: Feed | None

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Quit", id="app.quit"),
        Binding("ctrl+q", "quit", "Quit", show=False, priority=True, id="app.quit-now"),
        Binding("ctrl+c", "quit", "Quit", show=False, priority=True, id="app.interrupt"),
        *TIME_BINDINGS,
        Binding("tab", "next_panel", "Next panel", priority=True, id="app.next-panel"),
        Binding("shift+tab", "previous_panel", "Previous panel", priority=True, id="app.previous-panel"),
        Binding("1", "panel(1)", "Panel: physical blocks", id="app.blocks"),
        Binding("2", "panel(2)", "Panel: requests", id="app.requests"),
        Binding("3", "panel(3)", "Panel: pool", id="app.pool"),
        Binding("4", "panel(4)", "Panel: batch per iteration", id="app.batch"),
        Binding("5", "panel(5)", "Panel: inspector", id="app.text"),
        Binding("6", "panel(6)", "Panel: log", id="app.log"),
        Binding("7", "panel(7)", "Panel: prefix tree", id="app.prefixes"),
        Binding("8", "panel(8)", "Panel: the old way, memory reserved in one piece", id="app.old-way"),
        Binding("9", "panel(9)", "Panel: formulas", id="app.formulas"),
        Binding("F", "formulas", "Formulas with the live numbers, or back to the pool", id="app.formulas-letter"),
        Binding("slash", "find", "Find a request or a block", id="app.find"),
        Binding("enter", "inspect", "Inspect", id="app.inspect"),
        Binding("escape", "deselect", "Back from the inspector, or select nothing", id="app.deselect"),
        Binding("h,l", "pick_block", "Pick a block", show=False, id="app.pick-block"),
        Binding("plus,equals_sign", "grid_zoom(-1)", "Blocks: zoom in", id="app.zoom-in"),
        Binding("minus", "grid_zoom(1)", "Blocks: zoom out", id="app.zoom-out"),
        Binding("0", "grid_whole", "Blocks: the whole pool", id="app.whole-pool"),
        Binding("o", "grid_order", "Blocks: order by address, owner or last use", id="app.order"),
        Binding("p", "grid_pixels", "Blocks: two pixels a cell, where a cell is many blocks", id="app.pixels"),
        Binding("e", "mark_next", "Blocks: mark those that are taken, or evicted, next", id="app.mark-next"),
        Binding("w", "hold_feed", "Hold the requests that come by themselves, or let them come", id="app.hold-feed"),
        Binding("n", "next_block(1)", "Next block of the selected request", id="app.next-block"),
        Binding("N", "next_block(-1)", "Previous block of the selected request", id="app.previous-block"),
        Binding("v", "inspector_page", "Inspector: another page", id="app.inspector-page"),
        Binding("y", "copy", "Copy what the inspector shows", id="app.copy"),
        Binding("t", "next_theme", "Next theme", id="app.theme"),
        Binding("s", "save_picture", "Save what is shown as an SVG picture", id="app.picture"),
        Binding("question_mark,f1", "help", "Help", id="app.help"),
    ]

    @property
    def main(self) -> MainScreen:
        """The dashboard's screen, whatever lies over it."""
        raise NotImplementedError

    def draw(self) -> None:
        """Show the present moment."""
        raise NotImplementedError

    def select(self, request: int | None, block: int | None) -> None:
        """Select a request, a block, both, or nothing."""
        raise NotImplementedError

    def select_block(self, block: int | None) -> None:
        """Select a block and its owner."""
        raise NotImplementedError

    @property
    def selected_request(self) -> int | None:
        """The request that is selected."""
        raise NotImplementedError

    @property
    def selected_block(self) -> int | None:
        """The block that is selected."""
        raise NotImplementedError

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        """Every action by name, for the command palette."""
        seen: set[str] = set()
        for binding in self.BINDINGS:
            assert isinstance(binding, Binding)
            if binding.action not in seen:
                seen.add(binding.action)
                keys = self.remapped.get(binding.id or "", binding.key)
                yield SystemCommand(binding.description, f"key {shown_keys(keys)}", self.runner(binding.action))
        for palette in self.palettes.values():
            name = palette.name
            yield SystemCommand(f"Theme: {name}", "colours", lambda name=name: self.set_theme(name))

    def action_save_picture(self) -> None:
        """Write the screen into the working folder; no file is written over."""
        step = max(0, self.source.position)
        for n in range(1, 1000):
            path = Path(f"kvtui-step-{step}{'' if n == 1 else f'-{n}'}.svg")
            try:
                with path.open("x", encoding="utf-8") as file:
                    file.write(self.export_screenshot(title="kvtui"))
            except FileExistsError:
                continue
            except OSError as error:
                self.notify(f"no picture was written to {path}: {error.strerror}", severity="error", markup=False)
                return
            self._say(f"{path} written")
            return

    def action_panel(self, number: int) -> None:
        """Go to a panel by its number."""
        self.main.open_tab(number - 1)

    def action_prefix_request(self) -> None:
        """Go to a request that uses the selected prefix."""
        self.main.prefixes.action_go_to_request()

    def action_inspect_request(self) -> None:
        """Read about the request that the table's cursor is on."""
        self.main.requests.action_select()

    def action_formulas(self) -> None:
        """Show the formulas; where they are in front already, the pool that they are about."""
        focused = self.main.focused
        self.main.open_panel("pool" if focused is not None and focused.id == "formulas" else "formulas")

    def action_next_panel(self) -> None:
        """Go to the next panel."""
        self.main.next_panel(1)

    def action_previous_panel(self) -> None:
        """Go to the panel before."""
        self.main.next_panel(-1)

    def action_pick_block(self) -> None:
        """Put the cursor on a block."""
        self.main.open_tab(0)
        self.main.grid.action_move(0, 0)

    def action_inspect(self) -> None:
        """Read about what is selected; escape leads back."""
        self.main.inspect()

    def action_deselect(self) -> None:
        """Go back to the panel that the inspector was opened from, or select nothing."""
        if not self.main.go_back():
            self.select(None, None)

    def action_grid_zoom(self, by: int) -> None:
        """Zoom the blocks about the cursor: negative is closer."""
        self.main.grid.zoom_by(by)

    def action_grid_whole(self) -> None:
        """Show the whole pool."""
        self.main.grid.show_whole_pool()

    def action_grid_order(self) -> None:
        """Order the blocks in another way."""
        self._say(f"blocks by {self.main.grid.next_order()}")

    def action_grid_pixels(self) -> None:
        """Draw pixels where a cell stands for many blocks, or glyphs again."""
        self._say(self.main.grid.toggle_pixels())

    def action_mark_next(self) -> None:
        """Mark the blocks at the head of the free queue, or mark them no more."""
        if self.source.header.policy != "paged":
            self._say("only a paged engine takes blocks from a queue")
            return
        self.marks_next = not self.marks_next
        glyphs = self.glyphs
        words = f"{glyphs.next_free} is taken next, {glyphs.next_cached} is taken and loses its cached content"
        self._say(words if self.marks_next else "the blocks that are taken next are not marked any more")
        self.draw()

    def action_hold_feed(self) -> None:
        """Let no more requests come by themselves, or let them come again; others are taken in all the same."""
        feed = self.feed
        if feed is None or feed.done:
            self._say("no requests come by themselves here")
            return
        feed.toggle()
        self._say("no more requests come by themselves" if feed.held else "requests come by themselves again")
        self.draw()

    def action_next_block(self, by: int) -> None:
        """Select the next block of the selected request, in the order of its table."""
        request = self.selected_request
        if request is None:
            self._say("select a request first: / finds one by number or name")
            return
        blocks = [block for block in self.source.state.table(request) if block >= 0]
        if not blocks:
            self._say(f"request {request} holds no block")
            return
        at = blocks.index(self.selected_block) if self.selected_block in blocks else (-1 if by > 0 else 0)
        self.select(request, blocks[(at + by) % len(blocks)])

    def action_find(self) -> None:
        """Ask what to find, and select it."""
        from kvtui.screens.find import FindScreen, find

        def answer(query: str | None) -> None:
            if not query:
                return
            found = find(self.source.state, query)
            if found.block is not None:
                self.select_block(found.block)
                self.main.grid.go_to(found.block)
            elif found.request is not None:
                self.select(found.request, None)
            else:
                self._say(found.problem or f"nothing found for {query!r}")

        self.push_screen(FindScreen(), answer)

    def action_help(self) -> None:
        """Explain the screen."""
        from kvtui.screens.help import HelpScreen, help_keys, help_text

        block_size, panel = self.source.header.block_size, self.main.panel_in_focus
        text = help_text(self.palette, self.glyphs, block_size, panel)
        self.push_screen(
            HelpScreen(text, help_keys(self.palette, self.glyphs, self.own_bindings), self.palette, self.glyphs)
        )

    def action_inspector_page(self) -> None:
        """Show another page of the inspector."""
        self.main.inspector.next_page()

    def action_copy(self) -> None:
        """Copy what the inspector shows to the clipboard."""
        text = self.main.inspector.plain_text()
        if text:
            self.copy_to_clipboard(text)
        self._say("copied" if text else "nothing to copy: the inspector is empty")

    def set_theme(self, name: str) -> None:
        """Draw everything in another theme, and say which."""
        super().set_theme(name)
        self._say(f"theme {name}")
