import logging

import pytest

from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.core.scheduler import Scheduler, SchedulerOutput
from engine.request import FinishReason, Request, RequestStatus, SamplingParams
from engine.trace.events import Decision, DecisionKind, Phase, Reason

ADMITTED, WAITS, PREEMPTED = DecisionKind.ADMITTED, DecisionKind.WAITS, DecisionKind.PREEMPTED
RESUMED, REFUSED, FAILED = DecisionKind.RESUMED, DecisionKind.REFUSED, DecisionKind.FAILED
EOS = 3


class Bench:
    """A scheduler with a forward that samples token 7 for whoever is complete."""

    def __init__(
        self, num_blocks: int = 64, block_size: int = 4, *, prefix_caching: bool = False, **limits: int
    ) -> None:
        self.scheduler = Scheduler(
            EngineConfig(
                cache=CacheConfig(block_size, num_blocks, prefix_caching),
                scheduler=SchedulerConfig(**limits),  # type: ignore[arg-type]
            ),
            eos_token_ids=frozenset({EOS}),
        )
        self.requests: list[Request] = []
        self.next_token = 7

    def add(self, tokens: int | list[int], max_tokens: int = 1000, **params: object) -> Request:
        number = len(self.requests)
        token_ids = [1000 * (number + 1) + i for i in range(tokens)] if isinstance(tokens, int) else tokens
        req = Request(number, "", token_ids, SamplingParams(max_tokens=max_tokens, **params))  # type: ignore[arg-type]
        self.requests.append(req)
        self.scheduler.add_request(req)
        return req

    def step(self) -> list[tuple[int, Phase, int, int]]:
        """One iteration; who was in it: (request, phase, computed_before, num_scheduled)."""
        output = self.scheduler.schedule()
        batch = [(s.request.request_id, s.phase, s.computed_before, s.num_scheduled) for s in output.scheduled]
        self.finish(output)
        return batch

    def finish(self, output: SchedulerOutput) -> None:
        sampled = [self.next_token if s.samples else None for s in output.scheduled]
        for token in self.scheduler.update(output, sampled):
            if token.ends is not None:
                self.scheduler.finish(token.request, token.ends)

    def decisions(self) -> list[Decision]:
        taken, self.scheduler.decisions = self.scheduler.decisions, []
        return taken

    def run(self, most: int = 1000) -> int:
        steps = 0
        while self.scheduler.running or self.scheduler.waiting:
            assert self.step() or self.scheduler.ended
            steps += 1
            assert steps < most, "no end in sight"
        return steps


def test_a_prompt_is_prefilled_and_then_decoded_token_by_token():
    bench = Bench()
    req = bench.add(5, max_tokens=3)
    assert bench.step() == [(0, Phase.PREFILL, 0, 5)]
    assert (req.status, req.output_token_ids) == (RequestStatus.RUNNING, [7])
    assert bench.step() == [(0, Phase.DECODE, 5, 1)]
    assert bench.step() == [(0, Phase.DECODE, 6, 1)]
    assert (req.status, req.finish_reason) == (RequestStatus.FINISHED_LENGTH, FinishReason.LENGTH)
    assert bench.step() == []
    assert bench.scheduler.ended == [req]


def test_a_long_prompt_comes_in_chunks_and_samples_with_the_last():
    bench = Bench(max_prefill_chunk=3)
    req = bench.add(8)
    seen = []
    for _ in range(3):
        seen += bench.step()
        seen.append(len(req.output_token_ids))
    assert seen == [(0, Phase.PREFILL, 0, 3), 0, (0, Phase.PREFILL, 3, 3), 0, (0, Phase.PREFILL, 6, 2), 1]


def test_decodes_and_prefill_chunks_share_an_iteration_within_the_budget():
    bench = Bench(max_num_batched_tokens=6)
    bench.add(2)
    bench.step()
    bench.add(9)
    bench.add(1)
    assert bench.step() == [(0, Phase.DECODE, 2, 1), (1, Phase.PREFILL, 0, 5)]
    assert bench.step() == [(0, Phase.DECODE, 3, 1), (1, Phase.PREFILL, 5, 4), (2, Phase.PREFILL, 0, 1)]


