"""`kvtui inspect` as its user meets it."""

import json
import os
import re
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from damaged_recording import SEGMENT, damaged_recording
from typer.testing import CliRunner

from kvtui.cli.main import app
from kvtui.packaged import packaged_folder

sys.path.append(str(Path(__file__).parent.parent / "trace"))
from trace_builder import (
    TraceBuilder,
    make_header,
    release,
    simulated_trace,
)

from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.engine import PagedEngine
from engine.request import SamplingParams
from engine.simulated import SimulatedCodec, SimulatedRunner
from engine.trace.reader import Recording
from engine.trace.recording import RecordingWriter


def write(path, header, messages):
    with RecordingWriter(path, header) as writer:
        for message in messages:
            writer(message)
    return str(path)


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    return write(tmp_path_factory.mktemp("inspect") / "sound.mcap", *simulated_trace(seed=9, num_requests=15))


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    build = TraceBuilder(make_header(title="evil \x1b[31m[bold]title[/bold]\n"))
    build.arrive(0)
    build.prefill(0, [3], 4)
    build.step(release(3, 0), release(3, 0), finished=[(0, "error", "\x1b]0;owned\x07 [red]")])
    build.step()
    return write(tmp_path_factory.mktemp("inspect") / "broken.mcap", build.header, build.messages)


def inspect(*arguments):
    return CliRunner().invoke(app, ["inspect", *arguments])


def test_a_sound_recording_is_reported_with_its_counts_and_verdict(sound):
    result = inspect(sound)
    assert result.exit_code == 0
    rows = {line[:12].strip(): line[13:] for line in result.stdout.splitlines()}
    assert rows["title"] == "simulated"
    assert rows["made by"] == "simulator, simulated, schema 1"
    assert rows["pool"].startswith("24 blocks of 4 tokens")
    assert rows["requests"].startswith("15: ")
    assert rows["invariants"] == "all hold after every step"
    assert " steps: " in rows["held up by"]
    assert "allocate" in rows["operations"]


def test_the_json_report_has_the_same_counts(sound):
    result = inspect(sound, "--json")
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    assert report["counts"]["requests"] == 15
    assert report["counts"]["ops"]["allocate"] > 0
    assert report["header"]["block_size"] == 4
    assert report["complete"] is True
    assert report["bottleneck"]["steps"] == report["counts"]["steps"]
    assert sum(report["bottleneck"]["steps_by_limit"].values()) == report["counts"]["steps"]
    assert report["invariants"] == {"hold": True, "check_interval": 1, "broken": 0, "violations": []}


def test_a_broken_invariant_is_named_with_block_and_step_and_exits_1(broken):
    result = inspect(broken)
    assert result.exit_code == 1
    assert "BROKEN, 1 times; the first:" in result.stdout
    assert "free_queue: block 3, step 1: request 0 released it, but it is free already" in result.stdout
    report = json.loads(inspect(broken, "--json").stdout)
    assert report["invariants"]["violations"][0]["name"] == "free_queue"
    assert report["invariants"]["hold"] is False


@pytest.mark.parametrize("arguments", [[], ["--step", "0"], ["--step", "2"]])
def test_nothing_in_a_recording_reaches_the_terminal_as_a_command(broken, arguments):
    output = inspect(broken, *arguments).output
    assert all(character.isprintable() or character == "\n" for character in output)


