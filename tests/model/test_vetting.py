"""Models that the paged cache would serve wrongly are refused by name, and those it serves are found by trying."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tiny_models import FAMILIES, fresh_model, generate, randomise, run, shared_model
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    Phi3Config,
    T5Config,
)

from engine.attention import hook
from engine.attention.reference import paged_attention
from engine.config import CacheConfig, ConfigError, EngineConfig, SchedulerConfig
from engine.engine import PagedEngine
from engine.model.forward import HookedModel
from engine.model.fused_llama import FusedLlama
from engine.model.load import make_runner
from engine.model.vetting import Trial, cache_shape, check_config
from engine.request import SamplingParams
from engine.simulated import SimulatedCodec

if TYPE_CHECKING:
    from engine.model.runner import ModelRunner

CONFIG = EngineConfig(
    cache=CacheConfig(block_size=4, num_blocks=60), scheduler=SchedulerConfig(max_model_len=64, max_prefill_chunk=5)
)


def runner_of(model: Any, **options: Any) -> ModelRunner:
    return make_runner(
        model, CONFIG, name="it", attention=paged_attention, attention_name="reference", poison=True, **options
    )


SMALL = {"vocab_size": 101, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 0}
SPECIAL = {"bos_token_id": None, "eos_token_id": None}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_fused_forward_is_taken_where_there_is_one(family: str) -> None:
    fused = isinstance(runner_of(shared_model(family)).forward, FusedLlama)
    assert fused == (family != "gpt2")
    assert isinstance(runner_of(shared_model(family), fuse=False).forward, HookedModel)


def test_shapes_and_names_come_from_the_model_itself() -> None:
    runner = runner_of(shared_model("qwen3"))
    info = runner.model_info
    assert (info.num_layers, info.num_query_heads, info.num_kv_heads, info.head_dim) == (2, 4, 2, 16)
    assert (info.vocab_size, info.dtype, info.device, info.attention) == (131, "float32", "cpu", "reference")
    assert info.kv_bytes_per_token == 2 * 2 * 2 * 16 * 4
    assert runner.max_model_len == 256
    assert runner.kv_cache.data.shape == (60, 2, 2, 2, 4, 16)


@pytest.mark.parametrize("max_model_len", [2, 3, 6])
def test_the_shortest_limit_is_enough_to_try_a_model(max_model_len: int) -> None:
    config = EngineConfig(
        cache=CacheConfig(block_size=4, num_blocks=4), scheduler=SchedulerConfig(max_model_len=max_model_len)
    )
    runner = make_runner(
        shared_model("llama"), config, name="it", attention=paged_attention, attention_name="reference"
    )
    assert isinstance(runner.forward, FusedLlama)
    tokens = run(PagedEngine(config, runner, SimulatedCodec()), [[5]], SamplingParams(max_tokens=9))[0]
    assert tokens == generate(shared_model("llama"), [5], max_model_len - 1)


def test_a_model_that_does_not_go_through_the_hook_is_refused() -> None:
    model = randomise(BloomForCausalLM(BloomConfig(vocab_size=101, hidden_size=32, n_layer=2, n_head=4)))
    with pytest.raises(ConfigError, match=r"it \(bloom\) is not supported"):
        runner_of(model)


def test_a_model_without_attention_is_refused() -> None:
    model = randomise(MambaForCausalLM(MambaConfig(vocab_size=101, hidden_size=32, num_hidden_layers=2)))
    with pytest.raises(ConfigError, match=r"it \(mamba\) is not supported"):
        runner_of(model)


def test_an_encoder_decoder_model_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"\(t5\) is an encoder-decoder model: name a decoder-only one"):
        check_config(T5Config(), "flan")


def test_rotary_positions_that_look_at_the_whole_batch_are_refused_by_name() -> None:
    dynamic = LlamaConfig(**SMALL, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    with pytest.raises(ConfigError, match=r"rotary positions \(dynamic\)"):
        check_config(dynamic, "it")
    long = Phi3Config(
        **SMALL,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0] * 4,
            "long_factor": [2.0] * 4,
            "original_max_position_embeddings": 64,
        },
    )
    with pytest.raises(ConfigError, match=r"rotary positions \(longrope\)"):
        check_config(long, "it")
    check_config(LlamaConfig(**SMALL), "it")


def test_attention_within_chunks_is_refused() -> None:
    config = Llama4TextConfig(**SMALL, intermediate_size=32, intermediate_size_mlp=32, num_local_experts=2)
    with pytest.raises(ConfigError, match="within chunks"):
        check_config(config, "it")


def test_a_window_that_layers_do_not_hand_over_is_refused() -> None:
    model = randomise(LlamaForCausalLM(LlamaConfig(**SMALL, **SPECIAL, intermediate_size=48)))
    model.config.sliding_window = 8
    with pytest.raises(ConfigError, match="layer 0 does not hand over its sliding window"):
        runner_of(model)


def test_a_model_whose_paged_logits_differ_is_refused_with_the_difference() -> None:
    def halves_the_scale(query: Any, key: Any, value: Any, layer: int, metadata: Any, **options: Any) -> Any:
        return paged_attention(query, key, value, layer, metadata, **{**options, "scale": options["scale"] * 0.5})

    with pytest.raises(ConfigError, match=r"logits differ from its own by \d+"):
        make_runner(fresh_model("gpt2"), CONFIG, name="it", attention=halves_the_scale, attention_name="reference")


def test_a_fused_forward_that_differs_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    model = fresh_model("llama")
    whole = FusedLlama.forward

    def wrong(self: FusedLlama, *args: Any) -> torch.Tensor:
        return whole(self, *args) * 1.5

    monkeypatch.setattr(FusedLlama, "forward", wrong)
    assert isinstance(runner_of(model).forward, HookedModel)


def test_the_trial_sees_a_single_stale_position() -> None:
    """Sensitive enough: one wrong key among seven is found."""
    model = fresh_model("llama")
    hooked = HookedModel(model, paged_attention)
    trial = Trial(model, cache_shape(hooked, "it"), 64)
    assert trial.accepts(trial.difference(hooked))

    def shifts_a_key(query: Any, key: Any, value: Any, layer: int, metadata: Any, **options: Any) -> Any:
        key = key.clone()
        key[0] = key[-1]
        return paged_attention(query, key, value, layer, metadata, **options)

    assert not trial.accepts(trial.difference(HookedModel(model, shifts_a_key)))


class _Layer(torch.nn.Module):
    layer_idx = 0


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"attention_mask": torch.zeros(1, 1, 3, 3)}, "mask of their own"),
        ({"position_bias": torch.zeros(1, 2, 3, 3)}, "position bias"),
        ({"dropout": 0.1}, "dropout"),
        ({"context": None}, "context"),
        ({"is_causal": False}, "not causal"),
        ({"layer_idx": None}, "no layer_idx"),
        ({"batch": 2}, "split the batch"),
    ],
)
def test_what_the_hook_cannot_do_it_refuses_to_do(options: dict[str, Any], reason: str) -> None:
    layer = _Layer()
    for name in ("is_causal", "layer_idx"):
        if name in options:
            setattr(layer, name, options.pop(name))
    q = torch.randn(options.pop("batch", 1), 2, 3, 4)
    batch = hook.running(hook.ProbeContext()) if "context" not in options else contextlib.nullcontext()
    options.pop("context", None)
    arguments = {"attention_mask": None, **options}
    with batch, pytest.raises(hook.HookError, match=reason):
        hook.layer_attention(layer, q, q, q, **arguments)
