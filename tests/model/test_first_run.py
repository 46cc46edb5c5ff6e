"""A GPU's kernels are tried before a model depends on them: where they cannot run, the reference does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import pytest
import torch
from test_greedy_equality import GREEDY, expected_all, prompt_of
from tiny_models import run, shared_model

from engine.attention import reference
from engine.attention.first_run import first_run
from engine.config import CacheConfig, ConfigError, EngineConfig, ModelConfig
from engine.model.load import make_runner
from engine.overlap import engine_for
from engine.simulated import SimulatedCodec

if TYPE_CHECKING:
    from engine.attention.metadata import AttentionMetadata
    from engine.engine import PagedEngine


def without_a_compiler(*batch: Any, **options: Any) -> torch.Tensor:
    raise RuntimeError("Failed to find C compiler.\nPlease specify one.")


def engine_with(attention: Any, asked: Literal["auto", "triton"]) -> PagedEngine:
    """An engine whose attention was chosen as a GPU's."""
    config = EngineConfig(model=ModelConfig(attention=asked), cache=CacheConfig(block_size=4, num_blocks=64))
    model = shared_model("llama")
    runner = make_runner(model, config, name="tiny", attention=attention, attention_name="triton", poison=True)
    return engine_for(config, runner, SimulatedCodec())


@pytest.mark.parametrize("fails", [True, False])
def test_a_model_runs_where_the_kernels_cannot(fails: bool, caplog: pytest.LogCaptureFixture) -> None:
    engine = engine_with(without_a_compiler if fails else reference.paged_attention, "auto")
    assert engine.header.model.attention == ("reference" if fails else "triton")
    prompts = [prompt_of(n) for n in (5, 17)]
    assert run(engine, prompts, GREEDY) == expected_all("llama", prompts)
    said = (
        "attention is computed by torch, slowly: the GPU's kernels cannot be used here "
        "(RuntimeError: Failed to find C compiler. Please specify one.)"
    )
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warnings == [said] * fails


def test_who_asks_for_the_kernels_by_name_is_told_why_not() -> None:
    with pytest.raises(ConfigError, match=r"'triton' cannot be used here \(RuntimeError: Failed.*use --attention auto"):
        engine_with(without_a_compiler, "triton")


@pytest.mark.parametrize("block_size", [1, 2, 16])
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.int8])
def test_it_is_the_models_own_heads_that_are_tried(block_size: int, kv_dtype: torch.dtype) -> None:
    seen: list[tuple[Any, ...]] = []

    def noting(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int, batch: AttentionMetadata, **o):  # type: ignore[no-untyped-def]
        seen.append((*query.shape[1:], key.shape[1], batch.num_decodes, batch.num_seqs, batch.kv_cache.dtype))
        return reference.paged_attention(query, key, value, layer, batch, **o)

    first_run(
        noting,
        num_query_heads=6,
        num_kv_heads=2,
        head_dim=24,
        block_size=block_size,
        dtype=torch.float32,
        kv_dtype=kv_dtype,
        device=torch.device("cpu"),
    )
    assert seen == [(6, 24, 2, 1, 2, kv_dtype)]
