from __future__ import annotations

import re

import msgspec
import pytest
from panel_session import Session, busy_session, lines, shown

from engine.trace.damage import Damage
from kvtui.advisor import advice_brief, advise_now
from kvtui.widgets.header_bar import HeaderBar, fitting, parts_of


async def header(session: Session, width: int, url: str | None = None) -> str:
    panel = HeaderBar()
    panel.url = url
    async with shown(panel, session.view(), width, 1):
        return lines(panel)[0]


async def test_a_wide_header_says_everything():
    session = busy_session()
    line = await header(session, 200, "http://127.0.0.1:8077")
    rates = session.history.rates()
    for part in (
        "kvtui",
        "● LIVE",
        "simulated",
        "40 blocks of 4",
        "90 KiB each",
        "http://127.0.0.1:8077",
        "step 29",
        f"{rates.steps_per_s:,.0f} steps/s" if rates.steps_per_s >= 10 else "steps/s",
        f"{rates.tokens_per_s:,.0f} tok/s" if rates.tokens_per_s >= 10 else "tok/s",
    ):
        assert part in line


async def test_the_type_of_the_cache_is_said_where_it_is_not_the_models():
    assert "simulated  bfloat16  " in await header(Session(), 200)
    assert "simulated  bfloat16 kv float8  " in await header(Session(kv_dtype="fp8"), 200)


async def test_a_narrow_header_keeps_the_badge_the_provenance_and_the_step():
    line = await header(busy_session(), 80)
    assert "● LIVE" in line
    assert "simulated" in line
    assert "step 29" in line
    assert "tok/s" in line
    assert "● LIVE" in await header(busy_session(2), 30)


def test_parts_are_left_out_whole_and_the_badge_never():
    parts = parts_of(busy_session().view(), "http://127.0.0.1:8077")
    for width in range(1, 220):
        kept = fitting(parts, width)
        assert [part for part in parts if part in kept] == kept
        assert any(part.rank == 0 for part in kept)
        if width >= 10:
            assert sum(len(part.text) + 2 for part in kept) + 2 <= width or len(kept) == 1


@pytest.mark.parametrize(
    ("state", "badge"),
    [
        ({}, "● LIVE"),
        ({"paused": True}, "‖ ENGINE PAUSED"),
        ({"looking_back": True}, "← LOOKING BACK  the engine goes on"),
        ({"looking_back": True, "paused": True}, "← LOOKING BACK  the engine is paused"),
        ({"live": False}, "▶ PLAY"),
        ({"live": False, "paused": True}, "‖ PAUSED"),
        ({"error": "gone"}, "! STOPPED"),
    ],
)
async def test_the_badge_says_what_the_session_does(state, badge):
    session = busy_session(3)
    for name, value in state.items():
        setattr(session, name, value)
    assert badge in await header(session, 100)


async def test_a_damaged_recording_says_where_and_how_much_of_it_can_be_read():
    session = busy_session(12)
    session.live, session.paused = False, True
    session.damage = Damage(12, 20, 21, 4)
    line = await header(session, 80)
    assert "! DAMAGED at step 12 " in line
    assert "4 of 12 steps can be read" in line
    assert "STOPPED" not in line


async def test_a_recording_that_was_cut_off_says_after_how_many_steps():
    session = busy_session(12)
    session.live, session.paused, session.cut_off = False, True, True
    assert "! cut off after 12 steps" in await header(session, 80)


async def test_the_header_says_what_holds_requests_up_and_the_option_that_moves_it():
    session = busy_session()
    assert "held up by blocks: raise --num-blocks (now 40)" in await header(session, 160)
    narrow = await header(session, 80)
    assert re.search(r"held up by blocks: (raise )?--num-blocks", narrow), narrow
    assert "● LIVE" in narrow
    assert "step 29" in narrow
    idle = Session()
    idle.ask(max_tokens=4)
    idle.run(4)
    assert "held up" not in await header(idle, 200)


async def test_a_longer_form_of_what_holds_requests_up_costs_nothing_that_weighs_more_than_its_words():
    session = busy_session()
    model = msgspec.structs.replace(session.header.model, name="a-model-with-a-name")
    session.header = msgspec.structs.replace(session.header, model=model)
    panel = HeaderBar()
    forms = advice_brief(advise_now(session.history, session.state))
    assert len(forms) == 4
    told = set()
    async with shown(panel, session.view(), 200, 1):
        for width in range(40, 240):
            (parts,) = panel.rows(session.view(), width, 1)
            said = [part.text for part in parts if part.text in forms]
            if not said:
                continue
            told |= set(said)
            shortest = fitting(parts_of(session.view(), None, forms[-1]), width)
            kept = {part.text for part in parts}
            assert {part.text for part in shortest if part.rank <= 4 and part.text != forms[-1]} <= kept
    assert forms[0] in told
    assert len(told) > 1


async def test_a_playback_says_how_long_the_recording_is():
    session = busy_session(20)
    session.live = False
    assert "step 19/19" in await header(session, 100)


async def test_an_engine_without_work_is_called_idle():
    session = Session()
    session.ask(max_tokens=2)
    session.run(4)
    line = await header(session, 100)
    assert "idle" in line
    assert "tok/s" not in line


async def test_a_hostile_model_name_is_bounded_and_harmless():
    session = busy_session(2)
    model = msgspec.structs.replace(session.header.model, name="\x1b]0;x\x07" + "m" * 5000)
    session.header = msgspec.structs.replace(session.header, model=model)
    line = await header(session, 200)
    assert "␛]0;x␇mmm" in line
    assert "● LIVE" in line


async def test_before_the_first_step_no_step_and_no_speed_is_claimed():
    session = Session()
    session.live = False
    line = await header(session, 100)
    assert "no step yet" in line
    assert "tok/s" not in line


async def test_requests_that_arrive_while_the_engine_is_held_are_announced_and_one_name_is_said_once():
    session = Session()
    session.ask()
    session.run(2)
    session.ask()
    session.paused = True
    async with shown(HeaderBar(), session.view(), 110, 1) as pilot:
        line = lines(pilot.app.panel)[0]
        assert "1 arrived, taken at the next step" in line
        assert line.count("simulated") == 1
