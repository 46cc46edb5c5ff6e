"""The block grid as a reader sees it: glyph says what, hue says who, and only what changed is drawn again."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from panel_session import PALETTE, PanelApp, Session, busy_session, lines, shown

from engine.trace.events import BlockOp, Op
from kvtui.glyphs import ASCII, UNICODE
from kvtui.palette import load_palettes
from kvtui.view import BlockSelected
from kvtui.widgets.block_moves import MovableGrid as BlockGrid

MONO = load_palettes(mono=True)["dark"]


def cell(grid: BlockGrid, block: int) -> tuple[str, object]:
    """Glyph and style of a block's cell."""
    layout = grid._layout_now
    x = next(x for x in range(grid.size.width) if layout.block_at(x, layout.line_of_block(block)) == block)
    strip = grid.render_line(layout.line_of_block(block) - grid.scroll_offset.y).crop(x, x + 1)
    segment = next(iter(strip))
    return segment.text, segment.style


async def settle(grid: BlockGrid, view) -> None:
    """Show a view with nothing lit up."""
    grid.update_view(view, (), True)


@pytest.mark.parametrize("glyphs", [UNICODE, ASCII], ids=["unicode", "ascii"])
@pytest.mark.parametrize("size", [(1, 1), (9, 3), (30, 6), (76, 12), (150, 40)])
async def test_every_line_is_as_wide_as_the_panel(glyphs, size) -> None:
    session = busy_session()
    async with shown(BlockGrid(), session.view(glyphs=glyphs), *size) as pilot:
        drawn = "".join(lines(pilot.app.panel))
        assert glyphs is UNICODE or drawn.isascii()


async def test_each_state_has_its_own_glyph() -> None:
    session = Session(num_blocks=24, block_size=4)
    grid = BlockGrid()
    async with shown(grid, session.view(), 60, 10):
        assert cell(grid, 5)[0] == "·"
        first = session.ask("aa bb cc dd ee ff gg hh", max_tokens=9)
        session.run(2)
        await settle(grid, session.view())
        request = session.state.requests[first]
        table = list(request.table)
        full = [b for b in table if session.state.filled[b] == 4]
        partial = [b for b in table if 0 < session.state.filled[b] < 4]
        assert cell(grid, full[0])[0] == "▇"
        assert partial, "the prompt should end inside a block"
        assert cell(grid, partial[0])[0] in "▂▄▆"
        session.ask("aa bb cc dd ee ff gg hh", max_tokens=9)
        session.run(1)
        await settle(grid, session.view())
        shared = [b for b in table if session.state.refs[b] == 2]
        assert shared
        assert cell(grid, shared[0])[0] == "2"
        session.run(20)
        assert not session.engine.has_work
        await settle(grid, session.view())
        assert cell(grid, shared[0])[0] == "░"


async def test_the_hue_is_the_owners_and_selecting_a_request_dims_all_others() -> None:
    session = busy_session(12)
    grid = BlockGrid()
    async with shown(grid, session.view(), 100, 12):
        state = session.state
        owned = {r: [b for b in req.table if state.refs[b] == 1] for r, req in state.requests.items()}
        first, second = [r for r, blocks in owned.items() if blocks][:2]
        a, b = owned[first][0], owned[second][0]
        assert cell(grid, a)[1].color == PALETTE.hue(first).color
        assert cell(grid, b)[1].color == PALETTE.hue(second).color
        await settle(grid, session.view(selected=first))
        assert cell(grid, a)[1].color == PALETTE.hue(first).color
        assert cell(grid, b)[1].color == PALETTE.hue(second, selected=first).color != PALETTE.hue(second).color


async def test_a_shared_block_lights_up_for_each_of_its_holders() -> None:
    session = Session(num_blocks=30, block_size=4)
    first = session.ask("one two three four five six seven eight", max_tokens=20)
    session.run(2)
    second = session.ask("one two three four five six seven eight", max_tokens=20)
    session.run(2)
    shared = next(b for b in session.state.table(second) if session.state.refs[b] == 2)
    assert session.state.owner[shared] == first
    grid = BlockGrid()
    async with shown(grid, session.view(selected=second), 80, 8):
        assert cell(grid, shared)[1].bgcolor == PALETTE.hue(second).color


