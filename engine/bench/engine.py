"""Tokens a second on a mixed workload, ours and its peers in turn: `python -m engine.bench.engine`.

Each side is a process of its own that stays loaded; in every round each runs the whole workload once while the others
sit idle, so that a drift of the machine meets all alike. transformers' static and continuous batching are always among
them; vLLM's CPU build and OpenVINO GenAI where they are installed, here or in the Python that is named.

Then the engine's own policies on equal arrivals in equal memory, with requests that may generate more than they do:
how many run at once, and what becomes of the throughput. Steps and batches are the same every time.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.bench.report import Figure, show

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import IO

PAGED = "ours-paged"
OURS = {PAGED: "ours", "ours-int8": "ours with int8 weights"}
TRANSFORMERS = ("transformers-static", "transformers-continuous")
POLICIES = ("ours-paged", "ours-contiguous", "ours-static")


def synthetic_workload(seed: int = 0, num: int = 32) -> list[dict[str, Any]]:
    """Requests of a chat service in small: prompts of 16 to 256 tokens, outputs of 8 to 256, short ones more often."""
    rng = random.Random(seed)

    def length(low: int, high: int) -> int:
        return min(high, low + int(rng.expovariate(1 / 70)))

    return [
        {"ids": [rng.randrange(100, 40_000) for _ in range(length(16, 256))], "out": length(8, 256)} for _ in range(num)
    ]


class Side:
    """One contender's process.

    Args:
        name: As `engine.bench.contenders` knows it.
        arguments: The rest of its command line.
        python: That runs it.
        log: Where its packages may print.
    """

    def __init__(self, name: str, arguments: Sequence[str], python: str, log: IO[bytes]) -> None:
        self.name = name
        self.results: list[dict[str, float]] = []
        # From the folder of the project, for a Python in which it is not installed.
        command = [python, "-m", "engine.bench.contenders", name, *arguments]
        root = str(Path(__file__).parents[2])
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, cwd=root
        )
        self._answer()

    def run(self) -> None:
        """Run the workload once."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        self.results.append(self._answer())

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def median(self, what: str) -> float:
        """Of a number that it told."""
        return statistics.median(result[what] for result in self.results)

    @property
    def tokens_per_s(self) -> float:
        """Median over the rounds."""
        return statistics.median(result["tokens"] / result["seconds"] for result in self.results)

    @property
    def tokens_per_cpu_s(self) -> float:
        """Median over the rounds; of all the process's threads, so that other programs count less."""
        return statistics.median(result["tokens"] / result["cpu_seconds"] for result in self.results)

    def _answer(self) -> dict[str, float]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended: see what it printed above")
        answer: dict[str, float] = json.loads(line)
        return answer


def run_sides(sides: dict[str, tuple[str, Sequence[str]]], rounds: int, log: IO[bytes]) -> list[Side]:
    """Load each side (name: Python, arguments) and let them run in turn; those that fail are left out, with a line."""
    running: list[Side] = []
    try:
        for name, (python, arguments) in sides.items():
            try:
                running.append(Side(name, arguments, python, log))
            except (OSError, RuntimeError) as error:
                print(f"left out: {error}", file=sys.stderr)
        for number in range(rounds):
            # Turn about: who comes first in one round comes last in the next.
            for side in list(running) if number % 2 == 0 else list(reversed(running)):
                try:
                    side.run()
                except (OSError, RuntimeError) as error:
                    print(f"left out: {error}", file=sys.stderr)
                    running.remove(side)
                    continue
                speed = side.results[-1]["tokens"] / side.results[-1]["seconds"]
                print(f"round {number + 1}: {side.name} {speed:.1f} tok/s", file=sys.stderr, flush=True)
    finally:
        for side in running:
            side.close()
    return running


def peer_figures(sides: list[Side]) -> list[Figure]:
    """Ratios of each of ours to each peer, then what each side did."""
    peers = [side for side in sides if side.name not in OURS]
    figures = []
    for mine in sides:
        if mine.name in OURS:
            for side in peers:
                ratios = [
                    (a["tokens"] / a["seconds"]) / (b["tokens"] / b["seconds"])
                    for a, b in zip(mine.results, side.results, strict=False)
                ]
                note = f"{mine.tokens_per_cpu_s / side.tokens_per_cpu_s:.2f} x by CPU time"
                figures.append(Figure(f"{OURS[mine.name]} over {side.name}", statistics.median(ratios), "x", note))
    figures += [
        Figure(side.name, side.tokens_per_s, "tok/s", f"{side.tokens_per_cpu_s:.1f} a CPU second") for side in sides
    ]
    return figures