def test_a_running_request_beyond_the_budget_keeps_its_place():
    bench = Bench(max_num_batched_tokens=2)
    for _ in range(3):
        bench.add(1)
    assert [who for who, *_ in bench.step()] == [0, 1]
    bench.scheduler.max_num_batched_tokens = 3
    assert [who for who, *_ in bench.step()] == [0, 1, 2]
    bench.scheduler.max_num_batched_tokens = 2
    assert [who for who, *_ in bench.step()] == [0, 1]
    assert list(bench.scheduler.running) == [0, 1, 2]


def test_blocks_are_taken_for_known_tokens_and_not_for_those_to_come():
    bench = Bench(num_blocks=8)
    bench.add(4, max_tokens=20)
    bench.step()
    assert bench.scheduler.kv.pool.num_used == 1
    bench.step()
    assert bench.scheduler.kv.pool.num_used == 2


# ---------------------------------------------------------------------- why


def test_each_waiting_request_has_its_reason_and_is_not_told_twice():
    bench = Bench(max_num_seqs=1)
    for _ in range(4):
        bench.add(2)
    bench.step()
    assert bench.decisions() == [
        (ADMITTED, 0, Reason.FITS, {"needs": 1, "free": 64, "cached_tokens": 0}),
        (WAITS, 1, Reason.SEQUENCE_CAP, {"running": 1, "limit": 1}),
        (WAITS, 2, Reason.BEHIND, {"ahead": 1}),
        (WAITS, 3, Reason.BEHIND, {"ahead": 2}),
    ]
    bench.step()
    assert bench.decisions() == []
    bench.add(2)
    bench.step()
    assert bench.decisions() == [(WAITS, 4, Reason.BEHIND, {"ahead": 3})]
    bench.scheduler.abort(2)
    bench.step()
    assert bench.decisions() == [(WAITS, 3, Reason.BEHIND, {"ahead": 1})]
    bench.scheduler.abort(0)
    bench.step()
    assert bench.decisions() == [
        (ADMITTED, 1, Reason.FITS, {"needs": 1, "free": 64, "cached_tokens": 0}),
        (WAITS, 3, Reason.SEQUENCE_CAP, {"running": 1, "limit": 1}),
    ]


def test_a_wait_for_the_budget_says_so():
    bench = Bench(max_num_batched_tokens=4)
    bench.add(4)
    bench.add(4)
    bench.step()
    assert bench.decisions()[1:] == [(WAITS, 1, Reason.TOKEN_BUDGET, {"scheduled": 4, "limit": 4})]


def test_a_wait_for_blocks_is_told_again_when_its_numbers_change():
    bench = Bench(num_blocks=4)
    bench.add(8, max_tokens=6)
    bench.add(9)
    waits = []
    for _ in range(6):
        bench.step()
        waits.append([d.numbers for d in bench.decisions() if d.kind == WAITS])
    assert waits == [[{"needs": 3, "free": 2}], [{"needs": 3, "free": 1}], [], [], [], [{"needs": 3, "free": 0}]]


def test_admission_counts_prefix_hits():
    bench = Bench(prefix_caching=True)
    first = bench.add(list(range(10)))
    bench.step()
    second = bench.add(list(range(10)))
    bench.decisions()
    assert bench.step() == [(0, Phase.DECODE, 10, 1), (1, Phase.PREFILL, 8, 2)]
    assert bench.decisions() == [(ADMITTED, 1, Reason.FITS, {"needs": 1, "free": 61, "cached_tokens": 8})]
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 8)
    assert (bench.scheduler.prefix_queried_tokens, bench.scheduler.prefix_hit_tokens) == (20, 8)


# ---------------------------------------------------------------------- what never fits


