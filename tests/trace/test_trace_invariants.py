"""The invariants: each one broken by hand is named with its block and step, and nothing else is."""

import msgspec
import pytest
from trace_builder import MODEL, TraceBuilder, admitted, allocate, fill, hashed, make_header, release, share

from engine.request import RequestStatus
from engine.trace.events import Phase
from engine.trace.invariants import MAX_NAMED, check, quick_check


@pytest.fixture
def build():
    """Request 0 in blocks 0 and 1 (6 tokens), block 0 shared with request 1, block 5 cached, at step 3."""
    build = TraceBuilder()
    build.arrive(0, num_tokens=6)
    build.arrive(1, 2)
    build.prefill(0, [0, 1], 6)
    build.step(hashed(0, 77), allocate(5, 2, 0), fill(5, 2, 4), batch=[(2, Phase.PREFILL, 0, 4)])
    build.step(hashed(5, 88), release(5, 2), finished=[(2, "stop", "")])
    build.step(share(0, 1, 0), decisions=[admitted(1, cached=4)])
    assert check(build.state) == quick_check(build.state) == build.state.violations == []
    assert (build.state.used, build.state.cached, build.state.free) == (2, 1, 5)
    return build


def broken(state):
    return [(violation.name, violation.block, violation.step) for violation in check(state)]


def test_references_that_differ_from_the_tables_are_named(build):
    build.state.refs[0] = 3
    assert broken(build.state) == [("references", 0, 3)]
    assert "3 references, but it is in 2 places" in str(check(build.state)[0])


def test_a_block_in_a_table_without_a_reference_is_named(build):
    build.state.requests[1].table.append(7)
    assert ("references", 7, 3) in broken(build.state)


def test_levels_that_do_not_add_up_are_named(build):
    build.state.free -= 1
    assert ("partition", -1, 3) in broken(build.state)
    assert [v.name for v in quick_check(build.state)] == ["partition", "counters"]


def test_levels_that_differ_from_the_blocks_are_named_though_they_add_up(build):
    build.state.free -= 1
    build.state.cached += 1
    assert ("partition", -1, 3) in broken(build.state)


def test_counters_of_the_step_that_differ_are_named_with_both_numbers(build):
    build.step(used_blocks=3)
    assert [v.message for v in quick_check(build.state)] == ["the step counts 3 used blocks, its operations leave 2"]


def test_an_owner_without_a_reference_is_named(build):
    build.state.owner[6] = 1
    assert broken(build.state) == [("partition", 6, 3)]


def test_a_reference_without_an_owner_is_named(build):
    build.state.owner[1] = -1
    assert broken(build.state) == [("partition", 1, 3)]


def test_two_blocks_in_one_place_of_the_free_queue_are_named(build):
    build.state.free_order[6] = build.state.free_order[3]
    assert broken(build.state) == [("free_queue", 6, 3)]


def test_a_block_in_use_may_keep_any_old_place_in_the_free_queue(build):
    build.state.free_order[0] = build.state.free_order[3]
    assert broken(build.state) == []


def test_a_hashed_block_that_is_not_full_is_named(build):
    build.state.filled[5] = 3
    assert broken(build.state) == [("hashed_full", 5, 3)]


def test_slots_that_differ_from_computed_tokens_are_named(build):
    build.state.filled[1] = 1
    assert broken(build.state) == [("filled", 1, 3)]
    assert "needs 2 at place 1" in check(build.state)[0].message


def test_computed_tokens_beyond_the_table_are_named(build):
    build.state.requests[0].num_computed = 9
    assert broken(build.state) == [("filled", 1, 3), ("filled", -1, 3)]


def test_a_request_that_ended_and_holds_a_block_is_named(build):
    build.step(finished=[(0, "stop", "")])
    assert ("tables", 0, 4) in broken(build.state)


def test_a_request_whose_first_place_is_a_hole_is_still_checked(build):
    build.state.header = make_header(model=msgspec.structs.replace(MODEL, sliding_window=3))
    build.step(release(0, 0))
    assert broken(build.state) == []
    build.state.filled[1] = 0
    assert broken(build.state) == [("filled", 1, 4)]


@pytest.mark.parametrize("window", [0, 4])
def test_a_hole_that_is_not_behind_the_window_is_named(build, window):
    build.state.header = make_header(model=msgspec.structs.replace(MODEL, sliding_window=window))
    build.step(release(0, 0))
    assert broken(build.state) == [("tables", -1, 4)]
    assert "request 0 with 6 computed tokens has no block at place 0" in str(check(build.state)[0])


def test_one_kind_of_violation_does_not_hide_the_others():
    build = TraceBuilder(make_header(num_blocks=100))
    build.step()
    build.state.refs[:50] = 1
    build.state.key[60] = 5
    names = [violation.name for violation in check(build.state)]
    assert names.count("references") == MAX_NAMED
    assert "hashed_full" in names


@pytest.fixture
def swapped(build):
    """Request 3 was preempted, and has its first two places in the CPU pool."""
    state = build.state
    build.arrive(3)
    state.requests[3].status = RequestStatus.PREEMPTED
    state.cpu_owner[:], state.cpu_logical[:], state.cpu_filled[:], state.cpu_used = 3, (0, 1), (4, 2), 2
    assert check(state) == []
    return state


def offloaded(state):
    """Two evicted contents instead."""
    state.cpu_owner[:], state.cpu_filled[:], state.cpu_key[:] = -1, 4, (77, 99)
    assert check(state) == []
    return state


def messages(state):
    assert {(violation.name, violation.block, violation.step) for violation in check(state)} == {("cpu_pool", -1, 3)}
    return [violation.message for violation in check(state)]


def test_a_place_of_a_request_that_is_in_the_cpu_pool_twice_is_named(swapped):
    swapped.cpu_logical[1] = 0
    assert messages(swapped) == ["CPU block 1 holds place 0 of request 3 a second time"]


@pytest.mark.parametrize("owner", [3, 9], ids=["who waits", "nobody"])
def test_a_swapped_content_of_who_was_not_preempted_is_named(swapped, owner):
    swapped.requests[3].status = RequestStatus.WAITING
    swapped.cpu_owner[:] = owner
    assert messages(swapped) == [f"CPU block {at} is of request {owner}, which is not preempted" for at in (0, 1)]


def test_a_count_of_the_cpu_pool_that_differs_from_its_blocks_is_named(swapped):
    swapped.cpu_used = 1
    assert messages(swapped) == ["2 CPU blocks are filled; the state counts 1"]


def test_an_owner_of_an_empty_cpu_block_is_named(swapped):
    swapped.cpu_filled[0], swapped.cpu_used = 0, 1
    assert messages(swapped) == ["CPU block 0 holds nothing, but has an owner or a key"]


def test_a_content_that_was_offloaded_twice_is_named(swapped):
    offloaded(swapped).cpu_key[:] = 77
    assert messages(swapped) == ["a content was offloaded twice"]


@pytest.mark.parametrize("what", ["not full", "without a key"])
def test_an_offloaded_content_that_nobody_could_use_is_named(swapped, what):
    (offloaded(swapped).cpu_filled if what == "not full" else offloaded(swapped).cpu_key)[1] = 0
    if what == "not full":
        swapped.cpu_filled[1] = 3
    assert messages(swapped) == ["CPU block 1 holds an offloaded content that is not full or has no key"]
