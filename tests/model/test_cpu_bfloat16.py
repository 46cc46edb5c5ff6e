"""Linear layers of bfloat16 rows, against a plain product in double precision."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
import torch
from coded_weights import eight_bits, four_bits, of_bfloat16
from row_by_row import one_by_one
from test_greedy_equality import GREEDY, prompt_of
from test_tokenizer import byte_tokenizer
from tiny_models import fresh_model, run

from engine.config import CacheConfig, EngineConfig, ModelConfig
from engine.model import load_engine
from engine.model.originals import Originals
from engine.model.projection import make_bfloat16_projection, make_exact_projection, multiplies_bfloat16

if TYPE_CHECKING:
    from pathlib import Path

    from engine.model.projection import Projection


@pytest.fixture(autouse=True)
def _threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of threads that a load sets would stay for other tests."""
    monkeypatch.setenv("OMP_NUM_THREADS", "2")


pytestmark = pytest.mark.skipif(not multiplies_bfloat16(), reason="this processor does not multiply bfloat16 (AVX-512)")

FORMS = pytest.mark.parametrize("make", [four_bits, eight_bits, of_bfloat16])
CODES = pytest.mark.parametrize("make", [four_bits, eight_bits])


def layer_of(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Projection:
    from engine.model.cpu_bfloat16 import linear

    layer = linear(weight, bias)
    assert layer is not None
    return layer


def rows(n: int, inputs: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return (torch.randn(n, inputs, generator=generator) * 10 ** torch.linspace(-3, 3, n)[:, None]).bfloat16()


def check(y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    """Right but for sums in float32 and one rounding at the end, half of bfloat16's last place."""
    exact = x.double() @ weight.double().T
    if bias is not None:
        exact += bias
    bound = x.double().abs() @ weight.double().abs().T * 2e-6 + exact.abs() * 1.01 * 2**-8 + 1e-6 * (bias is not None)
    assert y.dtype == torch.bfloat16
    assert y.shape == exact.shape
    assert y.is_contiguous()
    assert bool(((y - exact).abs() <= bound).all())


@FORMS
@pytest.mark.parametrize("outputs", [1, 47, 48, 49, 100, 640])
@pytest.mark.parametrize("inputs", [32, 96, 160, 288])
def test_products_are_those_of_the_weights_themselves(make, outputs, inputs) -> None:
    weight = make(outputs, inputs)
    layer = layer_of(weight)
    for n in (*range(1, 14), 40):
        x = rows(n, inputs)
        check(layer(x), x, weight)


@FORMS
def test_any_number_of_rows(make) -> None:
    weight = make(70, 64)
    layer = layer_of(weight)
    for n in (*range(1, 71), 127, 128, 129, 130, 257, 300):
        x = rows(n, 64)
        check(layer(x), x, weight)


@pytest.mark.parametrize("inputs", [2, 30, 34, 130, 222])
def test_bfloat16_weights_may_have_any_even_number_of_inputs(inputs) -> None:
    weight = of_bfloat16(70, inputs)
    layer = layer_of(weight)
    # What lies behind a row is the next one's, and must not be read for it.
    x = rows(4, inputs)
    x[1:] = math.nan
    check(layer(x)[:1], x[:1], weight)


@pytest.mark.parametrize("inputs", [1, 3, 33, 63])
def test_an_odd_number_of_inputs_is_one_more_that_is_zero(inputs) -> None:
    weight, bias, x = of_bfloat16(70, inputs).bfloat16(), torch.linspace(-2, 2, 70).bfloat16(), rows(140, inputs)
    layer = make_exact_projection(weight, bias)
    together = layer(x)
    check(together, x, weight, bias)
    assert all(torch.equal(layer(x[n : n + 1])[0], together[n]) for n in range(len(x)))


def test_largest_codes_and_smallest_are_taken_as_they_are() -> None:
    codes = torch.arange(256).view(4, 64).repeat(12, 1)
    for low, top, least in ((0, 15, 0), (-127, 127, -127)):
        weight = (codes % (top - least + 1) + low).float() * 0.5
        weight[:, ::32], weight[:, 1::32] = 0.5 * top, 0.5 * low
        for column in range(64):
            x = torch.zeros(5, 64, dtype=torch.bfloat16)
            x[:, column] = 1
            assert torch.equal(layer_of(weight)(x).float(), weight[:, column].bfloat16().float().expand(5, -1))


@FORMS
def test_a_row_is_the_same_alone_and_among_others_on_one_thread_and_on_several(make) -> None:
    layer = layer_of(make(640, 288))
    x = rows(139, 288)
    together = layer(x)
    assert torch.equal(together, one_by_one(layer, x))
    for n in (2, 3, 5, 8):
        assert torch.equal(layer(x[7 : 7 + n]), together[7 : 7 + n])


@FORMS
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("n", [3, 7])
def test_a_row_that_is_not_a_number_harms_no_other(make, bad, n) -> None:
    layer = layer_of(make(64, 64))
    x = rows(n, 64)
    want = layer(x)
    x[2, 10] = bad
    got = layer(x)
    assert not bool(got[2].isfinite().any())
    others = [i for i in range(n) if i != 2]
    assert torch.equal(got[others], want[others])


@FORMS
def test_bias_and_rows_that_lie_apart(make) -> None:
    weight = make(96, 64)
    bias = torch.linspace(-2, 2, 96)
    layer = layer_of(weight, bias)
    wide = rows(5, 130)
    for x in (wide[:, 3:67], wide[:, ::2][:, :64], rows(64, 5).T[:, :64]):
        check(layer(x), x, weight, bias)
    assert layer(rows(0, 64)).shape == (0, 96)


def test_inputs_that_do_not_fit_are_refused() -> None:
    layer = layer_of(four_bits(32, 64))
    with pytest.raises(ValueError, match="do not fit a layer of 64"):
        layer(rows(2, 32))
    with pytest.raises(ValueError, match="bfloat16"):
        layer(torch.zeros(2, 64))


def differences(inputs: int) -> torch.Tensor:
    """Rows that take one weight from another: that shows a rounding of the weights."""
    return (torch.eye(inputs) - torch.eye(inputs).roll(1, 0)).bfloat16()


@CODES
def test_weights_that_were_made_of_codes_are_not_rounded(make) -> None:
    weight, x = make(48, 64), differences(64)
    for make_projection in (make_exact_projection, make_bfloat16_projection):
        check(make_projection(weight, dtype=torch.bfloat16)(x), x, weight)
    with pytest.raises(AssertionError):
        check(make_exact_projection(weight.bfloat16())(x), x, weight)


def coded_model(make) -> torch.nn.Module:
    model = fresh_model("llama")
    model.resize_token_embeddings(258)
    with torch.no_grad():
        for n, parameter in enumerate(model.parameters()):
            if parameter.dim() == 2 and parameter.shape[1] % 32 == 0:
                parameter.copy_(make(*parameter.shape, seed=n) / 8)
    return model


@FORMS
def test_what_a_bfloat16_model_was_rounded_from_is_found(make, tmp_path: Path) -> None:
    exact = coded_model(make)
    exact.save_pretrained(tmp_path)
    model = type(exact).from_pretrained(tmp_path, dtype=torch.bfloat16)
    original = Originals(model, tmp_path)
    for (name, rounded), weight in zip(model.named_parameters(), exact.parameters(), strict=True):
        assert torch.equal(original(rounded), weight), name


@CODES
def test_a_bfloat16_model_computes_with_the_codes_that_it_was_rounded_from(make, tmp_path: Path) -> None:
    model = coded_model(make)
    model.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    settings = ModelConfig(str(tmp_path), "cpu", "bfloat16", "reference")
    engine = load_engine(EngineConfig(model=settings, cache=CacheConfig(num_blocks=64)))
    forward, x = engine.runner.forward, differences(32)
    mlp = model.model.layers[1].mlp
    check(forward._layers[1].gate_up(x), x, torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight)))
    check(forward._head(x), x, model.lm_head.weight)
    ids = torch.arange(258)
    assert torch.equal(forward._embedding(ids), model.model.embed_tokens.weight.bfloat16())
    assert all(run(engine, [prompt_of(40), prompt_of(9)], GREEDY))


def test_a_weight_that_is_not_the_files_is_left_as_it_is(tmp_path: Path) -> None:
    exact = coded_model(four_bits)
    exact.save_pretrained(tmp_path)
    model = type(exact).from_pretrained(tmp_path, dtype=torch.bfloat16)
    weight = model.model.layers[0].mlp.up_proj.weight
    original = Originals(model, tmp_path)
    with torch.no_grad():
        weight[0, 0] += 1
    assert torch.equal(original(weight), weight)
    apart = torch.ones(3, 3, dtype=torch.bfloat16)
    assert torch.equal(original(apart), apart)
