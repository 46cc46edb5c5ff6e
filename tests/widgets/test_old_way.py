from __future__ import annotations

import re

import pytest
from panel_session import Session, busy_session, lines, shown

from kvtui.ghost import Ghost
from kvtui.glyphs import ASCII
from kvtui.palette import load_palettes
from kvtui.view import RequestSelected
from kvtui.widgets.old_way import OldWay, strip_cells


async def test_the_strip_shows_pieces_filled_reserved_and_the_holes_and_who_would_wait():
    session = busy_session(30)
    ghost = Ghost(session.header)
    ghost.rebuild(session.state)
    assert len(ghost.pieces) >= 2
    assert ghost.head is not None
    panel = OldWay()
    async with shown(panel, session.view(), 104, 12):
        drawn = lines(panel)
        strip = drawn[0].strip() + drawn[1].strip()
        reserved = sum(piece.num for piece in ghost.pieces.values())
        assert len(strip) == 40 * 3, "three cells a block"
        assert strip.count("╌") == 3 * (40 - reserved)
        unused = sum(p.num - -(-ghost.filled(session.state, n) // 4) for n, p in ghost.pieces.items())
        assert strip.count("□") == 3 * unused
        text = "\n".join(drawn)
        assert re.search(rf"run +{len(session.view().running)} +{len(ghost.pieces)} ", text)
        assert re.search(rf"wait +\d+ +{len(ghost.waiting)} {session.view().names.of(ghost.head)}", text)
        lost = ghost.fragmentation(session.state)
        assert f"{1 - lost.filled_slots / lost.reserved_slots:.1%}" in text
        assert f"no {ghost.waiting[ghost.head]} in a row" in text
        assert str(panel.border_title).startswith(f"The old way ─ {len(ghost.pieces)} of ")


async def test_what_paging_shares_is_wasted_in_the_old_way_as_copies():
    session = Session(num_blocks=120, chunk=64)
    for _ in range(5):
        session.ask("one document for all of them " * 3, max_tokens=30)
        session.run(3)
    ghost = Ghost(session.header)
    ghost.rebuild(session.state)
    lost, copies = ghost.fragmentation(session.state), ghost.copies(session.state)
    assert copies > 0
    panel = OldWay()
    async with shown(panel, session.view(), 104, 12):
        text = "\n".join(lines(panel))
        wasted = 1 - (lost.filled_slots - copies) / lost.reserved_slots
        assert re.search(rf"wasted .* {wasted:.1%} · [\d.]+ MiB, [\d.]+ MiB of it copies", text), text


async def test_it_follows_step_by_step_and_comes_to_the_same_after_a_jump():
    session = busy_session(10)
    panel, fresh = OldWay(), OldWay()
    async with shown(panel, session.view(), 90, 14):
        for _ in range(20):
            panel.update_view(session.view(), session.run(2), False)
        followed = lines(panel)
    async with shown(fresh, session.view(), 90, 14):
        assert lines(fresh) == followed


def test_a_cell_of_many_blocks_is_as_full_as_their_slots():
    session = busy_session(12)
    ghost = Ghost(session.header)
    ghost.rebuild(session.state)
    one = strip_cells(session.state, ghost, 1)
    ten = strip_cells(session.state, ghost, 10)
    assert (len(one.codes), len(ten.codes)) == (40, 4)
    assert (ten.owners >= 0).tolist() == [bool((one.owners[i : i + 10] >= 0).any()) for i in range(0, 40, 10)]


async def test_a_click_on_a_piece_selects_its_request():
    session = busy_session(12)
    ghost = Ghost(session.header)
    ghost.rebuild(session.state)
    number, piece = list(ghost.pieces.items())[1]
    panel = OldWay()
    async with shown(panel, session.view(), 104, 12) as pilot:
        await pilot.click(panel, offset=(1 + 3 * piece.start, 0))
        (message,) = pilot.app.posted
        assert isinstance(message, RequestSelected)
        assert message.request == number


@pytest.mark.parametrize("size", [(78, 20), (60, 9), (40, 5), (20, 2), (5, 1)])
async def test_every_size_can_be_drawn_in_ascii_without_color(size):
    mono = next(iter(load_palettes(mono=True).values()))
    panel = OldWay()
    async with shown(panel, busy_session().view(glyphs=ASCII, palette=mono), *size):
        assert all(line.isascii() for line in lines(panel))
        assert re.search("[#8o]", lines(panel)[0])


async def test_without_a_request_it_says_what_it_would_show():
    panel = OldWay()
    async with shown(panel, Session().view(), 90, 8):
        assert "in one piece" in "\n".join(lines(panel))
