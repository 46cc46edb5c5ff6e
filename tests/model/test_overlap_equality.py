"""Steps that are launched before the tokens of the one before are known bring the same tokens as those that wait."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from test_decode_graphs import Recorder, with_graphs
from test_greedy_equality import GREEDY, expected_all, prompt_of
from tiny_models import VOCAB, engine_over, engine_without_room, run, shared_model

from engine.model.launched import DeviceStep, Draws, Samples, filled_in
from engine.model.sampler import choose, sample
from engine.overlap import OverlappedEngine
from engine.request import FinishReason, SamplingParams
from engine.runner import RunnerError
from engine.trace.events import Phase, StepTrace

if TYPE_CHECKING:
    from engine.config import Preemption


def overrun_steps(engine: object) -> list[StepTrace]:
    assert isinstance(engine, OverlappedEngine)
    steps: list[StepTrace] = []
    engine.add_sink(lambda m: steps.append(m) if isinstance(m, StepTrace) else None)
    return steps


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2"])
def test_chunks_and_decodes_of_many_lengths_equal_generate(family: str) -> None:
    prompts = [prompt_of(n) for n in (1, 3, 13, 16, 17, 33, 49)]
    engine = engine_over(
        shared_model(family), block_size=3, chunk=7, max_num_batched_tokens=23, max_num_seqs=5, async_scheduling=True
    )
    assert run(engine, prompts, GREEDY) == expected_all(family, prompts)


@pytest.mark.parametrize("preemption", ["swap", "recompute", "auto"])
@pytest.mark.parametrize("length", [13, 15, 16, 17])
def test_preempted_outputs_equal_the_unpreempted(length: int, preemption: Preemption) -> None:
    prompts = [prompt_of(length, seed) for seed in range(3)]
    engine = engine_without_room(length, preemption=preemption, async_scheduling=True)
    assert run(engine, prompts, GREEDY) == expected_all("llama", prompts)
    assert engine.scheduler.num_preemptions > 0


def test_offloaded_prefixes_give_the_same_tokens() -> None:
    engine = engine_over(
        shared_model("llama"), block_size=4, num_blocks=16, num_cpu_blocks=16, max_num_seqs=1, async_scheduling=True
    )
    prompts = [prompt_of(48, seed) for seed in range(3)]
    for _ in range(2):
        assert run(engine, prompts, GREEDY) == expected_all("llama", prompts)


def test_who_ends_by_its_token_is_thrown_out_of_the_step_behind_and_nobody_else_notices() -> None:
    prompts = [prompt_of(n) for n in (5, 16, 17, 31)]
    want = expected_all("llama", prompts)
    params = [replace(GREEDY, stop_token_ids=(tokens[at],)) for at, tokens in enumerate(want)]
    engine = engine_over(shared_model("llama"), block_size=3, async_scheduling=True)
    steps = overrun_steps(engine)
    got = run(engine, prompts, params)
    for at, tokens in enumerate(got):
        assert tokens == want[at][: want[at].index(want[at][at]) + 1]
    overruns = [member.request for step in steps for member in step.batch if member.phase == Phase.OVERRUN]
    assert sorted(overruns) == [0, 1, 2, 3]


@pytest.mark.parametrize("at", range(2, 12))
def test_a_block_that_an_overrun_still_writes_to_is_filled_from_the_cpu_pool_behind_it(at: int) -> None:
    prompts = [prompt_of(5, seed) for seed in range(3)]
    want = expected_all("llama", prompts, 14)
    ends = want[0].index(want[0][at])
    engine = engine_over(
        shared_model("llama"),
        block_size=4,
        num_blocks=5,
        num_cpu_blocks=9,
        preemption="swap",
        prefix_caching=False,
        async_scheduling=True,
    )
    params = SamplingParams(max_tokens=14)
    got = run(engine, prompts, [replace(params, stop_token_ids=(want[0][at],)), params, params])
    assert got == [want[0][: ends + 1], *want[1:]]


@pytest.mark.parametrize("block_size", [3, 16])
def test_choices_and_forks_equal_generate(block_size: int) -> None:
    engine = engine_over(shared_model("qwen3"), block_size=block_size, async_scheduling=True)
    prompt = prompt_of(16)
    first = engine.add_request(prompt, replace(GREEDY, n=3))
    tokens: dict[tuple[int, int], list[int]] = {}
    fork = -1
    while engine.has_work:
        for output in engine.step():
            tokens.setdefault((output.request_id, output.index), []).extend(output.token_ids)
        if fork < 0 and len(tokens[first, 1]) == 2:
            fork = engine.fork(first + 1)
    (want,) = expected_all("qwen3", [prompt])
    assert [tokens[first, index] for index in range(3)] == [want] * 3
    # The fork was handed in after the second token, and the step in flight brought the third.
    assert tokens[fork, 0] == want[3:]


def test_drawn_tokens_are_the_same() -> None:
    prompts = [prompt_of(n) for n in (5, 6, 17)]
    params = [SamplingParams(max_tokens=12, temperature=1.0, top_p=0.9, seed=seed) for seed in (1, 2)]
    params.append(SamplingParams(max_tokens=9))
    sides = [run(engine_over(shared_model("qwen3"), async_scheduling=on), prompts, params) for on in (False, True)]
    assert sides[0] == sides[1]


def test_captured_decodes_take_their_tokens_from_the_step_before() -> None:
    prompts = [prompt_of(n, n) for n in (3, 15, 16, 17, 31)]
    recorder = Recorder()
    engine = with_graphs(engine_over(shared_model("llama"), block_size=4, async_scheduling=True), recorder)
    assert run(engine, prompts, GREEDY) == expected_all("llama", prompts)
    assert recorder.replayed > recorder.captured >= 1


def test_logits_that_are_not_numbers_end_their_request_and_the_others_keep_their_tokens() -> None:
    prompts = [prompt_of(n) for n in (4, 7, 9)]
    want = expected_all("llama", prompts)
    engine = engine_over(shared_model("llama"), block_size=3, async_scheduling=True)
    forward = engine.runner.forward  # type: ignore[attr-defined]
    calls = 0

    class Breaks:
        def forward(self, *batch: object) -> torch.Tensor:
            nonlocal calls
            calls += 1
            logits: torch.Tensor = forward.forward(*batch)
            if calls == 3:
                logits[1] = torch.nan
            return logits

    engine.runner.forward = Breaks()  # type: ignore[attr-defined]
    ids = [engine.add_request(prompt, GREEDY) for prompt in prompts]
    tokens: dict[int, list[int]] = {request: [] for request in ids}
    ends = {}
    while engine.has_work:
        for output in engine.step():
            tokens[output.request_id] += output.token_ids
            ends[output.request_id] = output.finish_reason
    assert [ends[request] for request in ids] == [FinishReason.LENGTH, FinishReason.ERROR, FinishReason.LENGTH]
    assert [tokens[ids[0]], tokens[ids[1]], tokens[ids[2]]] == [want[0], want[1][:2], want[2]]


def test_choosing_without_the_host_brings_the_same_tokens_and_the_same_bad_rows() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn((6, VOCAB), generator=generator)
    logits[2] = torch.nan
    logits[4] = -torch.inf
    params = [
        SamplingParams(),
        SamplingParams(temperature=1.0, top_k=20),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.7, min_p=0.1, top_p=0.9),
        SamplingParams(),
        SamplingParams(temperature=2.0),
    ]
    seeds, positions = list(range(6)), list(range(10, 16))
    tokens, bad = choose(logits, params, seeds, positions)
    expected, expected_bad = sample(logits, params, seeds, positions)
    assert torch.nonzero(bad).flatten().tolist() == expected_bad == [2, 4]
    good = [row for row in range(6) if row not in expected_bad]
    assert [tokens.tolist()[row] for row in good] == [expected[row] for row in good]
    assert bool(((tokens >= 0) & (tokens < VOCAB)).all())


class FakeEvents:
    """Stands for a device's events: what was recorded and waited for, in order; an event is a millisecond apart."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[str] = []
        self.recorded = 0
        empty = torch.empty
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: _FakeEvent(self))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "stream")
        monkeypatch.setattr(torch, "empty", lambda *size, pin_memory, **options: empty(*size, **options))