def test_a_prompt_that_never_fits_is_refused_at_once_and_the_next_one_runs():
    bench = Bench(num_blocks=4)
    never = bench.add(20)
    short = bench.add(3, max_tokens=2)
    assert bench.decisions() == [(REFUSED, 0, Reason.NEVER_FITS, {"needs": 6, "pool": 4})]
    assert (never.status, never.finish_reason) == (RequestStatus.FINISHED_REFUSED, FinishReason.REFUSED)
    assert "need 6 blocks" in (never.error or "")
    assert "pool has 4" in (never.error or "")
    bench.run()
    assert short.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(("tokens", "fits"), [(14, True), (15, True), (16, False)])
def test_a_prompt_fits_if_one_new_token_does(tokens: int, fits: bool):
    bench = Bench(num_blocks=4)
    assert (bench.add(tokens).finish_reason is None) == fits


@pytest.mark.parametrize(("tokens", "refused"), [(31, False), (32, True), (33, True)])
def test_a_prompt_as_long_as_the_longest_request_is_refused(tokens: int, refused: bool):
    bench = Bench(max_model_len=32)
    req = bench.add(tokens)
    assert (req.finish_reason is FinishReason.REFUSED) == refused
    if refused:
        assert bench.decisions() == [(REFUSED, 0, Reason.TOO_LONG, {"tokens": tokens, "limit": 32})]
        assert f"{tokens} tokens" in (req.error or "")
        assert "at most 31" in (req.error or "")


def test_an_empty_prompt_is_refused():
    bench = Bench()
    req = bench.add(0)
    assert bench.decisions() == [(REFUSED, 0, Reason.EMPTY_PROMPT, {})]
    assert "empty" in (req.error or "")


def test_the_models_own_limit_counts_too():
    scheduler = Scheduler(EngineConfig(scheduler=SchedulerConfig(max_model_len=64)), max_model_len=16)
    assert scheduler.max_model_len == 16


def test_a_request_that_outgrows_the_pool_alone_ends_and_keeps_its_tokens():
    bench = Bench(num_blocks=3)
    big = bench.add(6)
    small = bench.add(3, max_tokens=2)
    bench.run()
    # Twelve slots hold all but the last of 13 tokens.
    assert (big.finish_reason, len(big.output_token_ids)) == (FinishReason.ERROR, 7)
    assert "needs 4 blocks and the whole pool has 3" in (big.error or "")
    assert (FAILED, 0, Reason.OUTGREW_POOL, {"needs": 4, "pool": 3}) in bench.decisions()
    assert small.finish_reason is FinishReason.LENGTH
    assert (bench.scheduler.kv.pool.num_used, bench.scheduler.num_preemptions) == (0, 0)


# ---------------------------------------------------------------------- ends


@pytest.mark.parametrize(
    ("params", "ends", "kept"),
    [
        ({}, FinishReason.STOP, 1),
        ({"ignore_eos": True}, FinishReason.LENGTH, 4),
        ({"ignore_eos": True, "stop_token_ids": (9, EOS)}, FinishReason.STOP, 1),
    ],
)
def test_the_end_of_sequence_token_ends_unless_ignored(params: dict[str, object], ends: FinishReason, kept: int):
    bench = Bench()
    bench.next_token = EOS
    req = bench.add(2, max_tokens=4, **params)
    bench.run()
    assert (req.finish_reason, req.output_token_ids) == (ends, [EOS] * kept)


def test_the_output_ends_at_the_longest_request():
    bench = Bench(max_model_len=16)
    req = bench.add(12, max_tokens=500)
    assert bench.scheduler.max_tokens(req) == 4
    bench.run()
    assert (req.finish_reason, len(req.output_token_ids)) == (FinishReason.LENGTH, 4)


def test_a_request_ends_once_whatever_is_called_after():
    bench = Bench()
    req = bench.add(5)
    bench.step()
    assert bench.scheduler.abort(0)
    before = bench.scheduler.kv.pool.num_free
    assert not bench.scheduler.abort(0)
    bench.scheduler.finish(req, FinishReason.STOP)
    bench.scheduler.fail(req, Reason.STEP_FAILED, {}, "late")
    assert (req.finish_reason, req.error) == (FinishReason.ABORT, None)
    assert bench.scheduler.ended == [req]
    assert bench.scheduler.kv.pool.num_free == before == 64


