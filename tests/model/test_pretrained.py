"""Checkpoints that are not whole are refused, and the message names what is wrong: no weight is made up."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from safetensors.torch import load_file, save_file
from test_greedy_equality import GREEDY, prompt_of
from test_tokenizer import byte_tokenizer
from tiny_models import fresh_model, run

from engine.config import CacheConfig, ConfigError, EngineConfig, ModelConfig
from engine.model import load_engine

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import torch

    from engine.engine import PagedEngine

UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of threads that a load sets would stay for other tests."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def saved(folder: Path, **options: Any) -> Path:
    model = fresh_model("llama")
    model.resize_token_embeddings(258)
    model.save_pretrained(folder, **options)
    byte_tokenizer().save_pretrained(folder)
    return folder


def load(folder: Path) -> PagedEngine:
    model = ModelConfig(str(folder), "cpu", "float32", "reference")
    return load_engine(EngineConfig(model=model, cache=CacheConfig(num_blocks=32)))


def refusal(folder: Path) -> str:
    with pytest.raises(ConfigError) as error:
        load(folder)
    text = str(error.value)
    assert "\n" not in text
    return text


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def change_config(folder: Path, **values: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def test_a_tensor_that_the_files_lack_is_named(tmp_path: Path) -> None:
    change_tensors(saved(tmp_path), lambda tensors: tensors.pop(UP))
    text = refusal(tmp_path)
    assert f"is not whole: its files lack {UP}; fetch or convert it again" in text
    assert str(tmp_path) in text


def test_of_many_tensors_that_the_files_lack_some_are_named(tmp_path: Path) -> None:
    change_config(saved(tmp_path), num_hidden_layers=4)
    text = refusal(tmp_path)
    assert text.count("model.layers.") == 3
    assert "and 15 more; fetch or convert it again, or correct its config.json" in text


def test_a_tensor_of_another_shape_is_named_with_both(tmp_path: Path) -> None:
    change_tensors(saved(tmp_path), lambda tensors: tensors.update({UP: tensors[UP][:40].clone()}))
    assert f"does not fit its config.json: {UP} is [40, 32] and should be [48, 32]; correct it" in refusal(tmp_path)


def test_shards_are_loaded_and_a_lost_or_cut_one_is_named(tmp_path: Path) -> None:
    saved(tmp_path, max_shard_size="60KB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 1
    assert len(run(load(tmp_path), [prompt_of(9)], GREEDY)[0]) == GREEDY.max_tokens
    whole = shards[1].read_bytes()
    shards[1].write_bytes(whole[: len(whole) // 2])
    assert f"({shards[1].name} is broken: fetch or convert it again)" in refusal(tmp_path)
    shards[1].unlink()
    assert f"No such file or directory: {shards[1]}" in refusal(tmp_path)


def test_an_index_that_is_no_json_is_named(tmp_path: Path) -> None:
    saved(tmp_path, max_shard_size="60KB")
    (tmp_path / "model.safetensors.index.json").write_text("{")
    assert "(model.safetensors.index.json is broken: fetch or convert it again)" in refusal(tmp_path)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_weight_that_is_no_number_is_not_told_as_a_difference(bad: float, tmp_path: Path) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.mlp.down_proj.weight"][3] = bad

    change_tensors(saved(tmp_path), spoil)
    text = refusal(tmp_path)
    assert "its own logits in float32 are not finite numbers; use another --dtype" in text


def test_a_model_without_layers_is_refused(tmp_path: Path) -> None:
    change_config(saved(tmp_path), num_hidden_layers=0)
    assert "it has no layers" in refusal(tmp_path)


def test_an_activation_that_nobody_knows_is_named_as_a_key(tmp_path: Path) -> None:
    change_config(saved(tmp_path), hidden_act="nonsense")
    assert "cannot be loaded: KeyError: 'nonsense'" in refusal(tmp_path)
