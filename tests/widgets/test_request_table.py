from __future__ import annotations

import re

import pytest
from panel_session import Session, busy_session, lines, shown

from engine.request import RequestStatus
from kvtui.glyphs import ASCII, UNICODE
from kvtui.view import RequestSelected
from kvtui.widgets.request_row import columns_for, table_pieces
from kvtui.widgets.request_table import RequestTable


def numbers(drawn: list[str]) -> list[int]:
    """The request numbers of the rows, in order."""
    return [int(m[1]) for line in drawn if (m := re.match(r"[▸ ](?:rag-|#)(\d+) ", line))]


async def test_running_requests_come_in_the_batch_s_order_then_waiting_ones_then_ended_ones():
    session = busy_session()
    panel = RequestTable()
    async with shown(panel, session.view(), 98, 30):
        order = numbers(lines(panel))
        status = [session.state.requests[r].status for r in order]
        running = [r for r, s in zip(order, status, strict=True) if s == RequestStatus.RUNNING]
        assert running[: len(session.state.last_step.batch)] == [m.request for m in session.state.last_step.batch]
        ranks = [2 if s.is_finished else 0 if s == RequestStatus.RUNNING else 1 for s in status]
        assert ranks == sorted(ranks)
        assert set(order) == set(session.state.requests)
        counts = [ranks.count(0), status.count(RequestStatus.WAITING), status.count(RequestStatus.PREEMPTED)]
        title = panel.border_title
        assert f"{counts[0]} running" in title
        assert f"{counts[1]} waiting" in title
        assert f"{counts[2]} preempted" in title


async def test_a_row_says_how_far_a_request_is_and_where_its_blocks_lie():
    session = Session(num_blocks=40, block_size=4)
    number = session.ask("a b c d e f g h i j k l", max_tokens=30)
    session.run(5)
    request = session.state.requests[number]
    panel = RequestTable()
    async with shown(panel, session.view(), 120, 6):
        row = lines(panel)[1]
        assert "▪ decode" in row
        assert f"{request.num_computed}/{request.num_tokens}" in row
        assert " ".join(map(str, request.table)) in row
        assert row.rstrip().endswith("".join(request.pieces)[-8:].replace("\n", "⏎").rstrip())


async def test_a_waiting_request_says_why():
    session = Session(num_blocks=12, block_size=4)
    session.ask("the block of the page " * 5, max_tokens=20)
    waiting = session.ask("the queue of the cache " * 5, max_tokens=20)
    session.run(2)
    assert session.state.requests[waiting].waiting_for is not None
    needs = session.state.requests[waiting].waiting_for.numbers
    panel = RequestTable()
    for width in (98, 80, 40):
        async with shown(panel := RequestTable(), session.view(), width, 8):
            row = next(line for line in lines(panel) if "waiting" in line)
            assert f"needs {needs['needs']}" in row
    assert numbers([row]) == [waiting]


async def test_waiting_requests_are_in_sight_when_running_ones_alone_would_fill_the_table():
    session = Session(num_blocks=200, max_num_seqs=20)
    for i in range(30):
        session.ask(f"page {i}", max_tokens=40)
    session.run(3)
    panel = RequestTable()
    async with shown(panel, session.view(), 98, 14) as pilot:
        drawn = lines(panel)
        assert numbers(drawn) == [*range(9), 20, 21, 22]
        assert "11 more running" in drawn[10]
        assert "12 of 30 shown" in panel.border_title
        assert "20 of 20 places taken" in drawn[11]
        await pilot.click(panel, offset=(10, 10))
        assert pilot.app.posted == []
        panel.focus()
        await pilot.press("down")
        assert numbers(lines(panel)) == list(range(13))
        assert lines(panel)[2].startswith("▸")


async def test_a_refused_request_says_what_went_wrong():
    session = Session(num_blocks=4, block_size=4)
    session.ask("the block of the page " * 20)
    session.ask("short")
    session.run(2)
    panel = RequestTable()
    async with shown(panel, session.view(), 98, 8):
        row = next(line for line in lines(panel) if "refused" in line)
        assert "! refused" in row
        assert "4" in row.partition("refused")[2]


def test_columns_never_take_more_than_the_panel_has():
    for cells in range(1, 300):
        for prefer_text in (False, True):
            columns = columns_for(cells, prefer_text)
            if cells >= 26:
                assert sum(w + 1 for w in columns if w) <= cells
    assert columns_for(40, False).blocks == 6
    assert columns_for(50, False).table >= 6
    assert columns_for(80, False).out == 4
    assert columns_for(98, False).text >= 16


async def test_narrow_tables_show_block_table_or_text_as_wished():
    session = Session()
    session.ask("the block of the page " * 3, max_tokens=30)
    session.run(8)
    panel = RequestTable()
    async with shown(panel, session.view(), 60, 5) as pilot:
        panel.focus()
        assert "block table" in lines(panel)[0]
        await pilot.press("v")
        assert "block table" not in lines(panel)[0]
        assert "text" in lines(panel)[0]


