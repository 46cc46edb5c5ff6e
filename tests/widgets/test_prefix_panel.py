from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING

import pytest
from panel_session import PALETTE, PanelApp, Session, lines, shown

from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.request import Request, SamplingParams
from engine.simulated import simulated_engine
from engine.trace.state import PoolState
from kvtui.glyphs import ASCII, UNICODE
from kvtui.palette import load_palettes
from kvtui.prefix_tree import PrefixTree
from kvtui.view import Prefix, PrefixSelected, RequestSelected
from kvtui.widgets.prefix_row import Row, draw_row, uses
from kvtui.widgets.prefix_tree import PrefixPanel

if TYPE_CHECKING:
    from textual.pilot import Pilot

SHARED = "the block of the cache page and the table of it "


def questions(count: int = 5, steps: int = 12, **settings) -> Session:
    """Questions that begin with the same four blocks of four tokens, the first of them asked alone."""
    session = Session(num_blocks=120, **settings)
    for i in range(count):
        session.ask(f"{SHARED}{i} what is the page", max_tokens=8 + 4 * i)
        session.run(2)
    session.run(steps)
    return session


class Posting(PanelApp):
    def on_prefix_selected(self, message: PrefixSelected) -> None:
        self.posted.append(message)


def prefix_of(pilot: Pilot[None]) -> list[Prefix]:
    return [message.prefix for message in pilot.app.posted if isinstance(message, PrefixSelected)]


@pytest.fixture(autouse=True)
def _posting(monkeypatch):
    monkeypatch.setattr("panel_session.PanelApp", Posting)


async def test_a_shared_prefix_is_one_line_with_its_users_its_hits_and_what_branches_off_below_it():
    session = questions()
    state = session.state
    users = sum(1 for request in state.requests.values() if request.table)
    assert users >= 2
    panel = PrefixPanel()
    async with shown(panel, session.view(), 110, 12):
        drawn = lines(panel)
        assert re.match(rf". +{users} +4 +now  █ \d block", drawn[1])
        assert "the block of the cache page" in drawn[1]
        below = [line for line in drawn[2:] if line.strip()]
        assert len(below) == 5
        assert all(re.search(r"[├└]─", line) for line in below)
        assert [" now " in line for line in below].count(True) == users
        assert sum("░" in line for line in below) == 5 - users
        assert str(panel.border_title).startswith(f"Prefix tree ─ {sum(panel.prefixes.counts)} blocks")


@pytest.mark.parametrize("glyphs", [UNICODE, ASCII])
async def test_siblings_that_begin_with_the_same_words_are_told_apart_by_those_that_follow(glyphs):
    session = Session(num_blocks=120, block_size=16)
    shared = "the block of the cache page and the table of it is what we look at\nand "
    for last in ("tides", "stars", "winds"):
        session.ask(
            shared + f"now explain about those very large {last} and what they are made of, in many words", max_tokens=8
        )
    session.run(4)
    panel = PrefixPanel()
    async with shown(panel, dataclasses.replace(session.view(), glyphs=glyphs), 90, 12):
        below = [line for line in lines(panel)[2:] if line.strip()]
        assert len(below) == 3
        first = next(line for line in below if "very large" in line)
        assert below[0] is first, "the first of them says all"
        for line in below[1:]:
            assert re.search(rf"{re.escape(glyphs.ellipsis)}(tides|stars|winds)", line)


async def test_moving_the_cursor_selects_the_blocks_and_enter_goes_to_each_request_that_uses_them():
    session = questions()
    using = [number for number, request in session.state.requests.items() if request.table]
    first = session.state.requests[using[0]].table
    panel = PrefixPanel()
    async with shown(panel, session.view(), 100, 12) as pilot:
        panel.focus()
        await pilot.press("down")
        (selected,) = prefix_of(pilot)
        assert list(selected.blocks) == first[: len(selected.blocks)]
        for request in (*using, using[0]):
            await pilot.press("enter")
            message = pilot.app.posted[-1]
            assert isinstance(message, RequestSelected)
            assert message.request == request
            assert message.jump
            panel.update_view(session.view(selected=request), (), False)
        await pilot.press("down", "down", "up")
        blocks = prefix_of(pilot)[-1].blocks
        assert not set(blocks) & set(selected.blocks)
        assert lines(panel)[2].startswith("▸")


async def test_what_is_selected_grows_with_its_run():
    session = questions(count=1, steps=0)
    panel = PrefixPanel()
    async with shown(panel, session.view(), 100, 8) as pilot:
        panel.focus()
        await pilot.press("down")
        told = prefix_of(pilot)[-1]
        steps = session.run(4)
        view = dataclasses.replace(session.view(), selected_prefix=told.key, selected_blocks=told.blocks)
        panel.update_view(view, steps, False)
        await pilot.pause()
        assert len(prefix_of(pilot)[-1].blocks) > len(told.blocks)
        assert prefix_of(pilot)[-1].key == told.key


@pytest.mark.parametrize(
    ("guides", "drawn"),
    [
        ((), "░"),
        ((False,), "├─░"),
        ((True,), "└─░"),
        ((False, True, False), "│   ├─░"),
        ((True, False, True), "  │ └─░"),
    ],
)
def test_a_line_leads_down_past_a_run_to_its_next_sibling_and_ends_at_the_last(guides, drawn):
    row = Row(1, guides, False, False, False, False, False, False, 0, -1, 0, -1, (0, 1, 0), "the page")
    assert draw_row(Session().view(), row, 60).text.startswith(f"    ·    ·  {drawn} 4 tok  the page")