async def test_the_blocks_of_a_selected_prefix_are_lit_held_or_not_and_all_others_dimmed() -> None:
    session = Session(num_blocks=30, block_size=4)
    session.ask("one two three four five six seven eight", max_tokens=1)
    session.run(3)
    holder = session.ask("nine ten eleven twelve thirteen fourteen", max_tokens=20)
    session.run(2)
    kept = int(((session.state.key != 0) & (session.state.refs == 0)).argmax())
    held, other = session.state.table(holder)[:2]
    assert session.state.refs[kept] == 0
    view = replace(session.view(), selected_prefix=1, selected_blocks=(kept, held))
    grid = BlockGrid()
    async with shown(grid, view, 80, 8):
        await settle(grid, view)
        assert cell(grid, kept)[1] == PALETTE.lit(PALETTE.cached)
        assert cell(grid, held)[1] == PALETTE.lit(PALETTE.hue(holder))
        assert cell(grid, other)[1] == PALETTE.hue(holder, selected=holder + 1)


async def test_what_a_step_changed_stays_lit_while_paused_and_goes_out_when_running() -> None:
    session = Session(num_blocks=24)
    now = [100.0]
    grid = BlockGrid(clock=lambda: now[0])
    async with shown(grid, session.view(), 60, 8):
        session.ask("aa bb cc dd ee ff", max_tokens=30)
        session.paused = True
        steps = session.run(1)
        grid.update_view(session.view(), steps, False)
        block = next(op.a for op in steps[0].ops if op.op == Op.ALLOCATE)
        calm = PALETTE.hue(int(session.state.owner[block])).color
        assert cell(grid, block)[1].color != calm
        now[0] += 60
        grid.update_view(session.view(), (), False)
        assert cell(grid, block)[1].color != calm
        assert grid.flashing
        session.paused = False
        grid.update_view(session.view(), (), False)
        assert cell(grid, block)[1].color == calm
        assert not grid.flashing


async def test_the_next_single_step_puts_out_what_the_one_before_lit_up() -> None:
    session = Session(num_blocks=24)
    grid = BlockGrid()
    async with shown(grid, session.view(), 60, 8):
        session.ask("aa bb cc dd ee ff", max_tokens=30)
        session.paused = True
        first = session.run(1)
        grid.update_view(session.view(), first, False)
        block = next(op.a for op in first[0].ops if op.op == Op.ALLOCATE)
        lit = cell(grid, block)
        grid.update_view(session.view(), session.run(1), False)
        assert cell(grid, block) != lit
        assert cell(grid, block)[1].color == PALETTE.hue(int(session.state.owner[block])).color


async def test_an_evicted_block_shows_a_cross_for_a_moment() -> None:
    session = Session(num_blocks=6, block_size=4)
    grid = BlockGrid()
    async with shown(grid, session.view(), 60, 8):
        session.ask("aa bb cc dd", max_tokens=2)
        session.run(4)
        assert session.state.cached
        session.ask("xx yy zz ww vv uu", max_tokens=2)
        steps = session.run(1)
        evicted = [op.a for op in steps[0].ops if op.op == Op.EVICT]
        assert evicted
        grid.update_view(session.view(), steps, False)
        assert cell(grid, evicted[0])[0] == "×"
        await settle(grid, session.view())
        assert cell(grid, evicted[0])[0] != "×"


