"""`kvtui shot` draws what a recording holds, or says in one line why it cannot."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from engine.config import CacheConfig, EngineConfig
from engine.request import SamplingParams
from engine.simulated import simulated_engine
from engine.trace.recording import RecordingWriter
from kvtui.cli.main import app

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shot") / "small.mcap"
    engine = simulated_engine(EngineConfig(cache=CacheConfig(num_blocks=32)))
    writer = RecordingWriter(path, engine.header)
    engine.add_sink(writer)
    engine.add_request("a picture of one request", SamplingParams(max_tokens=12, ignore_eos=True), name="painted")
    while engine.has_work:
        engine.step()
    writer.close()
    return path


def test_the_picture_shows_the_step_asked_for(recording: Path, tmp_path: Path) -> None:
    out = tmp_path / "picture.svg"
    result = CliRunner().invoke(app, ["shot", str(recording), "--step", "3", "--size", "120x36", "-o", str(out)])

    assert result.exit_code == 0, result.output
    svg = out.read_text(encoding="utf-8")
    assert svg.startswith("<svg")
    for shown in ("Physical&#160;blocks", "painted", "of&#160;32"):
        assert shown in svg


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--step", "99999"], "behind the end"),
        (["--size", "big"], "--size big"),
        (["-o", "no/such/x.svg"], "no folder"),
    ],
)
def test_what_cannot_be_drawn_is_said_in_one_line(
    recording: Path, tmp_path: Path, arguments: list[str], said: str
) -> None:
    given = ["shot", str(recording), "-o", str(tmp_path / "x.svg"), *arguments]
    result = CliRunner().invoke(app, given)

    assert result.exit_code == 2
    assert said in result.output
    assert "Traceback" not in result.output
