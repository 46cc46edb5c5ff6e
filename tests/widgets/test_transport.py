from __future__ import annotations

import re

import pytest
from panel_session import Session, busy_session, lines, shown

from engine.trace.damage import Damage
from engine.trace.marks import MarkKind, Marks
from kvtui.widgets.transport import Transport


def played(steps: int = 30, at: int = -1) -> Session:
    """A session that plays: the steps are known, the position is somewhere in them."""

    class Played(Session):
        live = False
        speed = 2.0
        length = 101

        @property
        def position(self) -> int:
            return at if at >= 0 else self.state.step

    session = Played()
    session.ask(max_tokens=40)
    session.run(steps)
    return session


async def test_the_bar_is_filled_up_to_the_position():
    panel = Transport()
    async with shown(panel, played(at=50).view(), 80, 1):
        line = lines(panel)[0]
        assert line.startswith(" ▶ 2×  ━")
        assert "50 / 100" in line
        filled, empty = line.count("━"), line.count("─")
        assert abs(filled - empty) <= 1
        panel.update_view(played(at=0).view(), [], True)
        assert lines(panel)[0].count("━") == 0
        panel.update_view(played(at=100).view(), [], True)
        assert lines(panel)[0].count("─") == 0


async def test_a_paused_recording_says_so():
    session = played()
    session.paused = True
    panel = Transport()
    async with shown(panel, session.view(), 80, 1):
        assert "‖ paused" in lines(panel)[0]


