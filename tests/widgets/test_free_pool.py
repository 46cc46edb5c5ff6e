from __future__ import annotations

import re

import numpy as np
import pytest
from panel_session import Session, busy_session, lines, shown

from kvtui.glyphs import ASCII, UNICODE
from kvtui.waste import Waste, waste_of
from kvtui.widgets.free_pool import FreePool, byte_words, waste_words
from kvtui.widgets.level_chart import CACHED, TRACE, Gathered, cells, gather


def gathered(used, held, **fields):
    zeros = np.zeros(len(used), np.int64)
    values = {"preemptions": zeros, "evictions": zeros} | fields
    return Gathered(0, len(used), 1, np.array(used, float), np.array(held, float), **values)


def test_used_blocks_are_drawn_to_an_eighth_of_a_cell_and_cached_ones_above_them():
    codes = cells(gathered([0, 8, 20, 32], [0, 24, 20, 32]), num_blocks=32, rows=4)
    assert codes.tolist() == [
        [0, 0, 0, 8],
        [0, CACHED, 4, 8],
        [0, CACHED, 8, 8],
        [0, 8, 8, 8],
    ]


def test_whatever_is_not_none_is_seen():
    codes = cells(gathered([1, 0, 1], [1, 1, 2]), num_blocks=10_000, rows=3)
    assert codes.tolist() == [[0, 0, 0], [0, 0, TRACE], [1, TRACE, 1]]
    assert cells(gathered([0], [10_000]), num_blocks=10_000, rows=3).tolist() == [[CACHED], [CACHED], [CACHED]]


def test_a_column_is_the_mean_of_its_steps_and_keeps_its_value_while_it_moves():
    session = busy_session(37)
    used = session.history.series("used", 0, 37)
    first = gather(session.history, 10, 4)
    assert (first.first, first.stop, first.steps_per_column) == (0, 37, 4)
    assert first.used.tolist() == [used[i : i + 4].mean() for i in range(0, 37, 4)]
    assert first.preemptions.sum() == session.state.counters.preemptions > 0
    session.run(2)
    assert gather(session.history, 10, 4).used[:9].tolist() == first.used[:9].tolist()


def test_the_scale_shows_all_that_is_remembered_and_drops_columns_that_lost_steps():
    session = Session(history=50)
    session.ask(max_tokens=100)
    session.run(99)
    shown_now = gather(session.history, 20)
    assert shown_now.steps_per_column == 3
    assert shown_now.first == 51, "49 to 50 are what is left of a column of three"
    assert shown_now.stop == 99
    assert gather(session.history, 0) is None
    assert gather(Session().history, 20) is None


@pytest.mark.parametrize("width", [40, 110])
async def test_the_size_of_a_large_pool_is_written_as_everywhere_else(width):
    session = Session(num_blocks=120_000)
    session.ask()
    session.run(3)
    panel = FreePool()
    async with shown(panel, session.view(), width, 11):
        assert lines(panel)[1].split()[0] == "120,000"


async def test_the_scales_of_a_quantised_cache_stand_apart_in_the_formula():
    session = Session(kv_dtype="int8")
    session.ask("abc def", max_tokens=4)
    session.run(3)
    waste = waste_of(session.state)
    panel = FreePool()
    async with shown(panel, session.view(), 120, 14):
        assert f"2·30 layers·3 kv heads·{waste.held_tokens} tokens·(64·1 B + 4 B scale)" in lines(panel)[-1]
    assert waste.bytes == 2 * 30 * 3 * waste.held_tokens * (64 * 1 + 4) > 0


async def test_the_panel_says_the_levels_and_the_waste_with_its_formula():
    session = busy_session()
    waste = waste_of(session.state)
    panel = FreePool()
    async with shown(panel, session.view(), 120, 14):
        drawn = lines(panel)
        state = session.state
        assert re.search(rf"used {state.used} .*cached {state.cached} .*free {state.free} .*of 40 blocks", drawn[0])
        assert f"waste {waste.waste:.1%} = 1 − {waste.held_tokens}/({waste.used_blocks}·4)" in drawn[-2]
        reserved = f"versus {waste.reserved_waste:.0%} = 1 − {waste.held_tokens}/{waste.reserved_slots}"
        assert f"{reserved} if each request had reserved its maximum for itself" in drawn[-2]
        assert f"2·30 layers·3 kv heads·64·{waste.held_tokens} tokens·2 B" in drawn[-1]
        assert waste.bytes == 2 * 30 * 3 * 64 * waste.held_tokens * 2
        assert drawn[1].lstrip().startswith("40 ")
        assert re.search(r"step +0 .* 29 $", drawn[-4])
        assert "█" in "".join(drawn)
        assert drawn[-3].startswith(" held up by blocks in ")
        assert "preempted" in drawn[-6]
        assert sum(int(c) for c in re.findall(r"\d", drawn[-6])) == session.state.counters.preemptions


