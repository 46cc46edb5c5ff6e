"""What every panel has to do, whatever it draws."""

from __future__ import annotations

import pytest
from panel_session import Session, busy_session, lines, shown

from kvtui.glyphs import ASCII
from kvtui.palette import load_palettes
from kvtui.widgets.batch_timeline import BatchTimeline
from kvtui.widgets.free_pool import FreePool
from kvtui.widgets.header_bar import HeaderBar
from kvtui.widgets.log_panel import LogPanel
from kvtui.widgets.request_table import RequestTable
from kvtui.widgets.transport import Transport

PANELS = [RequestTable, FreePool, BatchTimeline, HeaderBar, LogPanel, Transport]
SIZES = [(1, 1), (2, 3), (7, 2), (40, 4), (80, 24), (98, 22), (200, 50)]


@pytest.fixture(scope="module")
def busy() -> Session:
    session = busy_session()
    statuses = {request.status.name for request in session.state.requests.values()}
    assert {"RUNNING", "WAITING", "PREEMPTED", "FINISHED_LENGTH"} <= statuses
    return session


@pytest.mark.parametrize("panel_class", PANELS)
async def test_every_line_is_as_wide_as_the_panel_at_any_size(panel_class, busy):
    panel = panel_class()
    async with shown(panel, busy.view(), 80, 24) as pilot:
        for width, height in SIZES:
            await pilot.resize_terminal(width, height)
            panel.update_view(busy.view(), [], False)
            assert len(lines(panel)) == panel.size.height
        panel.update_view(busy.view(selected=3), [], False)
        lines(panel)


@pytest.mark.parametrize("panel_class", PANELS)
async def test_nothing_crashes_before_the_first_step_and_the_panel_says_something(panel_class):
    panel = panel_class()
    session = Session()
    async with shown(panel, session.view(), 80, 24) as pilot:
        assert "".join(lines(panel)).strip()
        await pilot.press("up", "down", "pageup", "pagedown", "enter", "t", "plus", "minus")
        await pilot.click(panel, offset=(2, 2))
        for width, height in SIZES:
            await pilot.resize_terminal(width, height)
            lines(panel)


@pytest.mark.parametrize("panel_class", PANELS)
async def test_the_ascii_set_draws_ascii_and_nothing_else(panel_class, busy):
    panel = panel_class()
    async with shown(panel, busy.view(glyphs=ASCII), 80, 24) as pilot:
        if isinstance(panel, LogPanel):
            panel.write("naïve → 字")
            panel.drain()
        for width in (200, 80, 40):
            await pilot.resize_terminal(width, 24)
            panel.update_view(busy.view(glyphs=ASCII), [], True)
            assert all(line.isascii() for line in lines(panel))
        assert (panel.border_title or "").isascii()


@pytest.mark.parametrize("panel_class", PANELS)
async def test_without_colour_a_panel_says_the_same(panel_class, busy):
    mono = next(iter(load_palettes(mono=True).values()))
    panel = panel_class()
    async with shown(panel, busy.view(), 98, 22):
        coloured = lines(panel)
        panel.update_view(busy.view(palette=mono), [], True)
        assert lines(panel) == coloured
        for y in range(panel.size.height):
            assert all(
                s.style is None or (s.style.color is None and s.style.bgcolor is None) for s in panel.render_line(y)
            )


@pytest.mark.parametrize("panel_class", PANELS)
async def test_a_new_theme_is_taken_over_by_every_line(panel_class, busy):
    light = load_palettes()["light"]
    panel = panel_class()
    async with shown(panel, busy.view(), 80, 24):
        lines(panel)
        panel.update_view(busy.view(palette=light), [], True)
        colours = {
            segment.style.bgcolor.name
            for y in range(panel.size.height)
            for segment in panel.render_line(y)
            if segment.style is not None and segment.style.bgcolor is not None
        }
        assert colours <= {light.colors["background"], light.colors["raised"]}


@pytest.mark.parametrize("panel_class", PANELS)
async def test_an_unchanged_view_refreshes_nothing(panel_class, busy, monkeypatch):
    panel = panel_class()
    async with shown(panel, busy.view(), 80, 24):
        lines(panel)
        refreshed = []
        monkeypatch.setattr(panel, "refresh", lambda *regions, **kwargs: refreshed.append(regions))
        panel.update_view(busy.view(), [], False)
        assert refreshed == []


async def test_a_title_is_shortened_by_whole_parts_and_is_never_markup():
    panel = RequestTable()
    panel.styles.border = ("round", "white")
    async with shown(panel, busy_session().view(), 44, 12) as pilot:
        assert panel.border_title.endswith("waiting")
        await pilot.resize_terminal(120, 12)
        panel.update_view(busy_session().view(), [], False)
        assert panel.border_title.endswith("ended")
        panel.set_title("[red]x[/red] y")
        assert panel._border_title.plain == "[red]x[/red] y"


@pytest.mark.parametrize("panel_class", [RequestTable, BatchTimeline])
async def test_large_request_numbers_are_shown_whole(panel_class):
    session = busy_session(3)
    request = session.state.requests.pop(11)
    request.request, request.name = 1_234_567, ""
    session.state.requests[1_234_567] = request
    session.run(1)
    panel = panel_class()
    async with shown(panel, session.view(), 98, 22):
        assert any("#1234567 " in line for line in lines(panel))
