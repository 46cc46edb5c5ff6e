"""Regret: prompts that compute again what the cache had had and evicted."""

import pytest
from trace_builder import TraceBuilder, admitted, allocate, evict, fill, hashed, make_header, release, share

from engine.trace import block_fold
from engine.trace.events import BlockOp, Op, Phase

KEYS = (101, 102, 103)


def prompt(build, request, blocks, *, num_tokens=9, lost=(), phase=Phase.PREFILL):
    """A request computes its prompt of nine tokens, two full blocks and one token, into blocks that hold others."""
    ops = [evict(block, key) for block, key in lost]
    ops += [allocate(block, request, place) for place, block in enumerate(blocks)]
    ops += [fill(b, request, min(4, num_tokens - 4 * at)) for at, b in enumerate(blocks)]
    ops += [hashed(b, KEYS[at]) for at, b in enumerate(blocks) if num_tokens >= 4 * at + 4]
    build.step(*ops, batch=[(request, phase, 0, num_tokens)], decisions=[admitted(request)], tokens=[(request, 1, "x")])


def end(build, request):
    blocks = build.state.table(request)
    build.step(*(release(b, request) for b in reversed(blocks)), finished=[(request, "stop", "")])


def evicted_after_its_end(num_blocks=8):
    """A prompt was computed into the blocks 0, 1, 2; it ended, and its two contents were lost to request 1."""
    build = TraceBuilder(make_header(num_blocks=num_blocks))
    build.arrive(0, 1, 2, 3, num_tokens=9)
    prompt(build, 0, [0, 1, 2])
    end(build, 0)
    build.step(evict(1, 102), allocate(1, 1, 0), evict(0, 101), allocate(0, 1, 1))
    build.step()
    return build


def test_a_prompt_that_computes_what_was_evicted_is_counted_with_the_step_of_the_eviction():
    build = evicted_after_its_end()
    assert build.state.evicted == {102: (2, -1), 101: (2, -1)}
    prompt(build, 2, [3, 4, 5])
    request = build.state.requests[2]
    assert (request.regret_blocks, request.regret_step, request.admitted_step) == (2, 2, 4)
    assert build.state.regret_blocks == 2
    assert build.state.requests[0].regret_blocks == 0


def test_a_content_is_missed_once_and_not_by_who_could_have_found_it_again():
    build = evicted_after_its_end()
    prompt(build, 2, [3, 4, 5])
    build.step()
    prompt(build, 3, [6, 7, 2])
    assert build.state.requests[3].regret_blocks == 0
    assert build.state.regret_blocks == 2


def test_who_asked_in_the_same_step_missed_it_as_well():
    build = evicted_after_its_end()
    ops = []
    for request, blocks in ((2, [3, 4]), (3, [6, 7])):
        ops += [allocate(block, request, place) for place, block in enumerate(blocks)]
        ops += [fill(block, request, 4) for block in blocks] + [hashed(b, KEYS[at]) for at, b in enumerate(blocks)]
    batch = [(request, Phase.PREFILL, 0, 8) for request in (2, 3)]
    build.step(*ops, batch=batch, decisions=[admitted(2), admitted(3)])
    assert [build.state.requests[request].regret_blocks for request in (2, 3)] == [2, 2]
    assert build.state.regret_blocks == 4


def test_the_block_of_a_prompts_last_token_is_computed_anyway():
    build = evicted_after_its_end()
    build.arrive(4, num_tokens=8)
    prompt(build, 4, [3, 4], num_tokens=8)
    assert build.state.requests[4].regret_blocks == 1


@pytest.mark.parametrize("phase", [Phase.DECODE, Phase.RECOMPUTE])
def test_what_is_generated_or_computed_after_a_preemption_is_no_regret(phase):
    build = evicted_after_its_end()
    prompt(build, 2, [3, 4, 5], phase=phase)
    assert build.state.regret_blocks == 0


def test_what_comes_back_from_the_cpu_pool_was_not_computed_again():
    build = evicted_after_its_end()
    build.step(
        *(allocate(3, 2, 0), BlockOp(Op.SWAP_IN, 0, 3, 2), hashed(3, 101)),
        batch=[(2, Phase.PREFILL, 4, 5)],
        decisions=[admitted(2)],
    )
    assert build.state.regret_blocks == 0
    assert build.state.evicted[101] == (2, 4)


def test_a_content_that_was_found_is_no_regret():
    build = TraceBuilder()
    build.arrive(0, 1, num_tokens=9)
    prompt(build, 0, [0, 1, 2])
    build.step(
        *(share(0, 1, 0), share(1, 1, 1), allocate(3, 1, 2), fill(3, 1, 1)),
        batch=[(1, Phase.PREFILL, 8, 1)],
        decisions=[admitted(1, cached=8)],
    )
    assert build.state.regret_blocks == 0


def test_as_many_evictions_are_remembered_as_the_pool_has_blocks():
    build = evicted_after_its_end(num_blocks=8)
    for at in range(8):
        block = at % 2
        build.step(release(block, 1))
        build.step(allocate(block, 1, block), fill(block, 1, 4), hashed(block, 900 + at), release(block, 1))
        build.step(evict(block, 900 + at), allocate(block, 1, block))
    assert list(build.state.evicted) == [900 + at for at in range(8)]
    prompt(build, 2, [3, 4, 5])
    assert build.state.regret_blocks == 0


def test_a_large_pool_remembers_a_bounded_number_of_evictions(monkeypatch):
    monkeypatch.setattr(block_fold, "MAX_EVICTED", 1)
    build = evicted_after_its_end()
    assert list(build.state.evicted) == [101]
