"""The engine with whole models on a GPU: are its tokens the reference's, and how many come in a second."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any

import torch

from engine.attention.choice import choose_attention
from engine.bench.gpu_report import Check, one_line
from engine.config import CacheConfig, DType, EngineConfig, ModelConfig, SchedulerConfig
from engine.model.load import make_runner
from engine.overlap import engine_for
from engine.request import SamplingParams
from engine.simulated import SimulatedCodec
from engine.trace.events import StepTrace

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from engine.bench.gpu_report import Row
    from engine.engine import PagedEngine

SHAPES: dict[str, dict[str, Any]] = {
    "SmolLM2-135M": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
    },
    "Llama-3.1-8B": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
}
"""Models by their shapes alone: their weights are drawn at random here, which no figure of this file depends on."""


class _Codec(SimulatedCodec):
    """Texts of a model that has none: every token is one letter."""

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        return ["x"] * len(token_ids)

    def stream(self, prompt_token_ids: Sequence[int]) -> Any:
        return _Letters()


class _Letters:
    def push(self, token_id: int) -> str:
        return "x"

    def flush(self) -> str:
        return ""


def made_up(shape: str, device: str, dtype: torch.dtype) -> Any:
    """A Llama of this shape with random weights, made on the device."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**SHAPES[shape], max_position_embeddings=8192, tie_word_embeddings=shape.startswith("Smol"))
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model: Any = LlamaForCausalLM(config)
            return model.eval()
    finally:
        torch.set_default_dtype(before)


def same_tokens(device: str = "cuda", num_tokens: int = 24) -> Check:
    """Greedy tokens in float32 through the kernels and through the reference; the share that differs."""
    name = "greedy tokens of a model of SmolLM2's shape in float32, captured kernels and plain reference"
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, 49152, (n,), generator=generator).tolist() for n in (15, 16, 17, 130)]
    try:
        sides = []
        for attention in ("triton", "reference"):
            model = made_up("SmolLM2-135M", device, torch.float32)
            engine = _engine(model, device, attention, "float32", cuda_graphs=attention == "triton")
            sides.append(_run(engine, prompts, num_tokens))
    except Exception as error:  # the report is to say how it went
        return Check(name, float("nan"), 0.0, one_line(error))
    pairs = [pair for one, other in zip(*sides, strict=True) for pair in zip(one, other, strict=True)]
    return Check(name, sum(a != b for a, b in pairs) / len(pairs), 0.0)


