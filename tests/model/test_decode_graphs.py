"""Captured decodes give the tokens of the plain ones, whatever the batch, and step aside where they cannot."""

from __future__ import annotations

import contextlib
import gc
import weakref
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from test_greedy_equality import GREEDY, expected_all, prompt_of
from tiny_models import engine_over, run, shared_model

from engine.model.decode_graphs import CudaCapture, DecodeGraphs, _Inputs, graph_size
from engine.model.runner import ModelRunner

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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


def test_tables_that_reserve_more_than_the_reach_are_taken_as_far_as_it_goes() -> None:
    runner = engine_over(shared_model("llama"), block_size=4).runner
    assert isinstance(runner, ModelRunner)
    graphs = DecodeGraphs(runner.forward, runner.kv_cache, 4, 8, Recorder())
    reserved = np.arange(12, dtype=np.int32)[None]  # of which sequences of up to 8 tokens see two
    token, length = [5], np.array([1], np.int32)
    with torch.inference_mode():
        logits = graphs.run(token, length, reserved)
        assert logits is not None
        expected = logits.clone()
        assert torch.equal(graphs.run(token, length, reserved[:, :2]), expected)  # type: ignore[arg-type]


class LateDevice:
    """Stands for a device whose copies from the host take place when they are asked for, and not before."""

    type = "cuda"

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.copies: list[Callable[[], object]] = []
        zeros, arange, to, copy = torch.zeros, torch.arange, torch.Tensor.to, torch.Tensor.copy_
        monkeypatch.setattr(torch, "zeros", lambda *shape, pin_memory, **options: zeros(*shape, **options))
        monkeypatch.setattr(torch, "arange", lambda *ends, device, **options: arange(*ends, **options))
        monkeypatch.setattr(torch.Tensor, "to", lambda tensor, device, copy: to(tensor, "cpu", copy=copy))

        def later(into: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
            if non_blocking:
                self.copies.append(lambda: copy(into, source))
                return into
            return copy(into, source)

        monkeypatch.setattr(torch.Tensor, "copy_", later)


def test_a_step_in_flight_still_gets_what_it_was_given_when_the_next_one_is_filled_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = LateDevice(monkeypatch)
    inputs = _Inputs(2, 3, device)  # type: ignore[arg-type]
    for step in range(4):
        inputs.fill([step], np.array([step + 1], np.int32), np.array([[step + 7]], np.int32), 4)
        if step:  # the device gets to the step before, while the one filled in last waits
            device.copies.pop(0)()
            assert inputs.token_ids.tolist() == [step - 1, 0]
            assert inputs.positions.tolist() == [step - 1, 0]


class FakeCuda:
    """Two devices with a current stream each, and torch's way to capture: one that fails leaves its stream current."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.at = 0
        self.current = ["default 0", "default 1"]
        self.made = 0
        self.waits: list[tuple[str, str]] = []
        self.captured: list[tuple[str, object]] = []
        for name in ("device", "stream", "graph"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "Stream", lambda: FakeStream(self, f"side {self.at}"))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: FakeStream(self, self.current[self.at], made=True))
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: FakeGraph())

    @contextlib.contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        before, self.at = self.at, device.index
        try:
            yield
        finally:
            self.at = before

    @contextlib.contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        at = self.at
        before, self.current[at] = self.current[at], stream.name
        try:
            yield
        finally:
            self.current[at] = before

    @contextlib.contextmanager
    def graph(self, graph: FakeGraph, pool: object = None, stream: FakeStream | None = None) -> Iterator[None]:
        assert stream is not None
        before, self.current[self.at] = self.current[self.at], stream.name
        self.captured.append((stream.name, pool))
        try:
            yield
        except Exception:
            raise RuntimeError("the capture was ended by an error before")  # noqa: B904 - as torch does it
        self.current[self.at] = before


class FakeStream:
    def __init__(self, cuda: FakeCuda, name: str, *, made: bool = False) -> None:
        self._cuda, self.name = cuda, name
        cuda.made += not made

    def wait_stream(self, other: FakeStream) -> None:
        self._cuda.waits.append((self.name, other.name))


class FakeGraph:
    def replay(self) -> None:
        pass

    def pool(self) -> object:
        return "pool"


def test_a_capture_takes_place_on_the_device_of_the_model_and_leaves_everything_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = FakeCuda(monkeypatch)
    capture = CudaCapture(torch.device("cuda", 1))
    where: list[tuple[int, str, bool]] = []

    def function() -> torch.Tensor:
        where.append((cuda.at, cuda.current[cuda.at], gc.isenabled()))
        return torch.zeros(1)

    for _ in range(2):
        capture(function)
    run, captured = (1, "side 1", True), (1, "side 1", False)
    assert where == [run, captured] * 2
    assert cuda.waits == [("side 1", "default 1"), ("default 1", "side 1")] * 2
    assert cuda.captured == [("side 1", None), ("side 1", "pool")]
    assert cuda.made == 1
    assert (cuda.at, cuda.current) == (0, ["default 0", "default 1"])
    assert gc.isenabled()


def test_a_capture_that_fails_leaves_the_stream_that_was_current_and_says_what_came_first(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cuda = FakeCuda(monkeypatch)
    calls = 0

    class Breaks:
        def __init__(self, inner: Forward) -> None:
            self._inner = inner

        def forward(self, *batch: torch.Tensor | AttentionMetadata) -> torch.Tensor:
            nonlocal calls
            calls += 1
            if calls == 2:
                raise RuntimeError("operation not permitted when stream is capturing")
            return self._inner.forward(*batch)  # type: ignore[arg-type]

    runner = engine_over(shared_model("llama"), block_size=4).runner
    assert isinstance(runner, ModelRunner)
    capture = CudaCapture(torch.device("cuda", 1))
    graphs = DecodeGraphs(Breaks(runner.forward), runner.kv_cache, 4, 256, capture)  # type: ignore[arg-type]
    with torch.inference_mode():
        assert graphs.run([5], np.array([1], np.int32), np.array([[0]], np.int32)) is None
    assert (cuda.at, cuda.current) == (0, ["default 0", "default 1"])
    assert gc.isenabled()
    assert [r.getMessage() for r in caplog.records] == [
        "decode steps run without CUDA graphs: operation not permitted when stream is capturing"
    ]
