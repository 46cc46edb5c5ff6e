"""A pool of any size in one grid: zoom about a block, pan, map, orders, pixels; with keys and with the mouse."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from panel_session import PALETTE, Session, busy_session, lines, shown
from textual import events

from kvtui.block_order import ADDRESS, OWNER, USE
from kvtui.glyphs import ASCII, UNICODE
from kvtui.palette import load_palettes
from kvtui.view import BlockSelected
from kvtui.widgets.block_moves import MovableGrid

MONO = load_palettes(mono=True)["dark"]
SIZES = (1, 2, 8, 513, 100_000, 1_000_000)


def pool_of(num_blocks: int, seed: int = 0) -> Session:
    """A pool with blocks in use in long runs and alone."""
    session = Session(num_blocks=8)
    header = session.header = replace_blocks(session.header, num_blocks)
    session.state = type(session.state)(header)
    state, rng = session.state, np.random.default_rng(seed)
    owner = np.repeat(rng.integers(-2, 9, num_blocks), rng.integers(1, 30, num_blocks))[:num_blocks]
    state.owner[:] = np.maximum(owner, -1)
    state.refs[:] = owner >= 0
    state.filled[:] = np.where(owner >= 0, header.block_size, 0)
    state.key[:] = owner == -1
    state.used = int((owner >= 0).sum())
    state.cached = int((owner == -1).sum())
    state.free = num_blocks - state.used - state.cached
    return session


def replace_blocks(header, num_blocks: int):
    return msgspec.structs.replace(header, num_blocks=num_blocks)


def wheel(grid: MovableGrid, up: bool, y: int, ctrl: bool = False) -> None:
    kind = events.MouseScrollUp if up else events.MouseScrollDown
    event = kind(grid, 20, y, 0, 0, 0, False, False, ctrl, screen_x=20, screen_y=y)
    (grid.on_mouse_scroll_up if up else grid.on_mouse_scroll_down)(event)


def line_of(grid: MovableGrid, block: int) -> int:
    return grid._layout_now.line_of_block(grid._order.place(block)) - grid.scroll_offset.y


@pytest.mark.parametrize(("glyphs", "palette"), [(UNICODE, PALETTE), (ASCII, PALETTE), (UNICODE, MONO)])
@pytest.mark.parametrize("num_blocks", SIZES)
async def test_a_pool_of_any_size_is_seen_whole_and_zoomed_through(num_blocks, glyphs, palette) -> None:
    session, grid = pool_of(num_blocks), MovableGrid()
    async with shown(grid, session.view(glyphs=glyphs, palette=palette), 80, 20) as pilot:
        assert grid.max_scroll_y == 0, "all of it is in sight"
        cells = {
            grid._layout_now.block_at(x, y) for y in range(20) for x in range(80) if grid._layout_now.block_at(x, y)
        }
        assert len(cells | {0}) == -(-num_blocks // grid.blocks_per_cell)
        scales = [grid.blocks_per_cell]
        await pilot.press("plus")
        for _ in range(24):
            grid.zoom_by(-1)
            drawn = lines_of(grid)
            assert glyphs is UNICODE or "".join(drawn).isascii()
            scales.append(grid.blocks_per_cell)
        assert scales == sorted(scales, reverse=True)
        assert grid.blocks_per_cell == 1
        await pilot.press("minus")
        for _ in range(26):
            grid.zoom_by(1)
            lines_of(grid)
        assert grid.blocks_per_cell >= num_blocks
        grid.show_whole_pool()
        assert grid.blocks_per_cell == scales[0]


def lines_of(grid: MovableGrid) -> list[str]:
    """The panel's lines; each as wide as its content."""
    width = grid.scrollable_content_region.width
    strips = [grid.render_line(y) for y in range(grid.size.height)]
    assert all(strip.cell_length == width for strip in strips)
    return [strip.text for strip in strips]


@pytest.mark.parametrize("num_blocks", [513, 100_000, 1_000_000])
async def test_zooming_keeps_the_cursor_where_it_is_on_screen(num_blocks) -> None:
    session, grid = pool_of(num_blocks), MovableGrid()
    block = num_blocks * 2 // 3
    async with shown(grid, session.view(), 80, 20) as pilot:
        grid.update_view(replace(session.view(), selected_block=block), (), False)
        for key in ["plus"] * 14 + ["minus"] * 14:
            before = line_of(grid, block)
            await pilot.press(key)
            assert 0 <= line_of(grid, block) < grid._num_lines, "the cursor stays in sight"
            # Where the pool ends, and between rows, it has to move a little.
            assert abs(line_of(grid, block) - before) <= 2 or grid.scroll_offset.y in (0, grid.max_scroll_y)


