"""`kvtui inspect --block` and `--request` as their user meets them."""

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvtui.cli.main import app

sys.path.append(str(Path(__file__).parent.parent / "trace"))
from trace_builder import TraceBuilder, allocate, evict, fill, hashed, make_header, release, simulated_trace

from engine.trace.events import Decision, DecisionKind, Phase, Reason
from engine.trace.recording import RecordingWriter


def write(path, header, messages):
    with RecordingWriter(path, header) as writer:
        for message in messages:
            writer(message)
    return str(path)


def inspect(*arguments):
    return CliRunner().invoke(app, ["inspect", *arguments])


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    """Request 0 gives way to request 1 and is resumed; block 3 goes from one to the other."""
    build = TraceBuilder(make_header(num_blocks=4))
    build.arrive(0, 1, num_tokens=4)
    build.prefill(0, [3], 4)
    build.step(hashed(3, 0xABC0000000000000 - 2**64), allocate(2, 0, 1), fill(2, 0, 1), batch=[(0, Phase.DECODE, 4, 1)])
    gave_way = Decision(
        DecisionKind.PREEMPTED, 0, Reason.GAVE_WAY, {"needs": 3, "free": 2, "to": 1, "released": 2, "extra": 1}
    )
    waits = Decision(DecisionKind.WAITS, 0, Reason.NO_BLOCKS, {"needs": 2, "free": 1})
    build.step(release(2, 0), release(3, 0), decisions=[gave_way, waits])
    build.step(evict(3, 0xABC0000000000000 - 2**64), allocate(3, 1, 0), batch=[(1, Phase.PREFILL, 0, 1)])
    again = Decision(DecisionKind.RESUMED, 0, Reason.FITS, {"needs": 2, "free": 2, "cached_tokens": 0})
    build.step(allocate(0, 0, 0), allocate(1, 0, 1), batch=[(0, Phase.RECOMPUTE, 0, 5)], decisions=[again])
    build.step(batch=[(0, Phase.DECODE, 5, 1)], tokens=[(0, 7, " on")])
    build.step(release(0, 0), release(1, 0), finished=[(0, "error", "\x1b]0;owned\x07 [red]it ended")])
    return write(tmp_path_factory.mktemp("why") / "story.mcap", build.header, build.messages)


def test_a_block_tells_who_had_it_from_its_first_allocation_to_the_last_step(story):
    result = inspect(story, "--block", "3")
    assert result.exit_code == 0
    assert [line.strip() for line in result.stdout.splitlines()] == [
        "block 3 at step 6: in use by #1",
        "step  what happened",
        "0  taken by #0 for place 0 of its table",
        "0  filled by #0: 4/4 slots",
        "1  full, and hashed: its content can be found as abc00000",
        "2  released by #0, nobody else holds it: cached as abc00000",
        "3  evicted: content abc00000 was lost, #1 needed the block",
        "3  taken by #1 for place 0 of its table",
    ]


def test_a_step_ends_the_story_there(story):
    result = inspect(story, "--block", "3", "--step", "2")
    assert "cached: nobody holds it" in result.stdout
    assert "evicted" not in result.stdout
    assert "nothing has happened to it" in inspect(story, "--block", "1", "--step", "3").stdout


def test_the_story_of_a_block_as_json(story):
    report = json.loads(inspect(story, "--block", "3", "--json").stdout)
    assert [event["what"] for event in report["events"]] == [
        *("allocated", "filled", "hashed", "cached", "evicted", "allocated"),
    ]
    assert (report["step"], report["refs"], report["owner"], report["searched_from_step"]) == (6, 1, 1, 0)
    assert report["events"][4]["request"] == 1