@pytest.mark.parametrize("when", ["waiting", "prefilling", "decoding", "preempted"])
def test_an_abort_frees_everything_at_any_time(when: str):
    bench = Bench(num_blocks=4, max_prefill_chunk=2)
    first = bench.add(6)
    second = bench.add(4)
    if when == "waiting":
        assert bench.scheduler.abort(1)
    elif when == "prefilling":
        bench.step()
        assert bench.scheduler.abort(1)
    else:
        while second.status is not (RequestStatus.PREEMPTED if when == "preempted" else RequestStatus.RUNNING):
            bench.step()
        assert bench.scheduler.abort(1)
    assert bench.scheduler.num_preempted == 0
    assert second.finish_reason is FinishReason.ABORT
    assert bench.scheduler.abort(first.request_id)
    assert bench.scheduler.kv.pool.num_used == 0
    assert bench.step() == []


# ---------------------------------------------------------------------- pressure


def test_the_youngest_gives_way_with_the_numbers_and_is_computed_again():
    bench = Bench(num_blocks=4)
    bench.add(7)
    young = bench.add(5)
    bench.step()
    bench.step()
    bench.decisions()
    # The older one writes its ninth token: it needs a third block and none is free.
    assert bench.step() == [(0, Phase.DECODE, 8, 1)]
    assert bench.decisions() == [
        (PREEMPTED, 1, Reason.GAVE_WAY, {"needs": 1, "free": 0, "released": 2, "to": 0}),
        (WAITS, 1, Reason.NO_BLOCKS, {"needs": 2, "free": 1}),
    ]
    assert (young.status, young.num_preemptions, young.num_computed_tokens) == (RequestStatus.PREEMPTED, 1, 0)
    assert len(young.output_token_ids) == 2
    assert bench.scheduler.num_preempted == 1
    bench.scheduler.abort(0)
    assert bench.step() == [(1, Phase.RECOMPUTE, 0, 7)]
    assert bench.decisions() == [(RESUMED, 1, Reason.FITS, {"needs": 2, "free": 4, "cached_tokens": 0})]
    assert bench.scheduler.num_preempted == 0
    assert bench.step() == [(1, Phase.DECODE, 7, 1)]
    assert bench.scheduler.num_preemptions == 1


def test_the_youngest_gives_way_to_itself():
    bench = Bench(num_blocks=4)
    bench.add(5)
    bench.add(8)
    bench.step()
    bench.decisions()
    assert bench.step() == [(0, Phase.DECODE, 5, 1)]
    assert bench.decisions() == [
        (PREEMPTED, 1, Reason.GAVE_WAY_TO_ITSELF, {"needs": 1, "free": 0, "released": 2}),
        (WAITS, 1, Reason.NO_BLOCKS, {"needs": 3, "free": 2}),
    ]


def test_the_preempted_wait_in_front_in_order_of_arrival():
    bench = Bench(num_blocks=6, block_size=2)
    bench.add(2)
    bench.add([1] * 3)
    bench.add([2] * 3)
    bench.add(4)
    bench.step()
    assert list(bench.scheduler.running) == [0, 1, 2]
    while len(bench.scheduler.running) > 1:
        bench.step()
    assert list(bench.scheduler.waiting) == [1, 2, 3]
    bench.scheduler.abort(0)
    bench.step()
    assert next(iter(bench.scheduler.running)) == 1


def test_chunks_below_what_was_computed_once_are_recompute_and_those_above_prefill():
    bench = Bench(num_blocks=4, max_prefill_chunk=3)
    bench.add(3)
    young = bench.add(10)
    assert bench.step() == [(0, Phase.PREFILL, 0, 3), (1, Phase.PREFILL, 0, 3)]
    assert bench.step() == [(0, Phase.DECODE, 3, 1), (1, Phase.PREFILL, 3, 3)]
    assert bench.step() == [(0, Phase.DECODE, 4, 1)]
    assert young.num_preemptions == 1
    bench.scheduler.abort(0)
    seen = [bench.step()[0] for _ in range(4)]
    assert seen == [
        (1, Phase.RECOMPUTE, 0, 3),
        (1, Phase.RECOMPUTE, 3, 3),
        (1, Phase.PREFILL, 6, 3),
        (1, Phase.PREFILL, 9, 1),
    ]


