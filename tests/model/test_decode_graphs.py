"""Captured decodes give the tokens of the plain ones, whatever the batch, and step aside where they cannot."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from test_greedy_equality import GREEDY, expected_all, prompt_of
from tiny_models import engine_over, run, shared_model

from engine.model.decode_graphs import DecodeGraphs, graph_size
from engine.model.runner import ModelRunner

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.attention.metadata import AttentionMetadata
    from engine.engine import PagedEngine
    from engine.model.forward import Forward


class Recorder:
    """Stands in for the device's capture: runs the function again over the same tensors, into the same result."""

    def __init__(self) -> None:
        self.captured = 0
        self.replayed = 0

    def __call__(self, function: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        self.captured += 1
        result = function().clone()

        def replay() -> None:
            self.replayed += 1
            result.copy_(function())

        return replay, result


def with_graphs(engine: PagedEngine, recorder: Callable[..., object], max_num_seqs: int = 64) -> PagedEngine:
    runner = engine.runner
    assert isinstance(runner, ModelRunner)
    runner.graphs = DecodeGraphs(runner.forward, runner.kv_cache, max_num_seqs, 256, recorder)  # type: ignore[arg-type]
    return engine


def test_what_a_recording_reads_lives_as_long_as_it() -> None:
    read: list[weakref.ref[torch.Tensor]] = []

    class Watched:
        def __init__(self, inner: Forward) -> None:
            self._inner = inner

        def forward(
            self, input_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, metadata: AttentionMetadata
        ) -> torch.Tensor:
            read.extend(weakref.ref(tensor) for tensor in (input_ids, positions, rows))
            return self._inner.forward(input_ids, positions, rows, metadata)

    def capture(function: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        return (lambda: None), function()

    runner = engine_over(shared_model("llama"), block_size=4).runner
    assert isinstance(runner, ModelRunner)
    graphs = DecodeGraphs(Watched(runner.forward), runner.kv_cache, 4, 256, capture)
    with torch.inference_mode():
        assert graphs.run([5], np.array([1], np.int32), np.array([[0]], np.int32)) is not None
    gc.collect()
    assert len(read) == 3
    assert all(reference() is not None for reference in read)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_padded_decodes_give_the_same_tokens(family: str) -> None:
    prompts = [prompt_of(n, n) for n in (3, 15, 16, 17, 31)]
    recorder = Recorder()
    engine = with_graphs(engine_over(shared_model(family), block_size=4), recorder)
    assert run(engine, prompts, GREEDY) == expected_all(family, prompts)
    assert recorder.replayed > recorder.captured >= 1


def test_preempted_and_chunked_requests_mix_with_captured_decodes() -> None:
    prompts = [prompt_of(17, seed) for seed in range(4)]
    recorder = Recorder()
    engine = with_graphs(engine_over(shared_model("llama"), block_size=4, num_blocks=21, chunk=5), recorder)
    assert run(engine, prompts, GREEDY) == expected_all("llama", prompts)
    assert engine.scheduler.num_preemptions > 0
    assert recorder.replayed > 0


def test_a_batch_beyond_the_largest_graph_runs_without() -> None:
    prompts = [prompt_of(5, seed) for seed in range(3)]
    recorder = Recorder()
    engine = with_graphs(engine_over(shared_model("llama")), recorder, max_num_seqs=2)
    assert run(engine, prompts, GREEDY) == expected_all("llama", prompts)
    assert recorder.captured == 0


def test_a_model_that_cannot_be_captured_runs_without(caplog: pytest.LogCaptureFixture) -> None:
    def refuses(function: Callable[[], torch.Tensor]) -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    prompts = [prompt_of(5, 0)]
    engine = with_graphs(engine_over(shared_model("llama")), refuses)
    assert run(engine, prompts, GREEDY) == expected_all("llama", prompts)
    assert [r.getMessage() for r in caplog.records] == [
        "decode steps run without CUDA graphs: operation not permitted when stream is capturing"
    ]


@pytest.mark.parametrize(("n", "size"), [(1, 1), (3, 4), (8, 8), (9, 16), (33, 40), (65, 96), (250, 250)])
def test_sizes_waste_little_and_never_exceed_the_limit(n: int, size: int) -> None:
    assert graph_size(n, 250) == size
