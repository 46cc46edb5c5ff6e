"""What the grid shows is what is there: read back from the cells of the screen, every block equals the state.

The reader below knows the legend and the theme's colours, and nothing of how the grid draws.
"""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from panel_session import PALETTE, PanelApp, Session
from rich.color import Color

from kvtui.block_flash import FLASH_SECONDS
from kvtui.block_order import ORDERS
from kvtui.glyphs import ASCII, UNICODE
from kvtui.palette import load_palettes
from kvtui.widgets.block_moves import MovableGrid

MONO = load_palettes(mono=True)["dark"]
NUM_HUES = len(PALETTE.hues)
HUES = {Color.parse(color).triplet: index for index, color in enumerate(PALETTE.hues)}


def random_session(seed: int) -> Session:
    """A random engine with random requests, some steps in."""
    rng = random.Random(seed)
    session = Session(num_blocks=rng.choice((8, 33, 64, 200, 513)), block_size=rng.choice((1, 4, 8, 16)), chunk=24)
    for number in range(14):
        words = ["the", "block", "of", "cache"][: rng.randrange(1, 5)]
        session.ask(" ".join(words * rng.randrange(1, 9)), max_tokens=rng.randrange(1, 40), name=f"r{number}")
    session.run(rng.randrange(1, 60))
    return session


def cells_of(grid: MovableGrid) -> list[list[tuple[str, object]]]:
    """The screen, as the compositor puts it together: a character and its style for each cell."""
    grid.screen._compositor_refresh()
    rows = []
    for strip in grid.screen._compositor.render_strips():
        rows.append([(char, segment.style) for segment in strip for char in segment.text])
    return rows


def told_by(cells, glyphs, roomy: bool):
    """What a block's cells say: its kind, and a set of what its level or number of references may be, and its hue."""
    char, style = cells[0]
    levels = glyphs.levels if not roomy or glyphs.ascii else "▁▂▃▄▅▆▆▇"
    if char == glyphs.free:
        return "free", None, None
    if char == glyphs.cached:
        return "cached", None, None
    if char in levels:
        color = style.color.triplet if style.color is not None else None
        return "used", {i for i, level in enumerate(levels) if level == char}, HUES.get(color)
    color = style.bgcolor.triplet if style.bgcolor is not None else None
    return "shared", {10 if char == glyphs.many else int(char)}, HUES.get(color)


