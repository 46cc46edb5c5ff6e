"""What the quality benchmark reports of a cache: the same tokens, and how far the logits are from the unquantised."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from test_greedy_equality import prompt_of
from tiny_models import engine_over, run, shared_model

from engine.bench.agreement import agreement, engine_said, logit_errors
from engine.request import SamplingParams

if TYPE_CHECKING:
    from engine.config import KVDType

PROMPTS = [prompt_of(n) for n in (3, 17, 40)]


def said(form: KVDType, texts: list[list[int]]) -> tuple[list[list[int]], torch.Tensor]:
    return engine_said(engine_over(shared_model("llama"), chunk=7, kv_dtype=form), PROMPTS, texts)


def test_a_run_forced_along_its_own_text_says_it_again_with_the_logits_of_each_token() -> None:
    texts = run(engine_over(shared_model("llama")), PROMPTS, SamplingParams(max_tokens=6))
    tokens, logits = said("auto", texts)
    assert tokens == texts
    assert logits.argmax(-1).tolist() == [token for text in texts for token in text]


def test_errors_grow_as_the_cache_has_fewer_bits() -> None:
    texts = [[(7 * i + n) % 100 for i in range(6)] for n in range(len(PROMPTS))]
    expected, exact = said("auto", texts)
    found = {form: said(form, texts) for form in ("auto", "bf16", "int8", "fp8")}
    errors = [sum(logit_errors(logits, exact)) / len(exact) for _, logits in found.values()]
    assert errors[0] < 1e-5 < errors[1] < errors[2] < errors[3] < 0.5
    assert agreement(found["auto"][0], expected) == 1
    assert 0.5 < agreement(found["fp8"][0], expected) <= 1


def test_the_error_is_relative_to_the_expected_row() -> None:
    expected = torch.tensor([[3.0, 4.0], [0.0, 2.0]])
    assert logit_errors(expected + torch.tensor([[0.0, 1.25], [0.5, 0.0]]), expected) == [0.25, 0.25]
