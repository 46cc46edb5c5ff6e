"""Races: equal outputs under every policy, in a time that is reckoned, and the numbers that are made of them."""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict

import numpy as np
import pytest
from races import arrivals, lanes

from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.request import SamplingParams
from engine.simulated import simulated_engine
from engine.trace.events import RequestArrived, StepTrace
from engine.trace.invariants import check
from engine.trace.reader import Recording
from engine.trace.recording import RecordingWriter
from engine.trace.state import PoolState
from kvtui.glyphs import ASCII, UNICODE
from kvtui.race.arrivals import (
    DEFAULT_COST,
    MOST_SLOTS,
    Cost,
    RaceError,
    fitted_cost,
    from_recording,
    from_workload,
    require_room,
)
from kvtui.race.lane import POLICIES, run_lane
from kvtui.race.report import as_json, batch_over_time, chart_lines, report_lines, result_of, speed_up
from kvtui.workloads.workload import Workload


def outputs(lane):
    tokens = defaultdict(list)
    for message in lane.messages:
        if isinstance(message, StepTrace):
            for token in message.tokens:
                tokens[token[0]].append(token[1])
    return dict(tokens)


def test_every_policy_gives_the_same_outputs_and_the_newer_ones_in_fewer_steps():
    raced = lanes(arrivals())
    assert [lane.policy for lane in raced] == list(POLICIES)
    assert outputs(raced[0]) == outputs(raced[1]) == outputs(raced[2])
    static, contiguous, paged = map(result_of, raced)
    assert paged.steps < contiguous.steps <= static.steps
    assert paged.average_batch > contiguous.average_batch >= static.average_batch
    assert speed_up(paged, static) > 1
    assert static.requests == paged.requests == 8


def test_the_traces_hold_together_at_every_step():
    for lane in lanes(arrivals()):
        state = PoolState(lane.header)
        for message in lane.messages:
            state.apply(message)
            if isinstance(message, StepTrace):
                assert check(state) == []
        assert state.num_violations == 0


def test_time_is_what_the_steps_cost_and_does_not_depend_on_the_machine():
    raced = dataclasses.replace(arrivals(), cost=Cost(0.5, 0.25, "told"))
    lane = run_lane(raced, "paged")
    again = run_lane(raced, "paged")
    steps = [m for m in lane.messages if isinstance(m, StepTrace)]
    assert lane.messages == again.messages
    for step in steps:
        assert step.execute_ns == (0.5 + 0.25 * sum(member[3] for member in step.batch)) * 1e9
    result = result_of(lane)
    tokens = sum(len(step.tokens) for step in steps)
    assert result.generated_tokens == tokens
    assert result.seconds == pytest.approx(sum(step.execute_ns for step in steps) / 1e9)
    assert result.tokens_per_s == pytest.approx(tokens / result.seconds, abs=0.001)
    assert result.average_batch == pytest.approx(np.mean([len(s.batch) for s in steps]), abs=0.001)


def test_a_request_that_arrives_later_is_waited_for():
    raced = arrivals(2)
    late = dataclasses.replace(raced.workload.sessions[1], at=100.0)
    raced = dataclasses.replace(
        raced, workload=dataclasses.replace(raced.workload, sessions=(raced.workload.sessions[0], late))
    )
    lane = run_lane(raced, "paged")
    arrived = [m.time_ns for m in lane.messages if isinstance(m, RequestArrived)]
    assert arrived[1] >= 100e9
    assert result_of(lane).seconds > 100


def recorded(tmp_path, **settings):
    """A recording of a few requests, some ended by themselves, one refused."""
    engine = simulated_engine(
        EngineConfig(
            cache=CacheConfig(block_size=4, num_blocks=30, **settings),
            scheduler=SchedulerConfig(max_num_seqs=5, max_num_batched_tokens=64, max_model_len=100),
        ),
        eos_rate=0.1,
    )
    path = tmp_path / "some.mcap"
    writer = RecordingWriter(path, engine.header)
    engine.add_sink(writer)
    heard = []
    engine.add_sink(heard.append)
    for i in range(7):
        engine.add_request("the page of the block " * 2 + str(i), SamplingParams(max_tokens=25))
    engine.add_request("a " * 200, SamplingParams(max_tokens=5), name="too long")
    while engine.has_work:
        engine.step()
    writer.close()
    return path, heard


def test_a_recordings_requests_end_where_they_ended_whatever_the_policy(tmp_path):
    path, heard = recorded(tmp_path)
    lengths = defaultdict(int)
    for message in heard:
        if isinstance(message, StepTrace):
            for token in message.tokens:
                lengths[token[0]] += 1
    with Recording.open(path) as recording:
        raced = from_recording(recording, "some")
    assert any("1 of 8 requests generated nothing" in note for note in raced.notes)
    assert "recorded steps" in raced.cost.source
    assert len(set(lengths.values())) > 1
    for lane in lanes(raced):
        assert {n: len(tokens) for n, tokens in outputs(lane).items()} == dict(lengths)
        assert lane.header.num_blocks == 30