def expected(state, block: int):
    """What the state says of a block."""
    refs, hue = int(state.refs[block]), int(state.owner[block]) % NUM_HUES
    if refs == 0:
        return ("cached" if state.key[block] else "free"), None, None
    if refs > 1:
        return "shared", min(refs, 10), hue
    eighths = -(-int(state.filled[block]) * 8 // state.header.block_size)
    return "used", max(eighths, 1) - 1, hue


def blocks_by_cell(grid: MovableGrid, num_blocks: int) -> dict[tuple[int, int], int]:
    """Where on screen which block is, by what a click there would select."""
    layout, top = grid._layout_now, grid.scroll_offset.y
    places = {}
    for y in range(grid._num_lines):
        for x in range(grid.scrollable_content_region.width):
            place = layout.block_at(x, y + top)
            if place is not None:
                places[x, y] = grid._order.block(place)
    return places


def check_single_blocks(grid: MovableGrid, session: Session, glyphs, with_hues: bool) -> int:
    screen, seen = cells_of(grid), set()
    for (x, y), block in blocks_by_cell(grid, session.header.num_blocks).items():
        if block in seen:
            continue
        seen.add(block)
        kind, value, hue = told_by(screen[y][x : x + 2], glyphs, grid.scale.roomy)
        right_kind, right_value, right_hue = expected(session.state, block)
        assert kind == right_kind, f"block {block}"
        assert value is None or right_value in value, f"block {block}"
        assert not with_hues or hue == right_hue, f"block {block}"
    return len(seen)


def check_many_blocks(grid: MovableGrid, session: Session, with_hues: bool) -> None:
    state, screen, blocks = session.state, cells_of(grid), grid.blocks_per_cell
    layout, top = grid._layout_now, grid.scroll_offset.y
    for (x, y), _ in blocks_by_cell(grid, session.header.num_blocks).items():
        first = layout.block_at(x, y + top)
        members = np.array([grid._order.block(p) for p in range(first, min(first + blocks, session.header.num_blocks))])
        used = state.refs[members] > 0
        cached = int(((state.refs[members] == 0) & (state.key[members] != 0)).sum())
        free = len(members) - int(used.sum()) - cached
        char, style = screen[y][x]
        if not used.any():
            assert char == ("░" if cached else "·")
            continue
        level = "▁▂▃▄▅▆▇█".index(char)
        assert level == (7 if used.all() else int(used.sum()) * 7 // len(members))
        if with_hues:
            share = np.bincount(state.owner[members][used] % NUM_HUES, minlength=NUM_HUES)
            assert share[HUES[style.color.triplet]] == share.max()
            tinted = style.bgcolor.triplet != Color.parse(PALETTE.colors["background"]).triplet
            assert tinted == (cached > 0 and cached >= free)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("seed", range(6))
async def test_every_block_in_sight_is_read_back_at_every_zoom(seed, order) -> None:
    session, rng, now = random_session(seed), random.Random(seed), [0.0]
    grid = MovableGrid(clock=lambda: now[0])
    app = PanelApp(grid)
    async with app.run_test(size=rng.choice([(34, 9), (60, 14), (101, 30)])) as pilot:
        grid.update_view(session.view(), (), True)
        while grid.order != order:
            grid.next_order()
        await pilot.pause()
        grid.zoom_by(-9)
        assert grid._layout_now.level.pitch == 2, "the roomiest level"
        scales = set()
        for _ in range(40):
            grid.scroll_to(y=rng.randrange(grid.max_scroll_y + 1), animate=False)
            # What a step changed is lit; a second look, after a while, shows it as it is.
            grid.update_view(session.view(), session.run(rng.randrange(4)), False)
            session.paused = False
            now[0] += FLASH_SECONDS
            grid.update_view(session.view(), (), False)
            scales.add(grid._layout_now.level)
            if grid.blocks_per_cell == 1:
                assert check_single_blocks(grid, session, UNICODE, with_hues=True) > 0
            else:
                check_many_blocks(grid, session, with_hues=True)
            if rng.random() < 0.7:
                before = grid._zoom
                grid.zoom_by(1)
                if grid._zoom == before:
                    break
        assert len(scales) >= 4


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("zoom", [-1, 2, 4])
async def test_what_is_brought_up_to_date_change_by_change_is_what_a_look_at_everything_gives(zoom, order) -> None:
    session, rng, now = random_session(7), random.Random(zoom), [0.0]
    grid, fresh = (MovableGrid(clock=lambda: now[0]) for _ in range(2))
    async with PanelApp(grid).run_test(size=(60, 14)), PanelApp(fresh).run_test(size=(60, 14)):
        for each in (grid, fresh):
            each.update_view(session.view(), (), True)
            each.zoom_by(zoom)
            while each.order != order:
                each.next_order()
        for _ in range(20):
            session.paused = rng.random() < 0.2
            selected = rng.choice((None, None, rng.randrange(14)))
            for _ in range(rng.randrange(1, 4)):
                now[0] += rng.random() * FLASH_SECONDS / 2
                steps = session.run(rng.randrange(3)) if rng.random() < 0.7 else []
                grid.update_view(session.view(selected=selected), steps, False)
            session.paused = False
            now[0] += FLASH_SECONDS
            grid.update_view(session.view(selected=selected), (), False)
            fresh.update_view(session.view(selected=selected), (), True)
            if not grid._order.stale(session.state):
                for y in range(14):
                    assert list(grid.render_line(y)) == list(fresh.render_line(y))


@pytest.mark.parametrize(("glyphs", "palette"), [(ASCII, PALETTE), (UNICODE, MONO), (ASCII, MONO)])
async def test_without_colour_or_unicode_every_state_is_still_read_back(glyphs, palette) -> None:
    for seed in range(6, 9):
        session, grid = random_session(seed), MovableGrid()
        async with PanelApp(grid).run_test(size=(90, 20)):
            grid.update_view(session.view(glyphs=glyphs, palette=palette), (), True)
            for _ in range(4):
                if grid.blocks_per_cell == 1:
                    assert check_single_blocks(grid, session, glyphs, with_hues=False) > 0
                grid.zoom_by(-1)


def marked(session: Session, glyphs=UNICODE, palette=PALETTE):
    """A view that marks the head of the free queue, and what each block of it is to be drawn as."""
    queue = tuple(session.state.free_queue(8).tolist())
    keyed = {block: glyphs.next_cached if session.state.key[block] else glyphs.next_free for block in queue}
    return replace(session.view(glyphs=glyphs, palette=palette), next_blocks=queue), keyed


@pytest.mark.parametrize(("glyphs", "palette"), [(UNICODE, PALETTE), (ASCII, PALETTE), (UNICODE, MONO), (ASCII, MONO)])
async def test_the_blocks_that_are_taken_next_are_read_back_at_every_zoom(glyphs, palette) -> None:
    seen, now = set(), [0.0]
    for seed in range(2):
        session, rng, grid = random_session(seed), random.Random(seed), MovableGrid(clock=lambda: now[0])
        async with PanelApp(grid).run_test(size=(60, 14)):
            grid.update_view(marked(session, glyphs, palette)[0], (), True)
            grid.zoom_by(-9)
            for turn in range(20):
                steps = session.run(rng.randrange(3))
                view, expected_of = marked(session, glyphs, palette)
                grid.update_view(view, steps, False)
                changed_only = grid._chars.copy()
                grid._recode()
                assert (grid._chars == changed_only).all(), "what was left alone looks as it does when all is looked at"
                now[0] += 1 + FLASH_SECONDS
                grid.update_view(view, (), False)
                screen, blocks = cells_of(grid), grid.blocks_per_cell
                layout, top = grid._layout_now, grid.scroll_offset.y
                for (x, y), block in blocks_by_cell(grid, session.header.num_blocks).items():
                    place = layout.block_at(x, y + top)
                    ours = [grid._order.block(p) for p in range(place, min(place + blocks, session.header.num_blocks))]
                    right = {expected_of[member] for member in ours if member in expected_of}
                    char = screen[y][x][0]
                    if right:
                        seen |= right
                        assert char == max(right, key=glyphs.next_cached.__eq__) or (char == " " and blocks == 1)
                    else:
                        assert char not in (glyphs.next_free, glyphs.next_cached), f"block {block}"
                if turn % 4 == 3:
                    grid.zoom_by(1)
    assert seen == {glyphs.next_free, glyphs.next_cached}
