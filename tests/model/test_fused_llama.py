"""The fused Llama forward gives transformers' own numbers, over a poisoned cache."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from engine.attention import cpu, reference
from engine.attention.metadata import AttentionMetadata, positions_of
from engine.attention.reference import paged_attention
from engine.kv_cache import KVCache
from engine.model.fused_llama import FusedLlama, NotFusableError

SHAPE = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, attention_bias=True)),
    "llama tied": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True)),
    "llama 3 positions": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, rope_parameters=LLAMA3_ROPE)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=7)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=16)),
}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest):
    torch.manual_seed(7)
    made = MODELS[request.param]().eval()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            # Norm weights and biases away from 1 and 0, or a forgotten one would not show.
            parameter.add_(torch.randn_like(parameter) * (0.3 if "norm" in name or "bias" in name else 0.05))
    return made


def paged_logits(model, prompts: list[list[int]], chunks: list[int], attention=paged_attention) -> list[torch.Tensor]:
    """Last-row logits of each prompt, computed chunk by chunk in one packed batch with scattered blocks."""
    block_size, max_blocks = 4, 12
    cache = KVCache(
        num_blocks=len(prompts) * max_blocks,
        num_layers=3,
        num_kv_heads=2,
        block_size=block_size,
        head_dim=model.model.layers[0].self_attn.head_dim,
        dtype=model.dtype,
        poison=True,
    )
    table = np.random.default_rng(3).permutation(cache.num_blocks).reshape(len(prompts), max_blocks).astype(np.int32)
    fused = FusedLlama.of(model, attention, 128)
    done = [0] * len(prompts)
    last: list[torch.Tensor] = []
    for chunk in chunks:
        ends = [min(len(p), d + chunk) for p, d in zip(prompts, done, strict=True)]
        lengths = [max(1, e - d) for e, d in zip(ends, done, strict=True)]
        starts = [e - n for e, n in zip(ends, lengths, strict=True)]
        loc = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
        metadata = AttentionMetadata.build(
            query_start_loc=loc, seq_lens=np.array(ends, np.int32), block_table=table, kv_cache=cache
        )
        ids = [t for p, s, e in zip(prompts, starts, ends, strict=True) for t in p[s:e]]
        positions = torch.from_numpy(positions_of(loc, np.array(ends, np.int32)))
        with torch.inference_mode():
            logits = fused.forward(
                torch.tensor(ids), positions, torch.from_numpy(loc[1:].astype(np.int64) - 1), metadata
            )
        last, done = list(logits), ends
    assert done == [len(p) for p in prompts]
    return last


def prompts_of(*lengths: int) -> list[list[int]]:
    rng = np.random.default_rng(11)
    return [rng.integers(1, 97, size=n).tolist() for n in lengths]


@pytest.mark.parametrize("attention", [reference.paged_attention, cpu.paged_attention], ids=["torch", "compiled"])
@pytest.mark.parametrize("chunks", [[64], [5, 5, 5, 5, 5, 5, 5]])
def test_logits_equal_transformers_own(model, chunks: list[int], attention) -> None:
    prompts = prompts_of(1, 4, 5, 17, 31)
    ours = paged_logits(model, prompts, chunks, attention)
    for prompt, got in zip(prompts, ours, strict=True):
        with torch.inference_mode():
            want = model(torch.tensor([prompt])).logits[0, -1]
        assert want.std() > 0.05
        torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.inference_mode()
def test_half_precision_is_no_further_from_float32_than_transformers(model, dtype: torch.dtype) -> None:
    prompts = prompts_of(5, 17, 31)
    exact = [model(torch.tensor([prompt])).logits[0, -1] for prompt in prompts]
    half = copy.deepcopy(model).to(dtype)
    ours = paged_logits(half, prompts, [64], cpu.paged_attention)
    theirs = [half(torch.tensor([prompt])).logits[0, -1] for prompt in prompts]

    def error(got: list[torch.Tensor]) -> float:
        return float(torch.stack([(g.float() - e).norm() / e.norm() for g, e in zip(got, exact, strict=True)]).mean())

    assert error(ours) < 1.2 * error(theirs)


def test_a_request_of_nan_leaves_the_others_their_logits_to_the_bit(model) -> None:
    poison, prompts = 96, prompts_of(17, 9, 4, 31)
    prompts = [[token % poison for token in prompt] for prompt in prompts]
    clean = paged_logits(model, prompts, [5] * 7, cpu.paged_attention)
    prompts[1][3] = poison
    with torch.no_grad():
        model.model.embed_tokens.weight[poison] = float("nan")
    spoilt = paged_logits(model, prompts, [5] * 7, cpu.paged_attention)
    assert not spoilt[1].isfinite().any()
    # Where the head is the embedding, one column of the logits is NaN for everyone.
    for i in (0, 2, 3):
        assert torch.equal(spoilt[i][:poison], clean[i][:poison])


def test_another_family_is_refused_by_name() -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_embd=16, n_layer=1, n_head=2))
    with pytest.raises(NotFusableError, match="GPT2LMHeadModel"):
        FusedLlama.of(model, paged_attention, 64)


def test_another_activation_is_refused_by_name() -> None:
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, hidden_act="gelu"))
    with pytest.raises(NotFusableError, match="gelu"):
        FusedLlama.of(model, paged_attention, 64)