def test_a_recording_in_which_nothing_was_generated_cannot_be_raced(tmp_path):
    engine = simulated_engine(EngineConfig())
    path = tmp_path / "none.mcap"
    writer = RecordingWriter(path, engine.header)
    engine.add_sink(writer)
    engine.add_request([], SamplingParams())
    engine.step()
    writer.close()
    with Recording.open(path) as recording, pytest.raises(RaceError, match="nothing to race"):
        from_recording(recording, "none")


def test_several_answers_become_as_many_requests_and_nothing_cannot_be_raced():
    raced = arrivals(2, n=3)
    assert [s.name for s in raced.workload.sessions] == ["ask-0", "ask-0/2", "ask-0/3", "ask-1", "ask-1/2", "ask-1/3"]
    assert all(lane.num_failed == 0 for lane in lanes(raced))
    with pytest.raises(RaceError, match="nothing to race"):
        from_workload(Workload("none", "", ()), EngineConfig())


def test_a_pool_that_no_memory_holds_is_refused():
    raced = arrivals(1)
    cache = dataclasses.replace(raced.config.cache, num_blocks=MOST_SLOTS)
    with pytest.raises(RaceError, match="too large to race in"):
        require_room(dataclasses.replace(raced, config=dataclasses.replace(raced.config, cache=cache)))


@pytest.mark.parametrize(
    ("tokens", "times", "cost"),
    [
        ([1, 2, 3], [3e9, 5e9, 7e9], (1.0, 2.0)),
        ([1, 2, 3], [9e9, 6e9, 3e9], (6.0, 0.0)),
        ([10, 20], [1e9, 3e9], (0.0, 0.14)),
        ([5, 5], [2e9, 4e9], (3.0, 0.0)),
        ([], [], (DEFAULT_COST.seconds, DEFAULT_COST.seconds_per_token)),
    ],
)
def test_the_cost_of_a_step_is_fitted_and_never_below_nothing(tokens, times, cost):
    found = fitted_cost(tokens, [int(t) for t in times])
    assert (found.seconds, found.seconds_per_token) == pytest.approx(cost)


def test_the_batch_over_time_keeps_the_requests_times_their_time():
    lane = run_lane(arrivals(), "contiguous")
    result = result_of(lane)
    values = batch_over_time(lane, 37, result.seconds)
    work = sum(len(m.batch) * m.execute_ns / 1e9 for m in lane.messages if isinstance(m, StepTrace))
    assert values.sum() * result.seconds / 37 == pytest.approx(work, rel=1e-6)


def test_the_report_of_minutes_fits_into_80_columns_and_tells_of_failures_only_where_there_are_some():
    raced = arrivals()
    ran = lanes(raced)
    large = {"steps": 2016, "seconds": 176.6, "average_batch": 16.46, "generated_tokens": 5188, "tokens_per_s": 129.4}
    results = [
        dataclasses.replace(result_of(lane), mean_first_token_s=181.02, mean_latency_s=199.67, **large) for lane in ran
    ]
    lines = report_lines(raced, ran, results, UNICODE, 80)
    assert any("181.02 s" in line for line in lines)
    assert max(map(len, lines)) <= 80
    assert not any("failed" in line for line in lines)

    results[0] = dataclasses.replace(results[0], failed=3)
    table = report_lines(raced, ran, results, UNICODE, 80)
    at = next(at for at, line in enumerate(table) if line.startswith("policy"))
    assert table[at].endswith("failed")
    assert table[at + 1].split()[-1] == "3"


def test_the_report_has_a_row_a_lane_and_a_chart_on_one_scale():
    raced = arrivals()
    ran = lanes(raced)
    results = [result_of(lane) for lane in ran]
    text = "\n".join(report_lines(raced, ran, results, UNICODE, 80))
    for result in results:
        assert f"{result.average_batch:.2f}" in text
        assert f"{result.tokens_per_s:,.1f}" in text
    assert f"paged makes {speed_up(results[2], results[0]):.2f} times static" in text
    chart = chart_lines(ran, results, UNICODE, 60)
    assert [line.split()[0] for line in chart[1:]] == list(POLICIES)
    assert "█" in chart[3]
    assert len(chart[1]) > len(chart[3])
    assert all(line.isascii() for line in report_lines(raced, ran, results, ASCII, 60))
    told = json.loads(json.dumps(as_json(raced, results)))
    assert [lane["policy"] for lane in told["lanes"]] == list(POLICIES)
    assert told["speed_up"]["static"] == 1
