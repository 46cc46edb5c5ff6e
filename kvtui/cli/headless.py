"""`run --headless`: the engine without a screen, a line a second, and a summary."""

from __future__ import annotations

import sys
import threading
import time
from typing import TYPE_CHECKING, Any, TextIO

from engine.trace.events import StepTrace

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.engine import PagedEngine
    from engine.trace.events import Counters, TraceMessage
    from kvtui.workloads.driver import WorkloadDriver

LINE_S = 1.0
_LONGEST_SLEEP_S = 0.25


class RunStats:
    """A sink that adds up what a summary says.

    Attributes:
        num_steps: Steps with a batch.
        counters: After the last step; None before the first.
    """

    def __init__(self) -> None:
        self.num_steps = 0
        self.counters: Counters | None = None
        self._spent = {"schedule": 0, "execute": 0, "sample": 0, "update": 0}
        self._members = 0
        self._computed = 0
        self._first_ns: int | None = None
        self._last_ns = 0

    def __call__(self, message: TraceMessage) -> None:
        """Take the next message of the trace."""
        if not isinstance(message, StepTrace):
            return
        self.counters = message.counters
        if not message.batch:
            return
        self.num_steps += 1
        self._members += len(message.batch)
        self._computed += sum(member.num_scheduled for member in message.batch)
        spent = {
            "schedule": message.schedule_ns,
            "execute": message.execute_ns,
            "sample": message.sample_ns,
            "update": message.update_ns,
        }
        for part, ns in spent.items():
            self._spent[part] += ns
        if self._first_ns is None:
            self._first_ns = message.start_ns
        self._last_ns = message.start_ns + sum(spent.values())

    def summary(self) -> dict[str, Any]:
        """The totals; durations of a step are means in ms."""
        counters, steps = self.counters, max(1, self.num_steps)
        wall = (self._last_ns - (self._first_ns or 0)) / 1e9
        generated = counters.generated_tokens if counters else 0
        queried = counters.prefix_queried_tokens if counters else 0
        hits = counters.prefix_hit_tokens if counters else 0
        busy = sum(self._spent.values()) / 1e9
        return {
            "steps": self.num_steps,
            "wall_s": round(wall, 3),
            "busy_s": round(busy, 3),
            "generated_tokens": generated,
            "computed_tokens": self._computed,
            "tokens_per_s": round(generated / wall, 2) if wall > 0 else 0.0,
            "steps_per_s": round(self.num_steps / wall, 2) if wall > 0 else 0.0,
            "mean_batch": round(self._members / steps, 2),
            "mean_step_ms": {part: round(ns / steps / 1e6, 3) for part, ns in self._spent.items()},
            "prefix_hit_rate": round(hits / queried, 4) if queried else 0.0,
            "preemptions": counters.preemptions if counters else 0,
        }


def run_headless(
    engine: PagedEngine,
    stats: RunStats,
    driver: WorkloadDriver | None,
    *,
    serving: bool,
    max_steps: int | None,
    lines: TextIO,
    stopped: Callable[[], bool] = lambda: False,
) -> None:
    """Step the engine until the work is done.

    Args:
        engine: Stepped in this thread.
        stats: A sink of the engine.
        driver: Brings the workload's requests; None without one.
        serving: Requests come from outside as well, so that there is no end.
        max_steps: End after so many steps.
        lines: Gets a line a second.
        stopped: Asked between steps.
    """
    wake = threading.Event()
    engine.on_work = wake.set
    next_line, tokens_before, time_before = time.monotonic() + LINE_S, 0, time.monotonic()
    while not stopped() and (max_steps is None or stats.num_steps < max_steps):
        due = driver.poll() if driver is not None else None
        if engine.has_work:
            engine.step()
        elif not serving and (driver is None or driver.done):
            break
        else:
            wake.wait(_LONGEST_SLEEP_S if due is None else min(_LONGEST_SLEEP_S, due))
        wake.clear()
        now = time.monotonic()
        if now >= next_line and stats.counters is not None:
            generated = stats.counters.generated_tokens
            print(
                progress_line(stats.num_steps, stats.counters, (generated - tokens_before) / (now - time_before)),
                file=lines,
                flush=True,
            )
            next_line, tokens_before, time_before = now + LINE_S, generated, now


def progress_line(step: int, counters: Counters, tokens_per_s: float) -> str:
    """The line a second."""
    return (
        f"step {step:>6,}  running {counters.running:>3}  waiting {counters.waiting:>3}  "
        f"blocks used {counters.used_blocks:>5,} cached {counters.cached_blocks:>5,} free {counters.free_blocks:>5,}  "
        f"{tokens_per_s:>7,.1f} tok/s"
    )


def summary_text(summary: dict[str, Any]) -> str:
    """The summary for people."""
    step = summary["mean_step_ms"]
    parts = ", ".join(f"{part} {ms:.2f}" for part, ms in step.items())
    total = sum(step.values()) or 1.0
    return "\n".join(
        (
            (
                f"{summary['generated_tokens']:,} tokens generated, {summary['computed_tokens']:,} computed, in "
                f"{summary['steps']:,} steps and {summary['wall_s']:.1f} s: {summary['tokens_per_s']:.1f} tok/s"
            ),
            f"  mean batch       {summary['mean_batch']:.2f} requests",
            f"  mean step        {total:.2f} ms ({parts}; execute is {step['execute'] / total:.1%})",
            f"  prefix hit rate  {summary['prefix_hit_rate']:.1%} of the prompt tokens looked up",
            f"  preemptions      {summary['preemptions']:,}",
        )
    )


def lines_to(*, as_json: bool) -> TextIO:
    """Where the line a second goes: JSON has stdout for itself."""
    return sys.stderr if as_json else sys.stdout
