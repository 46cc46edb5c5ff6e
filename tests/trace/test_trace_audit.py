"""Going through a whole recording: what it counts, and that the first broken invariant is named exactly."""

import msgspec
import pytest
from trace_builder import TraceBuilder, allocate, fill, make_header, release, simulated_trace

from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.request import SamplingParams
from engine.simulated import simulated_engine
from engine.trace import audit as audit_module
from engine.trace.audit import audit
from engine.trace.events import DecisionKind, Op, Phase, RequestArrived, StepTrace
from engine.trace.reader import Recording
from engine.trace.recording import RecordingWriter
from engine.trace.state import PoolState


def audited(path, header, messages):
    with RecordingWriter(path, header) as writer:
        for message in messages:
            writer(message)
    with Recording.open(path) as recording:
        return audit(recording)


def test_a_sound_recording_is_counted_and_holds(tmp_path):
    header, messages = simulated_trace(seed=7, num_requests=25)
    found = audited(tmp_path / "a.mcap", header, messages)
    steps = [message for message in messages if isinstance(message, StepTrace)]
    arrivals = [message for message in messages if isinstance(message, RequestArrived)]
    ops = [op for step in steps for op in step.ops]
    decisions = [decision for step in steps for decision in step.decisions]
    assert (found.num_violations, found.violations, found.damage) == (0, [], "")
    assert (found.num_steps, found.num_requests) == (len(steps), len(arrivals))
    assert found.prompt_tokens == sum(len(arrival.prompt_token_ids) for arrival in arrivals)
    assert found.generated_tokens == sum(len(step.tokens) for step in steps)
    assert found.computed_tokens == sum(member.num_scheduled for step in steps for member in step.batch)
    assert found.ops == {op.name.lower(): n for op in Op if (n := sum(o.op == op for o in ops))}
    assert found.evictions == sum(op.op == Op.EVICT for op in ops) > 0
    assert found.preemptions == sum(d.kind == DecisionKind.PREEMPTED for d in decisions) > 0
    assert sum(found.finished.values()) == len(arrivals)
    assert found.peak_used == max(step.counters.used_blocks for step in steps)
    last = steps[-1].counters
    assert found.prefix_hit_rate == last.prefix_hit_tokens / last.prefix_queried_tokens > 0


@pytest.mark.parametrize(("window", "never_fit"), [(0, (2, 26)), (10, (0, 0))])
def test_refused_for_want_of_blocks_is_who_was_and_not_who_is_longer_than_the_pool(tmp_path, window, never_fit):
    limits = SchedulerConfig(max_model_len=120)
    engine = simulated_engine(EngineConfig(cache=CacheConfig(4, 8), scheduler=limits), sliding_window=window)
    messages = []
    engine.add_sink(messages.append)
    for length in (9, 100, 40, 300):
        engine.add_request([300 + i % 20 for i in range(length)], SamplingParams(max_tokens=2))
    while engine.has_work:
        engine.step()
    found = audited(tmp_path / "a.mcap", engine.header, messages[1:])
    assert found.never_fit == never_fit
    assert found.finished["refused"] == never_fit[0] + 1


def test_a_recording_of_steps_scheduled_ahead_holds_counts_its_overruns_and_is_sought_in(tmp_path):
    limits = SchedulerConfig(max_num_seqs=4, async_scheduling=True)
    engine = simulated_engine(EngineConfig(cache=CacheConfig(4, 24), scheduler=limits), eos_rate=0.1)
    messages = []
    engine.add_sink(messages.append)
    state = PoolState(engine.header)
    for number in range(12):
        engine.add_request(f"prompt {number}", SamplingParams(max_tokens=20))
    while engine.has_work:
        engine.step()
    found = audited(tmp_path / "a.mcap", engine.header, messages[1:])
    overruns = [m for s in messages if isinstance(s, StepTrace) for m in s.batch if m.phase == Phase.OVERRUN]
    assert (found.num_violations, found.damage) == (0, "")
    assert found.overruns == len(overruns) == found.finished["stop"] > 0
    with Recording.open(tmp_path / "a.mcap") as recording:
        assert recording.header.async_scheduling
        assert list(recording.messages()) == messages[1:]
        for message in messages[1:]:
            state.apply(message)
        assert recording.state_at(recording.num_steps - 1).same_as(state) == []


def test_an_operation_that_cannot_be_is_the_first_violation(tmp_path):
    build = TraceBuilder()
    build.arrive(0)
    build.prefill(0, [0], 4)
    build.step()
    build.step(release(0, 0), release(0, 0), finished=[(0, "stop", "")])
    build.step()
    found = audited(tmp_path / "a.mcap", build.header, build.messages)
    assert [(v.name, v.block, v.step) for v in found.violations] == [("free_queue", 0, 2)]
    assert found.num_steps == 4


def test_a_state_that_breaks_silently_is_named_at_its_first_step(tmp_path):
    """No operation is wrong by itself: the slots just do not match what was computed, for three steps."""
    build = TraceBuilder()
    build.arrive(0)
    build.step()
    build.step(allocate(0, 0, 0), fill(0, 0, 2), batch=[(0, 0, 0, 3)])
    build.step()
    build.step()
    found = audited(tmp_path / "a.mcap", build.header, build.messages)
    assert (found.violations[0].name, found.violations[0].block, found.violations[0].step) == ("filled", 0, 1)
    assert found.num_violations == 3


def test_a_large_pool_is_checked_now_and_then_and_still_named_exactly(tmp_path, monkeypatch):
    monkeypatch.setattr(audit_module, "_BLOCKS_PER_CHECK", 2)
    build = TraceBuilder(make_header(num_blocks=20))
    build.arrive(0)
    for _ in range(13):
        build.step()
    build.step(allocate(0, 0, 0), fill(0, 0, 2), batch=[(0, 0, 0, 3)])
    for _ in range(10):
        build.step()
    found = audited(tmp_path / "a.mcap", build.header, build.messages)
    assert found.check_interval == 10
    assert (found.violations[0].name, found.violations[0].block, found.violations[0].step) == ("filled", 0, 13)


def test_counters_that_lie_are_named(tmp_path):
    build = TraceBuilder()
    build.step()
    build.step(free_blocks=7)
    found = audited(tmp_path / "a.mcap", build.header, build.messages)
    assert [(v.name, v.step) for v in found.violations] == [("counters", 1)]


def test_names_that_nobody_knows_are_counted_as_unknown(tmp_path):
    build = TraceBuilder()
    build.arrive(0)
    step = build.step(finished=[(0, "boredom", "")])
    strange = msgspec.structs.replace(step, ops=[(50 + at, 0, 0, 0) for at in range(20)])
    found = audited(tmp_path / "a.mcap", build.header, [build.messages[0], strange])
    assert found.ops == {"unknown": 20}
    assert found.finished == {"unknown": 1}


def test_damage_ends_the_audit_and_is_told(tmp_path):
    header, messages = simulated_trace(seed=8, num_requests=6)
    path = tmp_path / "a.mcap"
    with RecordingWriter(path, header) as writer:
        for message in messages:
            writer(message)
    with Recording.open(path) as recording:
        segment = recording._layout.segments[-1].tolist()
    content = bytearray(path.read_bytes())
    content[segment[2] + segment[3] // 2] ^= 0xFF
    path.write_bytes(content)
    with Recording.open(path) as recording:
        found = audit(recording)
    assert "is damaged: steps" in found.damage
    assert found.num_violations == 0
