import logging
import threading
from collections.abc import Sequence

import pytest

from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.core.scheduler_output import SchedulerOutput
from engine.engine import PagedEngine
from engine.request import FinishReason, RequestError, RequestOutput, SamplingParams
from engine.runner import RunnerError
from engine.simulated import EOS_TOKEN_ID, SimulatedCodec, SimulatedRunner, SimulatedStream
from engine.trace.events import DecisionKind, Header, Op, Reason, RequestArrived, StepTrace, TraceMessage


class ScriptedRunner(SimulatedRunner):
    """Samples given tokens, the same for every request."""

    def __init__(self, config: EngineConfig, tokens: Sequence[int], max_model_len: int = 10**6) -> None:
        super().__init__(config, max_model_len=max_model_len)
        self.tokens = tokens
        self.failures: list[Exception | None] = []
        self.forgotten: list[int] = []

    def execute(self, output: SchedulerOutput) -> list[int | None]:
        failure = self.failures.pop(0) if self.failures else None
        if failure is not None:
            raise failure
        super().execute(output)
        return [
            self.tokens[len(s.request.output_token_ids) % len(self.tokens)] if s.samples else None
            for s in output.scheduled
        ]

    def forget(self, request_id: int) -> None:
        self.forgotten.append(request_id)


def build(
    script: str = "abcdefghij",
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    prefix_caching: bool = True,
    model_limit: int = 10**6,
    codec: SimulatedCodec | None = None,
    **limits: int,
) -> PagedEngine:
    """An engine whose every request is answered with the script's bytes, one a token."""
    config = EngineConfig(
        cache=CacheConfig(block_size, num_blocks, prefix_caching),
        scheduler=SchedulerConfig(**limits),  # type: ignore[arg-type]
    )
    runner = ScriptedRunner(config, list(script.encode()), model_limit)
    return PagedEngine(config, runner, codec or SimulatedCodec())


def scripted(engine: PagedEngine) -> ScriptedRunner:
    assert isinstance(engine.runner, ScriptedRunner)
    return engine.runner


def run(engine: PagedEngine) -> dict[int, list[RequestOutput]]:
    """All outputs until nothing is left to do, by request."""
    told: dict[int, list[RequestOutput]] = {}
    for _ in range(2000):
        if not engine.has_work:
            return told
        for output in engine.step():
            told.setdefault(output.request_id, []).append(output)
    raise AssertionError("no end in sight")


def text(outputs: list[RequestOutput]) -> str:
    return "".join(output.text for output in outputs)


def ask(max_tokens: int = 5, **params: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, **params)  # type: ignore[arg-type]


def steps(messages: list[TraceMessage]) -> list[StepTrace]:
    return [message for message in messages if isinstance(message, StepTrace)]


# ---------------------------------------------------------------------- requests and outputs


def test_a_request_is_answered_token_by_token_and_ends_once():
    engine = build()
    told: list[RequestOutput] = []
    number = engine.add_request("hi", ask(3), name="me", on_output=told.append)
    outputs = run(engine)[number]
    assert outputs == told
    assert [o.text for o in outputs] == ["a", "b", "c"]
    assert [o.token_ids for o in outputs] == [(97,), (98,), (99,)]
    assert [o.finish_reason for o in outputs] == [None, None, FinishReason.LENGTH]
    assert [(o.num_prompt_tokens, o.num_output_tokens) for o in outputs] == [(2, 1), (2, 2), (2, 3)]
    assert not engine.has_work
    assert engine.step() == []
    assert scripted(engine).forgotten == [number]


