"""The runner packs what the scheduler says and nothing else: tables, seeds, errors, durations."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import VOCAB, Results, engine_over, fresh_model, run, shared_model

from engine.core.scheduler_output import ScheduledRequest, SchedulerOutput
from engine.model.runner import _BlockTables
from engine.request import FinishReason, Request, SamplingParams
from engine.runner import RunnerError
from engine.trace.events import Phase, StepTrace


def share(request_id: int, block_ids: list[int]) -> ScheduledRequest:
    return ScheduledRequest(Request(request_id, "", [1, 2, 3], SamplingParams()), Phase.DECODE, 2, 1, block_ids)


def rows(tables: _BlockTables, shares: list[ScheduledRequest]) -> list[list[int]]:
    table = tables.of(shares)
    return [table[i, : len(s.block_ids)].tolist() for i, s in enumerate(shares)]


def test_tables_follow_lists_that_grow_are_replaced_and_change_owners() -> None:
    tables, rng = _BlockTables(), np.random.default_rng(2)
    lists: dict[int, list[int]] = {}
    for _ in range(300):
        request_id = int(rng.integers(0, 40))
        if request_id not in lists or rng.random() < 0.2:
            lists[request_id] = rng.integers(0, 10_000, size=rng.integers(1, 5)).tolist()
        elif rng.random() < 0.1:
            del lists[request_id]
            tables.forget(request_id)
        else:
            lists[request_id] += rng.integers(0, 10_000, size=rng.integers(0, 90)).tolist()
        batch = [share(i, lists[i]) for i in rng.permutation(list(lists))[:12].tolist()]
        if batch:
            assert rows(tables, batch) == [s.block_ids for s in batch]
    assert max(len(blocks) for blocks in lists.values()) > 64


def test_an_equal_list_that_is_another_one_is_written_anew() -> None:
    tables = _BlockTables()
    assert rows(tables, [share(1, [5, 6, 7])]) == [[5, 6, 7]]
    assert rows(tables, [share(1, [8, 9])]) == [[8, 9]]
    assert rows(tables, [share(1, [8, 9, 10, 11])]) == [[8, 9, 10, 11]]


def test_forgetting_who_never_ran_does_no_harm() -> None:
    engine_over(shared_model("llama")).runner.forget(12345)


SAMPLED = SamplingParams(max_tokens=12, temperature=1.0, top_p=0.95, seed=11)


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(8)
    return [rng.integers(1, VOCAB, size=n).tolist() for n in (5, 6, 7, 8, 9)]


def test_a_seeded_request_draws_the_same_alone_batched_and_preempted() -> None:
    params = [SamplingParams(max_tokens=12, temperature=1.0, top_p=0.95, seed=s) for s in (1, 2, 3, 4, 5)]
    model = shared_model("qwen3")
    alone = [run(engine_over(model), [p], [s])[0] for p, s in zip(prompts(), params, strict=True)]
    assert run(engine_over(model), prompts(), params) == alone
    tight = engine_over(model, block_size=4, num_blocks=9, chunk=3)
    assert run(tight, prompts(), params) == alone
    assert tight.scheduler.num_preemptions > 0
    assert len({tuple(tokens) for tokens in alone}) == 5


def test_a_request_without_a_seed_draws_its_own_and_the_engine_seed_repeats_the_run() -> None:
    model, params = shared_model("qwen3"), SamplingParams(max_tokens=12, temperature=1.5)
    same = [prompts()[0]] * 3
    first = run(engine_over(model, seed=1), same, params)
    assert len({tuple(tokens) for tokens in first}) == 3
    assert run(engine_over(model, seed=1), same, params) == first
    assert run(engine_over(model, seed=2), same, params) != first


def test_greedy_and_sampled_requests_share_batches() -> None:
    model = shared_model("llama")
    greedy = SamplingParams(max_tokens=12)
    mixed = [greedy, SAMPLED, greedy, SAMPLED, greedy]
    alone = [run(engine_over(model), [p], [s])[0] for p, s in zip(prompts(), mixed, strict=True)]
    assert run(engine_over(model), prompts(), mixed) == alone


def test_a_step_in_mid_prefill_samples_nothing() -> None:
    engine = engine_over(shared_model("llama"), chunk=4)
    steps: list[StepTrace] = []
    engine.add_sink(lambda message: steps.append(message) if isinstance(message, StepTrace) else None)
    assert len(run(engine, [list(range(1, 11))], SamplingParams(max_tokens=2))[0]) == 2
    assert [len(step.tokens) for step in steps] == [0, 0, 1, 1]
    assert [step.batch[0].num_scheduled for step in steps] == [4, 4, 2, 1]
    assert all(step.execute_ns > 0 and step.sample_ns > 0 for step in steps)


def test_a_request_whose_logits_are_not_numbers_ends_and_the_others_keep_their_tokens() -> None:
    model = fresh_model("llama")
    poisoned = VOCAB - 1
    others = [[1, 2, 3, 4], [5, 6, 7]]
    want = run(engine_over(model), others, SamplingParams(max_tokens=6))
    assert poisoned not in {t for tokens in want for t in tokens}
    engine = engine_over(model, block_size=3)
    with torch.no_grad():
        # Only a sequence that holds this token meets it.
        engine.runner.forward._embedding.table[poisoned] = math.nan  # type: ignore[attr-defined]
    ids = [engine.add_request(p, SamplingParams(max_tokens=6)) for p in (others[0], [9, poisoned, 8], others[1])]
    results = Results()
    while engine.has_work:
        results.take(engine.step())
    assert results.last[ids[1]].finish_reason is FinishReason.ERROR
    assert "not numbers" in str(results.last[ids[1]].error)
    assert [results.tokens[ids[0]], results.tokens[ids[2]]] == want
    # Blocks that held its NaN serve others without a trace of it.
    assert run(engine, others, SamplingParams(max_tokens=6)) == want


def test_the_error_names_the_request() -> None:
    engine = engine_over(shared_model("gpt2"))
    runner: Any = engine.runner
    whole = runner.forward.forward
    runner.forward.forward = lambda *args: whole(*args) * math.nan
    request = Request(77, "", [1, 2, 3], SamplingParams())
    with pytest.raises(RunnerError) as error:
        runner.execute(SchedulerOutput([ScheduledRequest(request, Phase.PREFILL, 0, 3, [4])], 3))
    assert error.value.request_ids == (77,)
