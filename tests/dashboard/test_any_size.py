"""The dashboard on screens of any size, and while the size changes."""

from __future__ import annotations

import re

import pytest
from live_dashboard import Live
from screen_text import frame, screen_lines, text_of


@pytest.mark.parametrize("size", [(200, 50), (110, 30), (80, 24), (60, 16)])
async def test_a_newcomer_sees_blocks_and_streaming_text_without_touching_anything(size) -> None:
    live = Live()
    live.ask(3)
    async with live.app.run_test(size=size) as pilot:
        live.run(12)
        await frame(pilot)
        picture = text_of(live.app)
        assert "Physical blocks" in picture
        assert re.search(r"█|▇", picture)
        assert "following ask-" in picture
        output = "".join(live.source.state.requests[0].pieces[live.source.state.requests[0].num_prompt_tokens :])
        followed = live.app.main.inspector.followed
        request = live.source.state.requests[followed]
        output = "".join(request.pieces[request.num_prompt_tokens :]).split()
        assert output[-1] in picture
        live.run(4)
        await frame(pilot)
        assert text_of(live.app) != picture


async def test_resizing_quickly_from_nothing_to_huge_and_back_never_fails() -> None:
    live = Live()
    live.ask(5)
    sizes = [
        (1, 1),
        (300, 80),
        (59, 16),
        (60, 15),
        (60, 16),
        (80, 24),
        (109, 40),
        (110, 30),
        (2, 70),
        (300, 2),
        (200, 50),
    ]
    async with live.app.run_test(size=(80, 24)) as pilot:
        for size in [*sizes, *reversed(sizes)]:
            live.run(1)
            await pilot.resize_terminal(*size)
            pilot.app.hurry()
        await frame(pilot)
        for size in sizes:
            await pilot.resize_terminal(*size)
            await frame(pilot)
            picture = "\n".join(screen_lines(live.app))
            if size[0] >= 60 and size[1] >= 16:
                assert "Physical blocks" in picture
            elif size[0] > 50 and size[1] > 1:
                assert "kvtui needs 60 x 16" in picture


@pytest.mark.parametrize(("before", "after"), [((100, 24), (200, 50)), ((200, 50), (80, 24))])
async def test_a_resize_draws_what_comes_into_sight_also_while_nothing_happens(before, after) -> None:
    live = Live()
    live.ask(3)
    async with live.app.run_test(size=before) as pilot:
        live.run(8)
        await frame(pilot)
        live.source.pause()
        await frame(pilot)
        await pilot.resize_terminal(*after)
        await pilot.pause(0.3)
        picture = text_of(live.app)
    wanted = ("Requests ", "Pool", "Batch per iteration") if after == (200, 50) else ("1 Blocks", "2 Requests")
    assert [shown for shown in wanted if shown not in picture] == []


async def test_the_focus_comes_back_with_the_room() -> None:
    live = Live()
    live.ask(3)
    async with live.app.run_test(size=(80, 24)) as pilot:
        live.run(8)
        await pilot.press("7")
        await frame(pilot)
        for size in ((20, 5), (80, 24)):
            await pilot.resize_terminal(*size)
            await frame(pilot)
        await frame(pilot)
        assert live.app.main.focused is live.app.main.prefixes
        await pilot.press("down")
        await frame(pilot)
        assert live.app.view().selected_prefix is not None


async def test_the_help_fits_any_size_and_explains_the_glyphs() -> None:
    live = Live()
    async with live.app.run_test(size=(120, 120)) as pilot:
        await pilot.press("question_mark")
        await pilot.pause()
        picture = text_of(live.app)
        for words in ("PagedAttention", "cached", "evicted", "shared", "pause and resume", "q ctrl+q"):
            assert words in picture
        await pilot.press("question_mark")
        await frame(pilot)
        assert "PagedAttention" not in text_of(live.app)
