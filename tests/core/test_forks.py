"""Forks: what is shared, what is copied, and that every continuation is the one that it would be alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
from followed_engine import Followed, alone, config_of

from engine.request import FinishReason, RequestError, SamplingParams
from engine.trace.events import DecisionKind, Op, Phase, Reason, StepTrace

GREEDY = SamplingParams(max_tokens=8)
DRAWN = SamplingParams(max_tokens=8, temperature=1.0, seed=3)


def prompt_of(length: int) -> list[int]:
    return [97 + i % 20 for i in range(length)]


def choice(params: SamplingParams, index: int) -> SamplingParams:
    return replace(params, n=1, seed=(params.seed or 0) + index)


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("length", range(1, 14))
def test_choices_compute_the_prompt_once_and_equal_requests_with_their_seeds(length: int, prefix_caching: bool):
    followed = Followed(config_of(4, 64, prefix_caching=prefix_caching))
    steps: list[StepTrace] = []
    followed.engine.add_sink(lambda message: steps.append(message) if isinstance(message, StepTrace) else None)
    first = followed.engine.add_request(prompt_of(length), replace(DRAWN, n=4))
    followed.run()

    for index in range(4):
        assert followed.tokens[first + index] == alone(prompt_of(length), choice(DRAWN, index))
        assert (followed.last[first + index].request_id, followed.last[first + index].index) == (first, index)
    prefilled = sum(m.num_scheduled for step in steps for m in step.batch if m.phase == Phase.PREFILL)
    assert prefilled == length
    # Whoever writes while others hold the tail copies it; the last one has it to itself.
    assert followed.count(Op.COPY) == (3 if length % 4 else 0)


def test_a_fork_in_mid_block_copies_the_tail_once_per_writer_whatever_becomes_of_the_others():
    # 9 prompt tokens and 2 of 4 in the third block when it is forked; 9 blocks are too few for four to the end.
    followed = Followed(config_of(4, 9, max_num_seqs=8))
    engine = followed.engine
    parent = engine.add_request(prompt_of(9), replace(DRAWN, max_tokens=12))
    followed.step(2)
    known = prompt_of(9) + followed.tokens[parent]
    forks = [engine.fork(parent, replace(DRAWN, max_tokens=12, seed=70 + i)) for i in range(3)]
    followed.step()
    assert followed.count(Op.COPY) == 3
    assert engine.scheduler.kv.pool.num_used == 2 + 4
    engine.abort(forks[0])
    followed.run()

    assert followed.last[forks[0]].finish_reason is FinishReason.ABORT
    assert {d.request for d in followed.decisions if d.kind == DecisionKind.PREEMPTED} == {forks[2]}
    assert followed.tokens[parent] == alone(prompt_of(9), replace(DRAWN, max_tokens=12))
    for i in (1, 2):
        assert followed.tokens[forks[i]] == alone(known, replace(DRAWN, max_tokens=12, seed=70 + i))
    assert followed.state.used == 0


def test_a_fork_without_a_free_block_for_its_copy_preempts_the_youngest():
    followed = Followed(config_of(4, 2, prefix_caching=False))
    parent = followed.engine.add_request(prompt_of(5), replace(GREEDY, max_tokens=3))
    followed.step()
    fork = followed.engine.fork(parent)
    followed.run()

    (gone,) = [d for d in followed.decisions if d.kind == DecisionKind.PREEMPTED]
    assert (gone.request, gone.numbers["needs"], gone.numbers["free"]) == (fork, 1, 0)
    assert followed.count(Op.COPY) == 0
    assert followed.tokens[parent] == alone(prompt_of(5), replace(GREEDY, max_tokens=3))
    assert followed.tokens[fork] == followed.tokens[parent][1:]


def test_a_fork_without_a_place_waits_its_turn():
    followed = Followed(config_of(4, 32, max_num_seqs=2))
    first = followed.engine.add_request(prompt_of(6), replace(DRAWN, n=4))
    behind = followed.engine.add_request(prompt_of(3), GREEDY)
    followed.step()

    assert list(followed.engine.scheduler.running) == [first, behind]
    assert list(followed.engine.scheduler.waiting) == [first + 1, first + 2, first + 3]
    waits = {d.request: d.reason for d in followed.decisions if d.kind == DecisionKind.WAITS}
    assert waits == {first + 1: Reason.SEQUENCE_CAP, first + 2: Reason.BEHIND, first + 3: Reason.BEHIND}
    followed.run()
    for index in range(4):
        assert followed.tokens[first + index] == alone(prompt_of(6), choice(DRAWN, index))


def test_a_greedy_fork_goes_on_as_its_parent_does():
    followed = Followed(config_of(4, 32))
    parent = followed.engine.add_request(prompt_of(6), GREEDY, name="asked")
    followed.step(3)
    fork = followed.engine.fork(parent)
    followed.run()

    state = followed.state.requests[fork]
    assert (state.parent, state.name, state.num_prompt_tokens) == (parent, "asked", 9)
    assert followed.tokens[fork] == followed.tokens[parent][3:]
    assert followed.last[fork].num_prompt_tokens == 9


def test_a_waiting_request_can_be_forked_too():
    followed = Followed(config_of(4, 32, max_num_seqs=1))
    followed.engine.add_request(prompt_of(6), GREEDY)
    waiting = followed.engine.add_request(prompt_of(7), GREEDY)
    followed.step()
    fork = followed.engine.fork(waiting)
    followed.run()
    assert followed.tokens[fork] == followed.tokens[waiting] == alone(prompt_of(7), GREEDY)


def test_a_fork_of_what_has_ended_is_refused_and_of_what_never_was_an_error():
    followed = Followed(config_of(4, 32))
    parent = followed.engine.add_request(prompt_of(6), GREEDY)
    followed.run()
    fork = followed.engine.fork(parent)
    followed.run()

    assert followed.last[fork].finish_reason is FinishReason.REFUSED
    assert followed.last[fork].error == f"request {parent} has ended, and only a live request can be forked"
    with pytest.raises(RequestError, match="request 17 was never added"):
        followed.engine.fork(17)


def test_aborting_the_first_number_ends_all_choices_and_anothers_only_that_one():
    followed = Followed(config_of(4, 32, max_prefill_chunk=4))
    ends = {}
    first = followed.engine.add_request(
        prompt_of(6), replace(DRAWN, n=3), on_output=lambda o: ends.update({o.index: o})
    )
    followed.step()
    followed.engine.abort(first + 2)  # not forked yet
    followed.step()
    assert {index for index, o in ends.items() if o.finish_reason is FinishReason.ABORT} == {2}
    followed.engine.abort(first)
    followed.run()
    assert {index: o.finish_reason for index, o in ends.items()} == dict.fromkeys(range(3), FinishReason.ABORT)


def test_every_choice_of_a_refused_request_is_told():
    followed = Followed(config_of(4, 2))
    first = followed.engine.add_request(prompt_of(9), replace(DRAWN, n=3))
    followed.run()
    assert {n: o.finish_reason for n, o in followed.last.items()} == dict.fromkeys(
        range(first, first + 3), FinishReason.REFUSED
    )


def test_a_failed_step_makes_no_forks_and_the_copies_before_it_stand():
    followed = Followed(config_of(4, 32))
    parent = followed.engine.add_request(prompt_of(5), replace(DRAWN, n=2))
    other = followed.engine.add_request(prompt_of(6), GREEDY)
    followed.step()
    execute = followed.engine.runner.execute

    def fail(output: object) -> list[int | None]:
        from engine.runner import RunnerError

        followed.engine.runner.execute = execute  # type: ignore[method-assign]
        raise RunnerError("no", [other])

    followed.engine.runner.execute = fail  # type: ignore[method-assign]
    followed.run()
    assert followed.last[other].finish_reason is FinishReason.ERROR
    for index in range(2):
        assert followed.tokens[parent + index] == alone(prompt_of(5), choice(DRAWN, index))


@pytest.mark.parametrize("n", [0, -1, 129])
def test_an_impossible_number_of_choices_is_an_error(n: int):
    with pytest.raises(RequestError, match=f"n {n} is not possible: ask for 1 to 128"):
        SamplingParams(n=n)
