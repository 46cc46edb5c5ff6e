"""A model whose layers all slide lets go of what is behind its window: the same tokens in few blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from test_architectures import SERVED
from test_greedy_equality import expected, expected_all, prompt_of
from tiny_models import engine_over, randomise, run, shared_model

from engine.request import SamplingParams
from engine.trace.events import Header, Op, Reason, StepTrace, TraceMessage
from engine.trace.invariants import check
from engine.trace.state import PoolState

if TYPE_CHECKING:
    from engine.config import KVDType
    from engine.engine import PagedEngine

WINDOW = 13
SIZE = 4


class Watched:
    """The most blocks that one request held, by the trace; contents of blocks that nobody needs become NaN."""

    def __init__(self, engine: PagedEngine) -> None:
        self.engine = engine
        self.most_held = 0
        self.kinds: set[int] = set()
        self.swapped_with_holes = 0
        self.state: PoolState
        engine.add_sink(self._follow)

    def _follow(self, message: TraceMessage) -> None:
        if isinstance(message, Header):
            self.state = PoolState(message)
            return
        self.state.apply(message)
        if isinstance(message, StepTrace):
            self.kinds.update(op[0] for op in message.ops)
            self.swapped_with_holes += sum(
                decision.reason == Reason.SWAPPED_IN and "behind" in decision.numbers for decision in message.decisions
            )
            assert self.state.violations == []
            assert check(self.state) == []
            for request in self.state.requests.values():
                self.most_held = max(self.most_held, sum(block >= 0 for block in request.table))
            cache = self.engine.runner.kv_cache  # type: ignore[attr-defined]
            free = torch.from_numpy((self.state.refs == 0) & (self.state.key == 0))
            (cache.data if cache.scales is None else cache.scales)[free] = torch.nan
            if cache.host is not None:
                empty = torch.from_numpy(self.state.cpu_filled == 0)
                (cache.host if cache.scales is None else cache.host_scales)[empty] = torch.nan


@pytest.mark.parametrize("attention", ["reference", "cpu"])
@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("chunk", [1, 3, 7])
def test_a_sequence_longer_than_the_pool_keeps_to_its_window(chunk: int, fuse: bool, attention: str) -> None:
    most = 1 + -(-(WINDOW - 2 + chunk) // SIZE)
    engine = engine_over(
        shared_model("mistral"),
        block_size=SIZE,
        num_blocks=most,
        chunk=chunk,
        prefix_caching=False,
        fuse=fuse,
        attention=attention,
    )
    watched = Watched(engine)
    prompt = prompt_of(41)
    assert len(prompt) + 60 > most * SIZE
    assert run(engine, [prompt], SamplingParams(max_tokens=60)) == [expected("mistral", tuple(prompt), 60)]
    assert watched.most_held <= most


@pytest.mark.parametrize("num_cpu_blocks", [0, 16])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_many_requests_under_pressure_give_the_same_tokens(prefix_caching: bool, num_cpu_blocks: int) -> None:
    prompts = [prompt_of(n, seed=6) for n in (3, 17, 30, 45, 8, 26)]
    engine = engine_over(
        shared_model("mistral"),
        block_size=SIZE,
        num_blocks=14,
        chunk=5,
        prefix_caching=prefix_caching,
        num_cpu_blocks=num_cpu_blocks,
        preemption="swap" if num_cpu_blocks else "recompute",
    )
    Watched(engine)
    for _ in range(2):
        assert run(engine, prompts, SamplingParams(max_tokens=25)) == expected_all("mistral", prompts, 25)
    assert engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize("attention", ["reference", "cpu"])
@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "fp8"])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_who_is_swapped_out_brings_the_window_back_and_not_what_is_behind_it(
    prefix_caching: bool, kv_dtype: KVDType, attention: str
) -> None:
    def engine_of(num_blocks: int, **more: Any) -> PagedEngine:
        return engine_over(
            shared_model("mistral"),
            block_size=SIZE,
            num_blocks=num_blocks,
            chunk=7,
            prefix_caching=prefix_caching,
            kv_dtype=kv_dtype,
            attention=attention,
            **more,
        )

    prompts = [prompt_of(n, seed=6 + n) for n in (3, 45, 44)]
    params = SamplingParams(max_tokens=25)
    engine = engine_of(13, num_cpu_blocks=16, preemption="swap")
    watched = Watched(engine)
    assert run(engine, prompts, params) == [run(engine_of(60), [prompt], params)[0] for prompt in prompts]
    assert watched.swapped_with_holes > 0


@pytest.mark.parametrize("num_cpu_blocks", [0, 16])
@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "fp8"])
def test_a_prefix_is_found_by_the_end_that_is_left_of_it(kv_dtype: KVDType, num_cpu_blocks: int) -> None:
    def engine_of(num_blocks: int, **more: Any) -> PagedEngine:
        return engine_over(
            shared_model("mistral"), block_size=SIZE, num_blocks=num_blocks, chunk=7, kv_dtype=kv_dtype, **more
        )

    engine = engine_of(10, num_cpu_blocks=num_cpu_blocks)
    watched = Watched(engine)
    document = prompt_of(60, seed=7)
    prompts = [document + prompt_of(n, seed=8) for n in (1, 2, 9)]
    params = SamplingParams(max_tokens=9)
    for prompt in prompts:
        # 15 blocks of the document are more than the pool has; the last four of them are all that is looked at.
        alone = run(engine_of(60, prefix_caching=False), [prompt], params)
        assert run(engine, [prompt], params) == alone
    assert Op.EVICT in watched.kinds
    assert watched.state.counters.prefix_hit_tokens == 2 * 60


def test_a_prefix_that_is_behind_the_window_is_found_all_the_same() -> None:
    engine = engine_over(shared_model("mistral"), block_size=SIZE, num_blocks=60, chunk=7)
    watched = Watched(engine)
    document = prompt_of(60, seed=7)
    prompts = [document + prompt_of(n, seed=8) for n in (1, 2, 9)]
    for prompt in prompts:
        assert run(engine, [prompt], SamplingParams(max_tokens=9)) == expected_all("mistral", [prompt], 9)
    assert Op.SHARE in watched.kinds
    assert watched.state.counters.prefix_hit_tokens == 2 * 60


def test_choices_and_forks_go_on_alike() -> None:
    engine = engine_over(shared_model("mistral"), block_size=SIZE, num_blocks=80, chunk=7)
    watched = Watched(engine)
    prompt = prompt_of(42)
    engine.add_request(prompt, SamplingParams(max_tokens=30, n=3))
    tokens: dict[tuple[int, int], list[int]] = {}
    fork = None
    while engine.has_work:
        for output in engine.step():
            said = tokens.setdefault((output.request_id, output.index), [])
            said += output.token_ids
            if fork is None and len(said) == 20:
                fork = engine.fork(output.request_id)
    whole = expected("mistral", tuple(prompt), 30)
    assert [tokens[0, index] for index in range(3)] == [whole] * 3
    assert fork is not None
    assert tokens[fork, 0] == whole[-len(tokens[fork, 0]) :]
    assert Op.COPY in watched.kinds


@pytest.mark.parametrize(("family", "window"), [("mistral", WINDOW), ("llama", 0), ("gpt2", 0)])
def test_the_header_says_how_far_a_model_looks_back(family: str, window: int) -> None:
    engine = engine_over(shared_model(family))
    assert engine.header.model.sliding_window == window


def test_a_model_with_one_layer_that_sees_all_keeps_every_block() -> None:
    engine = engine_over(randomise(SERVED["Gemma 2"]()), block_size=SIZE, chunk=7)
    watched = Watched(engine)
    run(engine, [list(range(1, 42))], SamplingParams(max_tokens=20))
    assert engine.header.model.sliding_window == 0
    assert watched.most_held == -(-60 // SIZE)
