from __future__ import annotations

import json
import sys

import pytest
from typer.testing import CliRunner

from kvtui import settings as settings_module
from kvtui.cli import race
from kvtui.cli.main import app
from kvtui.race.app import RaceApp

WORKLOAD = """
[defaults]
max_tokens = 12
[[requests]]
name = "one"
prompt = "the block of the page"
[[requests]]
name = "two"
prompt = "the block of the table"
"""


@pytest.fixture
def workload(tmp_path):
    path = tmp_path / "two.toml"
    path.write_text(WORKLOAD)
    return str(path)


def run(*arguments):
    return CliRunner().invoke(app, ["race", *arguments])


def test_without_a_terminal_the_result_is_printed(workload):
    result = run("--workload", workload, "--ascii")
    assert result.exit_code == 0, result.output
    assert "two: 2 requests, 256 blocks of 16" in result.stdout
    for policy in ("static", "contiguous", "paged"):
        assert f"\n{policy}" in result.stdout
    assert result.stdout.isascii()


def test_on_screen_the_settings_are_read_once_and_the_result_is_printed_behind_it(workload, monkeypatch, capsys):
    shown, read = [], []
    load = settings_module.load_settings
    monkeypatch.setattr(settings_module, "load_settings", lambda: (read.append(1), load())[1])
    monkeypatch.setattr(race, "_can_draw", lambda: True)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(RaceApp, "run", lambda app: shown.append((app.glyphs.ascii, app.speed, len(app.players))))
    race.race_command(workload=workload, num_blocks=64, seed=0, speed=2.0, ascii_only=True)
    assert shown == [(True, 2.0, 3)]
    assert read == [1]
    assert "two: 2 requests, 64 blocks of 16" in capsys.readouterr().out


def test_json_says_all_of_it_and_the_memory_can_be_chosen(workload):
    result = run("--workload", workload, "--json", "--num-blocks", "20", "--block-size", "4", "--max-num-seqs", "3")
    told = json.loads(result.stdout)
    assert told["memory"] == {"block_size": 4, "num_blocks": 20}
    assert told["limits"]["max_num_seqs"] == 3
    assert [lane["requests"] for lane in told["lanes"]] == [2, 2, 2]


def test_a_packaged_recording_is_raced_with_its_own_memory_and_costs():
    told = json.loads(run("shared-prefix", "--json").stdout)
    assert told["memory"]["num_blocks"] == 160
    assert "recorded steps" in told["step_cost"]["source"]
    assert told["speed_up"]["paged"] > 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("shared-prefix", "--workload", "burst"), "exclude each other"),
        (("shared-prefix", "--num", "3"), "--num goes with --workload"),
        (("nothing-of-the-kind",), "no recording"),
        (("--workload", "none"), "nothing to race"),
        (("--num-blocks", "0"), "at least 1 block"),
        (("shared-prefix", "--num-blocks", "0"), "at least 1 block"),
        (("--num-blocks", "2000000"), "too large to race in"),
    ],
)
def test_what_cannot_be_raced_is_said_in_one_line(arguments, said):
    result = run(*arguments)
    assert result.exit_code == 2
    assert said in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
