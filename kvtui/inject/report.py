"""Latency and throughput of requests that were sent, as text for people or as JSON."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtui.inject.client import Outcome

PERCENTILES = (50, 90, 99)


class Spread(msgspec.Struct, frozen=True):
    """How a duration is distributed, in ms."""

    mean: float
    p50: float
    p90: float
    p99: float


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What a workload's callers saw.

    Attributes:
        wall_s: From the first request sent to the last answer.
        output_tokens_per_s: Of all requests together.
        ttft_ms: Time to first token.
        tpot_ms: Time per output token after the first.
        e2e_ms: From sending to the end of the answer.
        errors: What went wrong, and how often.
    """

    workload: str
    requests: int
    completed: int
    failed: int
    wall_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    output_tokens_per_s: float
    requests_per_s: float
    ttft_ms: Spread | None
    tpot_ms: Spread | None
    e2e_ms: Spread | None
    errors: dict[str, int]


def percentile(values: Sequence[float], p: float) -> float:
    """The p-th percentile (0 to 100), linear between the closest two, as numpy's default; `values` is not empty."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * p / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summarise(workload: str, outcomes: Sequence[Outcome]) -> Report:
    """The report over these requests."""
    good = [outcome for outcome in outcomes if outcome.error is None]
    ends = [outcome.last for outcome in outcomes if outcome.last is not None]
    wall = max(ends) - min(outcome.sent for outcome in outcomes) if ends else 0.0
    output_tokens = sum(outcome.output_tokens for outcome in good)
    errors = Counter(outcome.error for outcome in outcomes if outcome.error is not None)
    return Report(
        workload=workload,
        requests=len(outcomes),
        completed=len(good),
        failed=len(outcomes) - len(good),
        wall_s=round(wall, 3),
        prompt_tokens=sum(outcome.prompt_tokens for outcome in good),
        cached_tokens=sum(outcome.cached_tokens for outcome in good),
        output_tokens=output_tokens,
        output_tokens_per_s=round(output_tokens / wall, 2) if wall > 0 else 0.0,
        requests_per_s=round(len(good) / wall, 3) if wall > 0 else 0.0,
        ttft_ms=_spread([outcome.ttft for outcome in good]),
        tpot_ms=_spread([outcome.tpot for outcome in good]),
        e2e_ms=_spread([outcome.latency for outcome in good]),
        errors=dict(errors.most_common(20)),
    )


def _spread(seconds: Sequence[float | None]) -> Spread | None:
    known = [value * 1e3 for value in seconds if value is not None]
    if not known:
        return None
    return Spread(round(sum(known) / len(known), 2), *(round(percentile(known, p), 2) for p in PERCENTILES))


def as_text(report: Report) -> str:
    """The report as lines for people."""
    cached = report.cached_tokens / report.prompt_tokens if report.prompt_tokens else 0.0
    lines = [
        (
            f"{report.workload}: {report.completed} of {report.requests} requests answered in {report.wall_s:.1f} s, "
            f"{report.failed} failed"
        ),
        f"  prompt tokens     {report.prompt_tokens:>10,}   {cached:.1%} from the prefix cache",
        (
            f"  generated tokens  {report.output_tokens:>10,}   {report.output_tokens_per_s:,.1f} tok/s, "
            f"{report.requests_per_s:.2f} requests/s"
        ),
    ]
    named: tuple[tuple[str, Spread | None], ...] = (
        ("time to first token", report.ttft_ms),
        ("time per output token", report.tpot_ms),
        ("end to end", report.e2e_ms),
    )
    if any(spread for _, spread in named):
        lines.append(f"  {'':24}{'p50':>10}{'p90':>10}{'p99':>10}{'mean':>10}")
    for name, spread in named:
        if spread is not None:
            numbers = (spread.p50, spread.p90, spread.p99, spread.mean)
            lines.append(f"  {name:24}" + "".join(f"{_duration(ms):>10}" for ms in numbers))
    return "\n".join(lines)


def _duration(ms: float) -> str:
    return f"{ms / 1e3:,.2f} s" if ms >= 1e3 else f"{ms:.1f} ms"


def as_json(report: Report, **more: Any) -> str:
    """The report as JSON, with further fields."""
    return msgspec.json.format(msgspec.json.encode(msgspec.to_builtins(report) | more), indent=2).decode()
