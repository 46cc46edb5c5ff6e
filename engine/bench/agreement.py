"""How often the engine's greedy token is transformers' own: `python -m engine.bench.agreement`.

In float32 the two agree token by token (the tests hold them to it). In bfloat16 many logits are exactly equal and the
order of summation decides, so this reports agreement instead. Every run is forced along one text, what eager float32
transformers generates, and asked at each position for its most likely next token: one early difference then does not
make all later ones differ. Beside it stands how far eager bfloat16 agrees with float32: what the precision alone costs.

In the same way, what the forms of the KV cache cost (`--kv-dtype`): the same tokens, and how far the logits are from
those over a cache in the model's own type, for each attention that runs here. And what narrow weights cost
(`--weights`), against the model's own.
"""

from __future__ import annotations

import argparse
import statistics
from typing import TYPE_CHECKING, Any

import torch

from engine.attention.choice import choose_attention
from engine.bench.report import Figure, show
from engine.config import DEFAULT_MODEL, CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from engine.model import load_engine
from engine.model.checkpoint import find_checkpoint
from engine.model.device import choose_device
from engine.model.pretrained import load_transformers
from engine.model.tokenizer import TokenizerCodec
from engine.request import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from engine.attention.metadata import AttentionMetadata
    from engine.config import DType, KVDType, Weights
    from engine.core.scheduler import SchedulerOutput
    from engine.engine import PagedEngine
    from engine.model.forward import Forward

_QUESTIONS = (
    "What is the capital of France, and what is it known for?",
    "Explain in three sentences why the sky is blue.",
    "Write a short poem about the sea in winter.",
    "List five animals that live in the desert.",
    "What is the difference between a virus and a bacterium?",
    "Give me a recipe for pancakes.",
    "Who wrote Hamlet, and when?",
    "How does a refrigerator work?",
)

_FORMS: tuple[KVDType, ...] = ("bf16", "fp8", "int8")
_WEIGHTS: tuple[Weights, ...] = ("auto", "bf16", "int8")


class _Noting:
    """A forward that keeps the logits of its last batch."""

    def __init__(self, forward: Forward) -> None:
        self._forward = forward
        self.logits: torch.Tensor

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, metadata: AttentionMetadata
    ) -> torch.Tensor:
        self.logits = self._forward.forward(input_ids, positions, rows, metadata)
        return self.logits


class _Forced:
    """A runner that answers with a given text and notes what the real one would have answered, and its logits."""

    def __init__(self, runner: Any, texts: dict[int, list[int]]) -> None:
        self._runner = runner
        self._noting = runner.forward = _Noting(runner.forward)
        self._texts = texts
        self.said: dict[int, list[int]] = {}
        self.logits: dict[int, list[torch.Tensor]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def execute(self, output: SchedulerOutput) -> list[int | None]:
        tokens: list[int | None] = []
        given = self._runner.execute(output)
        logits = iter(self._noting.logits.float().cpu())
        for share, token in zip(output.scheduled, given, strict=True):
            if token is None:
                tokens.append(None)
                continue
            request_id = share.request.request_id
            said = self.said.setdefault(request_id, [])
            tokens.append(self._texts[request_id][len(said)])
            said.append(token)
            self.logits.setdefault(request_id, []).append(next(logits))
        return tokens


def eager_texts(model: Any, prompts: Sequence[list[int]], num_tokens: int) -> list[list[int]]:
    """Greedy tokens by transformers' `generate`, each prompt alone."""
    texts = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=model.device)
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False)
        texts.append(out[0, len(prompt) :].tolist())
    return texts


@torch.inference_mode()
def eager_said(model: Any, prompts: Sequence[list[int]], texts: Sequence[list[int]]) -> list[list[int]]:
    """The most likely token at each position of the texts, by transformers."""
    said = []
    for prompt, text in zip(prompts, texts, strict=True):
        logits = model(torch.tensor([[*prompt, *text]], device=model.device), use_cache=False).logits[0]
        said.append(logits[len(prompt) - 1 : -1].argmax(-1).tolist())
    return said


def engine_said(
    engine: PagedEngine, prompts: Sequence[list[int]], texts: Sequence[list[int]]
) -> tuple[list[list[int]], torch.Tensor]:
    """The same by the engine, chunked prefill and batched decode over the paged cache; and its logits, a row each."""
    ids = [
        engine.add_request(prompt, SamplingParams(max_tokens=len(text), ignore_eos=True))
        for prompt, text in zip(prompts, texts, strict=True)
    ]
    forced = _Forced(engine.runner, dict(zip(ids, texts, strict=True)))
    engine.runner = forced
    while engine.has_work:
        engine.step()
    return [forced.said[i] for i in ids], torch.stack([row for i in ids for row in forced.logits[i]])


def agreement(one: Sequence[list[int]], other: Sequence[list[int]]) -> float:
    """Share of positions with the same token."""
    pairs = [(a, b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True)]
    return sum(a == b for a, b in pairs) / len(pairs)


