import json
import pickle
from functools import partial

import pytest
import torch
from made_up_parts import dies, hangs, is_killed, judges, measures, prints, raises

pytest.importorskip("triton")

from engine.bench import gpu
from engine.bench.gpu_parts import Part, run_parts
from engine.bench.gpu_report import Check, LeftOut, Report


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
    report = Report(60, clock=iter(range(1000)).__next__)
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
    report = Report(10, clock=lambda: now)
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


def test_several_rows_of_one_kind_end_with_the_time_too():
    now = 0.0

    def slow():
        nonlocal now
        for row in range(4):
            now += 6
            yield {"us": row}

    report = Report(10, clock=lambda: now)
    report.section("Other cuts", [slow])
    assert report.tables == {"Other cuts": [{"us": 0}, {"us": 1}]}
    assert report.skipped == ["Other cuts: row 1, no time left for what may follow in it"]


def test_a_number_that_is_none_is_null_in_json(report):
    report.check([Check("broken", float("nan"), 0.0, "it broke")])
    report.section("Other cuts", [lambda: {"us": float("inf")}])
    data = json.loads(report.as_json(), parse_constant=lambda name: pytest.fail(name))
    assert data["checks"][-1]["error"] is None
    assert data["tables"]["Other cuts"] == [{"us": None}]


def test_a_part_that_dies_hangs_or_fails_costs_no_other_its_figures():
    report = Report(1000)
    parts = [
        Part("dead", dies, 60),
        Part("killed", is_killed, 60, judges=True),
        Part("hung", hangs, 60),
        Part("broken", raises, 60, judges=True),
        Part("checks", judges, 60, judges=True),
        Part("prefills", partial(measures, title="Prefill"), 60),
    ]

    def clock():
        """Stands still until the part that hangs has told something, and then is past its time."""
        return 1000 if {"us": 8} in report.tables.get("Decode", []) else 0

    for finding in run_parts(parts, jobs=1, left=lambda: 600, grace=40, clock=clock):
        report.take(finding)
    assert report.tables == {"Decode": [{"us": 7}, {"us": 8}], "Prefill": [{"us": 0}, {"us": 1}]}
    assert report.skipped == ["dead: its process ended with status 3", "hung: stopped after 100 s"]
    assert [(check.name, check.passed, check.note) for check in report.checks] == [
        ("killed", False, "its process ended by SIGKILL"),
        ("broken", False, "RuntimeError: CUDA error: an illegal memory access was encountered"),
        ("good", True, ""),
        ("bad", False, ""),
    ]


def test_what_there_is_no_time_for_is_said_and_a_check_among_it_has_failed():
    parts = [Part("times", partial(measures, title="Decode"), 60), Part("tokens", judges, 60, judges=True)]
    times, tokens = run_parts(parts, jobs=2, left=lambda: 0)
    assert times == LeftOut("times: no time left")
    assert isinstance(tokens, Check)
    assert not tokens.passed


class Card:
    """Stands for a device as the command asks about it."""

    name, total_memory, multi_processor_count = "Some Card 80GB", 80 << 30, 132


@pytest.fixture
def card(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Card)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))


def planned(monkeypatch, *parts):
    monkeypatch.setattr(gpu, "plan", lambda device, **_: [list(parts[:1]), list(parts[1:])])


def test_the_command_keeps_a_report_from_the_first_figure_on(monkeypatch, capsys, tmp_path, card):
    seen = []

    def look(report, *arguments, run=gpu.run):
        tell = report._tell

        def telling(finding):
            tell(finding)
            seen.append(json.loads((tmp_path / "some-card-80gb.json").read_text(encoding="utf-8")))

        report._tell = telling
        run(report, *arguments)

    monkeypatch.setattr(gpu, "run", look)
    planned(monkeypatch, Part("checks", judges, 60, judges=True), Part("dead", dies, 60), Part("prefills", prints, 60))
    assert gpu.main(["--output", str(tmp_path)]) == 1
    assert [len(one["checks"]) for one in seen] == [1, 2, 2, 2, 2, 2]
    assert [len(one["tables"]) for one in seen] == [0, 0, 1, 1, 2, 2]
    assert not any(one["finished"] for one in seen)
    end = json.loads((tmp_path / "some-card-80gb.json").read_text(encoding="utf-8"))
    assert end["finished"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["some-card-80gb.json", "some-card-80gb.md"]
    printed = capsys.readouterr().out.splitlines()
    assert printed[:2] == ["ok   good: error 0.0e+00, limit 0.0e+00", "FAIL bad: error 1.0e+00, limit 0.0e+00"]
    assert printed[-1].startswith("1 of 2 checks passed in ")


def test_the_command_prints_one_json_object_and_nothing_that_a_library_says(monkeypatch, capfd, tmp_path, card):
    planned(monkeypatch, Part("prefills", prints, 60))
    assert gpu.main(["--output", str(tmp_path), "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["tables"] == {"Prefill": [{"us": 0}, {"us": 1}]}


def test_an_older_card_and_a_folder_that_cannot_be_written_are_said_before_anything_is_measured(
    monkeypatch, capsys, tmp_path, card
):
    (tmp_path / "file").write_text("")
    assert gpu.main(["--output", str(tmp_path / "file")]) == 2
    assert "cannot be written to" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert gpu.main(["--output", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("no GPU here that the kernels run on: cuda:0 has compute capability 7.5")


def test_every_part_of_the_plan_can_be_handed_to_another_process():
    stages = gpu.plan(torch.device("cuda", 0), model=True, tune=True)
    names = [part.name for stage in stages for part in pickle.loads(pickle.dumps(stage))]
    assert names[-6:] == [
        "batches",
        "tokens of whole models",
        "speed of SmolLM2-135M",
        "times of the kernels",
        "speed of Llama-3.1-8B",
        "other cuts",
    ]