def same_overlapped(device: str = "cuda", num_tokens: int = 24) -> Check:
    """Greedy tokens with and without asynchronous scheduling, in a pool too small for all; the share that differs.

    Some end by a token that stops them, so that their next one is computed in vain, and some are swapped out.
    """
    name = "greedy tokens of a model of SmolLM2's shape in float32, with and without asynchronous scheduling"
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(0, 49152, (n,), generator=generator).tolist() for n in (15, 16, 17, 130, 33, 64)]
    try:
        model = made_up("SmolLM2-135M", device, torch.float32)
        pool = CacheConfig(num_blocks=20, num_cpu_blocks=32)
        engines = [
            _engine(model, device, "auto", "float32", cuda_graphs=True, cache=pool, async_scheduling=on)
            for on in (False, True)
        ]
        plain = _run(engines[0], prompts, num_tokens)
        stops = [tokens[at * num_tokens // 8] for at, tokens in enumerate(plain)]
        overlapped = _run(engines[1], prompts, num_tokens)
        ended = [_run(engine, prompts, num_tokens, stops) for engine in engines]
        if not all(engine.scheduler.num_preemptions for engine in engines):
            raise RuntimeError("nobody gave way: the pool is too large for this check")
    except Exception as error:  # the report is to say how it went
        return Check(name, float("nan"), 0.0, one_line(error))
    pairs = [*zip(plain, overlapped, strict=True), *zip(*ended, strict=True)]
    return Check(name, sum(a != b for a, b in pairs) / len(pairs), 0.0)


def speed(
    shape: str,
    batches: Sequence[int],
    device: str = "cuda",
    num_tokens: int = 128,
    prompt: int = 128,
    *,
    cuda_graphs: bool = True,
    async_scheduling: bool = False,
) -> Iterator[Row]:
    """Tokens per second of some requests at once in bfloat16, prefill included, and where a decode's time goes."""
    model = made_up(shape, device, torch.bfloat16)
    engine = _engine(model, device, "auto", "bfloat16", cuda_graphs=cuda_graphs, async_scheduling=async_scheduling)
    generator = torch.Generator().manual_seed(2)
    size = (2, sum(batches), prompt)
    first, second = torch.randint(0, SHAPES[shape]["vocab_size"], size, generator=generator).tolist()
    steps: list[StepTrace] = []
    engine.add_sink(lambda message: steps.append(message) if isinstance(message, StepTrace) else None)
    for batch in batches:
        _run(engine, first[:batch], 4)  # compiles and captures; other prompts, so that no prefix is found
        steps.clear()
        began = time.perf_counter()
        outputs = _run(engine, second[:batch], num_tokens)
        seconds = time.perf_counter() - began
        first, second = first[batch:], second[batch:]
        generated = sum(len(tokens) for tokens in outputs)
        decodes = [s for s in steps if sum(member.num_scheduled for member in s.batch) == batch == len(s.tokens)]
        parts = {
            "schedule": [s.schedule_ns for s in decodes],
            "execute": [s.execute_ns for s in decodes],
            "sample": [s.sample_ns for s in decodes],
            "update": [s.update_ns for s in decodes],
        }
        name = f"{shape}, kvtui" + ("" if cuda_graphs else " without graphs") + ", async" * async_scheduling
        row: Row = {"shape": name, "requests": batch, "prompt": prompt, "generated": generated}
        row |= {"seconds": seconds, "tokens/s": generated / seconds}
        yield row | {f"{part} ms": statistics.median(times) / 1e6 for part, times in parts.items() if times}


def transformers_speed(shape: str, batch: int, device: str = "cuda", num_tokens: int = 128, prompt: int = 128) -> Row:
    """The same by transformers' own `generate`, one padded batch of equal lengths: static batching at its best."""
    model = made_up(shape, device, torch.bfloat16)
    ids = torch.randint(0, SHAPES[shape]["vocab_size"], (batch, prompt), device=device)

    def generate(tokens: int) -> None:
        model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False,
            pad_token_id=2,
        )  # fmt: skip
        torch.cuda.synchronize()

    generate(4)
    began = time.perf_counter()
    generate(num_tokens)
    seconds = time.perf_counter() - began
    row: Row = {"shape": f"{shape}, transformers", "requests": batch, "prompt": prompt}
    return row | {"generated": batch * num_tokens, "seconds": seconds, "tokens/s": batch * num_tokens / seconds}


def _engine(
    model: Any,
    device: str,
    attention: Any,
    dtype: DType,
    *,
    cuda_graphs: bool,
    cache: CacheConfig | None = None,
    async_scheduling: bool = False,
) -> PagedEngine:
    config = EngineConfig(
        model=ModelConfig(device=device, attention=attention, dtype=dtype, cuda_graphs=cuda_graphs),
        cache=cache or CacheConfig(num_blocks=8192),
        scheduler=SchedulerConfig(
            max_num_seqs=256,
            max_num_batched_tokens=4096,
            preemption="swap" if cache is not None else "recompute",
            async_scheduling=async_scheduling,
        ),
    )
    name, chosen = choose_attention(attention, torch.device(device))
    return engine_for(
        config, make_runner(model, config, name="made up", attention=chosen, attention_name=name), _Codec()
    )


def _run(engine: PagedEngine, prompts: list[list[int]], num_tokens: int, stops: Sequence[int] = ()) -> list[list[int]]:
    outputs: dict[int, list[int]] = {}
    for at, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, stop_token_ids=tuple(stops[at : at + 1]))
        outputs[engine.add_request(prompt, params)] = []
    while engine.has_work:
        for output in engine.step():
            if output.error:
                raise RuntimeError(output.error)
            outputs[output.request_id].extend(output.token_ids)
    return list(outputs.values())
