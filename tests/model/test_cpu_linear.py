"""Linear layers over weights in few bytes, against a plain product in double precision."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numba
import pytest
import torch
from coded_weights import eight_bits, four_bits, of_bfloat16
from row_by_row import one_by_one
from test_greedy_equality import GREEDY, prompt_of
from test_tokenizer import byte_tokenizer
from tiny_models import engine_over, fresh_model, run

from engine.attention import cpu
from engine.attention.cpu_compile import Compiled, CompileError, compiled_once
from engine.config import CacheConfig, ConfigError, EngineConfig, ModelConfig
from engine.model import cpu_bfloat16, cpu_bfloat16_kernel, cpu_linear, cpu_linear_kernel, load_engine, projection
from engine.model.cpu_linear import bfloat16_linear, exact_linear
from engine.model.cpu_linear_kernel import BITS
from engine.model.projection import make_bfloat16_projection, make_exact_projection, multiplies_bfloat16

if TYPE_CHECKING:
    from engine.engine import PagedEngine

FORMS = pytest.mark.parametrize("make", [four_bits, eight_bits, of_bfloat16])


def rows(n: int, inputs: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(n, inputs, generator=generator) * 10 ** torch.linspace(-3, 3, n)[:, None]


def check(y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    exact = x.double() @ weight.double().T
    if bias is not None:
        exact += bias
    bound = x.double().abs() @ weight.double().abs().T * 1e-6 + (0 if bias is None else 1e-6)
    assert y.dtype == torch.float32
    assert y.shape == exact.shape
    assert y.is_contiguous()
    assert bool(((y - exact).abs() <= bound).all())


@FORMS
@pytest.mark.parametrize("outputs", [1, 31, 64, 100, 640])
@pytest.mark.parametrize("inputs", [32, 96, 160])
def test_products_are_those_of_the_weights_themselves(make, outputs, inputs) -> None:
    weight = make(outputs, inputs)
    layer = exact_linear(weight)
    assert layer is not None
    for n in (1, 2, 3, 4, 5, 6, 7, 12, 13, 40):
        x = rows(n, inputs)
        check(layer(x), x, weight)


@pytest.mark.parametrize("inputs", [1, 31, 33, 130])
def test_bfloat16_weights_may_have_any_number_of_inputs(inputs) -> None:
    weight = of_bfloat16(70, inputs)
    layer = exact_linear(weight)
    assert layer is not None
    # What lies behind a row is the next one's, and must not be read for it.
    x = rows(4, inputs)
    x[1:] = math.nan
    check(layer(x)[:1], x[:1], weight)


@FORMS
def test_a_row_is_the_same_alone_and_among_others_on_one_thread_and_on_several(make) -> None:
    layer = exact_linear(make(640, 288))
    assert layer is not None
    x = rows(13, 288)
    together = layer(x)
    assert torch.equal(together, one_by_one(layer, x))


@FORMS
def test_a_row_that_is_not_a_number_harms_no_other(make) -> None:
    layer = exact_linear(make(64, 64))
    assert layer is not None
    x = rows(7, 64)
    want = layer(x)
    x[3, 10] = math.nan
    got = layer(x)
    assert bool(got[3].isnan().all())
    others = [0, 1, 2, 4, 5, 6]
    assert torch.equal(got[others], want[others])


@FORMS
def test_bias_and_rows_that_lie_apart(make) -> None:
    weight = make(96, 64)
    bias = torch.linspace(-2, 2, 96)
    layer = exact_linear(weight, bias)
    assert layer is not None
    wide = rows(5, 130)
    for x in (wide[:, 3:67], wide[:, ::2][:, :64], rows(64, 5).T[:, :64]):
        check(layer(x), x, weight, bias)
    assert layer(rows(0, 64)).shape == (0, 96)


@pytest.mark.parametrize(
    "make",
    [
        lambda: cpu_linear_kernel.make_worker(BITS[4]),
        pytest.param(
            lambda: cpu_bfloat16_kernel.make_worker(16),
            marks=pytest.mark.skipif(not multiplies_bfloat16(), reason="this processor does not multiply bfloat16"),
        ),
    ],
    ids=["float32", "bfloat16"],
)
def test_a_worker_is_compiled_once_and_then_found(make, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("KVTUI_CACHE", str(tmp_path))
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    for _ in range(2):
        Compiled(make)
        assert len(list(tmp_path.glob("**/*.nbc"))) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_cannot_be_compiled_is_tried_and_said_once_and_computed_by_torch(dtype, monkeypatch, caplog) -> None:
    tries = []

    def fail(bits: int) -> Compiled:
        tries.append(bits)
        raise CompileError("no such processor")

    worker = compiled_once(fail)
    for module in (cpu_linear, cpu_bfloat16):
        monkeypatch.setattr(module, "_worker", worker)
    monkeypatch.setattr(projection, "multiplies_bfloat16", lambda: True)
    projection._say_once.cache_clear()
    weights = [four_bits(48, 64, seed=n) for n in range(5)]
    for weight in weights:
        x = torch.randn(3, 64).to(dtype)
        y = make_exact_projection(weight, dtype=dtype)(x)
        assert torch.allclose(y.float(), x.float() @ weight.T, atol=0.1, rtol=0.02)
    assert tries == [4]
    assert [record.getMessage() for record in caplog.records] == [
        "weights keep all their bytes: their worker cannot be compiled (CompileError: no such processor)"
    ]


def test_a_model_runs_where_attention_cannot_be_compiled(monkeypatch, caplog, tmp_path) -> None:
    def fail(*types: torch.dtype) -> float:
        raise CompileError("no such processor")

    monkeypatch.setattr(cpu, "warmup", fail)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    model = fresh_model("llama")
    model.resize_token_embeddings(258)
    model.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)

    def load(attention: str) -> PagedEngine:
        settings = ModelConfig(str(tmp_path), "cpu", "float32", attention)
        return load_engine(EngineConfig(model=settings, cache=CacheConfig(num_blocks=64)))

    engine = load("auto")
    assert engine.header.model.attention == "reference"
    assert all(run(engine, [prompt_of(20)], GREEDY))
    assert [
        record.getMessage() for record in caplog.records if record.name == "engine" and record.levelname == "WARNING"
    ] == ["attention is computed by torch, slowly: its worker cannot be compiled (no such processor)"]
    with pytest.raises(ConfigError, match=r"cannot be compiled .*: use --attention auto"):
        load("cpu")


def test_inputs_that_do_not_fit_are_refused() -> None:
    layer = exact_linear(four_bits(32, 64))
    assert layer is not None
    with pytest.raises(ValueError, match="do not fit a layer of 64"):
        layer(torch.zeros(2, 32))
    with pytest.raises(ValueError, match="float32"):
        layer(torch.zeros(2, 64, dtype=torch.bfloat16))


def test_weights_that_need_all_their_bytes_are_left_to_others_unless_rounding_is_asked_for() -> None:
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    assert exact_linear(weight) is None
    x = rows(3, 64)
    check(bfloat16_linear(weight)(x), x, weight.bfloat16().float())
    assert torch.allclose(make_exact_projection(weight)(x), x @ weight.T, atol=1e-3)


def test_without_products_of_bfloat16_torch_multiplies_what_is_rounded(monkeypatch) -> None:
    monkeypatch.setattr(cpu_bfloat16_kernel, "supported", lambda: False)
    weight, x = four_bits(64, 64), rows(3, 64).bfloat16()
    want = torch.nn.functional.linear(x, weight.bfloat16())
    for make in (make_exact_projection, make_bfloat16_projection):
        assert torch.equal(make(weight, dtype=torch.bfloat16)(x), want)
        assert torch.equal(make(weight.bfloat16())(x), want)


def test_four_bits_are_kept_exactly_when_rounding_to_bfloat16_is_asked_for() -> None:
    weight = four_bits(64, 64)
    x = rows(3, 64)
    check(bfloat16_linear(weight)(x), x, weight)


@pytest.mark.parametrize("make", [four_bits, of_bfloat16])
def test_a_model_of_such_weights_gives_the_same_tokens(make) -> None:
    model = fresh_model("llama")
    with torch.no_grad():
        for n, parameter in enumerate(model.parameters()):
            if parameter.dim() == 2 and parameter.shape[1] % 32 == 0:
                parameter.copy_(make(*parameter.shape, seed=n))
    prompts = [prompt_of(40, seed=s) for s in range(3)]
    full = run(engine_over(model, weights="full"), prompts, GREEDY)
    engine = engine_over(model, weights="auto")
    # It is the other way of computing them that is tried here, and not the same one twice.
    assert type(engine.runner.forward._layers[0].gate_up) is type(exact_linear(make(32, 32)))
    assert run(engine, prompts, GREEDY) == full
    assert engine.header.model.weights == ""


def test_a_model_with_weights_rounded_to_bfloat16_says_so() -> None:
    engine = engine_over(fresh_model("llama"), weights="bf16")
    assert engine.header.model.weights == "bf16"
    assert len(run(engine, [prompt_of(9)], GREEDY)[0]) > 0
