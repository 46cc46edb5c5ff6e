import os

import pytest

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from engine.attention.triton_tiles import Tile
from engine.bench import ahead_of_time
from engine.bench.ahead_of_time import CONFIGURATIONS, TARGETS, Compiled, compile_one

BY_NAME = {configuration.name: configuration for configuration in CONFIGURATIONS}


# A sample that covers every kernel; the command compiles all of it.
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("kernel", "configuration"),
    [
        ("write", "int8 cache"),
        ("decode", "small llama"),
        ("decode", "float8 cache"),
        ("decode combine", "small llama"),
        ("prefill", "llama"),
    ],
)
def test_a_kernel_compiles_for_a_gpu_without_spilling(target, kernel, configuration):
    compiled = compile_one(target, kernel, BY_NAME[configuration])
    assert compiled.error == ""
    assert compiled.spilled == 0
    assert 0 < compiled.registers <= 512
    assert compiled.ok


def test_a_kernel_that_spills_is_found_out(monkeypatch):
    monkeypatch.setattr(ahead_of_time, "prefill_tile", lambda *_, **__: Tile(64, 64, 1, 1))
    compiled = compile_one("sm_80", "prefill", BY_NAME["llama"])
    assert compiled.error == ""
    assert compiled.spilled > 0
    assert not compiled.ok


def test_more_shared_memory_than_the_target_has_is_a_failure():
    assert not Compiled("gfx942", "decode", "llama", registers=64, shared=65 * 1024).ok
    assert Compiled("gfx942", "decode", "llama", registers=64, shared=64 * 1024).ok


def test_the_command_reports_and_fails_on_what_failed(monkeypatch, capsys, tmp_path):
    results = [
        Compiled("sm_80", "decode", "llama", "16x64 w4 s4", registers=112, shared=1024),
        Compiled("sm_90", "decode", "llama", error="RuntimeError: no"),
    ]
    monkeypatch.setattr(ahead_of_time, "compile_all", lambda *_: results)
    report = tmp_path / "report.json"
    assert ahead_of_time.main(["--json", str(report)]) == 1
    printed = capsys.readouterr().out
    assert "112 registers" in printed
    assert "FAIL sm_90" in printed
    assert '"registers": 112' in report.read_text(encoding="utf-8")
    results.pop()
    assert ahead_of_time.main([]) == 0
