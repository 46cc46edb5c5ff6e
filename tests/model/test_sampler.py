"""The sampler draws from the distribution that its filters leave, and depends on nothing but seed and position."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from engine.model.draw import draw_on_device, draw_on_host
from engine.model.sampler import request_seed, sample, uniforms
from engine.request import SamplingParams

LOGITS = [2.0, -1.0, 0.5, 3.0, 0.5, -4.0, 2.5, 1.0, 0.5, -0.5]


def kept_weights(logits: list[float], params: SamplingParams) -> dict[int, float]:
    """The distribution written out: token to probability, filters one after the other."""
    largest = max(logits)
    weights = {i: math.exp((x - largest) / params.temperature) for i, x in enumerate(logits)}
    order = sorted(weights, key=lambda i: -weights[i])
    if params.top_k and params.top_k < len(order):
        least = weights[order[params.top_k - 1]]
        order = [i for i in order if weights[i] >= least]
    if params.top_p < 1:
        total, mass, nucleus = sum(weights[i] for i in order), 0.0, []
        for i in order:
            if nucleus and mass >= params.top_p * total:
                break
            nucleus.append(i)
            mass += weights[i]
        # Tokens as likely as the last one stay with it.
        order = [i for i in order if weights[i] >= weights[nucleus[-1]]]
    order = [i for i in order if weights[i] >= params.min_p * weights[order[0]]]
    total = sum(weights[i] for i in order)
    return {i: weights[i] / total for i in order}


def on_host(logits: torch.Tensor, params: list[SamplingParams], uniform: np.ndarray) -> list[int]:
    return draw_on_host(list(logits.numpy()), params, uniform)


def on_device(logits: torch.Tensor, params: list[SamplingParams], uniform: np.ndarray) -> list[int]:
    """The vectorised form; it runs on the CPU as well."""
    return draw_on_device(logits, params, uniform).tolist()


Draw = Callable[[torch.Tensor, list[SamplingParams], np.ndarray], list[int]]
both_forms = pytest.mark.parametrize("draw", [on_host, on_device])

CASES = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.3),
    SamplingParams(temperature=2.5),
    SamplingParams(temperature=1.0, top_k=1),
    SamplingParams(temperature=1.0, top_k=3),
    SamplingParams(temperature=1.0, top_k=6),
    SamplingParams(temperature=1.0, top_k=10),
    SamplingParams(temperature=1.0, top_k=500),
    SamplingParams(temperature=1.0, top_p=0.01),
    SamplingParams(temperature=1.0, top_p=0.5),
    SamplingParams(temperature=1.0, top_p=0.85),
    SamplingParams(temperature=1.0, top_p=0.9999),
    SamplingParams(temperature=1.0, min_p=0.2),
    SamplingParams(temperature=1.0, min_p=1.0),
    SamplingParams(temperature=0.7, top_k=5, top_p=0.8, min_p=0.1),
    SamplingParams(temperature=1.5, top_k=4, top_p=0.95),
]


@pytest.mark.parametrize("params", CASES, ids=str)
@both_forms
def test_every_draw_is_the_token_that_the_written_out_distribution_gives(params: SamplingParams, draw: Draw) -> None:
    want = kept_weights(LOGITS, params)
    uniform = (np.arange(2000) + 0.5) / 2000
    got = draw(torch.tensor([LOGITS] * 2000), [params] * 2000, uniform)
    assert set(got) <= set(want)
    counts = np.bincount(got, minlength=len(LOGITS)) / 2000
    for token, share in want.items():
        # An even comb of uniform numbers meets each share but for the two teeth at its edges.
        assert counts[token] == pytest.approx(share, abs=1.5 / 2000)


@both_forms
def test_mixed_rows_are_drawn_as_alone(draw: Draw) -> None:
    rng = np.random.default_rng(5)
    logits = torch.from_numpy(rng.normal(size=(len(CASES), 5000)) * 3).float()
    uniform = rng.random(len(CASES))
    together = draw(logits, CASES, uniform)
    alone = [draw(logits[i : i + 1], [CASES[i]], uniform[i : i + 1])[0] for i in range(len(CASES))]
    assert together == alone
    assert len(set(together)) > len(CASES) / 2


def test_both_forms_draw_the_same() -> None:
    rng = np.random.default_rng(6)
    logits = torch.from_numpy(rng.normal(size=(40 * len(CASES), 3000)) * 3).float()
    uniform = rng.random(len(logits))
    host, device = (draw(logits, CASES * 40, uniform) for draw in (on_host, on_device))
    assert host == device


@both_forms
def test_a_nucleus_wider_than_the_first_look_is_found(draw: Draw) -> None:
    """Nearly even logits: 0.9 of the mass takes most of a vocabulary of 5,000."""
    logits = torch.from_numpy(np.random.default_rng(1).normal(size=5000) * 0.01).float()
    params = SamplingParams(temperature=1.0, top_p=0.9)
    allowed = set(kept_weights(logits.tolist(), params))
    uniform = (np.arange(4000) + 0.5) / 4000
    got = set(draw(logits.expand(4000, -1), [params] * 4000, uniform))
    assert 4000 < len(allowed) < 5000
    assert got <= allowed
    assert len(got) > 2000


@both_forms
def test_the_largest_uniform_number_draws_a_token_that_is_allowed(draw: Draw) -> None:
    almost_one = np.array([1.0 - 2.0**-53])
    logits = torch.cat([torch.zeros(3000), torch.full((3000,), -80.0)])[None]
    for params in (SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_k=7, top_p=0.9)):
        assert draw(logits, [params], almost_one)[0] < 3000


def test_a_device_that_adds_in_another_order_draws_no_token_that_was_filtered_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As scans on a device do: every run of tokens is summed by itself, and what lies before it is added at the end."""
    in_order = torch.Tensor.cumsum

    def in_runs(x: torch.Tensor, dim: int, dtype: torch.dtype | None = None, length: int = 64) -> torch.Tensor:
        x = x.to(dtype or x.dtype)
        runs = x.view(len(x), -1, length)
        before = in_order(runs.sum(dim=-1), -1) - runs.sum(dim=-1)
        return (in_order(runs, -1) + before[..., None]).view_as(x)

    logits = torch.from_numpy(np.random.default_rng(2).normal(size=(1, 64 * 64))).float()
    params = SamplingParams(temperature=1.0, top_k=2000)
    allowed = set(kept_weights(logits[0].tolist(), params))
    weights = (logits[0] - logits.max()).exp()
    weights[[token for token in range(len(weights)) if token not in allowed]] = 0.0
    sums = in_runs(weights[None], -1)[0].double()
    # Where float32 sums step although nothing is added: aim at the middle of each step.
    steps = [at for at in range(1, len(weights)) if weights[at] == 0 and sums[at] > sums[at - 1]]
    assert steps, "a case that shows it"
    uniform = np.array([float((sums[at - 1] + sums[at]) / 2 / sums[-1]) for at in steps])
    monkeypatch.setattr(torch.Tensor, "cumsum", in_runs)
    got = draw_on_device(logits.expand(len(steps), -1), [params] * len(steps), uniform).tolist()
    assert set(got) <= allowed


