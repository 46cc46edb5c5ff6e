"""8-bit linear layers: how far off they are, and that no row depends on another."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

import pytest
import torch
from test_greedy_equality import GREEDY, prompt_of
from tiny_models import engine_over, fresh_model, run

from engine.attention.cpu_compile import Compiled, CompileError, compiled_once
from engine.bench.agreement import agreement, engine_said, logit_errors
from engine.config import CacheConfig, ConfigError, EngineConfig, ModelConfig
from engine.model import byte_products, int8
from engine.model.byte_kernel import HAS_BYTE_PRODUCTS
from engine.model.int8 import make_int8_projection
from engine.model.load import make_runner

if TYPE_CHECKING:
    from engine.attention.metadata import PagedAttention

_WITH = pytest.mark.skipif(not HAS_BYTE_PRODUCTS, reason="this processor has no AVX-512 VNNI")
BOTH = pytest.mark.parametrize("byte_products", [pytest.param(True, marks=_WITH), False])


def layer(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(96, 64, generator=generator) * torch.rand(96, 1, generator=generator)
    return weight, torch.randn(96, generator=generator)


def rows(n: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, 64, generator=generator) * 10 ** torch.linspace(-3, 3, n)[:, None]


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_row_is_within_two_percent_whatever_its_size(byte_products: bool, dtype: torch.dtype) -> None:
    weight, _ = layer()
    x = rows(33).to(dtype)
    exact = x.float() @ weight.T
    y = make_int8_projection(weight, byte_products=byte_products)(x)
    assert y.dtype == dtype
    error = (y.float() - exact).norm(dim=1) / exact.norm(dim=1)
    assert float(error.max()) < 0.03
    assert float(error.max()) > 0  # it is quantised


@BOTH
def test_a_bias_is_added_as_it_is(byte_products: bool) -> None:
    weight, bias = layer()
    x = rows(5)
    plain, with_bias = (make_int8_projection(weight, b, byte_products=byte_products)(x) for b in (None, bias))
    assert torch.equal(with_bias, plain + bias)


@BOTH
def test_a_row_is_the_same_alone_and_among_others(byte_products: bool) -> None:
    weight, bias = layer()
    project = make_int8_projection(weight, bias, byte_products=byte_products)
    x = rows(17)
    together = project(x)
    for i in range(len(x)):
        assert torch.equal(project(x[i : i + 1])[0], together[i])


@BOTH
def test_a_row_of_nan_or_zeros_harms_no_other(byte_products: bool) -> None:
    weight, _ = layer()
    project = make_int8_projection(weight, byte_products=byte_products)
    x = rows(4)
    expected = project(x)
    x[1, 3] = float("nan")
    x[2] = 0
    y = project(x)
    assert y[1].isnan().all()
    assert torch.equal(y[2], torch.zeros(96))
    assert torch.equal(y[[0, 3]], expected[[0, 3]])


@BOTH
def test_a_channel_of_zero_weights_gives_zeros(byte_products: bool) -> None:
    weight, _ = layer()
    weight[7] = 0
    y = make_int8_projection(weight, byte_products=byte_products)(rows(3))
    assert torch.equal(y[:, 7], torch.zeros(3))
    assert y[:, 8].abs().min() > 0


def runner_with_int8(family: str, attention: PagedAttention | None = None) -> object:
    from engine.attention.reference import paged_attention

    config = EngineConfig(model=ModelConfig(weights="int8"), cache=CacheConfig(4, 64))
    return make_runner(
        fresh_model(family), config, name="tiny", attention=attention or paged_attention, attention_name="reference"
    )


def test_the_header_says_that_weights_are_int8() -> None:
    runner = runner_with_int8("llama")
    assert runner.model_info.weights == "int8"  # type: ignore[attr-defined]


def test_a_model_of_another_family_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="--weights int8 serves models of the Llama family, which tiny is not"):
        runner_with_int8("gpt2")


def with_an_outlier_channel() -> Any:
    """A model one of whose channels is far larger than the others wherever a norm gives it to a linear layer."""
    model = fresh_model("llama")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter[5] *= 40
    return model


def test_an_outlier_channel_in_every_layer_changes_logits_by_the_weights_rounding_alone() -> None:
    prompts, texts = ([prompt_of(n, seed) for seed in range(first, first + 4)] for n, first in ((17, 0), (24, 50)))
    said = {
        weights: engine_said(engine_over(with_an_outlier_channel(), weights=weights), prompts, texts)
        for weights in ("full", "int8")
    }
    errors = logit_errors(said["int8"][1], said["full"][1])
    assert 0 < statistics.median(errors) < 0.045  # with inputs of seven bits 0.10
    assert agreement(said["int8"][0], said["full"][0]) > 0.85  # 0.77


def test_tokens_do_not_depend_on_preemption() -> None:
    prompts = [prompt_of(17, seed) for seed in range(3)]
    roomy = engine_over(fresh_model("llama"), block_size=4, weights="int8")
    tight = engine_over(fresh_model("llama"), block_size=4, num_blocks=16, weights="int8")
    assert run(tight, prompts, GREEDY) == run(roomy, prompts, GREEDY)
    assert tight.scheduler.num_preemptions > 0


def test_without_a_product_of_bytes_inputs_have_sixteen_bits_which_is_said_once(monkeypatch, caplog) -> None:
    def fail(bits: int, dtype: torch.dtype) -> Compiled:
        raise CompileError("no such processor")

    monkeypatch.setattr(byte_products, "_worker", compiled_once(fail))
    int8._say_once.cache_clear()
    x = rows(5)
    for seed in range(3):
        weight, bias = layer(seed)
        made, slow = (make_int8_projection(weight, bias, byte_products=wanted) for wanted in (True, False))
        assert torch.equal(made(x), slow(x))
    assert [record.getMessage() for record in caplog.records] == [
        "8-bit layers take inputs of 16 bits: the product of bytes cannot be compiled (no such processor)"
    ]