async def test_ctrl_and_the_wheel_zoom_about_the_pointer_and_the_wheel_alone_pans() -> None:
    session, grid = pool_of(100_000), MovableGrid()
    async with shown(grid, session.view(), 80, 20):
        scale = grid.blocks_per_cell
        for _ in range(3):
            pointed = grid._layout_now.block_at(20, 5 + grid.scroll_offset.y)
            wheel(grid, up=True, y=5, ctrl=True)
            assert line_of(grid, pointed) == 5
        assert grid.blocks_per_cell == scale // 8
        top = grid.scroll_offset.y
        wheel(grid, up=False, y=9)
        assert grid.scroll_offset.y > top
        assert grid.blocks_per_cell == scale // 8
        wheel(grid, up=True, y=9)
        assert grid.scroll_offset.y == top


async def test_a_map_says_where_the_view_lies_and_a_click_on_it_goes_there() -> None:
    session, grid = pool_of(100_000), MovableGrid()
    async with shown(grid, session.view(), 100, 20) as pilot:
        assert "[" not in lines(grid)[-1], "there is no map where all is in sight"
        for _ in range(9):
            await pilot.press("plus")
        await pilot.pause()
        told = lines_of(grid)[-1]
        assert told.startswith("[")
        assert "0 to " in told
        assert told.rstrip().endswith("of 100,000")
        await pilot.click(MovableGrid, offset=(told.rindex("]") - 1 + told.count(" ", 0, 40) + 30, 19))
        await pilot.pause()
        moved = lines_of(grid)[-1]
        assert not moved.startswith("[")
        first = grid._window.units[0] * grid._layout_now.level.blocks
        assert f"{first:,} to " in moved
        before = grid.scroll_offset.y
        await pilot.press("J")
        await pilot.press("pagedown")
        assert grid.scroll_offset.y > before + grid._num_lines
        await pilot.press("K", "pageup")
        assert grid.scroll_offset.y == before


async def test_going_to_a_block_shows_it_as_a_cell_of_its_own() -> None:
    session, grid = pool_of(1_000_000), MovableGrid()
    async with shown(grid, session.view(), 80, 20) as pilot:
        assert grid.blocks_per_cell > 1
        grid.update_view(replace(session.view(), selected_block=777_777), (), False)
        grid.go_to(777_777)
        await pilot.pause()
        assert grid.blocks_per_cell == 1
        assert 0 <= line_of(grid, 777_777) < grid._num_lines
        shown_blocks = {grid._layout_now.block_at(x, y + grid.scroll_offset.y) for y in range(19) for x in range(80)}
        assert 777_777 in shown_blocks


async def test_selecting_a_request_out_of_sight_brings_its_blocks_into_sight() -> None:
    session = busy_session(25)
    grid = MovableGrid()
    async with shown(grid, session.view(), 30, 5) as pilot:
        for _ in range(9):
            await pilot.press("plus")
        tables = {r: [b for b in req.table if b >= 0] for r, req in session.state.requests.items()}
        hidden = [r for r, table in tables.items() if table and not any(grid._in_sight(b) for b in table)]
        assert hidden
        grid.update_view(session.view(selected=hidden[0]), (), False)
        assert any(grid._in_sight(b) for b in tables[hidden[0]])


@pytest.mark.parametrize("order", [OWNER, USE])
async def test_in_another_order_clicks_and_keys_find_the_blocks_that_are_drawn(order) -> None:
    session = busy_session(30)
    grid = MovableGrid()
    async with shown(grid, session.view(), 70, 12) as pilot:
        while grid.order != order:
            grid.next_order()
        state = session.state
        ranked = [grid._order.block(place) for place in range(40)]
        if order == OWNER:
            held = [int(state.owner[b]) for b in ranked if state.refs[b] > 0]
            assert held == sorted(held)
            assert all(state.refs[b] > 0 for b in ranked[: len(held)])
        else:
            assert [int(state.touched[b]) for b in ranked] == sorted(map(int, state.touched), reverse=True)
        layout = grid._layout_now
        x = next(x for x in range(70) if layout.block_at(x, 0) == 5)
        await pilot.click(MovableGrid, offset=(x, 0))
        await pilot.press("h")
        posted = [message.block for message in pilot.app.posted if isinstance(message, BlockSelected)]
        assert posted[0] == ranked[5]
        grid.update_view(replace(session.view(), selected_block=ranked[5]), (), False)
        await pilot.press("l")
        assert pilot.app.posted[-1].block == ranked[6]
        assert grid.next_order() in (ADDRESS, USE)