@both_forms
def test_a_tiny_temperature_overflows_nothing(draw: Draw) -> None:
    logits = torch.tensor([[300.0, -300.0, 299.0], [1e30, -1e30, 0.0]])
    params = [SamplingParams(temperature=1e-6), SamplingParams(temperature=1e-300)]
    assert draw(logits, params, np.array([0.999, 0.999])) == [0, 0]


@both_forms
def test_minus_infinity_is_never_drawn(draw: Draw) -> None:
    logits = torch.tensor([[-math.inf, 0.0, -math.inf, 0.0]] * 100)
    got = draw(logits, [SamplingParams(temperature=5.0)] * 100, np.linspace(0, 0.999, 100))
    assert set(got) == {1, 3}


def test_greedy_rows_and_drawn_rows_share_a_batch() -> None:
    logits = torch.randn(6, 500, generator=torch.Generator().manual_seed(3))
    params = [SamplingParams(temperature=t) for t in (0.0, 1.0, 0.0, 2.0, 0.0, 1.0)]
    before = logits.clone()
    tokens, bad = sample(logits, params, list(range(6)), [10] * 6)
    assert bad == []
    assert [tokens[i] for i in (0, 2, 4)] == logits.argmax(-1)[[0, 2, 4]].tolist()
    for i in (1, 3, 5):
        alone, _ = sample(logits[i : i + 1], [params[i]], [i], [10])
        assert tokens[i] == alone[0]
    torch.testing.assert_close(logits, before)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_that_are_not_numbers_are_named(temperature: float) -> None:
    logits = torch.randn(4, 50)
    logits[1, 7] = math.nan
    logits[3] = -math.inf
    _, bad = sample(logits, [SamplingParams(temperature=temperature)] * 4, [1, 2, 3, 4], [0] * 4)
    assert bad == [1, 3]


def test_a_seed_gives_the_same_token_at_a_position_and_others_elsewhere() -> None:
    logits = torch.zeros(1, 1000)
    params = [SamplingParams(temperature=1.0)]
    first = [sample(logits, params, [42], [p])[0][0] for p in range(50)]
    assert first == [sample(logits, params, [42], [p])[0][0] for p in range(50)]
    assert len(set(first)) > 40
    assert first != [sample(logits, params, [43], [p])[0][0] for p in range(50)]


def test_uniform_numbers_are_even_and_unrelated_from_seed_to_seed_and_place_to_place() -> None:
    n = 20_000
    along = uniforms([7] * n, range(n))
    across = uniforms(range(n), [7] * n)
    for u in (along, across):
        assert 0 <= u.min() <= u.max() < 1
        counts = np.histogram(u, bins=50, range=(0, 1))[0]
        # Chi-squared with 49 degrees of freedom: 99.99% are below 96.
        assert ((counts - n / 50) ** 2 / (n / 50)).sum() < 96
        assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.03
    assert abs(np.corrcoef(along, across)[0, 1]) < 0.03


def test_seeds_of_any_size_and_sign_are_taken() -> None:
    values = uniforms([0, -1, 2**63, 2**200 + 5, -(2**70)], [0] * 5)
    assert len(set(values.tolist())) >= 4


def test_requests_without_a_seed_get_one_of_their_own_that_the_engine_seed_decides() -> None:
    seeds = [request_seed(engine, request) for engine in range(20) for request in range(200)]
    assert len(set(seeds)) == len(seeds)
    assert request_seed(3, 5) == request_seed(3, 5)
