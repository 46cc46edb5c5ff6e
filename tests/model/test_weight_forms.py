"""What is asked for with `--weights`, of a checkpoint on disk: each matrix is read once, and refusals say why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import llvmlite.binding as llvm
import pytest
import torch
from coded_weights import eight_bits, four_bits, of_bfloat16
from safetensors.torch import load_file
from test_greedy_equality import GREEDY, prompt_of
from test_tokenizer import byte_tokenizer
from tiny_models import fresh_model, run

from engine.attention import cpu_pairs
from engine.attention.cpu_features import processor_has
from engine.attention.reference import paged_attention
from engine.config import CacheConfig, ConfigError, EngineConfig, ModelConfig
from engine.model import embedding, load_engine, originals
from engine.model.byte_kernel import HAS_BYTE_PRODUCTS
from engine.model.byte_products import ByteProduct
from engine.model.cpu_linear import bfloat16_linear, exact_linear
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


@pytest.mark.parametrize("outputs", [1, 47, 48, 49, 64, 65, 200])
@pytest.mark.parametrize("form", ["bfloat16", "float32", "bytes"])
@pytest.mark.parametrize("make", [four_bits, eight_bits, of_bfloat16])
def test_a_layer_gives_the_rows_of_its_weight_to_the_last_bit(form: str, make: Any, outputs: int) -> None:
    weight = make(outputs, 96, seed=2)
    if form == "bfloat16":
        if not multiplies_bfloat16():
            pytest.skip("this processor does not multiply bfloat16")
        from engine.model.cpu_bfloat16 import linear

        layer: Any = linear(weight)
    elif form == "float32":
        layer = exact_linear(weight)
    else:
        if not HAS_BYTE_PRODUCTS:
            pytest.skip("this processor does not multiply bytes")
        layer = ByteProduct(weight)
        if make is of_bfloat16:
            assert layer.rows is None  # they were rounded
            return
    index = torch.randint(outputs, (300,), generator=torch.Generator().manual_seed(3))
    assert torch.equal(layer.rows(index), weight[index])
    assert layer.rows(index[:0]).shape == (0, 96)


def test_rows_of_an_odd_number_of_inputs_and_of_weights_that_were_rounded() -> None:
    weight = of_bfloat16(70, 37)
    index = torch.tensor([69, 0, 33])
    assert torch.equal(exact_linear(weight).rows(index), weight[index])  # type: ignore[union-attr]
    assert getattr(bfloat16_linear(weight * 1.001), "rows", None) is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("weights", ["auto", "int8", "bf16"])
def test_a_tied_head_gives_the_embedding_its_rows(weights: Weights, dtype: DType, monkeypatch, tmp_path) -> None:
    compiled = multiplies_bfloat16() if dtype == "bfloat16" else True
    compiled = HAS_BYTE_PRODUCTS if weights == "int8" else compiled
    if not compiled:
        pytest.skip("the head of this form is not compiled for this processor")
    folder = coded_checkpoint(tmp_path, tied=True)
    table = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]

    def searched(weight: torch.Tensor) -> None:
        raise AssertionError("the table's codes are looked for again")

    monkeypatch.setattr(embedding, "block_codes", searched)
    forward = load_engine(settings(folder, weights, dtype)).runner.forward
    ids = torch.arange(258)
    assert torch.equal(forward._embedding(ids), table.to(getattr(torch, dtype)))
