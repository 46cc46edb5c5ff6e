"""Forks over the real cache: greedy ones go on as their parent does, whatever was shared and copied."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_greedy_equality import GREEDY, expected, prompt_of
from tiny_models import engine_over, run, shared_model

from engine.request import SamplingParams


@pytest.mark.parametrize("block_size", [3, 16])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_greedy_choices_and_forks_at_every_length_equal_generate(family: str, block_size: int) -> None:
    engine = engine_over(shared_model(family), block_size=block_size)
    prompts = [prompt_of(n) for n in (1, 2, 3, 15, 16, 17, 32)]
    ids = [engine.add_request(prompt, replace(GREEDY, n=3)) for prompt in prompts]
    tokens: dict[tuple[int, int], list[int]] = {}
    forks: dict[int, tuple[int, int]] = {}
    while engine.has_work:
        for output in engine.step():
            tokens.setdefault((output.request_id, output.index), []).extend(output.token_ids)
            made = len(tokens[output.request_id, output.index])
            if output.index == 1 and output.finish_reason is None and made % 3 == 0:
                forks[engine.fork(output.request_id + 1)] = (output.request_id, made + 1)
    for request, prompt in zip(ids, prompts, strict=True):
        for index in range(3):
            assert tokens[request, index] == expected(family, tuple(prompt))
    assert len(forks) == 2 * len(prompts)
    for fork, (request, known) in forks.items():
        assert tokens[fork, 0] in (tokens[request, 1][known - 1 :], tokens[request, 1][known:])


def test_drawn_choices_equal_requests_with_their_seeds() -> None:
    params = SamplingParams(max_tokens=9, temperature=1.0, seed=11)
    prompt = prompt_of(17)
    engine = engine_over(shared_model("llama"), block_size=16)
    engine.add_request(prompt, replace(params, n=4))
    together: dict[int, list[int]] = {}
    while engine.has_work:
        for output in engine.step():
            together.setdefault(output.index, []).extend(output.token_ids)
    each = [replace(params, seed=11 + index) for index in range(4)]
    assert run(engine_over(shared_model("llama"), block_size=16), [prompt] * 4, each) == [
        together[index] for index in range(4)
    ]
    assert len({tuple(tokens) for tokens in together.values()}) == 4