def test_shared_blocks_are_marked_with_their_references_and_long_tables_keep_head_and_tail():
    session = Session(num_blocks=100, block_size=4, chunk=64)
    first = session.ask("the block of the page " * 8, max_tokens=8)
    session.run(3)
    session.ask("the block of the page " * 8 + "again", max_tokens=8)
    session.run(2)
    table = session.state.requests[first].table
    pieces = table_pieces(session.state, table, 200, UNICODE)
    assert [(text.strip(), shared) for text, shared in pieces] == [
        (f"{b}×{session.state.refs[b]}" if session.state.refs[b] > 1 else str(b), session.state.refs[b] > 1)
        for b in table
    ]
    assert any(shared for _, shared in pieces)
    short = "".join(text for text, _ in table_pieces(session.state, table, 24, ASCII))
    assert len(short) <= 24
    assert short.startswith(f"{table[0]}x2 ")
    assert "~" in short
    assert short.split()[-1].partition("x")[0] == str(table[-1])


def test_a_table_of_a_million_blocks_costs_what_is_shown():
    session = Session()

    class Watched(list[int]):
        reads = 0

        def __iter__(self):
            for item in super().__iter__():
                type(self).reads += 1
                yield item

    table = Watched([1] * 1_000_000)
    assert table_pieces(session.state, table, 30, UNICODE)
    assert 0 < Watched.reads < 100


async def test_the_cursor_stays_on_its_request_when_rows_move_and_enter_selects_it():
    session = busy_session(5)
    panel = RequestTable()
    async with shown(panel, session.view(), 98, 20) as pilot:
        panel.focus()
        await pilot.pause()
        await pilot.press("down", "down", "down")
        before = next(line for line in lines(panel) if line.startswith("▸"))
        number = numbers([before])[0]
        place = numbers(lines(panel)).index(number)
        while True:
            panel.update_view(session.view(), session.run(1), False)
            after = next(line for line in lines(panel) if line.startswith("▸"))
            assert numbers([after]) == [number]
            if numbers(lines(panel)).index(number) != place:
                break
        await pilot.press("enter")
        await pilot.pause()
        assert [m.request for m in pilot.app.posted] == [number]
        assert pilot.app.posted[0].inspect
        panel.update_view(session.view(selected=number), [], False)
        await pilot.press("enter")
        await pilot.pause()
        assert [m.request for m in pilot.app.posted] == [number, number]


async def test_a_table_that_was_left_on_a_row_that_ended_shows_the_live_requests_again():
    session = Session(num_blocks=80, max_num_seqs=4)
    for i in range(16):
        session.ask(f"page {i}", max_tokens=3)
    while session.engine.has_work:
        session.run(1)
    live = [session.ask(f"another {i}", max_tokens=60) for i in range(3)]
    session.run(3)
    panel = RequestTable()
    async with shown(panel, session.view(), 80, 8) as pilot:
        panel.focus()
        await pilot.pause()
        await pilot.press("end")
        assert not set(live) & set(numbers(lines(panel)))
        pilot.app.set_focus(None)
        await pilot.pause()
        panel.update_view(session.view(), session.run(1), False)
        assert numbers(lines(panel))[:3] == live
        assert not any(line.startswith("▸") for line in lines(panel))


async def test_what_is_selected_stays_in_sight_when_the_table_is_left():
    session = busy_session()
    panel = RequestTable()
    async with shown(panel, session.view(), 98, 6) as pilot:
        panel.focus()
        last = panel._order[-1]
        panel.update_view(session.view(selected=last), [], False)
        pilot.app.set_focus(None)
        await pilot.pause()
        panel.update_view(session.view(selected=last), session.run(1), False)
        assert last in numbers(lines(panel))


async def test_home_and_end_go_to_the_first_and_the_last_row_and_the_title_says_where_one_is():
    session = busy_session()
    panel = RequestTable()
    count = len(session.state.requests)
    async with shown(panel, session.view(), 98, 6) as pilot:
        panel.focus()
        await pilot.pause()
        await pilot.press("end")
        assert lines(panel)[-1].startswith("▸")
        assert numbers(lines(panel))[-1] == panel._order[-1]
        assert f"rows {count - 4}-{count} of {count}" in panel.border_title
        await pilot.press("home")
        assert lines(panel)[1].startswith("▸")
        assert f"rows 1-5 of {count}" in panel.border_title
    async with shown(RequestTable(), session.view(), 98, 30) as pilot:
        assert "rows" not in pilot.app.panel.border_title


async def test_a_click_selects_the_row_under_the_mouse():
    session = busy_session()
    panel = RequestTable()
    async with shown(panel, session.view(), 98, 20) as pilot:
        await pilot.click(panel, offset=(10, 4))
        await pilot.pause()
        assert [type(m) for m in pilot.app.posted] == [RequestSelected]
        assert pilot.app.posted[0].request == numbers(lines(panel))[3]
        await pilot.click(panel, offset=(10, 0))
        await pilot.pause()
        assert len(pilot.app.posted) == 1