async def test_a_press_or_a_drag_on_the_bar_asks_for_the_step_under_it():
    panel = Transport()
    async with shown(panel, played(at=10).view(), 80, 1) as pilot:
        line = lines(panel)[0]
        start, stop = line.index("━"), line.rindex("─")
        await pilot.mouse_down(panel, offset=(start, 0))
        await pilot.hover(panel, offset=((start + stop) // 2, 0))
        await pilot.hover(panel, offset=(79, 0))
        await pilot.mouse_up(panel, offset=(79, 0))
        await pilot.hover(panel, offset=(start + 3, 0))
        await pilot.pause()
        asked = [message.step for message in pilot.app.posted]
        assert asked[0] == 0
        assert abs(asked[1] - 50) <= 1
        assert asked[2:] == [100]


async def test_a_press_beside_the_bar_asks_for_nothing():
    panel = Transport()
    async with shown(panel, played().view(), 80, 1) as pilot:
        await pilot.click(panel, offset=(2, 0))
        await pilot.pause()
        assert pilot.app.posted == []


async def test_a_live_session_has_the_same_bar_and_says_where_in_its_past_it_is():
    session = busy_session(5)
    panel = Transport()
    async with shown(panel, session.view(), 80, 1) as pilot:
        line = lines(panel)[0]
        assert line.startswith(" ● LIVE  ━━━")
        assert line.rstrip().endswith("0:00")
        session.paused = True
        panel.update_view(session.view(), [], False)
        assert "‖ ENGINE PAUSED" in lines(panel)[0]
        session.looking_back = True
        session.steps += session.steps[:3]
        panel.update_view(session.view(), [], False)
        line = lines(panel)[0]
        assert line.startswith(" ← PAST  ━━━")
        assert "4 / 7" in line
        assert "LIVE +3 steps behind" in line
        await pilot.click(panel, offset=(line.index("━"), 0))
        await pilot.pause()
        assert [message.step for message in pilot.app.posted] == [0]


async def test_history_that_begins_later_says_where():
    session = played(at=60)
    session.first = 50
    panel = Transport()
    async with shown(panel, session.view(), 100, 1):
        line = lines(panel)[0]
        assert "history begins at 50" in line
        assert line.count("━") < line.count("─"), "the bar begins there"


async def test_the_present_is_at_the_right_end_of_the_bar_also_where_the_engine_is_ahead_of_it():
    class Ahead(Session):
        length = 40

    session = Ahead()
    session.ask()
    session.run(10)
    panel = Transport()
    async with shown(panel, session.view(), 80, 1):
        assert "─" not in lines(panel)[0]


@pytest.mark.parametrize("width", [30, 40, 60, 80, 200])
async def test_the_bar_has_room_at_every_width(width):
    session = played(at=60)
    session.looking_back = session.live = True
    panel = Transport()
    async with shown(panel, session.view(), width, 1):
        line = lines(panel)[0]
        assert line.count("━") + line.count("─") >= max(7, width // 3 - 1 if width > 30 else 0)
        assert "60" in line


@pytest.mark.parametrize(("beyond", "said"), [(70, "! → goes on at 70 "), (-1, "! cannot go on ")])
async def test_before_damage_the_line_says_where_the_recording_goes_on(beyond, said):
    session = played(at=60)
    session.paused, session.damage = True, Damage(61, 69, beyond, 90)
    panel = Transport()
    async with shown(panel, session.view(), 80, 1):
        assert lines(panel)[0].lstrip().startswith(said)


async def test_of_a_recording_that_was_cut_off_the_line_says_so_and_at_its_end_that_nothing_follows():
    session = played(at=60)
    session.cut_off = session.paused = True
    panel = Transport()
    async with shown(panel, session.view(), 80, 1):
        assert "‖ paused" in lines(panel)[0]
        assert "60 / 100 cut off" in lines(panel)[0]
        session = played(at=100)
        session.cut_off = session.paused = True
        panel.update_view(session.view(), [], True)
        assert lines(panel)[0].lstrip().startswith("! cut off here")


async def test_the_numbers_beside_the_bar_are_of_steps():
    session = busy_session(30)
    session.live, session.paused = False, True
    marked = session.marks.counts[MarkKind.PREEMPTED]
    assert 0 < marked < session.state.counters.preemptions
    panel = Transport()
    async with shown(panel, session.view(), 140, 1):
        assert re.search(rf"▼ {marked} .*▌ \d+ steps  ", lines(panel)[0])


async def test_before_the_first_step_the_bar_stands_at_the_start():
    class Unplayed(Session):
        live = False
        length = 50

    panel = Transport()
    async with shown(panel, Unplayed().view(), 80, 1):
        line = lines(panel)[0]
        assert "start / 49" in line
        assert "━" not in line


def full_of_marks(at: int) -> Session:
    """A recording with a mark in every step."""
    session = played(at=at)
    session.marks = Marks()
    for _ in range(101):
        session.marks.append((1 << MarkKind.PREEMPTED) | (1 << MarkKind.EVICTED))
    return session


async def test_with_room_marks_have_a_row_of_their_own_and_the_fill_is_seen_however_many_there_are():
    panel = Transport()
    async with shown(panel, full_of_marks(50).view(), 120, 2) as pilot:
        marks, bar = lines(panel)
        start, stop = bar.index("━"), bar.rindex("─")
        assert set(marks[start : stop + 1]) <= set("▼×")
        assert abs(bar.count("━") - bar.count("─")) <= 1
        assert not set("▼×") & set(bar[start : stop + 1])
        await pilot.mouse_down(panel, offset=((start + stop) // 2, 0))
        await pilot.mouse_up(panel, offset=((start + stop) // 2, 0))
        await pilot.pause()
        assert abs(pilot.app.posted[0].step - 50) <= 1, "the marks are pressed like the bar below them"


async def test_without_room_what_has_been_played_has_a_ground_of_its_own_under_the_marks():
    panel = Transport()
    async with shown(panel, full_of_marks(50).view(), 80, 1):
        cells = [(char, style) for text, style, _ in panel.render_line(0) for char in text]
        at = [x for x, (char, _) in enumerate(cells) if char in "▼×" and x > 6]
        head = next(x for x, (char, _) in enumerate(cells) if char == "●" and at[0] < x)
        grounds = {x: cells[x][1].bgcolor for x in at}
        assert len({grounds[x] for x in at if x < head}) == 1
        assert {grounds[x] for x in at if x < head}.isdisjoint({grounds[x] for x in at if x > head})
