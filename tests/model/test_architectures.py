"""Every architecture that the documents name gives transformers' own greedy tokens over the paged cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers as hf
from tiny_models import engine_over, generate, randomise, run

from engine.request import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable

_ALL: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
_GATED = {**_ALL, "intermediate_size": 48, "num_key_value_heads": 2}
_LAYERS = ["sliding_attention", "full_attention"]

SERVED: dict[str, Callable[[], Any]] = {
    "Llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**_GATED)),
    "Mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**_GATED, sliding_window=6)),
    "Qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**_GATED)),
    "Qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**_GATED, head_dim=8)),
    "Gemma 2": lambda: hf.Gemma2ForCausalLM(
        hf.Gemma2Config(
            **_GATED, head_dim=8, sliding_window=6, attn_logit_softcapping=3.0, query_pre_attn_scalar=8,
            layer_types=_LAYERS,
        )
    ),
    "Gemma 3": lambda: hf.Gemma3ForCausalLM(
        hf.Gemma3TextConfig(**_GATED, head_dim=8, sliding_window=6, query_pre_attn_scalar=8, layer_types=_LAYERS)
    ),
    "Phi-3": lambda: hf.Phi3ForCausalLM(
        hf.Phi3Config(**_GATED, original_max_position_embeddings=256, sliding_window=None)
    ),
    "GPT-2": lambda: hf.GPT2LMHeadModel(
        hf.GPT2Config(
            vocab_size=101, n_embd=32, n_layer=2, n_head=4, n_positions=256, tie_word_embeddings=False,
            bos_token_id=None, eos_token_id=None, pad_token_id=0,
        )
    ),
    "GPT-NeoX": lambda: hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**_ALL, intermediate_size=48)),
    "OPT": lambda: hf.OPTForCausalLM(
        hf.OPTConfig(**_ALL, ffn_dim=48, word_embed_proj_dim=32, tie_word_embeddings=False)
    ),
    "StableLM": lambda: hf.StableLmForCausalLM(hf.StableLmConfig(**_GATED)),
    "OLMo 2": lambda: hf.Olmo2ForCausalLM(hf.Olmo2Config(**_GATED)),
    "Mixtral": lambda: hf.MixtralForCausalLM(
        hf.MixtralConfig(**_GATED, num_local_experts=4, num_experts_per_tok=2, sliding_window=None)
    ),
    "Qwen3-MoE": lambda: hf.Qwen3MoeForCausalLM(
        hf.Qwen3MoeConfig(**_GATED, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)
    ),
}  # fmt: skip


@pytest.mark.parametrize("attention", ["reference", "cpu"])
@pytest.mark.parametrize("family", SERVED)
def test_greedy_tokens_are_generates(family: str, attention: str) -> None:
    model = randomise(SERVED[family](), seed=len(family))
    prompts = [list(range(1, 1 + n)) for n in (1, 4, 9, 17)]
    want = [generate(model, prompt, 8) for prompt in prompts]
    assert len({tuple(tokens) for tokens in want}) > 2
    engine = engine_over(model, block_size=4, num_blocks=60, chunk=5, attention=attention)
    assert run(engine, prompts, SamplingParams(max_tokens=8)) == want


def test_the_experts_differ() -> None:
    # Otherwise a wrong routing would not show.
    model = randomise(SERVED["Mixtral"](), seed=3)
    experts = [p for name, p in model.named_parameters() if "experts" in name and p.dim() == 3]
    assert experts
    assert all(not torch.equal(p[0], p[1]) for p in experts)
