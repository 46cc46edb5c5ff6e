import json

import pytest
import torch

pytest.importorskip("triton")

from engine.bench import gpu
from engine.bench.gpu_checks import Check


def test_without_a_gpu_it_ends_with_one_line_that_says_so(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main(["--output", str(tmp_path)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("no GPU here")
    assert printed.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def report():
    report = gpu.Report(60, echo=lambda _: None, clock=iter(range(1000)).__next__)
    report.machine = {"card": "Some Card 80GB", "processors": 132}
    report.check([Check("llama", 0.0012, 0.01), Check("float32", 0.5, 1e-5), Check("graph", 0.0, 0.0, "no | graph")])
    return report


def test_a_check_passes_only_by_a_number_within_its_limit(report):
    assert [check.name for check in report.failed] == ["float32", "graph"]
    assert not Check("nan", float("nan"), 1.0).passed


def test_the_report_tells_both_readers_the_same(report):
    report.section("Decode", [lambda: {"requests": 8, "us": 12.345}, lambda: iter([{"requests": 32, "us": 1234.5}])])
    markdown = report.as_markdown()
    assert "# GPU kernels on Some Card 80GB" in markdown
    assert "## Checks: 1 of 3 passed" in markdown
    assert "| llama | passed | 1.2e-03 | 1.0e-02 |" in markdown
    assert "| graph | **failed** | no \\| graph | 0.0e+00 |" in markdown
    assert "| 8 | 12.3 |" in markdown
    assert "| 32 | 1,234 |" in markdown
    data = json.loads(report.as_json())
    assert data["tables"]["Decode"][1] == {"requests": 32, "us": 1234.5}
    assert [check["passed"] for check in data["checks"]] == [True, False, False]


def test_a_figure_that_cannot_be_had_leaves_the_others(report):
    def broken():
        raise RuntimeError("out of memory\nand much more")

    report.section("Prefill", [lambda: {"us": 1.0}, broken, lambda: {"us": 2.0}])
    assert report.tables["Prefill"] == [{"us": 1.0}, {"us": 2.0}]
    assert report.skipped == ["Prefill: row 2, RuntimeError: out of memory"]
    assert "- Prefill: row 2, RuntimeError: out of memory" in report.as_markdown()


def test_nothing_is_begun_after_the_time_is_spent():
    now = 0.0
    report = gpu.Report(10, echo=lambda _: None, clock=lambda: now)
    made = []

    def slow():
        nonlocal now
        now += 6
        made.append(now)
        return {"us": now}

    report.section("Decode", [slow] * 4)
    report.section("Prefill", [slow])
    assert made == [6, 12]
    assert report.skipped == ["Decode: from row 3 on, no time left", "Prefill: from row 1 on, no time left"]
