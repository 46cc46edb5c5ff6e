"""Check and measure the GPU kernels on the machine at hand: `python -m engine.bench.gpu`.

In under five minutes: every kernel configuration against the float32 reference, a captured decode replayed for other
batches, the time of decodes and prefills beside torch's own attention, what paging costs, what a quantised cache
saves, and the engine's tokens and tokens per second with models of known shapes, with and without asynchronous
scheduling. Each part has its own process and its own time, so that none takes another's figures with it. A JSON and a
markdown report, named after the card, are there from the first figure on. Exits with 0 if every check passed, 1 if one
did not, 2 if there is no GPU for it.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.bench.gpu_parts import Part, run_parts
from engine.bench.gpu_report import Fact, Finding, Report

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

_MODELS = (("SmolLM2-135M", (1, 32, 256), 50), ("Llama-3.1-8B", (1, 32, 128), 75))
"""Shapes, the numbers of requests to measure each with, and seconds for it."""


def plan(device: torch.device, *, model: bool, tune: bool) -> list[list[Part]]:
    """The parts, checks first: those of the first list side by side, since they mostly compile, the others in turn."""
    from engine.bench import gpu_work
    from engine.bench.ahead_of_time import CONFIGURATIONS

    compiled = [
        Part(c.name, partial(gpu_work.configuration, device=device, what=c), 90, judges=True) for c in CONFIGURATIONS
    ]
    in_turn = [Part("batches", partial(gpu_work.batches, device=device), 60, judges=True)]
    timed = [Part("times of the kernels", partial(gpu_work.kernels, device=device), 75)]
    if model:
        in_turn.append(Part("tokens of whole models", gpu_work.tokens, 75, judges=True))
        small, large = (
            Part(f"speed of {shape}", partial(gpu_work.speed_of, shape=shape, requests=requests), seconds)
            for shape, requests, seconds in _MODELS
        )
        timed = [small, *timed, large]
    in_turn += timed
    if tune:
        in_turn.append(Part("other cuts", partial(gpu_work.tune, device=device), 600))
    return [compiled, in_turn]


def run(report: Report, stages: Sequence[Sequence[Part]], jobs: Sequence[int]) -> None:
    """Run stages of parts, so many parts of each at once, and take in what they find."""
    for parts, at_once in zip(stages, jobs, strict=True):
        for finding in run_parts(parts, jobs=at_once, left=lambda: report.left):
            report.take(finding)
    report.finished = True


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    summary = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m engine.bench.gpu", description=summary)
    parser.add_argument("--output", type=Path, default=Path("gpu-report"), help="folder for the two reports")
    parser.add_argument("--seconds", type=float, default=270, help="no measurement is begun after this")
    parser.add_argument("--no-model", action="store_true", help="only the kernels")
    parser.add_argument("--json", action="store_true", help="print the report as JSON, and nothing else")
    parser.add_argument("--tune", action="store_true", help="also try other tiles (takes longer: give it --seconds)")
    options = parser.parse_args(arguments)
    missing = _missing()
    if missing:
        print(missing, file=sys.stderr)
        return 2
    try:
        options.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        print(f"the report cannot be written to {options.output} ({error.strerror}): use --output", file=sys.stderr)
        return 2
    import torch

    from engine.model.device import physical_cores

    device = torch.device("cuda", torch.cuda.current_device())

    def tell(finding: Finding) -> None:
        report.write(options.output)
        if not options.json and not isinstance(finding, Fact):
            print(finding, flush=True)

    report = Report(options.seconds, tell)
    report.machine = _machine(device)
    jobs = max(1, min(8, physical_cores(), report.machine["memory, GiB"] // 4))
    run(report, plan(device, model=not options.no_model, tune=options.tune), [jobs, 1])
    report.write(options.output)
    if options.json:
        print(report.as_json(), end="")
        return 1 if report.failed else 0
    passed = len(report.checks) - len(report.failed)
    where = options.output / f"{report.name}.md"
    print(f"{passed} of {len(report.checks)} checks passed in {report.elapsed:.0f} s; {where}")
    return 1 if report.failed else 0


def _missing() -> str:
    """Why this machine cannot run it, in one line; empty if it can."""
    for package in ("torch", "triton"):
        if importlib.util.find_spec(package) is None:
            return f"the GPU bench needs {package}, which is not installed: pip install {package}"
    import torch

    from engine.attention.choice import lacks

    if not torch.cuda.is_available():
        sees = "sees none" if torch.version.cuda or torch.version.hip else "is built for CPUs alone"
        return f"no GPU here (torch {torch.__version__} {sees}): run this on a machine with a CUDA or ROCm device"
    reason = lacks("triton", torch.device("cuda", torch.cuda.current_device()))
    return f"no GPU here that the kernels run on: {reason}" if reason else ""


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


if __name__ == "__main__":
    sys.exit(main())
