"""The dashboard over pools of any size: scale, order, jumps and the ways to them, by key, mouse and command."""

from __future__ import annotations

import pytest
from screen_text import frame, text_of

from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.loop import EngineLoop
from engine.request import SamplingParams
from engine.simulated import simulated_engine
from kvtui.app import KvtuiApp
from kvtui.screens.help import KEYS
from kvtui.sources.live import LiveSource
from kvtui.view import BlockSelected


def app_over(num_blocks: int, requests: int = 3) -> KvtuiApp:
    """The dashboard over an engine that has just admitted some requests."""
    engine = simulated_engine(
        EngineConfig(
            cache=CacheConfig(num_blocks=num_blocks, block_size=4),
            scheduler=SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=128, max_model_len=160),
        )
    )
    app = KvtuiApp(LiveSource(engine, EngineLoop(engine)), theme="dark")
    for number in range(requests):
        engine.add_request([number + 1] * 40, SamplingParams(max_tokens=9), name=f"ask-{number}")
    engine.step()
    engine.step()
    return app


async def drawn(pilot) -> str:
    await frame(pilot)
    return text_of(pilot.app)


def said(app: KvtuiApp) -> str:
    """All notices."""
    return " ".join(notice.message for notice in app._notifications)


@pytest.mark.parametrize("size", [(200, 50), (80, 24)])
@pytest.mark.parametrize("num_blocks", [1, 2, 8, 513, 100_000, 1_000_000])
async def test_the_scale_is_in_the_legend_and_the_whole_pool_in_sight(num_blocks, size) -> None:
    app = app_over(num_blocks, requests=1)
    async with app.run_test(size=size) as pilot:
        picture = await drawn(pilot)
        blocks = app.main.grid.blocks_per_cell
        assert f"1 cell = {blocks:,} block{'' if blocks == 1 else 's'}" in picture
        assert app.main.grid.max_scroll_y == 0
        await pilot.press("plus")
        await pilot.pause()
        # Also while nothing streams and nothing else asks for a frame.
        blocks = app.main.grid.blocks_per_cell
        assert f"1 cell = {blocks:,} block{'' if blocks == 1 else 's'}" in text_of(app)


async def test_block_and_request_select_each_other_at_every_scale() -> None:
    app = app_over(100_000)
    async with app.run_test(size=(120, 34)) as pilot:
        await drawn(pilot)
        table = app.source.state.table(1)
        for key in ("0", "plus", "plus", "minus"):
            await pilot.press(key)
            app.on_block_selected(BlockSelected(table[2]))
            await drawn(pilot)
            assert app.view().selected_request == 1
            await pilot.press("n")
            assert app.view().selected_block == table[3]
            await pilot.press("N", "N")
            assert app.view().selected_block == table[1]
            assert app.view().selected_request == 1
            assert app.main.grid._in_sight(table[1])
        app.select(2, None)
        await pilot.press("n")
        assert app.view().selected_block == app.source.state.table(2)[0]
        await pilot.press("N")
        assert app.view().selected_block == app.source.state.table(2)[-1]


async def test_next_block_says_what_to_do_where_no_request_is_selected() -> None:
    app = app_over(64)
    async with app.run_test(size=(120, 34)) as pilot:
        await pilot.press("n")
        assert "select a request first" in said(app)
        assert app.view().selected_block is None


@pytest.mark.parametrize("typed", ["b777,777", "777777"])
async def test_find_goes_to_a_block_by_its_number_as_a_cell_of_its_own(typed) -> None:
    app = app_over(1_000_000)
    async with app.run_test(size=(120, 34)) as pilot:
        await drawn(pilot)
        names = {" ": "space", ",": "comma"}
        await pilot.press("slash", *(names.get(c, c) for c in typed), "enter")
        picture = await drawn(pilot)
        assert app.view().selected_block == 777_777
        assert "1 cell = 1 block" in picture
        assert "of 1,000,000" in picture, "the map says where that is"
        assert app.main.grid._in_sight(777_777)


async def test_find_says_which_blocks_there_are_where_a_number_is_too_large() -> None:
    app = app_over(64)
    async with app.run_test(size=(120, 34)) as pilot:
        await pilot.press("slash", *"b64", "enter")
        await pilot.pause()
        assert "there is no block 64: the pool has 64, from 0 to 63" in said(app)
        assert app.view().selected_block is None


async def test_the_order_is_chosen_by_key_and_named_in_the_title() -> None:
    app = app_over(64)
    async with app.run_test(size=(120, 34)) as pilot:
        assert "Physical blocks ─" in await drawn(pilot)
        await pilot.press("o")
        assert "Physical blocks by owner ─" in await drawn(pilot)
        await pilot.press("o")
        assert "Physical blocks by last use ─" in await drawn(pilot)
        await pilot.press("o")
        assert "Physical blocks ─" in await drawn(pilot)


async def test_a_title_too_long_for_its_panel_leaves_counts_out_instead_of_being_cut() -> None:
    app = app_over(1_000_000)
    async with app.run_test(size=(110, 32)) as pilot:
        await drawn(pilot)
        await pilot.press("o", "o")
        for _ in range(50):
            # A pool of this size may be sorted over several frames.
            title = (await drawn(pilot)).splitlines()[1]
            if "by last use" in title:
                break
        assert "Physical blocks by last use ─ " in title
        assert " used" in title
        assert "…" not in title


async def test_the_signs_beside_the_scale_zoom_when_clicked() -> None:
    app = app_over(1_000_000)
    async with app.run_test(size=(120, 34)) as pilot:
        await drawn(pilot)
        scale = app.main.grid.blocks_per_cell
        await pilot.click("#legend", offset=(app.main.legend._zooms[1], 0))
        await drawn(pilot)
        assert scale // 2 <= app.main.grid.blocks_per_cell < scale
        await pilot.click("#legend", offset=(0, 0))
        await drawn(pilot)
        assert app.main.grid.blocks_per_cell == scale


async def test_pixels_are_turned_on_by_key_and_the_legend_says_so() -> None:
    app = app_over(100_000)
    async with app.run_test(size=(120, 34)) as pilot:
        await drawn(pilot)
        blocks = app.main.grid.blocks_per_cell
        await pilot.press("p")
        picture = await drawn(pilot)
        assert f"1 pixel = {app.main.grid.blocks_per_cell // 2:,} block" in picture
        assert app.main.grid.blocks_per_cell <= blocks
        assert picture.count("▀") > 100


async def test_zoom_order_and_jumps_are_in_the_command_palette_and_in_the_help() -> None:
    app = app_over(8)
    async with app.run_test(size=(120, 34)):
        named = {command.title for command in app.get_system_commands(app.screen)}
        for words in ("zoom in", "zoom out", "whole pool", "order", "pixels", "Next block", "Previous block"):
            assert any(words in title for title in named), words
        keys = " ".join(key for key, _ in KEYS).split()
        assert {"+", "-", "J", "K", "0", "o", "p", "n", "N"} <= set(keys)