def test_numbers_are_given_in_order_of_arrival_from_many_threads():
    engine = build(max_num_batched_tokens=4096, max_num_seqs=256)
    arrived: list[TraceMessage] = []
    engine.add_sink(arrived.append)
    numbers: list[int] = []
    threads = [
        threading.Thread(target=lambda: numbers.extend(engine.add_request("x", ask(1)) for _ in range(20)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    engine.step()
    assert sorted(numbers) == list(range(80))
    came = [message for message in arrived if isinstance(message, RequestArrived)]
    assert [message.request for message in came] == list(range(80))
    assert [message.time_ns for message in came] == sorted(message.time_ns for message in came)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (5, "neither text nor a list"),
        (None, "neither text nor a list"),
        (["a"], "neither text nor a list"),
        ([1.5], "neither text nor a list"),
        ([True], "neither text nor a list"),
        (b"bytes", "neither text nor a list"),
        ([1, -1], "token -1 is not in the vocabulary"),
        ([1, 10**9], "token 1000000000 is not in the vocabulary"),
    ],
)
def test_what_is_no_prompt_is_refused_where_it_is_handed_in(prompt: object, message: str):
    engine = build()
    with pytest.raises(RequestError, match=message):
        engine.add_request(prompt)  # type: ignore[arg-type]
    assert not engine.has_work


def test_what_are_no_parameters_is_refused_where_they_are_handed_in():
    with pytest.raises(RequestError, match="params is a dict"):
        build().add_request("x", {"max_tokens": 3})  # type: ignore[arg-type]


def test_a_long_name_is_cut():
    engine = build()
    messages: list[TraceMessage] = []
    engine.add_sink(messages.append)
    engine.add_request("x", ask(1), name="n" * 5000)
    engine.step()
    assert isinstance(messages[1], RequestArrived)
    assert messages[1].name == "n" * 200


@pytest.mark.parametrize(
    ("prompt", "reason", "part"),
    [
        ("", Reason.EMPTY_PROMPT, "prompt is empty"),
        ("x" * 32, Reason.TOO_LONG, "the prompt has 32 tokens"),
        ("x" * 20, Reason.NEVER_FITS, "need 6 blocks and the pool has 5"),
    ],
)
def test_what_can_never_run_comes_back_as_refused_and_the_next_one_runs(prompt: str, reason: Reason, part: str):
    engine = build(num_blocks=5, max_model_len=32)
    messages: list[TraceMessage] = []
    engine.add_sink(messages.append)
    bad = engine.add_request(prompt, ask(3))
    good = engine.add_request("fine", ask(2))
    told = run(engine)
    (refusal,) = told[bad]
    assert refusal.finish_reason is FinishReason.REFUSED
    assert part in (refusal.error or "")
    assert text(told[good]) == "ab"
    assert [m.request for m in messages if isinstance(m, RequestArrived)] == [bad, good]
    first = steps(messages)[0]
    assert first.decisions[0][:3] == (DecisionKind.REFUSED, bad, reason)
    assert (bad, "refused", refusal.error) in first.finished


def test_a_step_of_refusals_and_aborts_only_is_traced_with_an_empty_batch():
    engine = build(num_blocks=2)
    messages: list[TraceMessage] = []
    engine.add_sink(messages.append)
    engine.add_request("x" * 50)
    engine.step()
    assert steps(messages)[0].batch == []
    engine.add_request("abc", ask(50))
    engine.step()
    engine.abort(1)
    engine.step()
    last = steps(messages)[-1]
    assert (last.batch, last.finished) == ([], [(1, "abort", "")])
    assert [op.op for op in last.ops] == [Op.RELEASE]
    assert [step.index for step in steps(messages)] == [0, 1, 2]


def test_a_request_that_outgrows_the_pool_keeps_its_text_and_says_why():
    engine = build(num_blocks=2)
    number = engine.add_request("abc", ask(50))
    behind = engine.add_request("xyz", ask(2))
    told = run(engine)
    assert text(told[number]) == "abcdef"
    assert told[number][-1].finish_reason is FinishReason.ERROR
    assert "needs 3 blocks and the whole pool has 2" in (told[number][-1].error or "")
    assert text(told[behind]) == "ab"


def test_the_models_limit_caps_the_configured_one():
    engine = build(model_limit=8, max_model_len=100)
    assert (engine.max_model_len, engine.header.max_model_len) == (8, 8)
    number = engine.add_request("abcde", ask(50))
    outputs = run(engine)[number]
    assert (outputs[-1].finish_reason, outputs[-1].num_output_tokens) == (FinishReason.LENGTH, 3)


# ---------------------------------------------------------------------- text


def test_a_stop_string_that_spans_tokens_is_not_streamed():
    engine = build("one END two")
    number = engine.add_request("q", ask(50, stop=("END",)))
    outputs = run(engine)[number]
    assert text(outputs) == "one "
    assert outputs[-1].finish_reason is FinishReason.STOP
    assert outputs[-1].num_output_tokens == 7
    assert engine.scheduler.kv.pool.num_used == 0


def test_the_beginning_of_a_stop_string_is_flushed_at_the_end():
    engine = build("one EN")
    number = engine.add_request("q", ask(6, stop=("END",)))
    outputs = run(engine)[number]
    assert [o.text for o in outputs] == ["o", "n", "e", " ", "", "EN"]
    assert outputs[-1].finish_reason is FinishReason.LENGTH


def test_a_stop_string_in_the_last_token_allowed_is_a_stop():
    engine = build("abcd")
    number = engine.add_request("q", ask(4, stop=("cd",)))
    outputs = run(engine)[number]
    assert (text(outputs), outputs[-1].finish_reason) == ("ab", FinishReason.STOP)


def test_half_a_character_is_never_shown():
    engine = build("é🙂字")
    messages: list[TraceMessage] = []
    engine.add_sink(messages.append)
    number = engine.add_request("q", ask(9))
    outputs = run(engine)[number]
    assert [o.text for o in outputs] == ["", "é", "", "", "", "🙂", "", "", "字"]
    assert [token.text for step in steps(messages) for token in step.tokens] == [o.text for o in outputs]


def test_a_character_cut_off_by_the_end_is_shown_as_replaced():
    engine = build("a🙂")
    messages: list[TraceMessage] = []
    engine.add_sink(messages.append)
    number = engine.add_request("q", ask(3))
    assert text(run(engine)[number]) == "a\N{REPLACEMENT CHARACTER}"
    assert [token.text for step in steps(messages) for token in step.tokens] == ["a", "", "\N{REPLACEMENT CHARACTER}"]


def test_a_stop_string_that_the_end_completes_is_a_stop():
    engine = build("a🙂")
    number = engine.add_request("q", ask(3, stop=("\N{REPLACEMENT CHARACTER}",)))
    outputs = run(engine)[number]
    assert (text(outputs), outputs[-1].finish_reason) == ("a", FinishReason.STOP)


def test_a_token_that_ends_the_output_has_no_text():
    engine = build("ab.cd")
    number = engine.add_request("q", ask(50, stop_token_ids=(ord("."),)))
    outputs = run(engine)[number]
    assert (text(outputs), outputs[-1].finish_reason) == ("ab", FinishReason.STOP)
    assert outputs[-1].token_ids == (ord("."),)


def test_the_models_end_ends_unless_ignored():
    engine = build()
    scripted(engine).tokens = [97, EOS_TOKEN_ID]
    plain = engine.add_request("q", ask(4))
    on = engine.add_request("q", ask(4, ignore_eos=True))
    told = run(engine)
    assert (text(told[plain]), told[plain][-1].finish_reason) == ("a", FinishReason.STOP)
    assert (text(told[on]), told[on][-1].finish_reason) == ("a<eos>a<eos>", FinishReason.LENGTH)


@pytest.mark.parametrize("prompt_tokens", range(1, 10))
def test_a_preempted_request_streams_nothing_twice_and_counts_right(prompt_tokens: int):
    engine = build("abcdefghijklmnopqrst", num_blocks=6, prefix_caching=False)
    engine.add_request([1] * 5, ask(14))
    number = engine.add_request([2] * prompt_tokens, ask(14))
    told = run(engine)[number]
    assert engine.scheduler.num_preemptions > 0
    assert text(told) == "abcdefghijklmn"
    assert sum((o.token_ids for o in told), ()) == tuple(b"abcdefghijklmn")
    assert (told[-1].num_prompt_tokens, told[-1].num_output_tokens) == (prompt_tokens, 14)


def test_a_prompt_sent_twice_is_cached_to_one_token_short():
    engine = build(num_blocks=16, block_size=16)
    prompt = "0123456789abcdef" * 2
    first = engine.add_request(prompt, ask(4))
    one = run(engine)[first]
    second = engine.add_request(prompt, ask(4))
    two = run(engine)[second]
    assert (one[-1].num_cached_tokens, two[-1].num_cached_tokens) == (0, 16)
    assert text(one) == text(two)


# ---------------------------------------------------------------------- aborts


def test_an_abort_takes_effect_in_the_next_step_and_only_once():
    engine = build()
    number = engine.add_request("q", ask(50))
    engine.step()
    engine.abort(number)
    engine.abort(number)
    assert engine.scheduler.kv.pool.num_used == 1
    (output,) = engine.step()
    assert (output.finish_reason, output.text, output.token_ids) == (FinishReason.ABORT, "", ())
    assert engine.scheduler.kv.pool.num_used == 0
    engine.abort(number)
    engine.abort(999)
    assert engine.step() == []


def test_a_request_aborted_before_it_was_seen_still_arrives_and_ends():
    engine = build()
    messages: list[TraceMessage] = []
    engine.add_sink(messages.append)
    engine.abort(engine.add_request("q"))
    (output,) = engine.step()
    assert output.finish_reason is FinishReason.ABORT
    assert [type(message) for message in messages] == [Header, RequestArrived, StepTrace]


def test_an_abort_shows_what_was_held_back():
    engine = build("one END")
    number = engine.add_request("q", ask(50, stop=("END",)))
    for _ in range(6):
        engine.step()
    engine.abort(number)
    (output,) = engine.step()
    assert output.text == "EN"


# ---------------------------------------------------------------------- failures


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL + 1, logger="engine")


