"""How every benchmark says what it measured: one line a figure, ratios first, and what the machine was doing."""

from __future__ import annotations

import json
import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True, slots=True)
class Figure:
    """Something measured.

    Attributes:
        name: What, in a few words; unique within a benchmark.
        value: In `unit`; of several measurements the median.
        unit: `x` for a ratio of two sides measured in turn.
        note: How it came about, where the name does not say.
    """

    name: str
    value: float
    unit: str
    note: str = ""


def machine() -> dict[str, Any]:
    """The processor and how busy it is.

    `python_loop_ns` is the CPU time of an empty turn of a Python loop, about 15 on an idle machine of today: compare it
    before comparing figures of two runs.
    """
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "python_loop_ns": round(statistics.median(_loop_ns() for _ in range(5)), 1),
    }


def _loop_ns() -> float:
    began = time.thread_time_ns()
    for _ in range(200_000):
        pass
    return (time.thread_time_ns() - began) / 200_000


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def show(name: str, figures: Iterable[Figure], *, as_json: bool, about: str = "") -> None:
    """Print a benchmark's figures, ratios first.

    Args:
        name: Of the benchmark.
        figures: What it measured.
        as_json: One JSON object instead of lines.
        about: What was run, for the first line.
    """
    ordered = sorted(figures, key=lambda figure: figure.unit != "x")
    where = machine()
    if as_json:
        rows = {f.name: {"value": f.value, "unit": f.unit} | ({"note": f.note} if f.note else {}) for f in ordered}
        print(json.dumps({"bench": name, "about": about, "machine": where, "figures": rows}, indent=2))
        return
    busy = f"load {where['load']}, Python loop {where['python_loop_ns']} ns"
    print(f"{name}: {about + '; ' if about else ''}{where['cores']} cores of {where['cpu']}, {busy}")
    for figure in ordered:
        note = f"   ({figure.note})" if figure.note else ""
        print(f"{_number(figure.value):>12} {figure.unit:<9} {figure.name}{note}")


def _number(value: float) -> str:
    if value == int(value) and abs(value) >= 1000:
        return f"{int(value):,}"
    return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
