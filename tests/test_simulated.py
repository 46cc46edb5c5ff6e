import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.config import CacheConfig, EngineConfig
from engine.core.scheduler import ScheduledRequest, SchedulerOutput
from engine.request import Request, SamplingParams
from engine.runner import RunnerError
from engine.simulated import EOS_TOKEN_ID, SimulatedCodec, SimulatedRunner, simulated_engine
from engine.trace.events import Phase


@given(st.text())
def test_any_text_comes_back_from_its_tokens(text: str):
    codec = SimulatedCodec()
    token_ids = codec.encode(text)
    assert all(0 <= token_id < codec.vocab_size and token_id != EOS_TOKEN_ID for token_id in token_ids)
    assert "".join(codec.pieces(token_ids)) == text.encode("utf-8", "replace").decode()


@given(st.lists(st.integers(0, SimulatedCodec.vocab_size - 1)))
def test_a_stream_and_pieces_give_the_same_text(token_ids: list[int]):
    codec = SimulatedCodec()
    stream = codec.stream([])
    streamed = [stream.push(token_id) for token_id in token_ids]
    pieces = codec.pieces(token_ids)
    assert len(pieces) == len(token_ids)
    assert "".join(streamed) + stream.flush() == "".join(pieces)
    assert streamed[:-1] == pieces[:-1]


def test_half_a_character_waits_for_its_other_half():
    stream = SimulatedCodec().stream([])
    assert [stream.push(byte) for byte in "🙂".encode()] == ["", "", "", "🙂"]
    assert [stream.push(0xF0), stream.flush()] == ["", "\N{REPLACEMENT CHARACTER}"]


def test_a_conversation_ends_where_the_assistant_answers():
    codec = SimulatedCodec()
    token_ids = codec.encode_chat([{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}])
    assert "".join(codec.pieces(token_ids)) == "system: be brief\nuser: hi\nassistant:"


# ---------------------------------------------------------------------- the paged memory


def runner(num_blocks: int = 8, block_size: int = 4, **options: float) -> SimulatedRunner:
    config = EngineConfig(cache=CacheConfig(block_size=block_size, num_blocks=num_blocks))
    return SimulatedRunner(config, **options)  # type: ignore[arg-type]


def forward(
    model: SimulatedRunner, tokens: list[int], blocks: list[int], start: int = 0, params: SamplingParams | None = None
) -> int | None:
    request = Request(0, "", tokens, params or SamplingParams())
    share = ScheduledRequest(request, Phase.PREFILL, start, len(tokens) - start, blocks)
    return model.execute(SchedulerOutput([share], share.num_scheduled))[0]


PROMPT = [300, 301, 302, 303, 304, 305, 306]


def test_the_next_token_does_not_depend_on_which_blocks_or_chunks():
    whole = forward(runner(), PROMPT, [0, 1])
    assert forward(runner(), PROMPT, [5, 2]) == whole
    assert forward(runner(block_size=1), PROMPT, [6, 5, 4, 3, 2, 1, 0]) == whole
    model = runner()
    request = Request(0, "", PROMPT, SamplingParams())
    parts = [ScheduledRequest(request, Phase.PREFILL, a, b - a, [3, 6]) for a, b in ((0, 3), (3, 5), (5, 7))]
    assert [model.execute(SchedulerOutput([part], part.num_scheduled))[0] for part in parts] == [None, None, whole]


@pytest.mark.parametrize("changed", range(7))
def test_every_earlier_token_counts(changed: int):
    outcomes = set()
    for token in range(310, 330):
        tokens = list(PROMPT)
        tokens[changed] = token
        outcomes.add(forward(runner(), tokens, [0, 1]))
    assert len(outcomes) > 8


def test_another_requests_content_in_a_block_changes_the_token():
    changes = 0
    for other in range(10):
        model = runner()
        right = forward(model, PROMPT, [0, 1])
        forward(model, [310 + other] * 4, [2])
        changes += forward(model, PROMPT, [2, 1], start=4) != right
    assert changes >= 8


def test_a_cell_that_nobody_wrote_is_never_read():
    model = runner()
    forward(model, PROMPT, [0, 1])
    with pytest.raises(RunnerError, match="position 3 of its cache, block 7") as raised:
        forward(model, PROMPT, [7, 1], start=4)
    assert raised.value.request_ids == (0,)
    model.memory[1] = 0
    with pytest.raises(RunnerError, match="position 1 of its cache, block 0"):
        forward(model, PROMPT, [0, 1], start=4)


def test_a_request_with_everything_cached_and_nothing_to_compute_is_an_error():
    model = runner()
    forward(model, PROMPT, [0, 1])
    with pytest.raises(RunnerError, match="without a token to compute"):
        forward(model, PROMPT, [0, 1], start=7)


def test_greedy_tokens_ignore_the_seed_and_sampled_ones_follow_it():
    greedy = {forward(runner(), PROMPT, [0, 1], params=SamplingParams(seed=seed)) for seed in range(20)}
    sampled = [
        forward(runner(), PROMPT, [0, 1], params=SamplingParams(seed=seed, temperature=1.0)) for seed in (*range(20), 3)
    ]
    assert len(greedy) == 1
    assert len(set(sampled)) > 8
    assert sampled[-1] == sampled[3]


def test_the_share_of_ends_is_as_asked_for():
    ends = sum(forward(runner(eos_rate=0.5), [300 + i, 301], [0]) == EOS_TOKEN_ID for i in range(60))
    assert 15 < ends < 45
    assert all(forward(runner(), [300 + i, 301], [0]) != EOS_TOKEN_ID for i in range(60))


def test_a_step_takes_the_time_asked_for():
    model = runner(step_seconds=0.003, seconds_per_token=0.001)
    forward(model, PROMPT, [0, 1])
    assert model.last_execute_ns + model.last_sample_ns >= 9_000_000


def test_made_up_text_is_whole_characters():
    engine = simulated_engine(EngineConfig(cache=CacheConfig(num_blocks=2048)), eos_rate=0.0)
    shown: dict[int, str] = {}
    for number in range(8):
        engine.add_request(f"question {number}", SamplingParams(max_tokens=120))
    while engine.has_work:
        for output in engine.step():
            shown[output.request_id] = shown.get(output.request_id, "") + output.text
    everything = "".join(shown.values())
    assert any(wide in everything for wide in "é→字🙂")
    # Only an output that was cut off within a character shows one that stands for it, and at its end.
    assert not any("\N{REPLACEMENT CHARACTER}" in text[:-1] for text in shown.values())


def test_two_engines_with_one_seed_answer_the_same_and_with_two_do_not():
    def answer(seed: int) -> str:
        engine = simulated_engine(EngineConfig(seed=seed))
        engine.add_request("hello", SamplingParams(max_tokens=12))
        return "".join(output.text for _ in range(12) for output in engine.step())

    assert answer(1) == answer(1)
    assert answer(1) != answer(2)


def test_its_trace_says_that_it_is_simulated():
    header = simulated_engine(title="a title", description="what it is").header
    assert (header.source, header.provenance, header.title) == ("simulator", "simulated", "a title")


def test_it_needs_no_torch():
    heavy = "'torch', 'transformers', 'numba'"
    code = f"import sys, engine.simulated, engine.loop; sys.exit(any(m in sys.modules for m in ({heavy})))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
