"""Benchmarks run in small, and say what they measured in one form."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from engine.bench import attention, pool
from engine.bench import engine as engine_bench
from engine.bench.report import Figure, show
from kvtui.bench import attached
from kvtui.cli.bench import MODULES
from kvtui.cli.main import app

SMALL = {
    "pool": ["--blocks", "500", "--rounds", "1", "--pools", "200", "2000", "--running", "1", "64"],
    "engine": ["--model", "simulated", "--rounds", "1", "--num", "6", "--policy-blocks", "40"],
    "trace": ["--steps", "60", "--long-steps", "0"],
    "seek": ["--rounds", "2", "--steps", "80"],
    "screen": ["--rounds", "1", "--frames", "20"],
}


def test_ratios_come_first_and_every_figure_has_a_line(capsys):
    figures = [
        Figure("a block", 12.345, "ns"),
        Figure("ours over theirs", 1.5, "x", "in turn"),
        Figure("all", 4000, ""),
    ]
    show("thing", figures, as_json=False, about="small")
    head, *rest = capsys.readouterr().out.splitlines()
    assert head.startswith("thing: small; ")
    assert [line.split() for line in rest] == [
        ["1.5", "x", "ours", "over", "theirs", "(in", "turn)"],
        ["12.35", "ns", "a", "block"],
        ["4,000", "all"],
    ]
    show("thing", figures, as_json=True)
    told = json.loads(capsys.readouterr().out)
    assert told["figures"]["ours over theirs"] == {"value": 1.5, "unit": "x", "note": "in turn"}
    assert told["machine"]["cores"] == os.cpu_count()


@pytest.mark.parametrize("name", SMALL)
def test_a_small_run_reports_finite_figures_as_json(name, capfd):
    __import__(MODULES[name], fromlist=["main"]).main([*SMALL[name], "--json"])
    told = json.loads(capfd.readouterr().out)
    assert told["bench"] == name
    assert told["figures"]
    assert all(row["value"] >= 0 for row in told["figures"].values())


def test_the_pools_figures_cover_what_fits_into_each_pool():
    names = [figure.name for figure in pool.step_figures([200, 2000], [1, 64])]
    assert names == [
        "a step, 1 running, 200 blocks",
        "a step, 1 running, 2,000 blocks",
        "a step, 64 running, 2,000 blocks",
    ]


def test_the_policies_run_the_same_work_and_paging_runs_more_of_it_at_once(capfd):
    engine_bench.main([*SMALL["engine"], "--json"])
    figures = json.loads(capfd.readouterr().out)["figures"]
    assert figures["average batch, paged over contiguous"]["value"] > 1
    assert figures["average batch, paged over static"]["value"] > 1
    assert figures["steps, paged"]["value"] < figures["steps, static"]["value"]


def test_a_side_that_cannot_start_is_left_out_with_a_line(tmp_path, capfd):
    workload = tmp_path / "work.json"
    workload.write_text(json.dumps([{"ids": [97] * 5, "out": 4}]))
    arguments = [str(workload), "--model", "simulated", "--vocabulary", "256"]
    sides = {"ours-paged": (sys.executable, arguments), "nobody": (sys.executable, arguments)}
    with Path(os.devnull).open("wb") as log:
        ran = engine_bench.run_sides(sides, 1, log)
    assert [(side.name, side.median("tokens")) for side in ran] == [("ours-paged", 4)]
    assert "left out: nobody ended" in capfd.readouterr().err


def test_a_benchmark_is_a_command_with_options_of_its_own():
    result = CliRunner().invoke(app, ["bench", "pool", "--json", "--", *SMALL["pool"]])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["bench"] == "pool"
    assert CliRunner().invoke(app, ["bench", "nothing"]).exit_code == 2


@pytest.mark.parametrize("name", MODULES)
def test_every_benchmark_answers_to_help_without_measuring(name):
    done = subprocess.run([sys.executable, "-m", MODULES[name], "--help"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0
    assert "--json" in done.stdout


def test_the_forms_of_a_cache_are_measured_against_the_models_own_type():
    shape = attention.Shape(dtype=torch.float32)
    forms = attention.forms(shape, seqs=2, context=20, layers=1, count=1)
    assert {name: row["bytes_by_own"] for name, row in forms.items()} == {
        "bfloat16": 1 / 2,
        "int8": (64 + 4) / 256,
        "float8": (64 + 4) / 256,
    }
    assert all(row["by_own"] > 0 and row["us_per_layer"] > 0 for row in forms.values())


def test_a_dashboard_in_a_terminal_of_its_own_is_measured_with_the_frames_that_it_drew(capfd):
    assert attached.main(["--model", "simulated", "--size", "120x40", "--windows", "2", "--json"]) == 0
    told = json.loads(capfd.readouterr().out)
    assert told["size"] == "120x40"
    assert told["ratio"] > 0
    assert told["frames_per_s"] > 0
    assert told["bytes_drawn_per_s"] > 0