def test_a_failed_forward_fails_its_batch_and_the_engine_goes_on():
    engine = build(max_num_seqs=2)
    messages: list[TraceMessage] = []
    engine.add_sink(messages.append)
    one, two, three = (engine.add_request("abc", ask(3)) for _ in range(3))
    scripted(engine).failures = [None, RuntimeError("CUDA error:\nan illegal\taccess")]
    told = run(engine)
    for number in (one, two):
        assert [o.text for o in told[number]] == ["a", ""]
        assert told[number][-1].finish_reason is FinishReason.ERROR
        assert told[number][-1].error == "the step failed: CUDA error: an illegal access"
    assert text(told[three]) == "abc"
    failed = steps(messages)[1]
    assert [(m.request, m.num_scheduled) for m in failed.batch] == [(one, 0), (two, 0)]
    assert [(d.kind, d.reason) for d in failed.decisions if d.kind != DecisionKind.WAITS] == [
        (DecisionKind.FAILED, Reason.STEP_FAILED)
    ] * 2
    assert engine.scheduler.kv.pool.num_used == 0


def test_an_error_that_names_its_request_leaves_the_others_unharmed():
    engine = build()
    one, two = engine.add_request("abc", ask(3)), engine.add_request("xyz", ask(3))
    scripted(engine).failures = [None, RunnerError("its logits are not finite", [one])]
    told = run(engine)
    assert told[one][-1].error == "the step failed: its logits are not finite"
    assert text(told[two]) == "abc"
    assert told[two][-1].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("error", [RunnerError("who?", [10**6]), RunnerError("all"), ValueError("")])