def logit_errors(logits: torch.Tensor, expected: torch.Tensor) -> list[float]:
    """Distance of each row of logits from the expected one, relative to that one's length."""
    error = torch.linalg.vector_norm(logits - expected, dim=-1)
    return (error / torch.linalg.vector_norm(expected, dim=-1)).tolist()  # type: ignore[no-any-return]


class _Bench:
    """One model, its prompts, and the text that every run is forced along."""

    def __init__(self, model: str, device: str, num_tokens: int) -> None:
        self.model, self.device = model, device
        self.checkpoint = find_checkpoint(model)
        self._eager("float32")
        _, tokenizer = self._loaded
        codec = TokenizerCodec(tokenizer)
        self.prompts = [codec.encode_chat([{"role": "user", "content": text}]) for text in _QUESTIONS]
        self.texts = eager_texts(self._loaded[0], self.prompts, num_tokens)
        self.positions = sum(len(text) for text in self.texts)

    def _eager(self, dtype: str) -> None:
        self._loaded = load_transformers(self.checkpoint, choose_device(self.device), getattr(torch, dtype))

    def eager(self, dtype: str) -> list[list[int]]:
        """What transformers says."""
        self._eager(dtype)
        return eager_said(self._loaded[0], self.prompts, self.texts)

    def engine(
        self, dtype: DType, attention: str, kv_dtype: KVDType = "auto", weights: Weights = "auto"
    ) -> tuple[list[list[int]], torch.Tensor]:
        """What the engine says, and its logits."""
        model = ModelConfig(self.model, self.device, dtype, attention, weights=weights)  # type: ignore[arg-type]
        cache = CacheConfig(num_blocks=512, kv_dtype=kv_dtype)
        engine = load_engine(EngineConfig(model=model, cache=cache, scheduler=SchedulerConfig(max_prefill_chunk=64)))
        return engine_said(engine, self.prompts, self.texts)

    def transformers(self, attention: str) -> Iterator[Figure]:
        """Agreement with transformers, in the model's two precisions."""
        float32, _ = self.engine("float32", attention)
        bfloat16, _ = self.engine("bfloat16", attention)
        eager32, eager16 = self.eager("float32"), self.eager("bfloat16")
        yield Figure("engine float32 = eager float32", agreement(float32, eager32), "x")
        yield Figure("engine bfloat16 = eager bfloat16", agreement(bfloat16, eager16), "x")
        yield Figure("engine bfloat16 = eager float32", agreement(bfloat16, eager32), "x")
        yield Figure("eager bfloat16 = eager float32", agreement(eager16, eager32), "x")

    def forms(self, attentions: Sequence[str]) -> Iterator[Figure]:
        """What each form of the cache costs against one in float32, the model being in float32."""
        for attention in attentions:
            said, logits = self.engine("float32", attention)
            for kv_dtype in _FORMS:
                other = self.engine("float32", attention, kv_dtype)
                yield from _cost(f"cache {kv_dtype}, attention {attention}", other, (said, logits))

    def weights(self, attention: str) -> Iterator[Figure]:
        """What each form of the weights costs against all of their bytes, in float32."""
        full = self.engine("float32", attention, weights="full")
        for weights in _WEIGHTS:
            yield from _cost(f"weights {weights}", self.engine("float32", attention, weights=weights), full)


_Answer = tuple[list[list[int]], torch.Tensor]
"""Tokens of each prompt, and all their logits, a row each."""


def _cost(name: str, answer: _Answer, expected: _Answer) -> Iterator[Figure]:
    errors = logit_errors(answer[1], expected[1])
    yield Figure(f"{name}: same token as over float32", agreement(answer[0], expected[0]), "x")
    yield Figure(f"{name}: error of the logits, median", statistics.median(errors), "x")
    yield Figure(f"{name}: error of the logits, largest", max(errors), "x")


def main(argv: Sequence[str] | None = None) -> None:
    """Run it."""
    parser = argparse.ArgumentParser(
        prog="python -m engine.bench.agreement", description="How often the engine's greedy token is transformers' own."
    )
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--attention", default="auto", choices=["auto", "reference", "cpu", "triton"])
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--only", choices=["transformers", "cache", "weights"], help="one part of it")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    device = choose_device(args.device)
    bench = _Bench(args.model, args.device, args.tokens)
    figures: list[Figure] = []
    chosen, _ = choose_attention(args.attention, device)
    if args.only in {None, "transformers"}:
        figures += bench.transformers(args.attention)
    if args.only in {None, "weights"} and device.type == "cpu":
        figures += bench.weights(chosen)
    if args.only in {None, "cache"}:
        figures += bench.forms(list(dict.fromkeys(["reference", chosen])) if args.attention == "auto" else [chosen])
    about = f"{bench.checkpoint.name} on {device}, {bench.positions} positions"
    show("quality", figures, as_json=args.json, about=about)


if __name__ == "__main__":
    main()