def test_a_request_uses_the_contents_whose_blocks_are_in_its_table():
    session = questions()
    tree = PrefixTree(session.header)
    tree.jump(session.state)
    answers = set()
    for request in session.state.requests:
        table = set(session.state.table(request))
        for node in tree.nodes.values():
            answers.add(bool(table & set(node.blocks)))
            assert uses(session.state, request, node) == bool(table & set(node.blocks))
    assert answers == {True, False}


async def test_branches_can_be_folded_away():
    session = questions()
    panel = PrefixPanel()
    async with shown(panel, session.view(), 100, 12) as pilot:
        panel.focus()
        await pilot.press("down", "minus")
        assert len([line for line in lines(panel)[1:] if line.strip()]) == 1
        assert "+ █" in lines(panel)[1]
        await pilot.press("plus")
        assert len([line for line in lines(panel)[1:] if line.strip()]) == 6


async def test_a_long_tree_scrolls_under_the_cursor_which_stays_on_its_run_while_the_tree_grows():
    session = Session(num_blocks=400)
    for i in range(60):
        session.ask(f"{i} " * 4 + SHARED, max_tokens=2)
    session.run(40)
    panel = PrefixPanel()
    async with shown(panel, session.view(), 90, 10) as pilot:
        panel.focus()
        await pilot.press(*["down"] * 20)
        before = lines(panel)
        assert before[9].startswith("▸")
        await pilot.press("pageup", "pageup", "pageup")
        assert lines(panel)[1].startswith("▸")
        await pilot.press(*["pagedown"] * 9)
        assert lines(panel)[9].startswith("▸"), "the end of the tree fills the window"
        marked = lines(panel)[9]
        session.ask("something else entirely, and long enough", max_tokens=1)
        panel.update_view(session.view(), session.run(3), False)
        assert marked in lines(panel)


@pytest.mark.parametrize(("size", "glyphs"), [((100, 12), ASCII), ((38, 6), ASCII), ((20, 2), ASCII), ((9, 1), ASCII)])
async def test_every_size_and_the_ascii_set_can_be_drawn(size, glyphs):
    panel = PrefixPanel()
    async with shown(panel, questions().view(glyphs=glyphs), *size) as pilot:
        panel.focus()
        await pilot.press("down", "down")
        assert all(line.isascii() for line in lines(panel))


async def test_untrusted_text_is_drawn_as_symbols_and_without_color_states_differ_by_glyph():
    session = Session(num_blocks=60)
    session.ask("\x1b[31mred\x1b[0m [bold]x[/bold] 🙂\x07", max_tokens=4)
    session.run(8)
    panel = PrefixPanel()
    mono = next(iter(load_palettes(mono=True).values()))
    async with shown(panel, session.view(palette=mono), 100, 5):
        (line,) = (line for line in lines(panel) if "blocks" in line)
        assert "␛[31mred" in line
        assert "[bold]" in line
        assert "░" in line


async def test_the_empty_state_says_what_to_do():
    panel = PrefixPanel()
    async with shown(panel, Session().view(), 90, 8):
        text = "\n".join(lines(panel))
        assert "first 4 tokens" in text
        assert "--workload rag" in text


@pytest.mark.parametrize(
    ("cache", "policy", "said"),
    [({"prefix_caching": False}, "paged", "--no-prefix-caching"), ({}, "contiguous", "--policy contiguous")],
)
async def test_a_session_without_prefix_caching_says_so(cache, policy, said):
    session = Session()
    engine = simulated_engine(
        EngineConfig(cache=CacheConfig(num_blocks=40, **cache), scheduler=SchedulerConfig(policy=policy))
    )
    engine.add_request("a b c", SamplingParams(max_tokens=1))
    session.header, session.state = engine.header, PoolState(engine.header)
    panel = PrefixPanel()
    async with shown(panel, session.view(palette=PALETTE), 90, 8):
        text = "\n".join(lines(panel))
        assert "Prefix caching is off" in text
        assert said in text


@pytest.mark.parametrize("window", [9, 10, 14])
async def test_a_text_without_its_beginning_is_called_lost_only_where_nobody_finds_it(window: int):
    session = Session(num_blocks=7, block_size=4, chunk=8, sliding_window=window)
    text = [300 + i for i in range(17)]
    session.ask(text, max_tokens=1)
    session.run(4)
    labels = []
    for i in range(6):
        session.ask([340 + i, 5], max_tokens=1)
        session.run(2)
        found = session.engine.scheduler.kv.get_computed_blocks(Request(10**6, "", text, SamplingParams()))
        session.engine.scheduler.kv.forget(10**6)
        panel = PrefixPanel()
        async with shown(panel, session.view(), 110, 12):
            drawn = [line for line in lines(panel)[1:] if "█" in line or "░" in line]
            labels.append("".join(re.findall("beginning [a-z ]*(?:gone|window)", "".join(drawn))))
            assert (found.num_tokens == 0) == (labels[-1] == "beginning gone" or not drawn)
    assert {"", "beginning gone"} <= set(labels)
    assert ("beginning behind the window" in labels) == (window < 14)


async def test_contents_in_the_cpu_pool_have_their_own_glyph():
    engine = simulated_engine(
        EngineConfig(
            cache=CacheConfig(num_blocks=12, block_size=4, num_cpu_blocks=20),
            scheduler=SchedulerConfig(max_num_seqs=2, max_model_len=64),
        )
    )
    session = Session()
    session.engine, session.header, session.state = engine, engine.header, PoolState(engine.header)
    engine.add_sink(session._messages.append)
    for i in range(6):
        session.ask(f"{i} " * 4 + SHARED, max_tokens=4)
    session.run(40)
    assert session.state.cpu_used
    panel = PrefixPanel()
    async with shown(panel, session.view(), 100, 20):
        assert any("⇄" in line for line in lines(panel))
        assert "on the CPU" in str(panel.border_title)
