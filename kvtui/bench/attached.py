"""What the dashboard costs the engine: tokens a second with it attached, over tokens a second headless.

    python -m kvtui.bench.attached [--size 200x50] [--rounds 3] [--steps 120] [--json]

Both sides run the same requests through the same model, one after the other in processes of their own, several times
in turn; the dashboard in a pseudo terminal whose output is read as fast as it comes. The first steps (prefill, and the
screen's first picture) are left out. Medians.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import pty
import select
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.engine import PagedEngine
    from engine.trace.events import Header, RequestArrived, StepTrace

_WARM_UP = 20
_NUM_REQUESTS = 16
_PATIENCE_S = 600.0

_PROMPTS = (
    "Explain to a child why the sky is blue.",
    "Write a short story about a lighthouse keeper.",
    "What does a compiler do?",
    "Describe a walk through an autumn forest.",
)


class _Stopwatch:
    """A sink that writes what it measured to a file once enough steps were made."""

    def __init__(self, steps: int, result: Path) -> None:
        self._last = _WARM_UP + steps
        self._result = result
        self._began = 0.0
        self._tokens = 0

    def __call__(self, message: Header | RequestArrived | StepTrace) -> None:
        from engine.trace.events import StepTrace

        if not isinstance(message, StepTrace):
            return
        if message.index == _WARM_UP:
            self._began = time.perf_counter()
        elif _WARM_UP < message.index <= self._last:
            self._tokens += len(message.tokens)
        if message.index == self._last:
            seconds = time.perf_counter() - self._began
            self._result.write_text(json.dumps({"tokens": self._tokens, "seconds": seconds}))


def _engine(model: str, steps: int, result: Path) -> PagedEngine:
    from engine.config import CacheConfig, EngineConfig, ModelConfig
    from engine.request import SamplingParams

    config = EngineConfig(model=ModelConfig(model=model), cache=CacheConfig(num_blocks=512))
    if model == "simulated":
        from engine.simulated import simulated_engine

        engine = simulated_engine(config, step_seconds=0.03)
    else:
        from engine.model import load_engine

        engine = load_engine(config, progress=lambda _: None)
    engine.add_sink(_Stopwatch(steps, result))
    params = SamplingParams(max_tokens=_WARM_UP + steps + 40, ignore_eos=True)
    for i in range(_NUM_REQUESTS):
        engine.add_request(_PROMPTS[i % len(_PROMPTS)], params, name=f"request {i}")
    return engine


def _headless(model: str, steps: int, result: Path) -> None:
    engine = _engine(model, steps, result)
    while engine.has_work and not result.exists():
        engine.step()


def _dashboard(model: str, steps: int, result: Path) -> None:
    engine = _engine(model, steps, result)
    from engine.loop import EngineLoop
    from kvtui.app import run_app
    from kvtui.sources.live import LiveSource

    loop = EngineLoop(engine)
    source = LiveSource(engine, loop)
    loop.start()
    run_app(source)
    os._exit(0)


def _measure(side: str, model: str, steps: int, columns: int, rows: int) -> tuple[float, int]:
    """Tokens a second of one side, and how many bytes it drew."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, "-m", "kvtui.bench.attached", "--side", side, "--result", str(result)]
        command += ["--model", model, "--steps", str(steps)]
        if side == "headless":
            subprocess.run(command, check=True, timeout=_PATIENCE_S)
            drawn = 0
        else:
            drawn = _in_terminal(command, result, columns, rows)
        measured = json.loads(result.read_text())
    return measured["tokens"] / measured["seconds"], drawn


def _in_terminal(command: list[str], result: Path, columns: int, rows: int) -> int:
    """Run a command in a pseudo terminal until it wrote its result; the bytes it drew."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    environment = os.environ | {"TERM": "xterm-256color", "COLORTERM": "truecolor"}
    environment.pop("NO_COLOR", None)
    child = subprocess.Popen(
        command, stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True, close_fds=True
    )
    os.close(slave)
    drawn, asked, deadline = 0, False, time.monotonic() + _PATIENCE_S
    try:
        while child.poll() is None and time.monotonic() < deadline:
            if select.select([master], [], [], 0.05)[0]:
                try:
                    drawn += len(os.read(master, 1 << 16))
                except OSError:
                    break
            if not asked and result.exists():
                asked = True
                os.write(master, b"q")
        child.wait(timeout=10)
    finally:
        child.kill()
        os.close(master)
    return drawn


def _main() -> int:
    parser = argparse.ArgumentParser(prog="python -m kvtui.bench.attached", description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="200x50", help="columns x rows of the terminal")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=120, help="decode steps that are timed")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--side", choices=("headless", "dashboard"), help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side is not None:
        run = _headless if arguments.side == "headless" else _dashboard
        run(arguments.model, arguments.steps, arguments.result)
        return 0
    columns, rows = (int(n) for n in arguments.size.split("x"))
    speeds: dict[str, list[float]] = {"headless": [], "dashboard": []}
    drawn = 0
    for round_ in range(arguments.rounds):
        # Turn about, so that a drift of the machine meets both sides alike.
        for side in ("headless", "dashboard") if round_ % 2 == 0 else ("dashboard", "headless"):
            speed, drawn_now = _measure(side, arguments.model, arguments.steps, columns, rows)
            speeds[side].append(speed)
            drawn = max(drawn, drawn_now)
            print(f"round {round_ + 1}: {side} {speed:.1f} tok/s", file=sys.stderr, flush=True)
    headless, dashboard = (statistics.median(speeds[side]) for side in ("headless", "dashboard"))
    figures = {
        "ratio": round(dashboard / headless, 3),
        "headless_tokens_per_s": round(headless, 1),
        "dashboard_tokens_per_s": round(dashboard, 1),
        "size": arguments.size,
        "bytes_drawn": drawn,
        "requests": _NUM_REQUESTS,
        "model": arguments.model,
        "cores": os.cpu_count(),
    }
    if arguments.json:
        print(json.dumps(figures))
    else:
        print(f"{figures['ratio']:.3f} of headless with the dashboard at {arguments.size}: {dashboard:.1f} tok/s")
        print(f"{headless:.1f} tok/s headless, {_NUM_REQUESTS} requests, {os.cpu_count()} cores")
    return 0


if __name__ == "__main__":
    sys.exit(_main())
