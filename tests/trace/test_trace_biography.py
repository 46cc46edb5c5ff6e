"""The story of a block: what happened to it, as far back as one looks, and that it agrees with the state."""

import random

import pytest
from trace_builder import (
    TraceBuilder,
    allocate,
    evict,
    fill,
    hashed,
    make_header,
    release,
    share,
    simulated_trace,
)

from engine.trace import biography as module
from engine.trace.biography import Biography, Happening, ops_of
from engine.trace.block_words import block_words, short_key
from engine.trace.events import NO_REQUEST, BlockOp, Op, Phase, StepTrace
from engine.trace.lookup import Lookup
from engine.trace.reader import Recording
from engine.trace.recording import RecordingWriter
from engine.trace.state import PoolState


class Steps:
    """Steps in a list, looked up as those of a recording are."""

    def __init__(self, messages):
        self.steps = [message for message in messages if isinstance(message, StepTrace)]
        self.asked = []

    def block_ops(self, block, start, stop):
        self.asked.append((start, stop))
        return ops_of((step for step in self.steps if start <= step.index < stop), block)


def told(build, block, **search):
    life = Biography(build.state, block)
    life.search(Steps(build.messages), **{"most_steps": 1000} | search)
    return life


def words(life):
    return [f"{event.step}: {block_words(event, 4)}" for event in reversed(life.events)]


def life_of_block_3():
    build = TraceBuilder()
    build.arrive(0, 1, 2)
    build.prefill(0, [3, 1], 6)
    build.step(hashed(3, 0xABC), fill(1, 0, 3), batch=[(0, Phase.DECODE, 6, 1)])
    build.step(share(3, 1, 0), allocate(2, 1, 1), batch=[(1, Phase.PREFILL, 4, 2)])
    build.step(release(1, 0), release(3, 0), finished=[(0, "stop", "")])
    build.step(release(2, 1), release(3, 1), finished=[(1, "abort", "")])
    build.step()
    build.step(evict(3, 0xABC), allocate(3, 2, 0), fill(3, 2, 1), batch=[(2, Phase.PREFILL, 0, 1)])
    build.step(fill(3, 2, 2), batch=[(2, Phase.DECODE, 1, 1)])
    build.step(fill(3, 2, 3), batch=[(2, Phase.DECODE, 2, 1)])
    return build


def test_a_block_tells_its_life_in_order_with_steps_and_with_whom():
    assert words(told(life_of_block_3(), 3)) == [
        "0: taken by #0 for place 0 of its table",
        "0: filled by #0: 4/4 slots",
        f"1: full, and hashed: its content can be found as {short_key(0xABC)}",
        "2: shared with #1, place 0 of its table: 2 references",
        "3: released by #0: 1 reference left",
        f"4: released by #1, nobody else holds it: cached as {short_key(0xABC)}",
        f"6: evicted: content {short_key(0xABC)} was lost, #2 needed the block",
        "6: taken by #2 for place 0 of its table",
        "8: filled by #2: 3/4 slots, since step 6",
    ]


def test_a_block_without_a_key_is_free_when_its_last_holder_lets_go():
    build = life_of_block_3()
    assert words(told(build, 1))[-1] == "3: released by #0, nobody else holds it: free"
    assert told(build, 7).events == []
    assert told(build, 7).complete


def test_a_content_found_in_the_cache_is_told_as_reuse():
    build = TraceBuilder()
    build.arrive(0, 1)
    build.prefill(0, [5], 4)
    build.step(hashed(5, 9), release(5, 0), finished=[(0, "stop", "")])
    build.step(share(5, 1, 0), batch=[(1, Phase.PREFILL, 3, 1)])
    assert words(told(build, 5))[-1] == "2: found by #1 in the cache, for place 0 of its table"


def test_both_sides_of_a_copy_on_write_tell_it():
    build = TraceBuilder()
    build.arrive(0, 1)
    build.prefill(0, [3], 2)
    build.step(share(3, 1, 0))
    build.step(allocate(6, 1, 0), BlockOp(Op.COPY, 3, 6, 2), release(3, 1))
    assert words(told(build, 3))[-2:] == [
        "2: copy on write: 2 slots copied to block 6",
        "2: released by #1: 1 reference left",
    ]
    assert words(told(build, 6)) == [
        "2: taken by #1 for place 0 of its table",
        "2: copy on write: 2 slots copied from block 3",
    ]


def test_swaps_are_told_with_the_cpu_block_and_why():
    build = TraceBuilder()
    build.arrive(0, 1)
    build.prefill(0, [2], 3)
    build.step(BlockOp(Op.SWAP_OUT, 2, 1, 0), release(2, 0))
    build.step(allocate(4, 0, 0), BlockOp(Op.SWAP_IN, 1, 4, 0), hashed(4, 7), release(4, 0))
    build.step(BlockOp(Op.SWAP_OUT, 4, 0, NO_REQUEST), evict(4, 7), allocate(4, 1, 0))
    assert words(told(build, 2))[-2] == "1: copied to CPU block 1 for #0"
    assert words(told(build, 4))[1] == "2: content of #0 brought back from CPU block 1"
    assert words(told(build, 4))[-3] == "3: copied to CPU block 0 before its eviction"
    # CPU block 1 is let go: that is no event of block 1 of the pool.
    build.step(BlockOp(Op.DROP, 0, NO_REQUEST, 7))
    assert told(build, 0).events == []