class _FakeEvent:
    def __init__(self, events: FakeEvents) -> None:
        self._events, self._at = events, 0

    def record(self, stream: str) -> None:
        self._events.recorded += 1
        self._at = self._events.recorded
        self._events.seen.append(f"record {self._at}")

    def synchronize(self) -> None:
        self._events.seen.append(f"wait for {self._at}")

    def elapsed_time(self, other: _FakeEvent) -> float:
        return float(other._at - self._at)


def test_a_step_on_a_device_waits_for_its_last_event_and_then_reads_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    events = FakeEvents(monkeypatch)
    took: list[tuple[int, int]] = []
    draws = Draws([7, 8], [SamplingParams()] * 2, [0, 0], [3, 4])
    samples = Samples({7: 0, 8: 1})

    def step(bad: list[bool]) -> DeviceStep:
        def compute() -> torch.Tensor:
            events.seen.append("forward")
            return torch.zeros((2, 5))

        def choose(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            events.seen.append("sample")
            return torch.tensor([4, 2]), torch.tensor(bad)

        return DeviceStep(
            torch.device("cpu"), compute, choose, samples, draws, [True, False, True], lambda *ns: took.append(ns)
        )

    launched = step([False, False])
    assert events.seen == ["record 1", "forward", "record 2", "sample", "record 3"]
    assert samples.tokens is not None
    assert launched.wait() == [4, None, 2]
    assert (events.seen[-1], took) == ("wait for 3", [(1_000_000, 1_000_000)])
    with pytest.raises(RunnerError) as raised:
        step([False, True]).wait()
    assert raised.value.request_ids == (8,)


def test_tokens_that_were_not_known_come_from_their_rows() -> None:
    known = torch.tensor([7, -1, 9, -3])
    assert filled_in(known, torch.tensor([50, 51, 52])).tolist() == [7, 50, 9, 52]