@pytest.mark.parametrize("arguments", [[], ["--step", "2"], ["--json"]])
def test_a_terminal_that_has_only_ascii_gets_only_ascii(broken, arguments):
    command = [sys.executable, "-m", "kvtui.cli.main", "inspect", broken, *arguments]
    done = subprocess.run(command, capture_output=True, env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert done.returncode == (0 if "--step" in arguments else 1), done.stderr
    assert done.stdout.isascii()


def test_markup_in_a_recording_is_text(broken):
    assert "[bold]title[/bold]" in inspect(broken).stdout
    assert "[red]" in inspect(broken, "--step", "2").stdout


def test_the_state_at_a_step_shows_requests_blocks_and_decisions(sound):
    result = inspect(sound, "--step", "10")
    assert result.exit_code == 0
    assert result.stdout.startswith("step 10 at ")
    state = json.loads(inspect(sound, "--step", "10", "--json").stdout)
    blocks = state["blocks"]
    assert f"{blocks['used']} used + {blocks['cached']} cached + {blocks['free']} free = 24 blocks" in result.stdout
    for request in state["requests"]:
        if request["status"] == "running" and len(request["table"]) <= 12:
            assert " ".join(map(str, request["table"])) in result.stdout
        if request["waiting_for"]:
            assert request["waiting_for"] in result.stdout
    grid = result.stdout.splitlines()[-1].split(maxsplit=1)[1].replace(" ", "")
    assert len(grid) == 24
    for refs, cell in zip(blocks["refs"], grid, strict=True):
        assert (cell == str(refs)) == (refs > 1)


def test_the_state_at_a_step_says_which_blocks_are_taken_next_and_whose_content_is_lost(sound):
    blocks = json.loads(inspect(sound, "--step", "-1", "--json").stdout)
    queue, keys, owners = blocks["free_queue"], blocks["blocks"]["key"], blocks["blocks"]["last_owner"]
    assert len(queue) == blocks["blocks"]["cached"] + blocks["blocks"]["free"] > 8
    line = next(line for line in inspect(sound, "--step", "-1").stdout.splitlines() if line.startswith("taken next: "))
    told = line.removeprefix("taken next: ").partition(" …")[0].split(", ")
    assert [int(words.split()[0]) for words in told] == queue[:8]
    for words, block in zip(told, queue, strict=False):
        assert (f"(#{owners[block]}'s place" in words) == (keys[block] != 0)


def test_the_grid_of_a_large_pool_has_a_cell_for_several_blocks(tmp_path):
    build = TraceBuilder(make_header(num_blocks=10_000))
    build.arrive(0)
    build.prefill(0, [9_999], 4)
    path = write(tmp_path / "large.mcap", build.header, build.messages)
    lines = inspect(path, "--step", "0").stdout.splitlines()
    legend = next(line for line in lines if line.startswith("a cell is 5 blocks"))
    assert "share in use" in legend
    assert len(lines) < 60
    assert lines[-1].split()[0] == "9920"


def test_a_negative_step_counts_from_the_end(sound):
    last = json.loads(inspect(sound, "--json").stdout)["counts"]["steps"] - 1
    assert inspect(sound, "--step", "-1").stdout == inspect(sound, "--step", str(last)).stdout


@pytest.mark.parametrize(
    ("make", "arguments", "says"),
    [
        (lambda path: None, [], "no recording"),
        (lambda path: path.write_bytes(b""), [], "is empty"),
        (lambda path: path.write_text("hello " * 9), [], "is not a recording"),
        (lambda path: write(path, make_header(), []), ["--step", "0"], "has no steps yet"),
        (lambda path: write(path, *simulated_trace(num_requests=1)), ["--step", "99999"], "it has steps 0 to"),
    ],
)
def test_wrong_use_gets_one_line_on_stderr_and_exit_code_2(tmp_path, make, arguments, says):
    path = tmp_path / "bad.mcap"
    make(path)
    result = inspect(str(path), *arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert says in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_recording_of_a_killed_process_is_reported_as_such(sound, tmp_path):
    path = tmp_path / "cut.mcap"
    path.write_bytes(Path(sound).read_bytes()[:-200])
    result = inspect(str(path))
    assert result.exit_code == 0
    assert "not closed properly" in result.stdout


def test_the_help_has_an_example():
    result = inspect("--help")
    assert result.exit_code == 0
    assert "kvtui inspect demo.mcap --request 7" in result.stdout


def test_places_behind_a_sliding_window_are_counted_in_front_of_the_table(tmp_path):
    config = EngineConfig(
        cache=CacheConfig(block_size=4, num_blocks=12), scheduler=SchedulerConfig(max_prefill_chunk=8)
    )
    engine = PagedEngine(config, SimulatedRunner(config, sliding_window=10), SimulatedCodec())
    path = tmp_path / "slid.mcap"
    with closing(RecordingWriter(path, engine.header)) as writer:
        engine.add_sink(writer)
        engine.add_request(list(range(1, 81)), SamplingParams(max_tokens=20, ignore_eos=True))
        while engine.has_work:
            engine.step()
    result = inspect(str(path), "--step", "18")
    assert re.search(r" 89/90 +3  -[×x]20 \d+ \d+ \d+$", result.output, re.MULTILINE), result.output
    assert "all hold" in inspect(str(path)).output


def test_of_a_damaged_recording_the_readable_part_is_reported_and_what_is_lost(tmp_path):
    num_steps = damaged_recording(tmp_path / "a.mcap", 0, 3)
    result = inspect(str(tmp_path / "a.mcap"))
    assert result.exit_code == 1
    assert re.search(rf"^steps +{num_steps - 18} of {num_steps} can be read, up to", result.output, re.MULTILINE)
    assert re.search(rf"^invariants +all hold in the {num_steps - 18} steps whose state", result.output, re.MULTILINE)
    assert re.search(r"^damage +.* is damaged: steps 0 to 8 cannot be read", result.output, re.MULTILINE)
    assert "in all, the steps 0 to 8, 27 to 35\n" in result.output
    assert re.search(r"^operations +\d+ fill", result.output, re.MULTILINE)
    told = json.loads(inspect(str(tmp_path / "a.mcap"), "--json").output)
    assert told["unreadable_steps"] == [[0, 8], [27, 35]]
    assert told["counts"]["steps"] == num_steps - 18


def test_of_a_recording_without_an_index_it_is_told_how_much_lies_behind_its_last_step(tmp_path):
    path = tmp_path / "a.mcap"
    num_steps = damaged_recording(path, 2)
    path.write_bytes(path.read_bytes()[:-100])
    result = inspect(str(path))
    assert re.search(
        r"^steps +18 in .* not closed properly; [\d.]+ KiB behind them cannot", result.output, re.MULTILINE
    )
    assert json.loads(inspect(str(path), "--json").output)["unread_bytes"] > 1000
    assert damaged_recording(path) == num_steps
    assert json.loads(inspect(str(path), "--json").output)["unread_bytes"] == 0


def test_where_no_step_can_be_read_no_count_is_claimed(tmp_path):
    num_steps = damaged_recording(tmp_path / "a.mcap", keyframes=10_000)
    damaged_recording(tmp_path / "a.mcap", *range(-(-num_steps // SEGMENT)), keyframes=10_000)
    result = inspect(str(tmp_path / "a.mcap"))
    assert result.exit_code == 1
    assert re.search(rf"^steps +none of {num_steps} can be read$", result.output, re.MULTILINE)
    assert re.search(r"^invariants +not checked", result.output, re.MULTILINE)
    assert "requests  " not in result.output
    assert "pool  " in result.output


def test_events_are_told_with_the_steps_that_the_marks_on_screen_count():
    result = inspect("under-pressure")
    told = json.loads(inspect("under-pressure", "--json").output)["counts"]
    steps = told["marked_steps"]["preempted"]
    assert 0 < steps < told["preemptions"]
    assert re.search(rf"^preemptions +{told['preemptions']}, in {steps} steps$", result.output, re.MULTILINE)
    with Recording.open(packaged_folder("recordings") / "under-pressure.mcap") as recording:
        while recording.marks.known < 1:
            recording.marks.look(1.0)
        assert list(told["marked_steps"].values()) == list(recording.marks.counts)
