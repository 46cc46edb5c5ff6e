"""From panel to panel and back: by number, tab, mouse, the footer, and enter and escape."""

from __future__ import annotations

import pytest
from live_dashboard import Live
from screen_text import frame, screen_lines, text_of

TITLES = {
    "1": "Physical blocks",
    "2": "Requests",
    "3": "Pool",
    "4": "Batch per iteration",
    "5": "Inspector",
    "6": "Log",
    "7": "Prefix tree",
    "8": "The old way",
    "9": "Formulas",
}


@pytest.mark.parametrize("size", [(60, 16), (80, 24)])
async def test_every_panel_is_reached_by_number_by_tab_and_by_mouse_where_there_is_room_for_one(size) -> None:
    live = Live()
    live.ask(3)
    async with live.app.run_test(size=size) as pilot:
        live.run(5)
        await frame(pilot)
        for key, title in TITLES.items():
            await pilot.press(key)
            await frame(pilot)
            assert f"─ {title}" in text_of(live.app)
        await pilot.press("1")
        seen = []
        for _ in TITLES:
            await frame(pilot)
            seen += [title for title in TITLES.values() if f"─ {title}" in text_of(live.app)][:1]
            await pilot.press("tab")
        assert set(seen) == set(TITLES.values())
        bar = next(line for line in screen_lines(live.app) if "3 Pool" in line)
        await pilot.click("#tabs", offset=(bar.index("3 Pool"), 0))
        await frame(pilot)
        assert "─ Pool" in text_of(live.app)


async def test_the_prefix_tree_shares_a_place_with_the_requests_and_leads_to_them() -> None:
    live = Live()
    live.ask(4)
    async with live.app.run_test(size=(200, 50)) as pilot:
        live.run(8)
        await frame(pilot)
        assert "─ Requests" in text_of(live.app)
        await pilot.press("7")
        await frame(pilot)
        picture = text_of(live.app)
        assert "─ Prefix tree" in picture
        assert "─ Requests" not in picture
        await pilot.press("down")
        await frame(pilot)
        view = live.app.view()
        assert live.source.state.table(0)[0] in view.selected_blocks, "they were computed at once, so in several blocks"
        assert view.selected_request is None
        await pilot.press("enter")
        await frame(pilot)
        view = live.app.view()
        assert view.selected_request == 0
        assert view.selected_blocks == ()
        assert "─ Requests" in text_of(live.app)
        await pilot.press("7", "down", "escape")
        await frame(pilot)
        assert live.app.view().selected_prefix is None


@pytest.mark.parametrize("size", [(80, 24), (200, 50)])
async def test_enter_on_a_request_opens_it_in_the_inspector_and_escape_leads_back(size) -> None:
    live = Live()
    live.ask(4)
    async with live.app.run_test(size=size) as pilot:
        live.run(6)
        await frame(pilot)
        await pilot.press("2", "down", "enter")
        await frame(pilot)
        main = live.app.main
        selected = live.app.view().selected_request
        assert selected is not None
        assert main.focused is main.inspector
        assert f"Inspector · ask-{selected}" in text_of(live.app)
        assert "esc back" in text_of(live.app)
        await pilot.press("escape")
        await frame(pilot)
        assert main.focused.id == "requests"
        assert live.app.view().selected_request == selected
        assert "esc deselect" in text_of(live.app) or size[0] == 80
        await pilot.press("enter")
        await frame(pilot)
        assert live.app.view().selected_request == selected
        assert main.focused is main.inspector
        await pilot.press("escape", "escape")
        await frame(pilot)
        assert live.app.view().selected_request is None
        assert main.focused.id == "requests"


async def test_escape_in_an_inspector_that_was_opened_by_itself_selects_nothing() -> None:
    live = Live()
    live.ask(4)
    async with live.app.run_test(size=(80, 24)) as pilot:
        live.run(6)
        live.app.select(1, None)
        await pilot.press("2", "enter", "4", "5", "escape")
        await frame(pilot)
        assert live.app.main.focused is live.app.main.inspector
        assert live.app.view().selected_request is None


async def test_f_shows_the_formulas_in_the_place_of_the_pool_and_the_pool_again() -> None:
    live = Live()
    live.ask(4)
    async with live.app.run_test(size=(200, 50)) as pilot:
        live.run(8)
        for key, title in (("8", "─ The old way"), ("F", "─ Formulas"), ("F", "─ Pool")):
            await pilot.press(key)
            await frame(pilot)
            titles = [t for t in ("─ The old way", "─ Formulas", "─ Pool") if t in text_of(live.app)]
            assert titles == [title]


async def test_the_footer_says_what_enter_does_with_a_selected_prefix_and_can_be_clicked() -> None:
    live = Live()
    live.ask(2)
    async with live.app.run_test(size=(80, 24)) as pilot:
        live.run(8)
        await frame(pilot)
        await pilot.press("7", "down")
        await frame(pilot)
        last = screen_lines(live.app)[-1]
        assert "enter its requests" in last
        await pilot.click("#footer", offset=(last.index("its requests"), 0))
        await frame(pilot)
        assert live.app.view().selected_request is not None
        assert "─ Requests" in text_of(live.app)


async def test_in_the_requests_the_footer_says_how_to_inspect_one_and_a_click_there_does_it() -> None:
    live = Live()
    live.ask(3)
    async with live.app.run_test(size=(80, 24)) as pilot:
        live.run(6)
        await frame(pilot)
        assert "inspect" not in screen_lines(live.app)[-1]
        await pilot.press("2", "j")
        await frame(pilot)
        last = screen_lines(live.app)[-1]
        assert "enter inspect" in last
        await pilot.click("#footer", offset=(last.index("inspect"), 0))
        await frame(pilot)
        assert "Inspector · ask-1 " in text_of(live.app)
        assert "esc back" in screen_lines(live.app)[-1]


async def test_j_and_k_move_in_the_panel_in_focus_and_h_and_l_lead_to_the_blocks() -> None:
    live = Live()
    live.ask(3)
    async with live.app.run_test(size=(80, 24)) as pilot:
        live.run(6)
        await frame(pilot)
        await pilot.press("2", "j")
        await frame(pilot)
        assert any(line.startswith("│▸ask-1") for line in screen_lines(live.app))
        await pilot.press("k")
        await frame(pilot)
        assert any(line.startswith("│▸ask-0") for line in screen_lines(live.app))
        await pilot.press("l")
        await frame(pilot)
        assert "Physical blocks" in text_of(live.app)
        assert live.app.selected_block == 0
