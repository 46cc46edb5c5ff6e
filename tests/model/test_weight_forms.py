"""What is asked for with `--weights`, of a checkpoint on disk: each matrix is read once, and refusals say why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import llvmlite.binding as llvm
import pytest
import torch
from coded_weights import four_bits
from test_greedy_equality import GREEDY, prompt_of
from test_tokenizer import byte_tokenizer
from tiny_models import fresh_model, run

from engine.attention import cpu_pairs
from engine.attention.cpu_features import processor_has
from engine.attention.reference import paged_attention
from engine.config import CacheConfig, ConfigError, EngineConfig, ModelConfig
from engine.model import load_engine, originals
from engine.model.load import make_runner
from engine.model.projection import multiplies_bfloat16

if TYPE_CHECKING:
    from pathlib import Path

    from engine.config import DType, Weights


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of threads that a load sets would stay for other tests."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def coded_checkpoint(folder: Path, *, tied: bool = False) -> Path:
    """A folder with a small Llama in float32, whose matrices were made of 4-bit codes."""
    model = fresh_model("llama")
    model.resize_token_embeddings(258)
    if tied:
        model.config.tie_word_embeddings = True
        model.tie_weights()
    with torch.no_grad():
        for n, parameter in enumerate(model.parameters()):
            if parameter.dim() == 2 and parameter.shape[1] % 32 == 0:
                parameter.copy_(four_bits(*parameter.shape, seed=n) / 4)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def settings(folder: Path, weights: Weights, dtype: DType = "bfloat16") -> EngineConfig:
    model = ModelConfig(str(folder), "cpu", dtype, "reference", weights=weights)
    return EngineConfig(model=model, cache=CacheConfig(num_blocks=64))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("weights", ["auto", "int8", "bf16"])
def test_each_matrix_is_read_from_the_checkpoint_once(weights: Weights, tied: bool, monkeypatch, tmp_path) -> None:
    if weights != "int8" and not multiplies_bfloat16():
        pytest.skip("originals are looked for where the processor multiplies bfloat16")
    read: list[str] = []

    class Noted:
        def __init__(self, file: Any) -> None:
            self._file = file

        def __enter__(self) -> Noted:
            self._tensors = self._file.__enter__()
            return self

        def __exit__(self, *about: object) -> None:
            self._file.__exit__(*about)

        def keys(self) -> list[str]:
            return list(self._tensors.keys())

        def get_tensor(self, name: str) -> torch.Tensor:
            read.append(name)
            tensor: torch.Tensor = self._tensors.get_tensor(name)
            return tensor

    real = originals._open
    monkeypatch.setattr(originals, "_open", lambda file: Noted(real(file)))
    engine = load_engine(settings(coded_checkpoint(tmp_path, tied=tied), weights))
    assert len(read) == len(set(read)) == 2 * 7 + (1 if tied else 2)
    assert all(run(engine, [prompt_of(20)], GREEDY))


@pytest.mark.parametrize("weights", ["int8", "bf16"])
def test_a_model_whose_own_weights_give_other_logits_is_refused_before_they_are_rounded(weights: Weights) -> None:
    def shifts(query: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        return paged_attention(query, *args, **options) + 1

    config = EngineConfig(model=ModelConfig(weights=weights), cache=CacheConfig(4, 64))
    refusal = rf"--weights {weights} cannot serve tiny: its logits differ .* by \d+"
    with pytest.raises(ConfigError, match=refusal) as said:
        make_runner(fresh_model("llama"), config, name="tiny", attention=shifts, attention_name="reference")
    assert "before any weight is rounded; leave it out" in str(said.value)


@pytest.mark.parametrize("lacking", ["avx512f", "avx512bw", "avx512vl", "avx512bf16", "avx512vbmi"])
def test_a_processor_that_lacks_one_instruction_multiplies_no_bfloat16(lacking: str, monkeypatch) -> None:
    asked: list[str] = []

    def features() -> dict[str, bool]:
        asked.append(lacking)
        return {name: name != lacking for name in ("avx512f", "avx512bw", "avx512vl", "avx512bf16", "avx512vbmi")}

    monkeypatch.setattr(llvm, "get_host_cpu_features", features)
    processor_has.cache_clear()
    try:
        assert not multiplies_bfloat16()
        assert cpu_pairs.supported() == (lacking == "avx512vbmi")
        before = len(asked)
        assert not multiplies_bfloat16()
        assert len(asked) == before  # it does not change
    finally:
        processor_has.cache_clear()
