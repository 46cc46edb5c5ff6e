"""What the dashboard costs the engine: tokens a second with it attached, over tokens a second headless.

    python -m kvtui.bench.attached [--size 200x50] [--windows 12] [--json]

Two processes load the same model and run the same requests: one headless, one under the dashboard in a pseudo terminal
whose output is read as fast as it comes. They take turns, a window of steps each, the other one waiting within a step:
so a machine whose speed drifts meets both sides alike. The first step of a window belongs to neither side, since its
caches are cold. The ratio is the median over pairs of neighbouring windows.

The pseudo terminal says that it can show a frame at once, as many do, so that each frame comes between two marks, which
it counts: the frames a second are those of the attached windows, the median of them.
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
import termios
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.engine import PagedEngine
    from engine.trace.events import Header, RequestArrived, StepTrace

_WARM_UP = 60
_WINDOW = 32
_NUM_REQUESTS = 16
_PATIENCE_S = 600.0

_CAN_IT_SYNCHRONISE, _IT_CAN = b"\x1b[?2026$p", b"\x1b[?2026;2$y"
_FRAME_BEGINS = b"\x1b[?2026h"

_PROMPTS = (
    "Explain to a child why the sky is blue.",
    "Write a short story about a lighthouse keeper.",
    "What does a compiler do?",
    "Describe a walk through an autumn forest.",
)


class _Turns:
    """A sink that says a window's tokens per second and then holds the engine until it is told to go on."""

    def __init__(self, go: int, said: int) -> None:
        self._go = go
        self._said = said
        self._tokens = 0
        self._began = 0.0

    def __call__(self, message: Header | RequestArrived | StepTrace) -> None:
        from engine.trace.events import StepTrace

        if not isinstance(message, StepTrace) or message.index < _WARM_UP:
            return
        window, place = divmod(message.index - _WARM_UP, _WINDOW + 1)
        if place == 0:
            speed = self._tokens / (time.perf_counter() - self._began) if window else 0.0
            os.write(self._said, f"{speed}\n".encode())
            if not os.read(self._go, 1):
                os._exit(0)
            self._tokens = 0
            return
        if place == 1:
            self._began = time.perf_counter()
        else:
            self._tokens += len(message.tokens)


def _engine(model: str, num_windows: int, turns: _Turns) -> PagedEngine:
    from engine.config import CacheConfig, EngineConfig, ModelConfig
    from engine.request import SamplingParams

    config = EngineConfig(model=ModelConfig(model=model), cache=CacheConfig(num_blocks=1024))
    if model == "simulated":
        from engine.simulated import simulated_engine

        engine = simulated_engine(config, step_seconds=0.03)
    else:
        from engine.model import load_engine

        engine = load_engine(config)
    engine.add_sink(turns)
    params = SamplingParams(max_tokens=_WARM_UP + (num_windows + 2) * (_WINDOW + 1), ignore_eos=True)
    for i in range(_NUM_REQUESTS):
        engine.add_request(_PROMPTS[i % len(_PROMPTS)], params, name=f"request {i}")
    return engine


def _run_side(side: str, model: str, num_windows: int, turns: _Turns) -> None:
    """One of the two processes; the parent ends it by closing its end of the pipe."""
    engine = _engine(model, num_windows, turns)
    if side == "headless":
        while engine.has_work:
            engine.step()
        return
    from engine.loop import EngineLoop
    from kvtui.app import run_app
    from kvtui.sources.live import LiveSource

    loop = EngineLoop(engine)
    source = LiveSource(engine, loop)
    loop.start()
    run_app(source)


@dataclass
class _Side:
    """The parent's end of one process."""

    process: subprocess.Popen[bytes]
    go: int
    said: int

    def window(self) -> float:
        """Let it run a window; its tokens per second."""
        os.write(self.go, b"g")
        return self.wait()

    def wait(self) -> float:
        """Until it has ended its window.

        Raises:
            RuntimeError: It ended, or takes too long.
        """
        if not select.select([self.said], [], [], _PATIENCE_S)[0]:
            raise RuntimeError(f"no answer in {_PATIENCE_S:.0f} s")
        line = os.read(self.said, 100)
        if not line:
            raise RuntimeError(f"it ended with exit status {self.process.wait(timeout=10)}")
        return float(line)

    def end(self) -> None:
        """Let go of it."""
        os.close(self.go)
        self.process.kill()
        self.process.wait(timeout=10)
        os.close(self.said)