def test_an_error_that_names_nobody_in_the_batch_fails_all_of_it(error: Exception):
    engine = build()
    numbers = [engine.add_request("abc", ask(3)) for _ in range(2)]
    scripted(engine).failures = [error]
    told = run(engine)
    assert [told[n][-1].finish_reason for n in numbers] == [FinishReason.ERROR] * 2
    assert told[0][-1].error == f"the step failed: {str(error) or 'ValueError'}"


def test_a_runner_that_returns_too_few_tokens_fails_its_batch(monkeypatch: pytest.MonkeyPatch):
    engine = build()
    engine.add_request("abc")
    monkeypatch.setattr(engine.runner, "execute", lambda output: [])
    (output,) = engine.step()
    assert "returned 0 tokens for 1 requests" in (output.error or "")


def test_a_codec_that_fails_on_one_request_harms_no_other():
    class Touchy(SimulatedCodec):
        def stream(self, prompt_token_ids: Sequence[int]) -> SimulatedStream:
            if prompt_token_ids[0] == ord("!"):
                raise KeyError("no such token")
            return super().stream(prompt_token_ids)

    engine = build(codec=Touchy())
    bad, good = engine.add_request("!", ask(3)), engine.add_request("q", ask(3))
    told = run(engine)
    assert told[bad][-1].finish_reason is FinishReason.ERROR
    assert "could not be decoded" in (told[bad][-1].error or "")
    assert text(told[good]) == "abc"


