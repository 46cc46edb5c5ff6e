"""The inspector's pages: a block's life, the decisions about a request, the step, and the free queue, as links."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace

import pytest
from panel_session import PALETTE, Session, busy_session, lines, shown

from engine.trace.biography import Biography
from engine.trace.events import DecisionKind, StepTrace
from engine.trace.file_format import RecordingError
from engine.trace.lookup import Lookup
from engine.trace.reader import Recording
from engine.trace.recording import RecordingWriter
from kvtui.glyphs import ASCII, UNICODE
from kvtui.history import History
from kvtui.names import Names
from kvtui.view import BlockSelected, View
from kvtui.widgets import inspector_lists
from kvtui.widgets.inspector import Inspector
from kvtui.widgets.transport import SeekRequested


class Played:
    """A recording shown at a step: a `Source` that does not move."""

    live = False
    paused = True
    speed = 1.0
    generation = 0
    error = None
    first = 0

    def __init__(self, recording, step):
        self.recording = recording
        self.header = recording.header
        self.state = recording.state_at(step)
        self.length = recording.num_steps
        self.history = History()
        self.steps = []
        self.names = Names()
        self.names.follow(self.state.requests)
        for message in recording.steps(0, step + 1):
            self.history.append(message, self.state)

    @property
    def position(self):
        return self.state.step

    def view(self, request=None, block=None, glyphs=UNICODE):
        return View(
            source=self,
            state=self.state,
            history=self.history,
            palette=PALETTE,
            glyphs=glyphs,
            selected_request=request,
            selected_block=block,
            names=self.names,
        )


@contextmanager
def played(tmp_path, step=-1, num_blocks=20):
    """A schedule under pressure, recorded and opened at a step."""
    session = Session(num_blocks=num_blocks)
    messages = []
    session.engine.add_sink(messages.append)
    for i in range(10):
        session.ask("the block of the cache page " * (1 + i % 3) + f"{i}", max_tokens=8 + 9 * (i % 4), name=f"rag-{i}")
    session.run(60)
    path = tmp_path / "r.mcap"
    with RecordingWriter(path, messages[0]) as writer:
        for message in messages[1:]:
            writer(message)
    with Recording.open(path) as recording:
        yield Played(recording, step % recording.num_steps)


def text(panel):
    return "\n".join(line.rstrip() for line in lines(panel))


def listed(panel):
    """The lines of a list of steps, without the cursor."""
    return [bare for line in lines(panel) if (bare := line.strip("▸ "))[:1].isdigit()]


async def turn_to(panel, page):
    for _ in range(5):
        if panel.page(panel.view) == page:
            return
        panel.next_page()
    raise AssertionError(f"there is no page {page}")


async def test_a_picked_block_shows_its_whole_life_newest_first(tmp_path) -> None:
    with played(tmp_path) as source:
        block = 3
        life = Biography(source.state, block)
        life.search(Lookup(source.recording), 10**6)
        async with shown(Inspector(), source.view(block=block), 110, 80) as pilot:
            found, heading = listed(pilot.app.panel), lines(pilot.app.panel)[0]
        assert len(life.events) > 8
        assert [int(line.split()[0]) for line in found] == [event.step for event in life.events]
        assert "evicted: content" in "".join(found)
        assert "taken by rag-" in found[-1]
        assert heading.startswith(f"block {block} · ")


async def test_enter_and_a_click_go_to_the_moment_of_a_line(tmp_path) -> None:
    with played(tmp_path) as source:
        panel = Inspector()
        async with shown(panel, source.view(block=3), 110, 30) as pilot:
            panel.focus()
            await pilot.pause()
            events = Biography(source.state, 3)
            events.search(Lookup(source.recording), 10**6)
            await pilot.press("down", "down", "enter")
            await pilot.pause()
            assert [m.step for m in pilot.app.posted] == [events.events[2].step]
            drawn = lines(panel)
            marked = next(y for y, line in enumerate(drawn) if "▸" in line)
            assert drawn[marked].split()[1] == str(events.events[2].step)
            await pilot.click(panel, offset=(20, marked + panel.gutter.top + 3))
            await pilot.pause()
            assert [m.step for m in pilot.app.posted][1:] == [events.events[5].step]
            assert all(isinstance(m, SeekRequested) for m in pilot.app.posted)


async def test_a_list_longer_than_its_window_follows_the_cursor(tmp_path) -> None:
    with played(tmp_path) as source:
        panel = Inspector()
        async with shown(panel, source.view(block=3), 110, 8) as pilot:
            panel.focus()
            await pilot.pause()
            seen = set()
            for _ in range(60):
                drawn = lines(panel)
                assert sum("▸" in line for line in drawn) == 1
                seen.update(line for line in drawn if "evicted" in line)
                await pilot.press("down")
            assert "taken by" in next(line for line in lines(panel) if "▸" in line)
            assert len(seen) > 1
            await pilot.press(*["pageup"] * 10)
            assert "▸" in next(line for line in lines(panel) if line.strip("▸ ")[:1].isdigit())


async def test_how_far_back_is_looked_without_being_asked_is_bounded(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(inspector_lists, "AHEAD", 10)
    monkeypatch.setattr(inspector_lists, "STRETCH", 5)
    with played(tmp_path, num_blocks=40) as source:
        panel = Inspector()
        async with shown(panel, source.view(block=0), 110, 60) as pilot:
            panel.focus()
            await pilot.pause()
            for _ in range(3):
                before = text(panel)
                if "older: the" not in before:
                    break
                await pilot.press("o")
                assert text(panel) != before
            for _ in range(12):
                await pilot.press("o")
            assert "older" not in text(panel)


async def test_a_search_that_takes_longer_than_a_frame_goes_on_by_itself(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(inspector_lists, "FRAME_SECONDS", -1.0)
    monkeypatch.setattr(inspector_lists, "STRETCH", 5)
    with played(tmp_path) as source:
        panel = Inspector()
        async with shown(panel, source.view(block=3), 110, 60) as pilot:
            for _ in range(100):
                if "looking further back" not in text(panel):
                    break
                await pilot.pause(0.02)
            assert "taken by rag-" in [line for line in lines(panel) if line.strip()][-1]


async def test_a_damaged_part_of_a_recording_ends_the_list_with_one_line_that_says_so(tmp_path, monkeypatch) -> None:
    look = Lookup.block_ops

    def damaged(self, block, start, stop):
        if start < 20:
            raise RecordingError("steps 0 to 19 cannot be read (\x1b[31mtorn)")
        return look(self, block, start, stop)

    monkeypatch.setattr(Lookup, "block_ops", damaged)
    monkeypatch.setattr(inspector_lists, "STRETCH", 5)
    with played(tmp_path) as source:
        async with shown(Inspector(), source.view(block=3), 110, 60) as pilot:
            found = listed(pilot.app.panel)
            assert (
                [line for line in lines(pilot.app.panel) if line.strip()][-1].strip().startswith("steps 0 to 19 cannot")
            )
            assert all(int(line.split()[0]) >= 20 for line in found)
            await pilot.press("o", "end", "enter")
            assert listed(pilot.app.panel) == found


async def test_steps_that_come_while_a_block_is_selected_are_added_to_its_life() -> None:
    session = busy_session(5)
    panel = Inspector()
    state = session.state
    block = next(b for b in range(40) if 0 < state.filled[b] < 4)
    async with shown(panel, replace(session.view(), selected_block=block), 110, 30):
        assert "what came before is not kept" in text(panel)
        steps = session.run(12)
        panel.update_view(replace(session.view(), selected_block=block), steps, False)
        ops = [step.index for step in steps for row in step.ops if row.a == block]
        assert listed(panel)[0].split()[0] == str(ops[-1])


async def test_the_decisions_about_a_request_are_listed_with_their_numbers(tmp_path) -> None:
    with played(tmp_path) as source:
        request = max(source.state.requests.values(), key=lambda r: r.preemptions)
        assert request.preemptions
        panel = Inspector()
        async with shown(panel, source.view(request=request.request), 110, 60) as pilot:
            await turn_to(panel, "decisions")
            await pilot.pause()
            drawn = text(panel)
            steps = [step for step in source.recording.steps() if isinstance(step, StepTrace)]
            decided = [(s.index, d) for s in steps for d in s.decisions if d.request == request.request]
            told = [line.split() for line in listed(panel)]
            assert [int(words[0]) for words in told if words[1].endswith(":")] == [i for i, _ in reversed(decided)]
            assert sum(d.kind == DecisionKind.PREEMPTED for _, d in decided) == drawn.count("preempted: ")


async def test_a_request_shows_where_its_time_went(tmp_path) -> None:
    with played(tmp_path) as source:
        request = max(source.state.requests.values(), key=lambda r: r.preemptions)
        panel = Inspector()
        async with shown(panel, source.view(request=request.request), 110, 12):
            drawn = text(panel)
            for words in ("queued ", "prefill ", "decode ", "preempted ", "recompute ", "first token ", "later one"):
                assert words in drawn


async def test_the_step_says_what_was_decided_and_on_what_numbers(tmp_path) -> None:
    with played(tmp_path) as source:
        steps = list(source.recording.steps())
        at = next(s.index for s in steps[1:] if any(d.kind == DecisionKind.PREEMPTED for d in s.decisions))
    with played(tmp_path, step=at) as source:
        panel = Inspector()
        async with shown(panel, source.view(), 110, 20):
            await turn_to(panel, "step")
            drawn, step, before = text(panel), steps[at], steps[at - 1].counters
            scheduled = sum(member.num_scheduled for member in step.batch)
            free = (before.cached_blocks + before.free_blocks, step.counters.cached_blocks + step.counters.free_blocks)
            assert f"step {at} · " in drawn
            assert f"{scheduled}/64 tokens" in drawn
            assert f"/{source.header.max_num_seqs} places" in drawn
            assert f"{free[0]} → {free[1]} blocks to be had" in drawn
            assert "yields  " in drawn
            assert "defers" in drawn
            assert " behind" in drawn
            assert "execute" in drawn


async def test_before_the_first_step_there_is_none_to_tell_of() -> None:
    panel = Inspector()
    async with shown(panel, Session().view(), 60, 10):
        await turn_to(panel, "step")
        assert "No step yet" in text(panel)
        await turn_to(panel, "next")
        assert "block  0 · free" in text(panel)


async def test_the_next_page_lists_the_blocks_in_the_order_in_which_they_are_taken(tmp_path) -> None:
    with played(tmp_path, step=45) as source:
        panel = Inspector()
        async with shown(panel, source.view(), 110, 40) as pilot:
            await turn_to(panel, "next")
            panel.focus()
            await pilot.pause()
            queue = [line for line in lines(panel) if ". block" in line]
            order = source.state.free_queue(64).tolist()
            assert [int(line.split("block")[1].split()[0]) for line in queue] == order
            assert ["░" in line for line in queue] == [bool(source.state.key[block]) for block in order]
            await pilot.press("down", "enter")
            await pilot.pause()
            assert [m.block for m in pilot.app.posted if isinstance(m, BlockSelected)] == [order[1]]


async def test_a_block_that_nobody_holds_says_how_many_are_taken_before_it(tmp_path) -> None:
    with played(tmp_path, step=45) as source:
        panel = Inspector()
        queue = source.state.free_queue(64).tolist()
        assert len(queue) > 2
        async with shown(panel, source.view(block=queue[0]), 150, 12):
            assert "it is taken next" in text(panel)
            panel.update_view(source.view(block=queue[1]), (), False)
            assert "one is taken before it" in text(panel)
            panel.update_view(source.view(block=queue[2]), (), False)
            assert "2 others are taken before it" in text(panel)
            used = next(b for b in range(20) if source.state.refs[b])
            panel.update_view(source.view(block=used), (), False)
            assert "taken before it" not in text(panel)


@pytest.mark.parametrize(
    ("glyphs", "size"), [(UNICODE, (1, 1)), (ASCII, (58, 5)), (UNICODE, (108, 12))], ids=["1x1", "58x5-ascii", "108x12"]
)
async def test_every_line_of_every_page_is_as_wide_as_the_panel(tmp_path, glyphs, size) -> None:
    with played(tmp_path) as source:
        panel = Inspector()
        async with shown(panel, source.view(glyphs=glyphs), *size) as pilot:
            panel.focus()
            for request, block in ((None, None), (0, None), (9, None), (0, 3), (None, 19), (None, 10**6)):
                panel.update_view(source.view(request, block, glyphs), (), True)
                for _ in range(4):
                    assert glyphs is UNICODE or text(panel).isascii()
                    await pilot.press("down", "enter", "o", "pageup")
                    assert len(lines(panel)) == size[1]
                    panel.next_page()


async def test_the_title_of_a_block_that_nobody_holds_names_no_request() -> None:
    session = Session()
    session.ask("the block", max_tokens=9)
    session.run(3)
    block = next(b for b in range(40) if session.state.refs[b] == 0)
    panel = Inspector()
    async with shown(panel, replace(session.view(), selected_block=block), 100, 10):
        assert str(panel.border_title).startswith(f"Inspector · block {block} · life 1/4")


async def test_the_text_page_of_a_block_is_about_who_holds_it_or_held_it_last_and_never_about_another(tmp_path) -> None:
    with played(tmp_path, step=45) as source:
        panel, state = Inspector(), source.state
        cached = next(b for b in source.state.free_queue(64).tolist() if int(state.last_owner[b]) in state.requests)
        used = next(b for b in range(20) if state.refs[b] and int(state.owner[b]) != max(state.requests))
        async with shown(panel, source.view(block=cached), 110, 12):
            for block, holder in ((cached, int(state.last_owner[cached])), (used, int(state.owner[used]))):
                panel.update_view(source.view(block=block), (), False)
                await turn_to(panel, "text")
                panel.update_view(source.view(block=block), (), False)
                assert f"rag-{holder} " in lines(panel)[0]
                assert f"block {block} · rag-{holder} " in str(panel.border_title)


async def test_the_text_page_of_a_block_that_nobody_has_held_says_so() -> None:
    session = Session()
    session.ask("the block", max_tokens=9)
    session.run(3)
    block = next(b for b in range(40) if session.state.last_op[b] < 0)
    panel = Inspector()
    async with shown(panel, replace(session.view(), selected_block=block), 100, 10):
        await turn_to(panel, "text")
        assert "No request holds this block" in text(panel)


async def test_the_title_says_which_page_it_is_and_that_there_are_more() -> None:
    panel = Inspector()
    async with shown(panel, busy_session().view(selected=3), 100, 10):
        assert "text 1/4, v: more" in str(panel.border_title)
        panel.next_page()
        assert "decisions 2/4" in str(panel.border_title)