def policy_figures(sides: list[Side]) -> list[Figure]:
    """How paging does against the older ways."""
    by_name = {side.name: side for side in sides}
    paged = by_name.get(PAGED)
    figures = []
    for side in sides:
        policy = side.name.removeprefix("ours-")
        if paged is not None and side is not paged:
            ratio = paged.median("batch") / side.median("batch")
            figures.append(Figure(f"average batch, paged over {policy}", ratio, "x"))
            per_cpu = paged.tokens_per_cpu_s / side.tokens_per_cpu_s
            ratio = paged.tokens_per_s / side.tokens_per_s
            figures.append(Figure(f"tokens/s, paged over {policy}", ratio, "x", f"{per_cpu:.2f} x by CPU time"))
        figures.append(Figure(f"average batch, {policy}", side.median("batch"), "requests"))
        figures.append(Figure(f"steps, {policy}", side.median("steps"), ""))
        figures.append(Figure(f"equal arrivals, {policy}", side.tokens_per_s, "tok/s"))
    return figures


def _peers(options: argparse.Namespace, base: list[str]) -> dict[str, tuple[str, Sequence[str]]]:
    """The peers that there are, and how each is started."""
    sides: dict[str, tuple[str, Sequence[str]]] = dict.fromkeys(TRANSFORMERS, (sys.executable, base))
    wanted = {"vllm": (options.vllm_python, "vllm"), "openvino": (options.openvino_python, "openvino_genai")}
    for name, (python, package) in wanted.items():
        if python is None and importlib.util.find_spec(package) is None:
            continue
        from engine.model.checkpoint import find_checkpoint
        from engine.model.weights import find_gguf

        folder, gguf = find_checkpoint(options.model).path, find_gguf()
        sides[name] = (python or sys.executable, [*base, "--folder", str(folder), "--gguf", str(gguf or "")])
    return sides


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m engine.bench.engine", description=__doc__)
    parser.add_argument("--workload", type=Path, help="JSON file of {ids, out}; a synthetic one without it")
    parser.add_argument("--num", type=int, help="only so many of its requests")
    parser.add_argument("--model", default="smollm2", help="'simulated' leaves the peers out")
    parser.add_argument("--dtype", default="auto", choices=["auto", "bfloat16", "float32"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sides", nargs="+", metavar="NAME", help="only these, as their lines name them")
    parser.add_argument("--vllm-python", metavar="PYTHON", help="interpreter in which vLLM is installed")
    parser.add_argument("--openvino-python", metavar="PYTHON", help="interpreter in which OpenVINO GenAI is installed")
    parser.add_argument("--policy-blocks", type=int, default=128, help="memory in which the policies compare")
    parser.add_argument("--asked", type=int, default=256, help="tokens that each request may generate there")
    parser.add_argument("--part", choices=["all", "peers", "policies"], default="all")
    parser.add_argument("--verbose", action="store_true", help="show what the sides print")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(argv)
    work = json.loads(options.workload.read_text()) if options.workload else synthetic_workload()
    work = work[: options.num]
    tokens = sum(r["out"] for r in work)
    about = f"{len(work)} requests, {sum(len(r['ids']) for r in work):,} prompt tokens, {tokens:,} generated"
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory() as folder, open(Path(folder, "log"), "w+b") as log:  # noqa: PTH123
        path = Path(folder, "workload.json")
        path.write_text(json.dumps(work))
        sink: IO[bytes] = sys.stderr.buffer if options.verbose else log
        base = [str(path), "--model", options.model, "--dtype", options.dtype, "--peer-dtype", _peer_dtype(options)]
        if options.model == "simulated":
            base += ["--vocabulary", "256"]
        if options.part != "policies" and options.model != "simulated":
            sides = dict.fromkeys(OURS, (sys.executable, base)) | _peers(options, base)
            unknown = set(options.sides or ()) - set(sides)
            if unknown:
                parser.error(f"no side is named {', '.join(sorted(unknown))}: there are {', '.join(sides)}")
            sides = {name: how for name, how in sides.items() if not options.sides or name in options.sides}
            figures += peer_figures(run_sides(sides, options.rounds, sink))
        if options.part != "peers":
            base += ["--num-blocks", str(options.policy_blocks), "--asked", str(options.asked)]
            figures += policy_figures(run_sides(dict.fromkeys(POLICIES, (sys.executable, base)), options.rounds, sink))
        if not figures:
            log.seek(0)
            sys.stderr.write(log.read().decode(errors="replace")[-4000:])
    show("engine", figures, as_json=options.json, about=about)


def _peer_dtype(options: argparse.Namespace) -> str:
    """The precision that ours chooses on this machine, for peers that must be told."""
    if options.dtype != "auto" or options.model == "simulated":
        return "float32" if options.dtype == "auto" else str(options.dtype)
    import torch

    from engine.model.device import choose_dtype

    return str(choose_dtype("auto", torch.device("cpu"))).removeprefix("torch.")


if __name__ == "__main__":
    main()
