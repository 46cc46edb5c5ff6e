from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from refused import refused
from typer.testing import CliRunner

from engine.config import CacheConfig, EngineConfig
from engine.request import SamplingParams
from engine.simulated import simulated_engine
from engine.trace.recording import RecordingWriter
from kvtui.cli.main import app

if TYPE_CHECKING:
    from pathlib import Path

runner = CliRunner()


def record(path: Path, title: str = "A title", **header: Any) -> Path:
    engine = simulated_engine(EngineConfig(cache=CacheConfig(num_blocks=32)), title=title)
    writer = RecordingWriter(path, msgspec.structs.replace(engine.header, **header))
    engine.add_sink(writer)
    engine.add_request("the block", SamplingParams(max_tokens=20))
    while engine.has_work:
        engine.step()
    writer.close()
    return path


@pytest.fixture
def packaged(tmp_path, monkeypatch):
    monkeypatch.setattr("kvtui.packaged.packaged_folder", lambda name: tmp_path)
    return tmp_path


@pytest.fixture
def on_screen(monkeypatch):
    """A screen that is not there; what it was given."""
    shown: list[Any] = []

    def run_app(source: Any, **settings: Any) -> int:
        shown.append((source, settings))
        return 0

    monkeypatch.setattr("kvtui.terminal.terminal_problem", lambda: None)
    monkeypatch.setattr("kvtui.app.run_app", run_app)
    return shown


def test_a_file_is_played_from_where_it_is_told(tmp_path, on_screen):
    path = record(tmp_path / "x.mcap")
    result = runner.invoke(app, ["play", str(path), "--speed", "4", "--start", "7", "--paused", "--ascii"])
    ((source, settings),) = on_screen

    assert result.exit_code == 0, result.output
    assert (source.position, source.speed, source.paused) == (7, 4.0, True)
    assert settings["ascii"] is True


def test_without_a_name_the_packaged_ones_are_listed_and_the_first_is_played(packaged, on_screen):
    record(packaged / "b.mcap", "The second")
    record(packaged / "a.mcap", "The first")
    result = runner.invoke(app, ["play"])

    assert result.exit_code == 0, result.output
    assert result.stderr.index("The first") < result.stderr.index("The second")
    assert on_screen[0][0].header.title == "The first"


def test_a_packaged_one_is_played_by_name(packaged, on_screen):
    record(packaged / "a.mcap", "The first")
    record(packaged / "b.mcap", "The second")
    runner.invoke(app, ["play", "b"])

    assert on_screen[0][0].header.title == "The second"


def test_a_recording_that_was_cut_off_is_played_as_far_as_it_goes_and_says_so(tmp_path, on_screen):
    path = record(tmp_path / "x.mcap")
    path.write_bytes(path.read_bytes()[:-60])
    result = runner.invoke(app, ["play", str(path)])

    assert result.exit_code == 0, result.output
    assert "was cut off" in result.stderr
    assert on_screen[0][0].length == 20
    assert on_screen[0][0].cut_off


def test_what_is_no_recording_is_told(tmp_path, on_screen):
    for name, content in {"text.mcap": b"plain words\n" * 50, "empty.mcap": b"", "head.mcap": b"\x89MCAP0\r\n"}.items():
        (tmp_path / name).write_bytes(content)
        assert name in refused(runner.invoke(app, ["play", str(tmp_path / name)]))
    assert not on_screen


def test_one_that_is_cut_off_before_its_first_step_is_told(tmp_path, on_screen):
    path = record(tmp_path / "x.mcap")
    path.write_bytes(path.read_bytes()[:60])

    assert "x.mcap" in refused(runner.invoke(app, ["play", str(path)]))


def test_one_of_a_newer_schema_is_told(tmp_path, on_screen):
    path = record(tmp_path / "x.mcap", schema_version=99)

    assert "99" in refused(runner.invoke(app, ["play", str(path)]))


def test_a_name_that_is_not_there_is_told_with_those_that_are(packaged, on_screen):
    record(packaged / "prefix.mcap")

    assert "neither a file nor packaged (prefix)" in refused(runner.invoke(app, ["play", "nothing"]))
    assert "is a folder" in refused(runner.invoke(app, ["play", str(packaged)]))


def test_without_packaged_recordings_it_says_how_to_make_one(packaged):
    assert "kvtui run --record FILE" in refused(runner.invoke(app, ["play"]))


def test_a_start_behind_the_end_is_told(tmp_path, on_screen):
    path = record(tmp_path / "x.mcap")

    assert "steps 0 to 19" in refused(runner.invoke(app, ["play", str(path), "--start", "20"]))


def test_without_a_terminal_it_says_so(tmp_path):
    assert "terminal" in refused(runner.invoke(app, ["play", str(record(tmp_path / "x.mcap"))]))


def test_the_table_of_recordings_has_steps_duration_size_and_title(packaged):
    record(packaged / "prefix.mcap", "Shared \x1b[31mprefixes")
    result = runner.invoke(app, ["recordings"])
    header, row = result.stdout.splitlines()

    assert header.split() == ["name", "steps", "duration", "size", "title"]
    assert row.startswith("prefix     20")
    assert "KiB" in row
    assert "\x1b" not in row


def test_recordings_as_json(packaged):
    record(packaged / "prefix.mcap")
    (listed,) = json.loads(runner.invoke(app, ["recordings", "--json"]).stdout)

    assert (listed["name"], listed["title"], listed["steps"]) == ("prefix", "A title", 20)
    assert listed["size_bytes"] == (packaged / "prefix.mcap").stat().st_size


def test_one_that_was_cut_off_is_listed_as_such(tmp_path):
    path = record(tmp_path / "x.mcap")
    path.write_bytes(path.read_bytes()[:-60])
    assert "(cut off after 20 steps)" in runner.invoke(app, ["recordings", str(tmp_path)]).stdout
    (listed,) = json.loads(runner.invoke(app, ["recordings", str(tmp_path), "--json"]).stdout)
    assert listed["complete"] is False


def test_a_broken_recording_in_the_folder_is_named_and_the_others_are_listed(tmp_path):
    record(tmp_path / "good.mcap")
    (tmp_path / "bad.mcap").write_bytes(b"x" * 100)
    result = runner.invoke(app, ["recordings", str(tmp_path)])

    assert result.exit_code == 0
    assert "bad.mcap" in result.stderr
    assert "good" in result.stdout
    assert "is not a folder" in refused(runner.invoke(app, ["recordings", str(tmp_path / "good.mcap")]))
