from __future__ import annotations

import re

import msgspec
import pytest
from panel_session import PALETTE, Session, busy_session, lines, shown

from kvtui.glyphs import ASCII, UNICODE
from kvtui.history import Mark
from kvtui.widgets.batch_timeline import BatchTimeline
from kvtui.widgets.marks import mark_row


def rows(drawn: list[str]) -> dict[int, str]:
    """The marks drawn for each request."""
    return {int(m[1]): line[6:] for line in drawn if (m := re.match(r"(?:rag-|#)(\d+) *$", line[:6]))}


@pytest.mark.parametrize("glyphs", [UNICODE, ASCII], ids=["unicode", "ascii"])
def test_every_mark_has_a_glyph_of_its_own_one_cell_wide(glyphs):
    row = mark_row(glyphs)
    assert len(row) == len(Mark)
    assert len(set(row)) == len(Mark)


async def test_each_request_has_a_row_and_each_step_a_column_with_the_newest_at_the_right():
    session = busy_session(30)
    panel = BatchTimeline()
    async with shown(panel, session.view(), 80, 20):
        drawn = lines(panel)
        glyphs = mark_row(UNICODE)
        for request, marks in rows(drawn).items():
            expected = "".join(glyphs[m] for m in session.history.marks(request, 0, 30))
            assert marks == expected.rjust(74)
        assert set(rows(drawn)) == set(session.state.requests)
        assert drawn[0].startswith("  step ")
        assert drawn[0].endswith("29")
        assert drawn[0][80 - 30] == "0"
        everything = "".join(rows(drawn).values())
        assert all(glyph in everything for glyph in "▒▪◇·×▌")


async def test_the_legend_names_every_glyph():
    panel = BatchTimeline()
    words = ("prefill", "decode", "recompute", "waits", "preempted", "end", "failed", "aborted", "lost, redone")
    async with shown(panel, busy_session().view(), 110, 20):
        legend = lines(panel)[-1]
        for glyph, word in zip("▒▪◇·×▌!/◈", words, strict=True):
            assert f"{glyph} {word}" in legend


async def test_the_legend_names_overruns_where_there_can_be_any():
    session = busy_session()
    panel = BatchTimeline()
    session.state.header = msgspec.structs.replace(session.state.header, async_scheduling=True)
    async with shown(panel, session.view(), 130, 20):
        assert "~ overrun" in lines(panel)[-1]


async def test_a_row_has_the_hue_of_its_request_and_steps_back_when_another_is_selected():
    session = busy_session()
    panel = BatchTimeline()
    request = next(iter(session.view().running))
    other = next(r for r in session.state.requests if r % 7 != request % 7)

    def styles(number: int):
        y = next(y for y in range(panel.size.height) if panel.render_line(y).text.startswith(f"rag-{number}".ljust(6)))
        return {segment.style for segment in panel.render_line(y) if segment.text.strip("· ")}

    async with shown(panel, session.view(), 80, 20):
        assert PALETTE.hue(request) in styles(request)
        panel.update_view(session.view(selected=other), [], False)
        assert styles(request) == {PALETTE.hue(request, other)}


async def test_more_requests_than_rows_show_the_batch_first_and_can_be_walked_through():
    session = Session(num_blocks=60, max_num_seqs=3)
    for i in range(20):
        session.ask(f"page {i}", max_tokens=5)
    session.run(12)
    panel = BatchTimeline()
    async with shown(panel, session.view(), 80, 7) as pilot:
        shown_rows = list(rows(lines(panel)))
        assert session.view().running <= set(shown_rows)
        assert shown_rows == sorted(shown_rows)
        assert "15 more" in panel.border_title
        panel.focus()
        seen = set(shown_rows)
        for _ in range(6):
            await pilot.press("pageup")
            seen |= set(rows(lines(panel)))
        assert list(rows(lines(panel))) == [0, 1, 2, 3, 4]
        for _ in range(6):
            await pilot.press("pagedown")
            seen |= set(rows(lines(panel)))
        assert seen == set(range(20))
        assert list(rows(lines(panel))) == shown_rows


async def test_of_those_that_ended_the_last_ones_have_a_row():
    session = Session(num_blocks=60, max_num_seqs=3)
    for i in range(20):
        session.ask(f"page {i}", max_tokens=5)
    session.run(60)
    assert not session.engine.has_work
    panel = BatchTimeline()
    async with shown(panel, session.view(), 80, 7):
        assert list(rows(lines(panel))) == [15, 16, 17, 18, 19]


async def test_a_selected_request_always_has_a_row():
    session = Session(num_blocks=60, max_num_seqs=3)
    for i in range(20):
        session.ask(f"page {i}", max_tokens=5)
    session.run(6)
    panel = BatchTimeline()
    async with shown(panel, session.view(selected=19), 80, 6):
        assert 19 in rows(lines(panel))


async def test_a_click_selects_the_request_of_the_row():
    session = busy_session()
    panel = BatchTimeline()
    async with shown(panel, session.view(), 80, 20) as pilot:
        await pilot.click(panel, offset=(40, 3))
        await pilot.pause()
        assert [m.request for m in pilot.app.posted] == [list(rows(lines(panel)))[2]]


async def test_the_title_has_the_average_batch():
    session = Session()
    for _ in range(3):
        session.ask(max_tokens=30)
    session.run(10)
    panel = BatchTimeline()
    async with shown(panel, session.view(), 80, 10):
        assert "average 3.0" in panel.border_title


async def test_steps_have_a_thousands_separator_as_everywhere_else() -> None:
    session = Session()
    for _ in range(40):
        session.ask(max_tokens=30)
        session.run(29)
    panel = BatchTimeline()
    async with shown(panel, session.view(), 120, 12):
        heading = lines(panel)[0]
        last = session.state.step
        assert last > 1000
        assert heading.rstrip().endswith(f"{last:,}")
