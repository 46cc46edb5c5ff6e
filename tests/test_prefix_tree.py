"""Prefixes as a tree: hand-made ones with known shapes, and real schedules against the state's own arrays."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.request import SamplingParams
from engine.simulated import simulated_engine
from engine.trace.events import StepTrace
from engine.trace.state import PoolState
from kvtui import prefix_tree
from kvtui.prefix_tree import Place, PrefixTree


def blocks_of(nodes):
    """The blocks of the pool that hold some contents."""
    return [block for node in nodes for block in node.blocks]


def shape(tree, run=None):
    """The tree as (blocks of the run, runs below), each level in order of its first block."""
    run = run or tree.top
    below = sorted(((blocks_of(b.nodes) or [-1], shape(tree, b)) for b in run.below), key=lambda item: item[0])
    return [(blocks, *rest) for blocks, rest in ((b, [r] if r else []) for b, r in below)]


class FakeState:
    """The arrays that a tree reads, set by hand."""

    def __init__(self, n=16, cpu=4):
        self.header = type("H", (), {"num_blocks": n, "num_cpu_blocks": cpu})()
        self.key, self.parent = np.zeros(n, np.int64), np.zeros(n, np.int64)
        self.refs, self.hits, self.logical = (np.zeros(n, np.int32) for _ in range(3))
        self.cpu_key, self.cpu_parent = np.zeros(cpu, np.int64), np.zeros(cpu, np.int64)

    def put(self, block, key, parent=0, refs=1):
        self.key[block], self.parent[block], self.refs[block] = key, parent, refs
        return self


def test_a_chain_without_a_branching_is_one_run():
    state = FakeState().put(1, 10).put(2, 20, 10).put(3, 30, 20)
    tree = PrefixTree(state.header)
    tree.jump(state)
    assert shape(tree) == [([1, 2, 3],)]
    assert tree.counts == [3, 0, 0]


def test_a_second_continuation_cuts_the_run_and_its_eviction_joins_it_again():
    state = FakeState().put(1, 10).put(2, 20, 10).put(3, 30, 20).put(4, 40, 10).put(5, 50, 40, refs=0)
    tree = PrefixTree(state.header)
    tree.jump(state)
    assert shape(tree) == [([1], [([2, 3],), ([4, 5],)])]
    state.key[5] = 0
    tree.jump(state)
    assert shape(tree) == [([1], [([2, 3],), ([4],)])]
    state.key[4] = 0
    tree.jump(state)
    assert shape(tree) == [([1, 2, 3],)]


def test_what_loses_its_beginning_stands_alone_until_that_is_computed_again():
    state = FakeState().put(1, 10).put(2, 20, 10).put(3, 30, 20)
    tree = PrefixTree(state.header)
    tree.jump(state)
    state.key[2] = 0
    tree.jump(state)
    assert shape(tree) == [([1],), ([3],)]
    state.put(7, 20, 10)
    tree.jump(state)
    assert shape(tree) == [([1, 7, 3],)]


def test_a_content_can_be_in_two_blocks_and_in_the_cpu_pool():
    state = FakeState().put(1, 10, refs=0).put(2, 10, refs=2)
    state.cpu_key[3], state.cpu_parent[3] = 20, 10
    tree = PrefixTree(state.header)
    tree.jump(state)
    (run,) = tree.top.below
    assert [node.key for node in run.nodes] == [10, 20]
    assert run.counts == [1, 0, 1]
    state.refs[2] = 0
    tree.jump(state)
    assert run.counts == [0, 1, 1]
    state.key[1] = state.key[2] = 0
    tree.jump(state)
    assert [node.key for node in tree.top.below[0].nodes] == [20]
    assert tree.nodes[20].place is Place.CPU


def test_siblings_are_ordered_by_how_often_they_were_hit():
    state = FakeState().put(1, 10).put(2, 20, 10).put(3, 30, 10).put(4, 40, 10)
    tree = PrefixTree(state.header)
    tree.jump(state)
    (run,) = tree.top.below
    assert [b.nodes[0].key for b in run.below] == [20, 30, 40]
    state.hits[3], state.hits[4] = 2, 5
    tree.jump(state)
    assert [b.nodes[0].key for b in run.below] == [40, 30, 20]


@pytest.mark.parametrize("folded", [set(), {20}])
def test_the_lines_can_be_walked_down_and_up(folded):
    state = FakeState().put(1, 10).put(2, 20, 10).put(3, 30, 10).put(4, 40, 20).put(5, 50, 20).put(6, 60)
    tree = PrefixTree(state.header)
    tree.jump(state)
    run, down = tree.after(tree.top, folded), []
    while run is not None:
        down.append(run)
        run = tree.after(run, folded)
    keys = [run.nodes[0].key for run in down]
    assert keys == [10, 20, *([] if folded else [40, 50]), 30, 60]
    run, up = down[-1], [down[-1]]
    while (run := tree.before(run, folded)) is not None:
        up.append(run)
    assert up == down[::-1]


def test_circles_in_a_made_up_trace_do_no_harm():
    state = FakeState().put(1, 10, 20).put(2, 20, 10).put(3, 30, 30).put(4, 40, 20)
    tree = PrefixTree(state.header)
    tree.jump(state)
    assert sorted(b for run in tree.runs() for b in blocks_of(run.nodes)) == [1, 2, 3, 4]
    state.key[:] = 0
    tree.jump(state)
    assert not tree.nodes
    assert not tree.top.below
    assert not list(tree.runs())


PROMPTS = ("", "the page of the block that all share first ", "the page of the block and then another ")


def followed(seed, num_blocks, cpu_blocks, window, requests):
    """Real schedules; yields the state and the steps since the last time."""
    config = EngineConfig(
        cache=CacheConfig(block_size=2, num_blocks=num_blocks, num_cpu_blocks=cpu_blocks),
        scheduler=SchedulerConfig(
            max_num_seqs=4,
            max_num_batched_tokens=32,
            max_model_len=64,
            preemption="swap" if cpu_blocks else "recompute",
        ),
        seed=seed,
    )
    engine = simulated_engine(config, sliding_window=window)
    messages: list[object] = []
    engine.add_sink(messages.append)
    state = PoolState(engine.header)
    for prompt, max_tokens, wait in requests:
        engine.add_request(PROMPTS[prompt] + f"{prompt}", SamplingParams(max_tokens=max_tokens))
        steps = []
        for _ in range(wait):
            engine.step()
            for message in messages:
                state.apply(message)
                if isinstance(message, StepTrace):
                    steps.append(message)
            messages.clear()
        yield state, steps


def drawn(tree):
    """All that the lines show, in order."""
    return [
        (
            [(node.key, node.parent, sorted(node.blocks), sorted(node.cpu_blocks), node.place) for node in run.nodes],
            run.counts,
            run.hits,
            len(run.below),
        )
        for run in tree.runs()
    ]


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 9),
    st.integers(12, 30),
    st.sampled_from([0, 6]),
    st.sampled_from([0, 5]),
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 12), st.integers(1, 9)), min_size=3, max_size=20),
)
def test_the_tree_is_the_published_blocks_and_the_same_whichever_way_one_came(
    seed, num_blocks, cpu_blocks, window, requests
):
    tree = slow = None
    for state, steps in followed(seed, num_blocks, cpu_blocks, window, requests):
        tree, slow = tree or PrefixTree(state.header), slow or PrefixTree(state.header)
        tree.follow(state, steps)
        there = [(node, run) for run in tree.runs() for node in run.nodes]
        assert sorted(b for node, _ in there for b in node.blocks) == np.flatnonzero(state.key).tolist()
        assert sorted(b for node, _ in there for b in node.cpu_blocks) == np.flatnonzero(state.cpu_key).tolist()
        assert all(state.key[b] == node.key for node, _ in there for b in node.blocks)
        assert len({node.key for node, _ in there}) == len(there) == len(tree.nodes) == sum(tree.counts)
        for node, run in there:
            if node.at:
                assert run.nodes[node.at - 1].key == node.parent
            elif run.above is not tree.top:
                assert run.above.nodes[-1].key == node.parent
            else:
                assert node.parent not in tree.nodes
        assert all(len(run.below) != 1 for run in tree.runs())
        used = {node.key for node, _ in there if any(state.refs[b] for b in node.blocks)}
        assert used == {node.key for node, _ in there if node.place is Place.USED}
        fresh = PrefixTree(state.header)
        fresh.jump(state)
        assert drawn(fresh) == drawn(tree)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(prefix_tree, "_AT_ONCE", 3)
            while not slow.jump(state, budget_s=0):
                pass
        assert drawn(slow) == drawn(tree)