@pytest.mark.parametrize(
    ("height", "has"),
    [(1, ""), (4, "step"), (6, "pressure"), (6, "held up by"), (8, "waste"), (10, "holds"), (11, "evicted")],
)
async def test_a_lower_panel_gives_up_words_before_the_chart(height, has):
    panel = FreePool()
    async with shown(panel, busy_session().view(), 100, height):
        drawn = lines(panel)
        assert has in "".join(drawn[1:])
        assert height < 2 or "█" in "".join(drawn[1:])


async def test_a_nearly_full_pool_is_called_so():
    session = Session(num_blocks=10, block_size=4)
    session.ask([300] * 38, max_tokens=3)
    session.run(4)
    assert session.state.free + session.state.cached == 0
    panel = FreePool()
    async with shown(panel, session.view(), 80, 9):
        assert " full " in lines(panel)[0]
        assert "nearly" not in lines(panel)[0]


@pytest.mark.parametrize(
    ("free", "cached", "words"),
    [(3, 0, ""), (2, 0, "nearly full"), (1, 1, "nearly full"), (0, 3, ""), (0, 0, "full")],
)
async def test_a_pool_is_nearly_full_when_a_twentieth_of_it_can_still_be_taken(free, cached, words):
    session = busy_session()
    session.state.used, session.state.cached, session.state.free = 40 - free - cached, cached, free
    panel = FreePool()
    async with shown(panel, session.view(), 80, 9):
        assert re.search(r"nearly full|full|$", lines(panel)[0])[0] == words


async def test_where_there_is_one_row_for_them_preemptions_and_evictions_are_counted_together():
    session = busy_session(60)
    history = session.history
    events = history.series("preemptions", 0, 60) + history.series("evictions", 0, 60)
    assert history.series("evictions", 0, 60).sum() > 0
    panel = FreePool()
    async with shown(panel, session.view(), 100, 9):
        (row,) = (line for line in lines(panel) if line.lstrip().startswith("pressure"))
        assert row[39:99] == "".join(" 123456789"[count] if count < 10 else "+" for count in events.tolist())


async def test_more_events_in_a_column_than_a_digit_tells_are_a_plus():
    panel = FreePool()
    view = busy_session().view()
    async with shown(panel, view, 60, 12):
        counts = np.array([0, 1, 9, 10, 500])
        assert panel.draw(view, ("events", "evicted", counts.tobytes()), 60).text.endswith(" 19++ ")


async def test_steps_a_column_can_be_chosen():
    session = Session()
    session.ask(max_tokens=140)
    session.run(120)
    panel = FreePool()
    async with shown(panel, session.view(), 70, 12) as pilot:
        panel.focus()
        assert "3 steps a column" in "".join(lines(panel))
        await pilot.press("plus", "plus")
        assert "1 step a column" in "".join(lines(panel))
        await pilot.press(*["minus"] * 3)
        assert "4 steps a column" in "".join(lines(panel))


def test_words_come_from_long_to_short_and_in_ascii():
    waste = Waste(
        held_tokens=1_234,
        used_blocks=80,
        utilisation=0.96,
        waste=0.04,
        reserved_slots=4_255,
        reserved_waste=0.71,
        bytes=5_000_000,
    )
    for words in (waste_words(waste, 16, ASCII), byte_words(waste, Session().header, ASCII)):
        sizes = [sum(len(text) for text, _ in variant) for variant in words]
        assert sizes == sorted(sizes, reverse=True)
        assert all(text.isascii() for variant in words for text, _ in variant)
    assert "4.8 MiB" in "".join(text for text, _ in byte_words(waste, Session().header, UNICODE)[0])
