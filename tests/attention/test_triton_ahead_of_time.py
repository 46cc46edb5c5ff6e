import os

import pytest

pytest.importorskip("triton")

import triton

from engine.attention.triton_tiles import Tile
from engine.bench import ahead_of_time
from engine.bench.ahead_of_time import CONFIGURATIONS, TARGETS, Compiled, compile_one

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")
BY_NAME = {configuration.name: configuration for configuration in CONFIGURATIONS}


# A sample of each kernel; the command compiles them all.
@pytest.mark.parametrize(
    ("kernel", "configuration", "target"),
    [
        *[("decode", "small llama", target) for target in TARGETS],
        *[("prefill", "llama", target) for target in TARGETS],
        ("decode combine", "small llama", "sm_90"),
        ("write", "int8 cache", "sm_80"),
        ("decode", "float8 cache", "sm_80"),
        ("decode", "float8 cache", "sm_90"),
    ],
)
def test_a_kernel_compiles_for_a_gpu_without_spilling(kernel, configuration, target):
    compiled = compile_one(target, kernel, BY_NAME[configuration])
    assert compiled.error == ""
    assert compiled.spilled == 0
    assert 0 < compiled.registers <= 512
    assert compiled.ok


def test_a_kernel_that_spills_is_found_out(monkeypatch):
    compile_it = triton.compile

    def with_few_registers(source, target, options):
        return compile_it(source, target=target, options=options | {"maxnreg": 32})

    monkeypatch.setattr(triton, "compile", with_few_registers)
    compiled = compile_one("sm_80", "decode", BY_NAME["small llama"])
    assert compiled.error == ""
    assert compiled.registers == 32
    assert compiled.spilled > 0
    assert not compiled.ok


def test_a_kernel_that_does_not_compile_is_named_with_the_reason(monkeypatch):
    monkeypatch.setattr(ahead_of_time, "decode_tile", lambda *_, **__: Tile(16, 24, 4, 1))
    compiled = compile_one("sm_90", "decode", BY_NAME["small llama"])
    assert not compiled.ok
    assert "\n" not in compiled.error
    assert "power of 2" in compiled.error


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