async def test_a_request_selected_elsewhere_comes_into_the_window_and_the_others_step_back():
    session = busy_session()
    panel = RequestTable()
    async with shown(panel, session.view(), 98, 5):
        last = panel._order[-1]
        assert last not in numbers(lines(panel))
        panel.update_view(session.view(selected=last), [], False)
        assert last in numbers(lines(panel))


class CountedRequests(dict):
    """Requests that count how often one of them is looked at."""

    def __init__(self, *args):
        super().__init__(*args)
        self.looks = 0

    def get(self, key, default=None):
        self.looks += 1
        return super().get(key, default)

    def values(self):
        self.looks += len(self)
        return super().values()


@pytest.mark.parametrize("count", [20, 500])
async def test_holding_the_down_key_costs_the_window_not_the_table(count, monkeypatch):
    session = Session(num_blocks=30)
    for i in range(count):
        session.ask(f"page {i}", max_tokens=4)
    session.run(3)
    assert len(session.state.requests) == count
    panel = RequestTable()
    async with shown(panel, session.view(), 80, 12) as pilot:
        panel.focus()
        await pilot.pause()
        requests = CountedRequests(session.state.requests)
        monkeypatch.setattr(session.state, "requests", requests)
        for _ in range(19):
            panel.action_scroll_down()
        assert requests.looks <= 19 * 2 * 12
        assert any(line.startswith("▸") for line in lines(panel))
        assert panel._cursor == panel._order[19]


async def test_the_cursor_stays_where_it_is_when_its_request_ends_and_the_window_does_not_run_after_it():
    session = Session(num_blocks=60, max_num_seqs=12)
    asked = [session.ask(f"page {i}", max_tokens=6 if i == 3 else 40) for i in range(11)]
    session.run(2)
    panel = RequestTable()
    async with shown(panel, session.view(), 80, 6) as pilot:
        panel.focus()
        await pilot.press("down", "down", "down")
        assert panel._cursor == asked[3]
        for _ in range(8):
            panel.update_view(session.view(), session.run(1), False)
        assert session.state.requests[asked[3]].status.is_finished
        assert numbers(lines(panel)) == [*asked[:3], *asked[4:6]]
        assert [line.startswith("▸") for line in lines(panel)[1:]] == [False, False, False, True, False]


async def test_the_cursor_survives_the_end_of_the_table_and_pages():
    session = busy_session()
    panel = RequestTable()
    async with shown(panel, session.view(), 80, 6) as pilot:
        panel.focus()
        await pilot.pause()
        await pilot.press(*["pagedown"] * 9)
        assert panel._cursor == panel._order[-1]
        assert numbers(lines(panel))[-1] == panel._order[-1]
        await pilot.press(*["pageup"] * 9)
        assert panel._cursor == panel._order[0]
        assert numbers(lines(panel))[0] == panel._order[0]


async def test_hostile_names_and_texts_are_shown_and_do_nothing():
    session = Session()
    session.ask("\x1b[2J[red]x[/red] 👨\u200d👩\u200d👧 \u202eevil\n\tend", name="[bold]\x1b]0;t\x07", max_tokens=3)
    session.run(1)
    panel = RequestTable()
    async with shown(panel, session.view(), 160, 5):
        row = lines(panel)[1]
        assert "[bold]␛]0;t␇" in row


async def test_an_empty_table_says_where_to_send_requests():
    session = Session()
    panel = RequestTable()
    async with shown(panel, session.view(), 80, 10):
        assert any("kvtui run --workload" in line for line in lines(panel))
        session.live = False
        panel.update_view(session.view(), [], True)
        assert any("Go on with" in line for line in lines(panel))


async def test_only_rows_that_look_different_are_refreshed(monkeypatch):
    session = Session()
    session.ask("a b c", max_tokens=40)
    session.ask("never scheduled " * 30, max_tokens=40)
    session.run(8)
    panel = RequestTable()
    async with shown(panel, session.view(), 98, 12):
        lines(panel)
        refreshed = []
        monkeypatch.setattr(panel, "refresh", lambda *regions, **_: refreshed.extend(regions))
        panel.update_view(session.view(), session.run(1), False)
        assert 0 < len(refreshed) <= 2


def test_places_behind_a_sliding_window_are_one_piece_in_front():
    state = Session().state

    def text(table: list[int], cells: int, glyphs=UNICODE) -> str:
        return "".join(text for text, _ in table_pieces(state, table, cells, glyphs))

    assert text([-1] * 25 + [3, 4, 5], 40) == "-×25 3 4 5"
    assert text([-1] * 25 + [3, 4, 5], 40, ASCII) == "-x25 3 4 5"
    assert text([-1, 3, -1, 5], 40) == "- 3 - 5"
    assert text([-1] * 25 + list(range(10, 30)), 24).startswith("-×25 10 ")
    for cells in range(3, 40):
        assert len(text([-1] * 25 + list(range(10, 30)), cells)) <= cells
