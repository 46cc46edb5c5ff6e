"""The engine with a real model on a GPU: are its tokens the reference's, and how many come in a second."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from engine.bench.gpu_checks import Check
from engine.config import CacheConfig, DType, EngineConfig, ModelConfig, SchedulerConfig
from engine.model import load_engine
from engine.request import SamplingParams

if TYPE_CHECKING:
    from engine.bench.gpu_timing import Row
    from engine.engine import PagedEngine

_PROMPTS = (
    "What is the capital of France, and what is it known for?",
    "Explain why the sky is blue.",
    "List five animals that live in the desert, and what each of them eats.",
    "How does a refrigerator work?",
)


def same_tokens(device: str = "cuda", num_tokens: int = 24) -> Check:
    """Greedy tokens in float32 through the kernels and through the reference; the share that differs."""
    name = "greedy tokens of the model in float32, kernels and reference"
    try:
        ours = _generate(_engine(device, "triton", "float32"), num_tokens)
        expected = _generate(_engine(device, "reference", "float32"), num_tokens)
    except Exception as error:  # most likely the model is not installed; the report says which
        return Check(name, float("nan"), 0.0, f"{type(error).__name__}: {error}".splitlines()[0][:300])
    pairs = [pair for one, other in zip(ours, expected, strict=True) for pair in zip(one, other, strict=True)]
    return Check(name, sum(a != b for a, b in pairs) / len(pairs), 0.0)


def speed(device: str = "cuda", batch: int = 32, num_tokens: int = 96, prompt: int = 87) -> Row:
    """Tokens per second of `batch` requests at once in bfloat16, prefill included."""
    engine = _engine(device, "triton", "bfloat16")
    ids = engine.codec.encode(" ".join(_PROMPTS) * 8)
    _run(engine, [ids[:prompt]] * 2, 4)  # compiles
    prompts = [ids[n : n + prompt] for n in range(batch)]
    began = time.perf_counter()
    outputs = _run(engine, prompts, num_tokens)
    seconds = time.perf_counter() - began
    generated = sum(len(tokens) for tokens in outputs)
    return {
        "model": engine.header.model.name,
        "attention": engine.header.model.attention,
        "requests": batch,
        "prompt": prompt,
        "generated": generated,
        "seconds": seconds,
        "tokens/s": generated / seconds,
    }


def _engine(device: str, attention: Any, dtype: DType) -> PagedEngine:
    config = EngineConfig(
        model=ModelConfig(device=device, attention=attention, dtype=dtype),
        cache=CacheConfig(num_blocks=1024),
        scheduler=SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=2048),
    )
    return load_engine(config)


def _generate(engine: PagedEngine, num_tokens: int) -> list[list[int]]:
    return _run(engine, [engine.codec.encode(prompt) for prompt in _PROMPTS], num_tokens)


def _run(engine: PagedEngine, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    outputs: dict[int, list[int]] = {engine.add_request(prompt, params): [] for prompt in prompts}
    while engine.has_work:
        for output in engine.step():
            if output.error:
                raise RuntimeError(output.error)
            outputs[output.request_id].extend(output.token_ids)
    return list(outputs.values())
