from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from refused import refused
from typer.testing import CliRunner

from engine.config import CacheConfig, EngineConfig
from engine.loop import EngineLoop
from engine.serving.listener import Listener, bind
from engine.simulated import simulated_engine
from kvtui.cli.main import app

if TYPE_CHECKING:
    from collections.abc import Iterator

runner = CliRunner()


@pytest.fixture
def url() -> Iterator[str]:
    engine = simulated_engine(EngineConfig(cache=CacheConfig(num_blocks=256)))
    loop, listener = EngineLoop(engine), Listener(engine, bind("127.0.0.1", 0))
    loop.start()
    listener.start()
    yield listener.url
    listener.stop()
    loop.stop()


def test_a_workload_is_sent_and_reported(url):
    result = runner.invoke(app, ["inject", "--url", url, "--workload", "burst", "--num", "4", "--max-tokens", "9"])

    assert result.exit_code == 0, result.output
    assert "burst: 4 of 4 requests answered" in result.stdout
    assert "36 " in result.stdout
    for name in ("time to first token", "time per output token", "end to end", "p50", "p90", "p99"):
        assert name in result.stdout
    assert result.stderr == ""


def test_the_report_as_json(url):
    result = runner.invoke(
        app, ["inject", "--url", url, "--workload", "burst", "--rate", "1000", "--max-tokens", "5", "--json"]
    )
    report = json.loads(result.stdout)

    assert report["workload"] == "burst"
    assert report["completed"] == 40
    assert report["output_tokens"] == 200
    assert set(report["e2e_ms"]) == {"mean", "p50", "p90", "p99"}


def test_a_prompt_of_ones_own_is_answered_on_stdout(url):
    asked = ["inject", "--url", url, "--prompt", "which block?", "--max-tokens", "20", "--temperature", "0"]
    first, second = runner.invoke(app, asked), runner.invoke(app, asked)

    assert first.exit_code == 0
    assert len(first.stdout.split()) > 5
    assert first.stdout == second.stdout
    assert "tok/s" in first.stderr


def test_a_traced_workload_is_scaled(url, tmp_path):
    path = tmp_path / "trace.jsonl"
    record = {"timestamp": 0, "input_length": 4000, "output_length": 100, "hash_ids": list(range(8))}
    path.write_text("\n".join([json.dumps(record)] * 2))
    whole = runner.invoke(app, ["inject", "--url", url, "--workload", str(path), "--json"])
    small = runner.invoke(app, ["inject", "--url", url, "--workload", str(path), "--length-scale", "0.05", "--json"])

    assert "2 of 2 requests of trace were cut to the 2,048 tokens" in whole.stderr
    assert json.loads(small.stdout)["prompt_tokens"] == 400
    assert json.loads(small.stdout)["output_tokens"] == 10
    assert json.loads(small.stdout)["completed"] == 2


def test_failures_are_counted_told_and_exit_with_1(url, tmp_path):
    path = tmp_path / "w.json"
    path.write_text(json.dumps([{"prompt": "the block " * 9000}, {"prompt": "the block", "max_tokens": 3}]))
    result = runner.invoke(app, ["inject", "--url", url, "--workload", str(path)])

    assert result.exit_code == 1
    assert "1 of 2 requests answered" in result.stdout
    assert "1 failed: " in result.stderr
    assert "2048" in result.stderr.replace(",", "")


def test_where_nothing_was_answered_there_is_no_report_of_zeros(url, tmp_path):
    path = tmp_path / "w.json"
    path.write_text(json.dumps([{"prompt": "the block " * 9000}]))
    result = runner.invoke(app, ["inject", "--url", url, "--workload", str(path)])

    assert result.exit_code == 1
    assert "1 failed: " in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "give one of --workload NAME|FILE and --prompt TEXT"),
        (["--workload", "chat", "--prompt", "hi"], "give one of"),
        (["--workload", "chatt"], "no workload 'chatt'"),
        (["--workload", "chat", "--arrival", "poisson"], "--arrival poisson needs a --rate"),
        (["--workload", "chat", "--rate", "-1"], "a rate of -1.0 is not possible"),
        (["--prompt", "  "], "--prompt is empty"),
        (["--workload", "chat", "--url", "http://127.0.0.1:9"], "start a session in another terminal with `kvtui run`"),
        (["--workload", "chat", "--url", "htp:/x"], "cannot be used"),
    ],
)
def test_a_wrong_use_is_one_line(arguments, said):
    result = runner.invoke(app, ["inject", *arguments])

    assert said in refused(result)