def test_a_resumed_request_may_find_its_own_blocks():
    bench = Bench(num_blocks=4, prefix_caching=True)
    bench.add(7)
    young = bench.add(5)
    for _ in range(3):
        bench.step()
    assert young.status is RequestStatus.PREEMPTED
    bench.scheduler.abort(0)
    assert bench.step() == [(1, Phase.RECOMPUTE, 4, 3)]
    assert (young.num_cached_tokens, bench.scheduler.prefix_hit_tokens) == (0, 0)


def test_all_requests_end_under_heavy_pressure():
    bench = Bench(num_blocks=5, block_size=2, max_prefill_chunk=2, max_num_batched_tokens=5)
    for tokens in (3, 5, 1, 6, 2, 4):
        bench.add(tokens, max_tokens=4)
    bench.run()
    assert [r.finish_reason for r in bench.requests] == [FinishReason.LENGTH] * 6
    assert [len(r.output_token_ids) for r in bench.requests] == [4] * 6
    assert bench.scheduler.num_preemptions > 0
    assert sorted(r.request_id for r in bench.scheduler.ended) == list(range(6))


def test_waiting_for_blocks_is_one_line_in_the_log_with_a_count(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, logger="engine")
    bench = Bench(num_blocks=4)
    bench.add(8, max_tokens=6)
    bench.add(9, max_tokens=1)
    bench.run()
    assert [record.getMessage() for record in caplog.records] == [
        "request 1 waited for blocks: not enough were free in 6 steps"
    ]


def test_a_batch_gives_the_runner_all_it_needs():
    bench = Bench(block_size=4, max_prefill_chunk=3)
    bench.add(5)
    bench.step()
    output = bench.scheduler.schedule()
    (share,) = output.scheduled
    assert (share.token_ids, share.block_ids, share.samples) == ([1003, 1004], [0, 1], True)
    assert output.num_batched_tokens == 2


@pytest.mark.parametrize("num_blocks", range(3, 16))
@pytest.mark.parametrize("chunk", [0, 3])
def test_where_there_is_room_for_all_nobody_gives_way(num_blocks: int, chunk: int):
    bench = Bench(num_blocks, block_size=2, max_prefill_chunk=chunk, max_num_batched_tokens=6)
    scheduler = bench.scheduler
    promises: list[bool] = []
    for number in range(5):
        bench.add(2 + number, max_tokens=5)
    for step in range(60):
        if step % 5 == 4 and scheduler.running:
            parent = next(iter(scheduler.running.values()))
            child = Request(100 + step, "", parent.tokens(0, parent.num_tokens), SamplingParams(max_tokens=4))
            scheduler.fork(parent, child)
        promised, plenty = scheduler.has_room, scheduler.has_plenty_of_room
        assert promised or not plenty
        bench.decisions()
        bench.step()
        gave_way = any(decision.kind in (PREEMPTED, FAILED) for decision in bench.decisions())
        assert not (promised and gave_way)
        promises.append(promised)
    assert True in promises
    assert False in promises or num_blocks > 8


@pytest.mark.parametrize("free", range(1, 8))
def test_plenty_of_room_counts_the_copies_of_a_block_that_forks_share_in_the_middle_of_a_prompt(free: int):
    bench = Bench(3 + free, block_size=4, max_prefill_chunk=3, max_num_batched_tokens=6)
    scheduler = bench.scheduler
    parent = bench.add(12)
    bench.step()
    for number in (100, 101):
        child = Request(number, "", parent.tokens(0, parent.num_tokens), SamplingParams(max_tokens=4))
        scheduler.fork(parent, child)
    # All three write to the block that they share, and the two that have no second one open it.
    assert scheduler.has_room == (free >= 3 + 2)
    assert scheduler.has_room or not scheduler.has_plenty_of_room
