"""Parts of the GPU bench, each in a process of its own.

A kernel that hangs, a device that fails for good or a process that dies costs one part; what it told before is kept.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections import deque
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any

from engine.bench.gpu_report import Check, Finding, LeftOut, Report, one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from multiprocessing.connection import Connection

GRACE = 12.0
"""Seconds that a part has after its time to end by itself; then it is ended."""

_JOIN = 5.0


@dataclass(frozen=True, slots=True)
class Part:
    """One piece of work.

    Attributes:
        name: What it is about.
        work: Tells a report what it finds; a function that a new process can import.
        seconds: The most that it may take.
        judges: Whether it is checks that it brings, so that one without an end is one that failed.
    """

    name: str
    work: Callable[[Report], None]
    seconds: float
    judges: bool = False

    def unfinished(self, why: str) -> Finding:
        """What there is to say where it has no end."""
        return Check(self.name, float("nan"), 0.0, why) if self.judges else LeftOut(f"{self.name}: {why}")


@dataclass(frozen=True, slots=True)
class _End:
    """The last thing that a part tells: why it went no further; empty where it is done."""

    why: str = ""


@dataclass(slots=True)
class _Running:
    part: Part
    process: Any
    seconds: float
    deadline: float
    ended: bool = False


def run_parts(
    parts: Sequence[Part],
    *,
    jobs: int,
    left: Callable[[], float],
    grace: float = GRACE,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Finding]:
    """Run parts side by side, and give what they find as it comes.

    Args:
        parts: In the order in which they are begun.
        jobs: How many at once.
        left: Seconds that are left for all of them.
        grace: See `GRACE`.
        clock: Seconds from anywhere.
    """
    waiting = deque(parts)
    running: dict[Connection, _Running] = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs and left() > 0:
                _begin(waiting.popleft(), left(), grace, clock, running)
            if not running:
                yield from (part.unfinished("no time left") for part in waiting)
                return
            first = min(one.deadline for one in running.values())
            for ready in wait(list(running), timeout=max(0.0, first - clock())):
                assert not isinstance(ready, int)
                yield from _receive(ready, running)  # type: ignore[arg-type]
            for connection, one in list(running.items()):
                if clock() >= one.deadline:
                    _end(running.pop(connection), connection)
                    yield one.part.unfinished(f"stopped after {one.seconds + grace:.0f} s")
    finally:
        for connection, one in running.items():
            _end(one, connection)


def _begin(
    part: Part, left: float, grace: float, clock: Callable[[], float], running: dict[Connection, _Running]
) -> None:
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    seconds = min(part.seconds, left)
    process = context.Process(target=_work, args=(sender, part, seconds), name=part.name)
    process.start()
    sender.close()  # what is left of it is the process's own, so that its end can be seen
    running[receiver] = _Running(part, process, seconds, clock() + seconds + grace)


def _receive(connection: Connection, running: dict[Connection, _Running]) -> Iterator[Finding]:
    one = running[connection]
    try:
        finding: Finding | _End = connection.recv()
    except (EOFError, OSError):
        one.process.join(_JOIN)
        finding = _End(f"its process ended {_how(one.process.exitcode)}")
    if not isinstance(finding, _End):
        yield finding
        return
    if finding.why:
        yield one.part.unfinished(finding.why)
    one.process.join(_JOIN)
    _end(running.pop(connection), connection)


def _how(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        with contextlib.suppress(ValueError):
            return f"by {signal.Signals(-exit_code).name}"
    return f"with status {exit_code}"


def _end(one: _Running, connection: Connection) -> None:
    """End a process that may be beyond hearing, and give back what it had."""
    connection.close()
    if one.process.is_alive():
        one.process.kill()
        one.process.join(_JOIN)


def _work(connection: Connection, part: Part, seconds: float) -> None:
    """What the process does."""
    os.dup2(2, 1)  # what libraries print is not the report
    end = _End()
    try:
        part.work(Report(seconds, tell=connection.send))
    except BaseException as error:  # told, whatever it is
        end = _End(one_line(error))
    with contextlib.suppress(OSError):
        connection.send(end)