def test_a_search_goes_back_a_stretch_at_a_time_and_no_further_than_asked(monkeypatch):
    monkeypatch.setattr(module, "STRETCH", 2)
    build = life_of_block_3()
    source = Steps(build.messages)
    life = Biography(build.state, 3)
    life.search(source, most_steps=3)
    assert source.asked == [(7, 9), (6, 7)]
    assert [event.what for event in life.events] == [Happening.FILLED, Happening.ALLOCATED, Happening.EVICTED]
    assert (life.searched, life.complete) == (6, False)
    life.search(source, most_steps=100, enough=5)
    assert (len(life.events), life.searched) == (6, 2)
    life.search(source, most_steps=100)
    assert (life.searched, life.complete) == (0, True)
    assert life.events == told(build, 3).events


def test_nothing_is_looked_up_after_the_last_operation_or_before_the_trace_begins():
    build = life_of_block_3()
    for _ in range(50):
        build.step()
    source = Steps(build.messages)
    life = Biography(build.state, 3, first=5)
    life.search(source, most_steps=1000)
    assert source.asked == [(5, 9)]
    assert life.complete


def test_steps_that_come_later_are_added_as_if_they_had_been_there():
    build = TraceBuilder()
    build.arrive(0, 1, 2)
    life = Biography(build.state, 3)
    for message in life_of_block_3().messages:
        if isinstance(message, StepTrace):
            life.extend([message, message])
    assert life.events == told(life_of_block_3(), 3).events


@pytest.mark.parametrize("seed", range(4))
def test_over_random_schedules_every_biography_agrees_with_the_state_at_its_step(seed, tmp_path):
    header, messages = simulated_trace(seed=seed, num_requests=20, num_blocks=12)
    with RecordingWriter(tmp_path / "r.mcap", header) as writer:
        for message in messages:
            writer(message)
    rng = random.Random(seed)
    state, source, growing = PoolState(header), Steps(messages), {}
    with Recording.open(tmp_path / "r.mcap") as recording:
        lookup = Lookup(recording)
        for message in messages:
            state.apply(message)
            if not isinstance(message, StepTrace):
                continue
            for life in growing.values():
                life.extend([message])
            if rng.random() < 0.85:
                continue
            for block in range(header.num_blocks):
                life = Biography(state, block)
                life.search(source, most_steps=10**6)
                again = Biography(state, block)
                again.search(lookup, most_steps=10**6)
                assert life.events == again.events
                if block in growing:
                    assert growing[block].events == life.events
                elif rng.random() < 0.5:
                    growing[block] = again
                if not life.events:
                    assert state.touched[block] == -1
                    continue
                last, first = life.events[0], life.events[-1]
                assert (last.step, last.refs) == (state.touched[block], state.refs[block])
                assert (last.what == Happening.CACHED) == (state.refs[block] == 0 and state.key[block] != 0)
                assert (last.what == Happening.FREED) == (state.refs[block] == 0 and state.key[block] == 0)
                assert (first.what, first.refs) == (Happening.ALLOCATED, 1)
                for newer, older in zip(life.events, life.events[1:], strict=False):
                    assert newer.what != Happening.ALLOCATED or older.what in (Happening.EVICTED, Happening.FREED)
                    assert newer.step >= older.step


@pytest.mark.parametrize("seed", range(6))
def test_the_free_queue_tells_which_blocks_are_taken_and_which_contents_are_lost_next(seed):
    header, messages = simulated_trace(seed=seed, num_requests=25, num_blocks=14)
    state = PoolState(header)
    checked = 0
    for message in messages:
        if isinstance(message, StepTrace):
            queue, keys = state.free_queue(header.num_blocks).tolist(), state.key.tolist()
            assert state.free_queue(3).tolist() == queue[:3]
            assert state.free_queue(0).tolist() == []
            taken = [row.a for row in message.ops if row.op == Op.ALLOCATE]
            shared = {row.a for row in message.ops if row.op == Op.SHARE}
            expected = [block for block in queue if block not in shared]
            n = min(len(taken), len(expected))
            assert taken[:n] == expected[:n]
            evicted = [(row.a, row.b) for row in message.ops if row.op == Op.EVICT and row.a in expected[:n]]
            assert evicted == [(block, keys[block]) for block in taken[:n] if keys[block]]
            checked += len(evicted)
        state.apply(message)
    assert checked > 10


def test_an_empty_queue_has_no_next_block():
    build = TraceBuilder(make_header(num_blocks=2))
    build.arrive(0)
    build.prefill(0, [0, 1], 4)
    assert build.state.free_queue(5).tolist() == []


def test_a_block_to_which_very_much_happened_is_told_as_far_back_as_is_kept(monkeypatch):
    monkeypatch.setattr(module, "MAX_EVENTS", 10)
    build = TraceBuilder()
    build.arrive(0, 1)
    for _ in range(4):
        build.step(allocate(3, 0, 0), release(3, 0), *[allocate(3, 1, 0), release(3, 1)] * 4)
    life = told(build, 3)
    assert life.complete
    assert 10 <= len(life.events) <= 11
    assert life.events[0].step == 3


def test_fills_of_two_requests_that_follow_each_other_are_told_apart():
    build = TraceBuilder()
    build.arrive(0, 1)
    build.step(allocate(3, 0, 0), share(3, 1, 0), fill(3, 0, 1))
    build.step(fill(3, 0, 2))
    build.step(fill(3, 1, 3))
    fills = [(e.request, e.first_step, e.step, e.number) for e in told(build, 3).events if e.what == Happening.FILLED]
    assert fills == [(1, 2, 2, 3), (0, 0, 1, 2)]


def test_a_life_that_goes_on_forgets_what_came_long_ago(monkeypatch):
    monkeypatch.setattr(module, "MAX_EVENTS", 10)
    build = TraceBuilder()
    build.arrive(0)
    life = Biography(build.state, 3)
    for _ in range(50):
        life.extend([build.step(allocate(3, 0, 0), release(3, 0))])
        assert len(life.events) <= 20
    assert [event.step for event in life.events[:4]] == [49, 49, 48, 48]
    assert len(life.events) >= 10