async def test_a_hundred_thousand_blocks_are_all_visible_at_80_by_24() -> None:
    session = Session(num_blocks=100_000, block_size=4)
    session.ask("aa bb cc dd ee ff gg hh " * 3, max_tokens=4)
    session.run(2)
    grid = BlockGrid()
    async with shown(grid, session.view(), 76, 12):
        assert grid.virtual_size.height <= 12
        assert grid.blocks_per_cell > 1
        drawn = "".join(lines(grid))
        assert sum(drawn.count(glyph) for glyph in "·▁▂") == -(-100_000 // grid.blocks_per_cell)
        assert drawn.count("▁") + drawn.count("▂") == 1
        last = session.view()
        session.state.refs[99_999] = 1
        session.state.filled[99_999] = 4
        session.state.owner[99_999] = 0
        # Only what steps changed is counted again, so a state that jumped has to be told.
        grid.update_view(last, (), True)
        assert "".join(lines(grid)).count("·") == -(-100_000 // grid.blocks_per_cell) - 2


async def test_only_rows_that_look_different_are_drawn_again(monkeypatch) -> None:
    session = Session(num_blocks=512)
    session.ask("aa bb cc dd ee ff", max_tokens=30)
    session.run(2)
    grid = BlockGrid()
    async with shown(grid, session.view(), 76, 12) as pilot:
        await settle(grid, session.view())
        await pilot.pause()
        refreshed: list[int] = []
        monkeypatch.setattr(grid, "refresh_lines", lambda y, count=1: refreshed.append(y))
        grid.update_view(session.view(), (), False)
        assert refreshed == []
        session.state.filled[200] = 2
        session.state.refs[200] = 1
        session.state.owner[200] = 0
        grid.update_view(session.view(), [SimpleNamespace(ops=[BlockOp(Op.FILL, 200, 0, 2)])], False)
        assert refreshed == [grid._layout_now.line_of_block(200)]


async def test_a_click_selects_the_block_under_the_pointer() -> None:
    session = busy_session()
    grid = BlockGrid()
    async with shown(grid, session.view(), 60, 10) as pilot:
        layout = grid._layout_now
        x = next(x for x in range(60) if layout.block_at(x, layout.line_of_block(13)) == 13)
        await pilot.click(BlockGrid, offset=(x, layout.line_of_block(13)))
        assert [message.block for message in pilot.app.posted if isinstance(message, BlockSelected)] == [13]


async def test_the_cursor_moves_by_cells_and_rows_however_fast_the_keys_come() -> None:
    session = busy_session()
    grid = BlockGrid()
    async with shown(grid, session.view(), 60, 10) as pilot:
        grid.focus()
        await pilot.press("l", "l", "l", "j", "h", "k", "k")
        columns = grid._layout_now.columns
        moved = [message.block for message in pilot.app.posted]
        assert moved == [0, 1, 2, 2 + columns, 1 + columns, 1]


async def test_the_selected_block_is_seen_without_colour() -> None:
    session = busy_session()
    view = session.view(palette=MONO)
    block = next(b for b in range(40) if session.state.refs[b] == 1 and session.state.filled[b] == 4)
    grid = BlockGrid()
    async with shown(grid, view, 60, 10):
        before = cell(grid, block)
        grid.update_view(replace(view, selected_block=block), (), False)
        after = cell(grid, block)
        assert before != after
        assert after[1].reverse
        assert after[1].color is None


async def test_zooming_in_scrolls_and_zooming_out_aggregates() -> None:
    session = busy_session()
    grid = BlockGrid()
    async with shown(grid, session.view(), 40, 6) as pilot:
        grid.focus()
        await pilot.press(*["minus"] * 12)
        assert grid.blocks_per_cell > 1
        await pilot.press(*["plus"] * 24)
        assert grid.blocks_per_cell == 1
        assert grid._layout_now.level.cell == 3
        await pilot.pause()
        width = grid.scrollable_content_region.width
        assert width == 39, "a scrollbar takes one column"
        assert all(grid.render_line(y).cell_length == width for y in range(grid.size.height))


def test_the_app_of_these_tests_has_no_painter() -> None:
    # Otherwise the lines above would be judged by another way of drawing than the compositor's.
    assert not hasattr(PanelApp(BlockGrid()), "painter")
