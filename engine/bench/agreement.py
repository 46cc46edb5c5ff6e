"""How often the engine's greedy token is transformers' own: `python -m engine.bench.agreement`.

In float32 the two agree token by token (the tests hold them to it). In bfloat16 many logits are exactly equal and the
order of summation decides, so this reports agreement instead. Every run is forced along one text, what eager float32
transformers generates, and asked at each position for its most likely next token: one early difference then does not
make all later ones differ. Beside it stands how far eager bfloat16 agrees with float32: what the precision alone costs.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

import torch

from engine.bench.report import Figure, show
from engine.config import DEFAULT_MODEL, CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from engine.model import load_engine
from engine.model.checkpoint import find_checkpoint
from engine.model.device import choose_device
from engine.model.load import load_transformers
from engine.request import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.core.scheduler import SchedulerOutput
    from engine.engine import PagedEngine

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


class _Forced:
    """A runner that answers with a given text and notes what the real one would have answered."""

    def __init__(self, runner: Any, texts: dict[int, list[int]]) -> None:
        self._runner = runner
        self._texts = texts
        self.said: dict[int, list[int]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def execute(self, output: SchedulerOutput) -> list[int | None]:
        tokens: list[int | None] = []
        for share, token in zip(output.scheduled, self._runner.execute(output), strict=True):
            if token is None:
                tokens.append(None)
                continue
            said = self.said.setdefault(share.request.request_id, [])
            tokens.append(self._texts[share.request.request_id][len(said)])
            said.append(token)
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


def engine_said(engine: PagedEngine, prompts: Sequence[list[int]], texts: Sequence[list[int]]) -> list[list[int]]:
    """The same by the engine: chunked prefill and batched decode over the paged cache."""
    ids = [
        engine.add_request(prompt, SamplingParams(max_tokens=len(text), ignore_eos=True))
        for prompt, text in zip(prompts, texts, strict=True)
    ]
    forced = _Forced(engine.runner, dict(zip(ids, texts, strict=True)))
    engine.runner = forced
    while engine.has_work:
        engine.step()
    return [forced.said[i] for i in ids]


def agreement(one: Sequence[list[int]], other: Sequence[list[int]]) -> float:
    """Share of positions with the same token."""
    pairs = [(a, b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True)]
    return sum(a == b for a, b in pairs) / len(pairs)


def main(argv: Sequence[str] | None = None) -> None:
    """Run it."""
    parser = argparse.ArgumentParser(
        prog="python -m engine.bench.agreement", description="How often the engine's greedy token is transformers' own."
    )
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--attention", default="auto", choices=["auto", "reference", "cpu", "triton"])
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    device = choose_device(args.device)
    checkpoint = find_checkpoint(args.model)

    def engine_of(dtype: str) -> PagedEngine:
        model: Any = ModelConfig(args.model, args.device, dtype, args.attention)  # type: ignore[arg-type]
        cache, scheduler = CacheConfig(num_blocks=512), SchedulerConfig(max_prefill_chunk=64)
        return load_engine(EngineConfig(model=model, cache=cache, scheduler=scheduler))

    engine = engine_of("float32")
    prompts = [engine.codec.encode_chat([{"role": "user", "content": text}]) for text in _QUESTIONS]
    eager, _ = load_transformers(checkpoint, device, torch.float32)
    texts = eager_texts(eager, prompts, args.tokens)
    float32 = eager_said(eager, prompts, texts)
    engine_float32 = engine_said(engine, prompts, texts)
    del engine, eager
    eager, _ = load_transformers(checkpoint, device, torch.bfloat16)
    bfloat16 = eager_said(eager, prompts, texts)
    del eager
    engine_bfloat16 = engine_said(engine_of("bfloat16"), prompts, texts)
    result = {
        "positions": sum(len(text) for text in texts),
        "engine float32 = eager float32": agreement(engine_float32, float32),
        "engine bfloat16 = eager bfloat16": agreement(engine_bfloat16, bfloat16),
        "engine bfloat16 = eager float32": agreement(engine_bfloat16, float32),
        "eager bfloat16 = eager float32": agreement(bfloat16, float32),
    }
    positions = result.pop("positions")
    figures = [Figure(name, value, "x") for name, value in result.items()]
    about = f"{checkpoint.name} on {device}, share of {positions} positions with the same greedy token"
    show("quality", figures, as_json=args.json, about=about)


if __name__ == "__main__":
    main()
