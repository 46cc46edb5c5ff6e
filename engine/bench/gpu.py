"""Check and measure the GPU kernels on the machine at hand: `python -m engine.bench.gpu`.

In under five minutes: every kernel configuration against the float32 reference, a captured decode replayed for other
batches, the time of decodes and prefills beside torch's own attention, what paging costs, what a quantised cache
saves, and the engine's tokens and tokens per second with models of known shapes, with and without asynchronous
scheduling. Writes a JSON and a markdown report, named
after the card. Exits with 0 if every check passed, 1 if one did not, 2 if there is no GPU.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import re
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import torch

    from engine.bench.gpu_checks import Check
    from engine.bench.gpu_timing import Row


class Report:
    """What has been found so far, within a time that is not to be exceeded.

    Args:
        seconds: After this a section is not begun, and a running one ends with the row it is at.
        echo: Told every line as it comes.
        clock: Seconds from anywhere.
    """

    def __init__(
        self, seconds: float, echo: Callable[[str], None] = print, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.machine: dict[str, Any] = {}
        self.checks: list[Check] = []
        self.tables: dict[str, list[Row]] = {}
        self.skipped: list[str] = []
        self._echo = echo
        self._clock = clock
        self._began = clock()
        self._limit = seconds

    @property
    def elapsed(self) -> float:
        """Seconds since it began."""
        return self._clock() - self._began

    @property
    def late(self) -> bool:
        """Whether the time is spent."""
        return self.elapsed >= self._limit

    def check(self, checks: Iterable[Check]) -> None:
        """Take in checks, one line each."""
        for check in checks:
            self.checks.append(check)
            text = check.note or f"error {check.error:.1e}, limit {check.limit:.1e}"
            self._echo(f"{'ok  ' if check.passed else 'FAIL'} {check.name}: {text}")

    def section(self, title: str, rows: Iterable[Callable[[], Row | Iterable[Row]]]) -> None:
        """Fill a table row by row; a row that fails is named, and the rest goes on."""
        table = self.tables.setdefault(title, [])
        for i, make in enumerate(rows):
            if self.late:
                self.skipped.append(f"{title}: from row {i + 1} on, no time left")
                return
            try:
                made = make()
                for row in [made] if isinstance(made, dict) else made:
                    table.append(row)
                    self._echo(f"{title}: " + ", ".join(f"{name} {_text(value)}" for name, value in row.items()))
            except Exception as error:  # one figure that cannot be had is no reason to lose the others
                self.skipped.append(f"{title}: row {i + 1}, {type(error).__name__}: {error}".splitlines()[0][:300])
                self._echo(self.skipped[-1])

    @property
    def failed(self) -> list[Check]:
        """The checks that did not pass."""
        return [check for check in self.checks if not check.passed]

    def as_json(self) -> str:
        """The report for programs."""
        checks = [
            {"name": c.name, "passed": c.passed, "error": c.error, "limit": c.limit, "note": c.note}
            for c in self.checks
        ]
        report = {
            "machine": self.machine,
            "checks": checks,
            "tables": self.tables,
            "skipped": self.skipped,
            "seconds": round(self.elapsed, 1),
        }
        return json.dumps(report, indent=1) + "\n"

    def as_markdown(self) -> str:
        """The report for people."""
        machine = ", ".join(f"{name} {value}" for name, value in self.machine.items() if name != "card")
        lines = [f"# GPU kernels on {self.machine.get('card', 'an unknown card')}", "", f"{machine}.", ""]
        lines += ["`python -m engine.bench.gpu`; medians; a row's error is its largest relative difference.", ""]
        passed = len(self.checks) - len(self.failed)
        lines += [f"## Checks: {passed} of {len(self.checks)} passed", ""]
        lines += _table(
            {
                "check": c.name,
                "result": "passed" if c.passed else "**failed**",
                "error": c.note or f"{c.error:.1e}",
                "limit": f"{c.limit:.1e}",
            }
            for c in self.checks
        )
        for title, rows in self.tables.items():
            if rows:
                lines += ["", f"## {title}", "", *_table(rows)]
        if self.skipped:
            lines += ["", "## Left out", "", *(f"- {line}" for line in self.skipped)]
        return "\n".join(lines) + "\n"


def run(report: Report, device: torch.device, *, model: bool, tune: bool) -> None:
    """All checks and measurements, the checks first."""
    import torch

    from engine.attention.triton import paged_attention
    from engine.bench.gpu_checks import check_configurations, check_graph, check_independence
    from engine.bench.gpu_timing import LLAMA_8B, SMOLLM2, Bench, graph_timer

    report.machine = _machine(device)
    gib = report.machine["memory, GiB"]
    report.check(check_configurations(device, jobs=max(1, min(8, os.cpu_count() or 1, gib // 4))))
    report.check([check_graph(device, paged_attention), check_independence(device, paged_attention)])
    if model:
        from engine.bench.gpu_model import same_overlapped, same_tokens, speed, transformers_speed

        report.check([same_tokens(), same_overlapped()])
        rows: list[Callable[[], Row | Iterable[Row]]] = []
        for shape, batches in (("SmolLM2-135M", (1, 32, 256)), ("Llama-3.1-8B", (1, 32, 128))):
            rows += [partial(speed, shape, batches), partial(speed, shape, batches[1:], async_scheduling=True)]
            rows += [partial(speed, shape, (32,), cuda_graphs=False)]
            rows += [partial(transformers_speed, shape, 32)]
        report.section("Whole models, random weights, bfloat16", rows)
    torch.cuda.empty_cache()

    bench = Bench(device, graph_timer)
    copied = bench.copy_bandwidth() / 1e9
    report.machine["copy bandwidth, GB/s"] = round(copied)
    decodes = [
        (LLAMA_8B, 1, 2048),
        (LLAMA_8B, 1, 16384),
        (LLAMA_8B, 8, 2048),
        (LLAMA_8B, 32, 512),
        (LLAMA_8B, 32, 2048),
        (LLAMA_8B, 128, 2048),
        (SMOLLM2, 32, 512),
        (SMOLLM2, 128, 2048),
    ]
    report.section("Decode, one layer", [partial(bench.decode, *case) for case in decodes])
    report.section(
        "What paging costs: 32 decodes of 512 tokens",
        [partial(bench.paging, LLAMA_8B, 32, 512, [8, 16, 32, 64, 128])],
    )
    report.section("Quantised cache: 32 decodes of 2048 tokens", [partial(bench.quantised, LLAMA_8B, 32, 2048)])
    prefills = [(1, 512, 512), (1, 2048, 2048), (4, 2048, 2048), (1, 8192, 8192), (1, 512, 8192), (1, 32, 16384)]
    report.section("Prefill, one layer", [partial(bench.prefill, LLAMA_8B, *case) for case in prefills])
    report.section("Cache write, one layer", [partial(bench.write, LLAMA_8B, tokens) for tokens in (32, 512, 8192)])
    if tune:
        report.section("Other cuts", [partial(bench.tune, LLAMA_8B, *choice) for choice in _choices()])


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    summary = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m engine.bench.gpu", description=summary)
    parser.add_argument("--output", type=Path, default=Path("gpu-report"), help="folder for the two reports")
    parser.add_argument("--seconds", type=float, default=270, help="no measurement is begun after this")
    parser.add_argument("--no-model", action="store_true", help="only the kernels")
    parser.add_argument("--json", action="store_true", help="print the report as JSON, and nothing else")
    parser.add_argument("--tune", action="store_true", help="also try other tiles")
    options = parser.parse_args(arguments)
    missing = _missing()
    if missing:
        print(missing, file=sys.stderr)
        return 2
    import torch

    report = Report(options.seconds, echo=(lambda _: None) if options.json else print)
    run(report, torch.device("cuda", torch.cuda.current_device()), model=not options.no_model, tune=options.tune)
    options.output.mkdir(parents=True, exist_ok=True)
    card = re.sub(r"[^a-z0-9]+", "-", str(report.machine["card"]).lower()).strip("-")
    for suffix, text in ((".json", report.as_json()), (".md", report.as_markdown())):
        (options.output / f"{card}{suffix}").write_text(text, encoding="utf-8")
    if options.json:
        print(report.as_json(), end="")
        return 1 if report.failed else 0
    passed = len(report.checks) - len(report.failed)
    print(f"{passed} of {len(report.checks)} checks passed in {report.elapsed:.0f} s; {options.output}/{card}.md")
    return 1 if report.failed else 0


def _missing() -> str:
    """Why this machine cannot run it, in one line; empty if it can."""
    for package in ("torch", "triton"):
        if importlib.util.find_spec(package) is None:
            return f"the GPU bench needs {package}, which is not installed: pip install {package}"
    import torch

    if not torch.cuda.is_available():
        return f"no GPU here (torch {torch.__version__} sees none): run this on a machine with a CUDA or ROCm device"
    return ""


def _machine(device: torch.device) -> dict[str, Any]:
    import torch
    import triton

    properties = torch.cuda.get_device_properties(device)
    return {
        "card": properties.name,
        "memory, GiB": round(properties.total_memory / 2**30),
        "processors": properties.multi_processor_count,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def _choices() -> list[tuple[list[tuple[int, int]], list[Any]]]:
    from engine.attention.triton_tiles import Tile

    decodes = [Tile(16, n, w, s) for n in (32, 64, 128) for w in (2, 4, 8) for s in (2, 3, 4)]
    prefills = [Tile(m, n, w, s) for m in (64, 128) for n in (32, 64, 128) for w in (4, 8) for s in (2, 3)]
    return [([(1, 2048)] * 32, decodes), ([(2048, 2048)], prefills)]


def _table(rows: Iterable[Row]) -> list[str]:
    rows = list(rows)
    if not rows:
        return []
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = ["| " + " | ".join(names) + " |", "| " + " | ".join("---" for _ in names) + " |"]
    lines += ["| " + " | ".join(_text(row.get(name, "")).replace("|", "\\|") for name in names) + " |" for row in rows]
    return lines


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return str(value)


if __name__ == "__main__":
    sys.exit(main())