async def test_a_step_is_sorted_in_at_once_while_paused_and_soon_while_running() -> None:
    now = [0.0]
    session = busy_session(5)
    grid = MovableGrid(clock=lambda: now[0])
    async with shown(grid, session.view(), 70, 12):
        grid.next_order()
        steps = session.run(8)
        grid._order._due = 9e9
        grid.update_view(session.view(), steps, False)
        assert grid.flashing, "the order is of an earlier step, so another frame is due"
        session.paused = True
        grid.update_view(session.view(), (), False)
        assert grid._order.step == session.state.step


async def test_pixels_show_two_units_a_cell_and_every_look_stands_for_one_state() -> None:
    session, grid = pool_of(2_000), MovableGrid()
    state = session.state
    async with shown(grid, session.view(), 80, 24) as pilot:
        assert grid.toggle_pixels().startswith("half blocks")
        while grid.blocks_per_cell > 2:
            await pilot.press("plus")
        assert (grid.blocks_per_cell, grid.scale.pixels) == (2, 2)
        layout = grid._layout_now
        look_of_state: dict[object, object] = {}
        for y in range(grid._num_lines):
            cells = [(char, segment.style) for segment in grid.render_line(y) for char in segment.text]
            for x, (char, style) in enumerate(cells):
                upper = layout.block_at(x, y + grid.scroll_offset.y)
                if upper is None:
                    continue
                assert char == "▀"
                for block, color in ((upper, style.color), (upper + layout.columns, style.bgcolor)):
                    if block < 2_000:
                        hue = int(state.owner[block]) % len(PALETTE.hues)
                        told = ("used", hue) if state.refs[block] else ("cached" if state.key[block] else "free")
                        assert look_of_state.setdefault(told, color.triplet) == color.triplet
        assert len(look_of_state) == len(PALETTE.hues) + 2
        assert len(set(look_of_state.values())) == len(look_of_state)
        assert grid.toggle_pixels() == "one glyph a cell"
        assert "▀" not in "".join(lines_of(grid))


@pytest.mark.parametrize(("glyphs", "palette"), [(ASCII, PALETTE), (UNICODE, MONO)])
async def test_pixels_are_refused_where_they_would_say_nothing(glyphs, palette) -> None:
    grid = MovableGrid()
    async with shown(grid, pool_of(5_000).view(glyphs=glyphs, palette=palette), 60, 9):
        before = lines(grid)
        assert "exact colours" in grid.toggle_pixels()
        assert lines(grid) == before


async def test_any_size_of_the_screen_at_any_scale_is_drawn_line_by_line() -> None:
    session, grid = pool_of(100_000), MovableGrid()
    async with shown(grid, session.view(), 80, 24) as pilot:
        for size in [(1, 1), (9, 2), (300, 80), (28, 3), (60, 16), (2, 40), (120, 4), (80, 24)]:
            await pilot.resize_terminal(*size)
            for by in (-3, -9, 4, 30, -30, 0):
                grid.zoom_by(by)
                lines_of(grid)
            grid.show_whole_pool()
            await pilot.pause()
            assert grid.max_scroll_y == 0
            assert grid.virtual_size.height <= size[1]


async def test_changes_in_a_large_pool_are_drawn_without_looking_at_all_of_it(monkeypatch) -> None:
    from kvtui import block_mix

    session = Session(num_blocks=100_000)
    session.ask("aa bb cc dd ee ff", max_tokens=60)
    session.run(2)
    grid = MovableGrid()
    async with shown(grid, session.view(), 80, 20) as pilot:
        await pilot.press("plus", "plus")
        looked_at: list[int] = []
        kinds_of = block_mix.kinds_of

        def noted(state, which, num_hues):
            kinds = kinds_of(state, which, num_hues)
            looked_at.append(len(kinds))
            return kinds

        monkeypatch.setattr(block_mix, "kinds_of", noted)
        for _ in range(20):
            grid.update_view(session.view(), session.run(1), False)
            lines_of(grid)
        assert looked_at, "something changed"
        assert max(looked_at) < 10