def _start(side: str, options: argparse.Namespace, terminal: int | None) -> _Side:
    go_there, go = os.pipe()
    said, said_there = os.pipe()
    command = [sys.executable, "-m", "kvtui.bench.attached", "--side", side, "--pipes", f"{go_there},{said_there}"]
    command += ["--model", options.model, "--windows", str(options.windows)]
    environment = os.environ | {"TERM": "xterm-256color", "COLORTERM": "truecolor"}
    environment.pop("NO_COLOR", None)
    process = subprocess.Popen(
        command, stdin=terminal, stdout=terminal, stderr=terminal, env=environment, start_new_session=True,
        pass_fds=(go_there, said_there),
    )  # fmt: skip
    os.close(go_there)
    os.close(said_there)
    return _Side(process, go, said)


class _Terminal:
    """A pseudo terminal whose output is read in a thread: bytes and frames are counted, and one question answered."""

    def __init__(self, columns: int, rows: int) -> None:
        self._master, self.slave = pty.openpty()
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.num_bytes = self.num_frames = 0
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        before = b""
        try:
            while drawn := os.read(self._master, 1 << 16):
                self.num_bytes += len(drawn)
                # A mark may lie across two reads; all of one are as long.
                drawn = before + drawn
                self.num_frames += drawn.count(_FRAME_BEGINS)
                if _CAN_IT_SYNCHRONISE in drawn:
                    os.write(self._master, _IT_CAN)
                before = drawn[1 - len(_FRAME_BEGINS) :]
        except OSError:  # all who had it open have ended
            return


def _measure(options: argparse.Namespace) -> dict[str, object]:
    columns, rows = (int(n) for n in options.size.split("x"))
    terminal = _Terminal(columns, rows)
    sides = {"headless": _start("headless", options, None), "attached": _start("attached", options, terminal.slave)}
    speeds: dict[str, list[float]] = {name: [] for name in sides}
    rates: list[float] = []
    try:
        for side in sides.values():
            side.wait()
        num_bytes, seconds = 0, 0.0
        for turn in range(options.windows):
            for name in sides if turn % 2 == 0 else reversed(sides):
                before, began = (terminal.num_bytes, terminal.num_frames), time.monotonic()
                speeds[name].append(sides[name].window())
                if name == "attached":
                    took = time.monotonic() - began
                    num_bytes, seconds = num_bytes + terminal.num_bytes - before[0], seconds + took
                    rates.append((terminal.num_frames - before[1]) / took)
    finally:
        for side in sides.values():
            side.end()
    pairs = zip(speeds["attached"], speeds["headless"], strict=True)
    return {
        "ratio": round(statistics.median(attached / headless for attached, headless in pairs), 3),
        "attached_tokens_per_s": round(statistics.median(speeds["attached"]), 1),
        "headless_tokens_per_s": round(statistics.median(speeds["headless"]), 1),
        "frames_per_s": round(statistics.median(rates), 1),
        "size": options.size,
        "windows": options.windows,
        "bytes_drawn_per_s": round(num_bytes / seconds),
        "requests": _NUM_REQUESTS,
        "model": options.model,
        "cores": os.cpu_count(),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    summary = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m kvtui.bench.attached", description=summary)
    parser.add_argument("--size", default="200x50", help="columns x rows of the terminal")
    parser.add_argument("--windows", type=int, default=12, help=f"windows of {_WINDOW} steps on each side")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--side", choices=("headless", "attached"), help=argparse.SUPPRESS)
    parser.add_argument("--pipes", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.side is not None:
        go, said = (int(n) for n in options.pipes.split(","))
        _run_side(options.side, options.model, options.windows, _Turns(go, said))
        return 0
    try:
        figures = _measure(options)
    except RuntimeError as error:
        print(f"a side could not be measured: {error}; try a smaller --model or fewer --windows", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps(figures))
    else:
        print(f"{figures['ratio']:.3f} of the headless engine's speed with the dashboard attached at {options.size}")
        print(f"{figures['frames_per_s']} frames a second drawn, {figures['bytes_drawn_per_s']} bytes a second")
        print(
            f"{figures['attached_tokens_per_s']} over {figures['headless_tokens_per_s']} tok/s, "
            f"{_NUM_REQUESTS} requests, {os.cpu_count()} cores"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
