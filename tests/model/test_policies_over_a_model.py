"""The older policies over a real forward: memory that nobody wrote is NaN, and tokens are transformers' own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tiny_models import VOCAB, engine_over, generate, run, shared_model

from engine.engine import PagedEngine
from engine.request import SamplingParams
from engine.simulated import SimulatedCodec

NEW_TOKENS = 7


@pytest.mark.parametrize("policy", ["paged", "contiguous", "static"])
@pytest.mark.parametrize(("family", "attention"), [("llama", "cpu"), ("mistral", "reference"), ("gpt2", "reference")])
def test_tokens_equal_generate_under_every_policy(family: str, attention: str, policy: str) -> None:
    model = shared_model(family)
    prompts = [np.random.default_rng(n).integers(1, VOCAB, size=n).tolist() for n in (1, 5, 12, 13, 16, 17, 31)]
    # Three or four at a time fit where each reserves its longest; chunks and the budget cut prompts.
    made = engine_over(model, block_size=4, num_blocks=26, chunk=6, max_num_batched_tokens=17, attention=attention)
    config = replace(made.config, scheduler=replace(made.config.scheduler, policy=policy))  # type: ignore[arg-type]
    engine = PagedEngine(config, made.runner, SimulatedCodec())
    got = run(engine, prompts, SamplingParams(max_tokens=NEW_TOKENS))
    assert got == [generate(model, tuple(prompt), NEW_TOKENS) for prompt in prompts]
    assert engine.scheduler.kv.pool.num_free == 26
