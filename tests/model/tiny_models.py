"""Small random models whose next token depends on everything before it, and engines around them."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from engine.attention.choice import choose_attention
from engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from engine.model.load import make_runner
from engine.overlap import engine_for
from engine.request import RequestOutput, SamplingParams
from engine.simulated import SimulatedCodec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from engine.config import KVDType, Preemption, Weights
    from engine.engine import PagedEngine
    from engine.runner import TextCodec

# Two threads that wait for each other at every small operation are slower than one, and far slower on a busy machine.
torch.set_num_threads(1)

VOCAB = 131
_SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_MAKERS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**_SHAPE)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**_SHAPE, head_dim=16)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**_SHAPE, sliding_window=13)),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCAB,
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_positions=256,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=0,
        )
    ),
}
FAMILIES = tuple(_MAKERS)


def fresh_model(family: str) -> Any:
    """A model in eval mode with weights large enough that its logits are far apart."""
    return randomise(_MAKERS[family](), seed=len(family))


def randomise(model: Any, seed: int = 0) -> Any:
    """Give a model such weights, norms away from 1 and biases away from 0 too."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                parameter.normal_(0.0, 0.25 if "embed" not in name and "wte" not in name else 1.0)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.eval()


@functools.cache
def shared_model(family: str) -> Any:
    """The same model for tests that only run it; its attention may be set to any."""
    return fresh_model(family)


def generate(model: Any, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Greedy tokens by transformers itself, with eager attention and its own cache."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        ids = torch.tensor([list(prompt)])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False, pad_token_id=0
        )
    finally:
        model.set_attn_implementation(before)
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


def engine_over(
    model: Any,
    *,
    block_size: int = 16,
    num_blocks: int = 512,
    chunk: int = 0,
    max_num_seqs: int = 64,
    max_num_batched_tokens: int = 4096,
    prefix_caching: bool = True,
    fuse: bool = True,
    seed: int = 0,
    codec: TextCodec | None = None,
    attention: str = "reference",
    num_cpu_blocks: int = 0,
    preemption: Preemption = "recompute",
    weights: Weights = "auto",
    kv_dtype: KVDType = "auto",
    async_scheduling: bool = False,
) -> PagedEngine:
    """An engine over a model and a cache that holds NaN wherever nothing was written."""
    config = EngineConfig(
        model=ModelConfig(weights=weights),
        cache=CacheConfig(block_size, num_blocks, prefix_caching, num_cpu_blocks, kv_dtype),
        scheduler=SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_prefill_chunk=chunk,
            max_model_len=256,
            preemption=preemption,
            async_scheduling=async_scheduling,
        ),
        seed=seed,
    )
    runner = make_runner(
        model,
        config,
        name="tiny",
        attention=choose_attention(attention, torch.device("cpu"))[1],
        attention_name=attention,
        fuse=fuse,
        poison=True,
    )
    return engine_for(config, runner, codec or SimulatedCodec())


def engine_without_room(length: int, **settings: Any) -> PagedEngine:
    """An engine over a tiny Llama with blocks for three prompts of a length and one more: somebody has to give way."""
    return engine_over(
        shared_model("llama"), block_size=4, num_blocks=3 * -(-length // 4) + 1, num_cpu_blocks=16, **settings
    )


class Results:
    """What an engine brought for each request."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.last: dict[int, RequestOutput] = {}

    def take(self, outputs: Sequence[RequestOutput]) -> None:
        """Add what a step brought."""
        for output in outputs:
            assert output.request_id not in self.last or self.last[output.request_id].finish_reason is None
            self.tokens.setdefault(output.request_id, []).extend(output.token_ids)
            self.last[output.request_id] = output


def run(
    engine: PagedEngine, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams]
) -> list[list[int]]:
    """All prompts at once to the end; their tokens in order."""
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    ids = [engine.add_request(list(prompt), p) for prompt, p in zip(prompts, each, strict=True)]
    results = Results()
    while engine.has_work:
        results.take(engine.step())
    for request_id in ids:
        assert results.last[request_id].error is None
    return [results.tokens[request_id] for request_id in ids]