def test_a_callback_that_raises_harms_nobody_and_is_not_called_again():
    engine = build()
    calls: list[RequestOutput] = []

    def broken(output: RequestOutput) -> None:
        calls.append(output)
        raise OSError("the client hung up")

    engine.add_request("q", ask(3), on_output=broken)
    other = engine.add_request("q", ask(3))
    assert text(run(engine)[other]) == "abc"
    assert len(calls) == 1


# ---------------------------------------------------------------------- the trace


def test_the_header_comes_at_once_and_requests_before_the_step_that_mentions_them():
    engine = build()
    messages: list[TraceMessage] = []
    engine.add_sink(messages.append)
    assert messages == [engine.header]
    engine.add_request(" the cache", ask(1, temperature=0.5), name="me")
    assert len(messages) == 1
    engine.step()
    arrived = messages[1]
    assert isinstance(arrived, RequestArrived)
    assert (arrived.name, arrived.max_tokens, arrived.temperature) == ("me", 1, 0.5)
    assert (arrived.prompt_token_ids, arrived.prompt_pieces) == (
        SimulatedCodec().encode(" the cache"),
        [" the", " cache"],
    )
    assert isinstance(messages[2], StepTrace)


def test_a_sink_comes_before_the_first_step_or_not_at_all():
    engine = build()
    engine.add_request("q")
    engine.step()
    with pytest.raises(RuntimeError, match="before the first step"):
        engine.add_sink(lambda message: None)


def test_a_sink_that_fails_loses_the_trace_and_nobody_else_does():
    engine = build()
    kept: list[TraceMessage] = []

    def full(message: TraceMessage) -> None:
        if isinstance(message, StepTrace) and message.index == 1:
            raise OSError("no space left on device")
        broken.append(message)

    broken: list[TraceMessage] = []
    engine.add_sink(full)
    engine.add_sink(kept.append)
    number = engine.add_request("q", ask(4))
    assert text(run(engine)[number]) == "abcd"
    assert (len(steps(broken)), len(steps(kept))) == (1, 4)


def test_a_steps_times_are_those_of_its_parts():
    ticks = iter(range(0, 10**6, 10))
    config = EngineConfig()
    runner = ScriptedRunner(config, [97])
    engine = PagedEngine(config, runner, SimulatedCodec(), clock=lambda: next(ticks))
    messages: list[TraceMessage] = []
    engine.add_sink(messages.append)
    engine.add_request("q", ask(2))
    engine.step()
    engine.step()
    first, second = steps(messages)
    assert first.start_ns < second.start_ns
    assert (first.schedule_ns, first.update_ns) == (10, 10)
    assert (second.execute_ns, second.sample_ns) == (runner.last_execute_ns, runner.last_sample_ns)


def test_without_a_sink_no_operation_is_noted():
    engine = build()
    engine.add_request("q", ask(2))
    run(engine)
    assert engine.scheduler.kv.pool.ops is None


def test_counters_are_levels_after_the_step_and_totals():
    engine = build(num_blocks=8)
    messages: list[TraceMessage] = []
    engine.add_sink(messages.append)
    engine.add_request("abcdefgh", ask(2))
    engine.add_request("abcdefgh", ask(2))
    run(engine)
    first, last = steps(messages)[0].counters, steps(messages)[-1].counters
    assert (first.running, first.used_blocks, first.cached_blocks, first.free_blocks) == (2, 4, 0, 4)
    assert (last.running, last.waiting, last.preempted) == (0, 0, 0)
    assert (last.used_blocks, last.cached_blocks, last.free_blocks) == (0, 4, 4)
    assert (last.generated_tokens, last.prefix_queried_tokens, last.prefix_hit_tokens) == (4, 16, 0)
    engine.add_request("abcdefgh", ask(2))
    run(engine)
    assert steps(messages)[-1].counters[6:8] == (24, 4)
