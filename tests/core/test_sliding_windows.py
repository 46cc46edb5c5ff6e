"""Requests that look back a few tokens: prefixes are found by their end, tables are swapped and forked with holes."""

from __future__ import annotations

import pytest
from followed_engine import Followed, alone, config_of

from engine.core.found_prefix import longest_prefix
from engine.request import SamplingParams
from engine.trace.events import NO_BLOCK, Decision, DecisionKind, Op, Phase, Reason, StepTrace
from engine.trace.explain import long

WINDOW = 6


def prompt_of(length: int, first: int = 97) -> list[int]:
    return [first + i % 20 for i in range(length)]


def expected(prompt: list[int], params: SamplingParams) -> list[int]:
    return alone(prompt, params, sliding_window=WINDOW)


def followed_over(num_blocks: int, **limits: object) -> Followed:
    return Followed(config_of(4, num_blocks, **limits), sliding_window=WINDOW)


def decisions(followed: Followed, kind: DecisionKind) -> list[Decision]:
    return [decision for decision in followed.decisions if decision.kind == kind]


@pytest.mark.parametrize("window", [0, 1, 2, 3, 4, 5, 8, 9, 30])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_longest_prefix_is_the_longest_whose_window_is_there(size: int, window: int) -> None:
    digests = [bytes([i]) for i in range(7)]
    for there in range(1 << len(digests)):
        places = {digest: 10 + i if i % 3 else NO_BLOCK for i, digest in enumerate(digests) if there >> i & 1}
        found = longest_prefix(digests, places.get, size, window)
        # Every prefix in turn, by what the token that follows it looks at; a prefix has its last block in any case.
        best, seen = 0, []
        for end in range(1, len(digests) + 1):
            looked_at = [p for p in range(end * size) if not window or p > end * size - window]
            needed = sorted({p // size for p in looked_at} | {end - 1})
            if all(digests[place] in places for place in needed):
                best, seen = end, needed
        assert found.num_tokens == best * size
        assert [found.num_behind + i for i in range(len(found.blocks))] == seen
        assert list(found.blocks) == [places[digests[place]] for place in seen]


def test_a_prefix_is_found_by_the_blocks_of_its_last_window():
    followed = followed_over(9, max_prefill_chunk=8)
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    document = prompt_of(24)
    followed.engine.add_request([*document, 120], params)
    followed.run()
    keys = [row[2] for row in followed.ops if row[0] == Op.HASH]
    # Another one takes the blocks that were released first: those behind the window of the document's end.
    followed.engine.add_request(prompt_of(16, 60), params)
    followed.run()
    there = [key in followed.state.key for key in keys]
    assert not there[0]
    assert there[4:] == [True, True]
    blocks = [followed.state.key.tolist().index(key) for key in keys[4:]]
    prompt = [*document, 121, 122]
    number = followed.engine.add_request(prompt, params)
    followed.run()

    assert [row[1:] for row in followed.ops if row[0] == Op.SHARE] == [(blocks[0], number, 4), (blocks[1], number, 5)]
    assert followed.last[number].num_cached_tokens == 24
    assert followed.tokens[number] == expected(prompt, params)
    admitted = decisions(followed, DecisionKind.ADMITTED)[-1]
    assert admitted.numbers == {"needs": 1, "free": 9, "behind": 4, "cached_tokens": 24}
    assert long(admitted).endswith(
        "24 tokens of it came from the prefix cache; for 4 places behind its window it needs no block."
    )


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("length", range(7, 20))
def test_who_is_swapped_out_goes_on_where_it_was_with_the_holes_of_its_table(length: int, prefix_caching: bool):
    followed = followed_over(7, prefix_caching=prefix_caching, num_cpu_blocks=8, preemption="swap", max_prefill_chunk=4)
    phases: list[int] = []
    followed.engine.add_sink(
        lambda m: phases.extend(member.phase for member in m.batch) if isinstance(m, StepTrace) else None
    )
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    requests = [followed.engine.add_request(prompt_of(length, 97 + i), params) for i in range(3)]
    followed.run()

    gone = decisions(followed, DecisionKind.PREEMPTED)
    back = decisions(followed, DecisionKind.RESUMED)
    assert {d.reason for d in gone} <= {Reason.SWAPPED_OUT, Reason.SWAPPED_OUT_ITSELF}
    assert {d.reason for d in back} == {Reason.SWAPPED_IN}
    assert any("behind" in d.numbers for d in back)
    assert Phase.RECOMPUTE not in phases
    for i, request in enumerate(requests):
        assert followed.tokens[request] == expected(prompt_of(length, 97 + i), params)
    # Never more than the window takes at any place: 5 tokens of those before, in three blocks at most.
    assert max(d.numbers["swapped"] for d in gone) <= 3
    moved = [row for row in followed.ops if row[0] == Op.SWAP_OUT and row[3] in requests]
    assert len(moved) == sum(d.numbers["swapped"] for d in gone)
    assert (followed.state.used, (followed.state.cpu_owner >= 0).sum()) == (0, 0)


@pytest.mark.parametrize(("ns_per_token", "swaps"), [(100.0, True), (1.0, False)])
def test_auto_weighs_the_blocks_that_are_held_and_not_those_behind(ns_per_token: float, swaps: bool):
    followed = followed_over(7, num_cpu_blocks=8, preemption="auto", prefix_caching=False, max_prefill_chunk=8)
    # 24 tokens are 6 blocks, of which 2 or 3 are held: there and back they are 6 copies at most, not 12.
    followed.engine.scheduler.preemption_costs = (200.0, ns_per_token)
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    for i in range(3):
        followed.engine.add_request(prompt_of(9, 97 + i), params)
    followed.run()
    reasons = {d.reason for d in decisions(followed, DecisionKind.PREEMPTED)}
    assert swaps != reasons.isdisjoint({Reason.SWAPPED_OUT_ITSELF, Reason.SWAPPED_OUT})


def test_offloaded_blocks_and_cached_ones_make_one_prefix_in_any_order():
    followed = followed_over(9, num_cpu_blocks=12, max_prefill_chunk=8)
    document = prompt_of(24)
    followed.engine.add_request([*document, 120], SamplingParams(max_tokens=12, ignore_eos=True))
    followed.run()
    keys = [row[2] for row in followed.ops if row[0] == Op.HASH]
    # Its blocks were released from the front as it went on: one after the other goes to the CPU pool.
    while keys[4] in followed.state.key:
        followed.engine.add_request([60 + len(followed.last), 61], SamplingParams(max_tokens=1))
        followed.run()
    assert keys[5] in followed.state.key
    assert keys[4] in followed.state.cpu_key
    number = followed.engine.add_request([*document, 121], SamplingParams(max_tokens=2, ignore_eos=True))
    followed.run()

    assert followed.tokens[number] == expected([*document, 121], SamplingParams(max_tokens=2, ignore_eos=True))
    admitted = decisions(followed, DecisionKind.ADMITTED)[-1]
    assert admitted.numbers == {"needs": 2, "free": 9, "behind": 4, "swapped": 1, "cached_tokens": 24}
    # The hit leaves the free queue before a block is taken for what is in front of it.
    mine = [(row[0], row[3]) for row in followed.ops if row[0] in (Op.SHARE, Op.ALLOCATE) and row[2] == number]
    assert mine == [(Op.SHARE, 5), (Op.ALLOCATE, 4), (Op.ALLOCATE, 6)]


def test_a_content_that_comes_back_behind_a_hole_keeps_its_place_in_the_chain():
    followed = followed_over(9, num_cpu_blocks=12, max_prefill_chunk=8)
    document = prompt_of(24)
    followed.engine.add_request([*document, 120], SamplingParams(max_tokens=1))
    followed.run()
    keys = [row[2] for row in followed.ops if row[0] == Op.HASH]
    while keys[5] in followed.state.key:
        followed.engine.add_request([60 + len(followed.last), 61], SamplingParams(max_tokens=1))
        followed.run()
    followed.engine.add_request([*document, 121], SamplingParams(max_tokens=1))
    followed.run()
    state = followed.state
    assert keys[3] not in state.key
    assert [state.parent[state.key == key].tolist() for key in keys[4:]] == [[keys[3]], [keys[4]]]


def test_a_fork_shares_the_window_of_a_parent_whose_beginning_is_gone():
    followed = followed_over(12, max_prefill_chunk=8)
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    prompt = prompt_of(30)
    parent = followed.engine.add_request(prompt, params)
    while len(followed.tokens.get(parent, ())) < 5:
        followed.step()
    behind = followed.engine.scheduler.kv.num_behind(parent)
    assert behind > 0
    child = followed.engine.fork(parent)
    followed.step()
    forked = decisions(followed, DecisionKind.ADMITTED)[-1]
    assert (forked.request, forked.reason, forked.numbers["behind"]) == (child, Reason.FORKED, behind)
    assert followed.state.table(child)[:behind] == [NO_BLOCK] * behind
    computed = forked.numbers["cached_tokens"]
    assert computed >= 30
    followed.run()
    whole = expected(prompt, params)
    assert followed.tokens[parent] == whole
    assert followed.tokens[child] == whole[5:]


def test_choices_of_a_prompt_longer_than_the_pool_begin_with_its_window():
    followed = followed_over(7, max_prefill_chunk=8)
    params = SamplingParams(max_tokens=4, n=3, ignore_eos=True)
    prompt = prompt_of(60)
    number = followed.engine.add_request(prompt, params)
    followed.run()
    whole = expected(prompt, SamplingParams(max_tokens=4, ignore_eos=True))
    assert [followed.tokens[number + index] for index in range(3)] == [whole] * 3


def test_who_could_begin_but_not_get_through_waits_for_what_it_takes_at_once():
    # A chunk of 8 takes 2 blocks, and with the 5 tokens in front of it 4. The older request never leaves so many.
    followed = followed_over(5, max_prefill_chunk=8, prefix_caching=False)
    phases: list[int] = []
    followed.engine.add_sink(
        lambda m: phases.extend(member.phase for member in m.batch) if isinstance(m, StepTrace) else None
    )
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    prompts = [prompt_of(5), prompt_of(40, 98)]
    requests = [followed.engine.add_request(prompts[0], params)]
    followed.step()
    requests.append(followed.engine.add_request(prompts[1], params))
    followed.step()
    waits = decisions(followed, DecisionKind.WAITS)[-1]
    assert (waits.request, waits.reason, waits.numbers) == (requests[1], Reason.NO_BLOCKS, {"needs": 4, "free": 3})
    followed.run()
    assert decisions(followed, DecisionKind.PREEMPTED) == []
    assert Phase.RECOMPUTE not in phases
    assert [followed.tokens[request] for request in requests] == [expected(prompt, params) for prompt in prompts]