def test_a_request_tells_where_its_time_went_and_every_decision_with_its_numbers(story):
    result = inspect(story, "--request", "0")
    assert result.exit_code == 0
    rows = {line[:12].strip(): line[13:] for line in result.stdout.splitlines() if line[:12].strip()}
    assert rows["request 0"] == "request 0: error, 4 prompt + 2 output tokens, at step 6"
    assert rows["preempted"] == "once"
    text = result.stdout
    assert "preempted: request 1 needed 3 blocks and 2 were free, so this one, the youngest, released its 2" in text
    assert "2  waits: its tokens need 2 blocks, but only 1 can be taken." in text
    assert "4  is resumed: it takes 2 new blocks of the 2 free ones." in text
    assert all(character.isprintable() or character == "\n" for character in text)


def test_the_parts_of_a_latency_add_up_in_the_json_report(tmp_path):
    path = write(tmp_path / "s.mcap", *simulated_trace(seed=3, num_requests=12, num_blocks=12))
    preempted = 0
    for number in range(12):
        report = json.loads(inspect(path, "--request", str(number), "--json").stdout)
        latency = report["latency"]
        parts = [latency[f"{name}_ns"] for name in ("queued", "prefill", "decode", "preempted", "recompute")]
        assert sum(parts) == latency["total_ns"]
        kinds = [decision["kind"] for decision in report["decisions"]]
        assert kinds.count("preempted") == report["preemptions"]
        assert kinds.count("admitted") <= 1
        preempted += report["preemptions"]
    assert preempted > 0


def test_a_request_that_ended_long_ago_is_found_at_its_end(tmp_path, monkeypatch):
    from engine.trace import state as state_module

    monkeypatch.setattr(state_module, "MAX_FINISHED", 2)
    path = write(tmp_path / "s.mcap", *simulated_trace(seed=4, num_requests=12))
    first = json.loads(inspect(path, "--request", "0", "--json").stdout)
    assert first["status"].startswith("finished")
    assert first["step"] < json.loads(inspect(path, "--request", "11", "--json").stdout)["step"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--block", "4"], "block 4 is not in"),
        (["--block", "-1"], "its pool has blocks 0 to 3"),
        (["--request", "9"], "request 9 did not arrive in"),
        (["--request", "1", "--block", "1"], "leave one of them out"),
        (["--request", "1", "--step", "99"], "it has steps 0 to 6"),
    ],
)
def test_what_is_not_in_the_recording_gets_one_line_and_exit_code_2(story, arguments, says):
    result = inspect(story, *arguments)
    assert result.exit_code == 2
    assert says in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_prompt_whose_prefix_was_evicted_says_when_and_how_much_was_computed_again(tmp_path):
    build = TraceBuilder()
    build.arrive(0, 1, 2, num_tokens=9)
    build.step(
        *(allocate(0, 0, 0), allocate(1, 0, 1), fill(0, 0, 4), fill(1, 0, 4), hashed(0, 5), hashed(1, 6)),
        batch=[(0, Phase.PREFILL, 0, 8)],
    )
    build.step(release(1, 0), release(0, 0), finished=[(0, "stop", "")])
    build.step(evict(1, 6), allocate(1, 1, 0), evict(0, 5), allocate(0, 1, 1))
    for _ in range(4):
        build.step()
    admitted = Decision(DecisionKind.ADMITTED, 2, Reason.FITS, {"needs": 3, "free": 6, "cached_tokens": 0})
    build.step(
        *(allocate(3, 2, 0), allocate(4, 2, 1), allocate(5, 2, 2), fill(3, 2, 4), fill(4, 2, 4), fill(5, 2, 1)),
        *(hashed(3, 5), hashed(4, 6)),
        batch=[(2, Phase.PREFILL, 0, 9)],
        decisions=[admitted],
    )
    path = write(tmp_path / "regret.mcap", build.header, build.messages)
    told = (
        "8 tokens of its prefix were evicted, the last of them 5 steps before it was admitted: 2 blocks computed again"
    )
    assert told in inspect(path, "--request", "2").stdout
    assert "2 evicted blocks computed again, 8 prompt tokens" in inspect(path).stdout
    assert json.loads(inspect(path, "--json").stdout)["counts"]["regret_blocks"] == 2
    assert json.loads(inspect(path, "--request", "2", "--json").stdout)["regret_tokens"] == 8
    assert "regret" not in inspect(path, "--request", "1").stdout
