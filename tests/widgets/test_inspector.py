"""The inspector: whom it follows, what it says of a request and of a block, and its text."""

from __future__ import annotations

from dataclasses import replace

import pytest
from panel_session import Session, busy_session, lines, shown

from engine.request import RequestStatus
from kvtui.glyphs import ASCII, UNICODE
from kvtui.widgets import inspector as module
from kvtui.widgets.inspector import Inspector


def text(panel: Inspector) -> str:
    return "\n".join(line.rstrip() for line in lines(panel))


@pytest.mark.parametrize("glyphs", [UNICODE, ASCII], ids=["unicode", "ascii"])
@pytest.mark.parametrize("size", [(1, 1), (12, 3), (58, 4), (76, 8), (100, 14)])
async def test_every_line_is_as_wide_as_the_panel(glyphs, size) -> None:
    session = busy_session()
    shared = next(b for b in range(40) if session.state.refs[b] > 1)
    async with shown(Inspector(), session.view(glyphs=glyphs), *size) as pilot:
        panel = pilot.app.panel
        for request in session.state.requests:
            for block in (None, shared, 0):
                panel.update_view(
                    replace(session.view(glyphs=glyphs), selected_request=request, selected_block=block), (), False
                )
                assert glyphs is UNICODE or text(panel).isascii()


async def test_it_follows_a_running_request_to_its_end_and_a_moment_longer(monkeypatch) -> None:
    session = Session(num_blocks=60)
    clock = [50.0]
    panel = Inspector(clock=lambda: clock[0])
    async with shown(panel, session.view(), 80, 8):
        assert "Nothing to inspect" in text(panel)
        first = session.ask("one", max_tokens=6)
        session.run(1)
        panel.update_view(session.view(), (), False)
        assert panel.followed == first
        second = session.ask("two", max_tokens=60)
        session.run(2)
        panel.update_view(session.view(), (), False)
        assert panel.followed == first
        while session.state.requests[first].status == RequestStatus.RUNNING:
            session.run(1)
        panel.update_view(session.view(), (), False)
        assert panel.followed == first
        assert "decode" not in text(panel)
        clock[0] += module.LINGER_SECONDS + 0.1
        panel.update_view(session.view(), (), False)
        assert panel.followed == second


async def test_a_waiting_request_says_why_with_its_numbers() -> None:
    session = busy_session()
    waiting = next(r for r in session.state.requests.values() if r.waiting_for is not None)
    panel = Inspector()
    async with shown(panel, session.view(selected=waiting.request), 100, 8):
        picture = text(panel)
        assert f"#{waiting.request}" in picture
        assert "why" in picture
        for number in waiting.waiting_for.numbers.values():
            assert f"{number}" in picture


async def test_the_end_of_the_output_is_in_sight_and_one_can_scroll_back_to_its_beginning() -> None:
    session = Session(num_blocks=60, block_size=16)
    request = session.ask("question", max_tokens=220)
    panel = Inspector()
    async with shown(panel, session.view(), 40, 7) as pilot:
        session.run(200)
        panel.update_view(session.view(), (), False)
        known = session.state.requests[request]
        words = "".join(known.pieces[known.num_prompt_tokens :]).split()
        assert words[-1] in text(panel)
        assert "output" in text(panel)
        panel.focus()
        await pilot.pause()
        await pilot.press(*["pageup"] * 12)
        assert words[0] in text(panel)
        assert "question" in text(panel)
        await pilot.press(*["pagedown"] * 12)
        assert words[-1] in text(panel)


async def test_a_block_tells_its_owner_place_fill_references_hash_and_the_text_of_its_tokens() -> None:
    session = Session(num_blocks=30, block_size=4)
    first = session.ask("one two three four five six", max_tokens=20)
    session.run(3)
    second = session.ask("one two three four five six", max_tokens=20)
    session.run(2)
    state = session.state
    shared = next(b for b in state.table(second) if state.refs[b] == 2)
    panel = Inspector()
    async with shown(panel, replace(session.view(selected=first), selected_block=shared), 120, 8):
        picture = text(panel)
        for words in (f"block {shared}", f"owner #{first}", "4/4 slots", "2 references", "hash ", f"#{second}"):
            assert words in picture
        assert "".join(state.block_text(shared)).replace(" ", "␣") in picture
        free = next(b for b in range(30) if state.refs[b] == 0 and state.key[b] == 0)
        panel.update_view(replace(session.view(), selected_block=free), (), False)
        assert f"block {free} · free" in text(panel)


async def test_what_is_copied_is_whole_and_as_it_was() -> None:
    session = Session(num_blocks=60, block_size=16)
    session.ask("a [question]\twith all", max_tokens=50)
    panel = Inspector()
    async with shown(panel, session.view(), 20, 3):
        assert panel.plain_text() == ""
        session.run(30)
        panel.update_view(session.view(), (), False)
        assert "a [question]\twith all" in panel.plain_text()
        assert "".join(session.state.requests[0].pieces).endswith(panel.plain_text().strip().split()[-1])


async def test_a_refusal_is_read_to_its_last_word_on_as_many_lines_as_it_needs() -> None:
    session = Session(num_blocks=8, block_size=4)
    refused = session.ask("many words to fill the pool with " * 6, max_tokens=8)
    session.run(1)
    request = session.state.requests[refused]
    assert len(request.message) > 50
    panel = Inspector()
    async with shown(panel, session.view(selected=refused), 50, 12):
        assert request.message in " ".join(text(panel).replace("ended", "").split())


async def test_facts_that_do_not_fit_go_on_below_and_what_is_cut_says_so() -> None:
    session = Session(num_blocks=60, block_size=16)
    first = session.ask("one two three four five six seven eight", max_tokens=40, name="a-rather-long-name-01")
    session.run(6)
    panel = Inspector()
    async with shown(panel, session.view(selected=first), 40, 12):
        picture = text(panel)
        assert "tokens computed" in picture
        assert "at most" in picture
        block = session.state.table(first)[0]
        panel.update_view(replace(session.view(selected=first), selected_block=block), (), False)
        words = "".join(session.state.block_text(block)).replace(" ", "␣")
        assert words in "".join(text(panel).replace("tokens", "").split())
    async with shown(Inspector(), session.view(selected=first), 20, 12) as pilot:
        name = next(line for line in text(pilot.app.panel).splitlines() if "a-rather" in line)
        assert name.endswith("…")


async def test_a_text_cut_at_its_front_never_begins_within_a_special_token() -> None:
    session = Session(num_blocks=60, block_size=16)
    chat = "x " * 20 + "\n<|im_start|>user\nhello there\n<|im_end|>\n<|im_start|>assistant\n"
    first = session.ask(chat, max_tokens=30)
    session.run(30)
    cut = 0
    for height in range(3, 12):
        async with shown(panel := Inspector(), session.view(selected=first), 60, height) as pilot:
            pilot.app.set_focus(None)
            await pilot.pause()
            panel.redraw()
            picture = text(panel)
            cut += "…" in picture
            assert "…|im_" not in picture
            assert "im_start|>" not in picture.replace("<|im_start|>", "")
    assert cut


async def test_before_the_first_request_it_says_how_to_send_one() -> None:
    session = Session()
    async with shown(Inspector(), replace(session.view(), listen_url="http://127.0.0.1:8099"), 78, 5) as pilot:
        assert "kvtui inject --url http://127.0.0.1:8099 --workload chat" in text(pilot.app.panel)
