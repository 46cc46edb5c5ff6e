"""A token's codes do not depend on the batch: over a quantised cache, too, the scheduler changes no token."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import pytest
from test_greedy_equality import GREEDY, prompt_of
from tiny_models import engine_over, engine_without_room, run, shared_model

from engine.request import SamplingParams
from engine.trace.events import Op, StepTrace

if TYPE_CHECKING:
    from engine.config import KVDType, Preemption

LENGTHS = (1, 2, 3, 15, 16, 17, 33)
FORMS = ("int8", "fp8")


@functools.cache
def alone(family: str, prompt: tuple[int, ...], form: KVDType, num_tokens: int = 7) -> list[int]:
    """Tokens of a request with a large pool to itself, its prompt computed at once."""
    engine = engine_over(shared_model(family), kv_dtype=form)
    return run(engine, [prompt], SamplingParams(max_tokens=num_tokens))[0]


def all_alone(prompts: list[list[int]], form: KVDType, family: str = "llama") -> list[list[int]]:
    return [alone(family, tuple(prompt), form) for prompt in prompts]


def test_the_form_of_the_cache_shows_in_the_logits() -> None:
    prompts = [prompt_of(n, seed) for n in LENGTHS for seed in range(5)]
    each = [
        run(engine_over(shared_model("llama"), kv_dtype=form), prompts, GREEDY) for form in ("auto", "bf16", *FORMS)
    ]
    same = [sum(a == b for a, b in zip(tokens, each[0], strict=True)) / len(prompts) for tokens in each]
    assert 0.3 < same[3] < 1, "otherwise float8 is not in use, or its codes are wrong"
    assert same[2] > 0.6
    assert same[1] > 0.6


@pytest.mark.parametrize("attention", ["reference", "cpu"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "mistral"])
def test_chunks_and_batches_change_no_token(family: str, form: KVDType, attention: str) -> None:
    prompts = [prompt_of(n) for n in LENGTHS]
    engine = engine_over(
        shared_model(family), block_size=3, chunk=7, max_num_batched_tokens=23, kv_dtype=form, attention=attention
    )
    assert run(engine, prompts, GREEDY) == all_alone(prompts, form, family)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("preemption", ["swap", "recompute"])
@pytest.mark.parametrize("length", [14, 16, 17])
def test_preempted_outputs_equal_the_unpreempted(length: int, preemption: Preemption, form: KVDType) -> None:
    prompts = [prompt_of(length, seed) for seed in range(3)]
    engine = engine_without_room(length, preemption=preemption, kv_dtype=form)
    assert run(engine, prompts, GREEDY) == all_alone(prompts, form)
    assert engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize("form", FORMS)
def test_prefix_hits_and_offloaded_prefixes_give_the_same_tokens(form: KVDType) -> None:
    engine = engine_over(shared_model("llama"), block_size=4, num_blocks=16, num_cpu_blocks=16, kv_dtype=form)
    kinds: set[int] = set()
    engine.add_sink(lambda m: kinds.update(op[0] for op in m.ops) if isinstance(m, StepTrace) else None)
    prompts = [prompt_of(48, seed) for seed in range(3)]
    for _ in range(2):
        for prompt in (*prompts, prompts[-1]):
            assert run(engine, [prompt], GREEDY) == all_alone([prompt], form)
    assert {Op.SHARE, Op.SWAP_OUT, Op.SWAP_IN} <= kinds


@pytest.mark.parametrize("form", FORMS)
def test_choices_that_copy_a_block_before_they_write_go_on_alike(form: KVDType) -> None:
    engine = engine_over(shared_model("llama"), block_size=16, kv_dtype=form)
    copies = 0

    def count(message: object) -> None:
        nonlocal copies
        copies += sum(op[0] == Op.COPY for op in message.ops) if isinstance(message, StepTrace) else 0

    engine.add_sink(count)
    prompt = prompt_of(17)
    engine.add_request(prompt, SamplingParams(max_tokens=7, n=3))
    tokens: dict[int, list[int]] = {}
    while engine.has_work:
        for output in engine.step():
            tokens.setdefault(output.index, []).extend(output.token_ids)
    assert list(tokens.values()) == all_alone([prompt], form) * 3
    assert copies >= 2


@pytest.mark.parametrize(
    ("form", "name", "element", "scale"),
    [("int8", "int8", 1, 4), ("fp8", "float8_e4m3fn", 1, 4), ("bf16", "bfloat16", 2, 0)],
)
def test_the_trace_says_what_the_cache_holds(form: KVDType, name: str, element: int, scale: int) -> None:
    model = engine_over(shared_model("llama"), kv_dtype=form).header.model
    assert (model.dtype, model.kv_dtype, model.kv_scale_bytes) == ("float32", name, scale)
    assert model.kv_bytes_per_token == 2 * 2 * 2 * (8 * element + scale)
