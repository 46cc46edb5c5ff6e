"""What the dashboard costs the engine: tokens a second with it drawing, over tokens a second without.

    python -m kvtui.bench.attached [--size 200x50] [--windows 12] [--json]

One process in a pseudo terminal whose output is read as fast as it comes. The same requests run on and on while the
dashboard draws for a window of steps and keeps still for the next, in turn: so a machine whose speed drifts meets both
sides alike. While it keeps still the trace goes on being queued, and nothing is folded or drawn. The first step of a
window belongs to neither side. Medians over the windows.
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
    from engine.trace.events import Header, RequestArrived, StepTrace

_WARM_UP = 20
_WINDOW = 16
_NUM_REQUESTS = 16
_PATIENCE_S = 600.0

_PROMPTS = (
    "Explain to a child why the sky is blue.",
    "Write a short story about a lighthouse keeper.",
    "What does a compiler do?",
    "Describe a walk through an autumn forest.",
)


class _Windows:
    """A sink that says whether to draw now, and writes what it measured to a file once there were enough windows."""

    def __init__(self, num_windows: int, result: Path) -> None:
        self._num_windows = num_windows
        self._result = result
        self._speeds: dict[bool, list[float]] = {True: [], False: []}
        self._tokens = 0
        self._began_ns = 0
        self.drawing = True

    def __call__(self, message: Header | RequestArrived | StepTrace) -> None:
        from engine.trace.events import StepTrace

        if not isinstance(message, StepTrace) or message.index < _WARM_UP:
            return
        turn, place = divmod(message.index - _WARM_UP, _WINDOW)
        if place == 0 and turn > 0:
            self._speeds[self.drawing].append(self._tokens / (message.start_ns - self._began_ns) * 1e9)
            if turn >= 2 * self._num_windows:
                self._write()
        if place == 0:
            self.drawing = turn % 2 == 0
        elif place == 1:
            self._began_ns, self._tokens = message.start_ns, 0
        if place >= 1:
            self._tokens += len(message.tokens)

    def _write(self) -> None:
        if not self._result.exists():
            medians = {str(drawing): statistics.median(speeds) for drawing, speeds in self._speeds.items()}
            self._result.write_text(json.dumps(medians))


def _dashboard(model: str, num_windows: int, result: Path) -> None:
    from engine.config import CacheConfig, EngineConfig, ModelConfig
    from engine.loop import EngineLoop
    from engine.request import SamplingParams
    from kvtui.app import KvtuiApp, run_app
    from kvtui.sources.live import LiveSource

    config = EngineConfig(model=ModelConfig(model=model), cache=CacheConfig(num_blocks=1024))
    if model == "simulated":
        from engine.simulated import simulated_engine

        engine = simulated_engine(config, step_seconds=0.03)
    else:
        from engine.model import load_engine

        engine = load_engine(config, progress=lambda _: None)
    windows = _Windows(num_windows, result)
    engine.add_sink(windows)
    params = SamplingParams(max_tokens=_WARM_UP + (2 * num_windows + 4) * _WINDOW, ignore_eos=True)
    for i in range(_NUM_REQUESTS):
        engine.add_request(_PROMPTS[i % len(_PROMPTS)], params, name=f"request {i}")

    draw = KvtuiApp.tick

    def tick(app: KvtuiApp) -> None:
        if windows.drawing or result.exists():
            draw(app)

    setattr(KvtuiApp, "tick", tick)  # noqa: B010 - the one place where the app is made to keep still
    loop = EngineLoop(engine)
    source = LiveSource(engine, loop)
    loop.start()
    run_app(source)
    os._exit(0)


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
    parser.add_argument("--windows", type=int, default=12, help=f"windows of {_WINDOW} steps on each side")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.result is not None:
        _dashboard(arguments.model, arguments.windows, arguments.result)
        return 0
    columns, rows = (int(n) for n in arguments.size.split("x"))
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, "-m", "kvtui.bench.attached", "--result", str(result)]
        command += ["--model", arguments.model, "--windows", str(arguments.windows)]
        drawn = _in_terminal(command, result, columns, rows)
        if not result.exists():
            print("the dashboard ended before it had drawn enough: run it by hand to see why", file=sys.stderr)
            return 1
        measured = json.loads(result.read_text())
    drawing, still = measured["True"], measured["False"]
    figures = {
        "ratio": round(drawing / still, 3),
        "drawing_tokens_per_s": round(drawing, 1),
        "still_tokens_per_s": round(still, 1),
        "size": arguments.size,
        "windows": arguments.windows,
        "bytes_drawn": drawn,
        "requests": _NUM_REQUESTS,
        "model": arguments.model,
        "cores": os.cpu_count(),
    }
    if arguments.json:
        print(json.dumps(figures))
    else:
        print(f"{figures['ratio']:.3f} of the engine's speed while the dashboard draws at {arguments.size}")
        print(f"{drawing:.1f} over {still:.1f} tok/s, {_NUM_REQUESTS} requests, {os.cpu_count()} cores")
    return 0


if __name__ == "__main__":
    sys.exit(_main())
