"""Who won, in words, as a table and as JSON."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.request import FinishReason
from engine.trace.events import RequestArrived
from kvtui.race.lane_time import BatchOverTime, began_ns, end_of
from kvtui.safe_text import clean

if TYPE_CHECKING:
    import numpy.typing as npt

    from kvtui.glyphs import Glyphs
    from kvtui.race.arrivals import Arrivals
    from kvtui.race.lane import Lane


@dataclass(frozen=True, slots=True)
class Result:
    """One lane in numbers.

    Attributes:
        policy: Whose.
        steps: Iterations with a batch.
        seconds: From the first arrival to the end of the last step, in the reckoned time.
        requests: That came to their end; `failed` did not.
        generated_tokens: New tokens in all.
        tokens_per_s: The same over `seconds`.
        average_batch: Requests in a batch, in the mean over the steps.
        mean_latency_s: From arrival to end, of those that came to it.
        mean_first_token_s: From arrival to the first token.
        preemptions: How often somebody gave way.
    """

    policy: str
    steps: int
    seconds: float
    requests: int
    failed: int
    generated_tokens: int
    tokens_per_s: float
    average_batch: float
    mean_latency_s: float
    mean_first_token_s: float
    preemptions: int


def result_of(lane: Lane) -> Result:
    """Count a lane."""
    arrived: dict[int, int] = {}
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    steps = members = tokens = preemptions = end_ns = 0
    reasons: Counter[str] = Counter()
    for message in lane.messages:
        if isinstance(message, RequestArrived):
            arrived[message.request] = message.time_ns
            continue
        end_ns = end_of(message)
        steps += bool(message.batch)
        members += len(message.batch)
        tokens += len(message.tokens)
        preemptions = message.counters.preemptions
        for token in message.tokens:
            first.setdefault(token[0], (end_ns - arrived.get(token[0], 0)) / 1e9)
        for finish in message.finished:
            reasons[finish.reason] += 1
            if finish.reason in (FinishReason.STOP, FinishReason.LENGTH):
                last[finish.request] = (end_ns - arrived.get(finish.request, 0)) / 1e9
    seconds = max(0, end_ns - began_ns(lane)) / 1e9
    return Result(
        policy=lane.policy,
        steps=steps,
        seconds=round(seconds, 6),
        requests=len(last),
        failed=lane.num_failed,
        generated_tokens=tokens,
        tokens_per_s=round(tokens / seconds, 3) if seconds > 0 else 0.0,
        average_batch=round(members / steps, 3) if steps else 0.0,
        mean_latency_s=round(float(np.mean(list(last.values()))), 3) if last else 0.0,
        mean_first_token_s=round(float(np.mean(list(first.values()))), 3) if first else 0.0,
        preemptions=preemptions,
    )


def batch_over_time(lane: Lane, columns: int, seconds: float) -> npt.NDArray[np.float64]:
    """Mean number of requests in the batch in so many equal spans of time; 0 where no step ran."""
    if seconds <= 0 or columns < 1:
        return np.zeros(max(0, columns))
    return BatchOverTime(lane).mean(np.linspace(0.0, seconds, columns + 1))


def as_json(arrivals: Arrivals, results: list[Result]) -> dict[str, Any]:
    """All there is to say, for programs."""
    cache, scheduler = arrivals.config.cache, arrivals.config.scheduler
    return {
        "name": arrivals.name,
        "requests": arrivals.workload.num_requests,
        "memory": {"block_size": cache.block_size, "num_blocks": cache.num_blocks},
        "limits": {
            "max_num_seqs": scheduler.max_num_seqs,
            "max_num_batched_tokens": scheduler.max_num_batched_tokens,
            "max_model_len": scheduler.max_model_len,
        },
        "step_cost": asdict(arrivals.cost),
        "lanes": [asdict(result) for result in results],
        "speed_up": {result.policy: round(speed_up(result, results[0]), 3) for result in results},
        "notes": list(arrivals.notes),
    }


def speed_up(result: Result, over: Result) -> float:
    """How many times the tokens a second."""
    return result.tokens_per_s / over.tokens_per_s if over.tokens_per_s else 0.0


_HEADS = ("policy", "steps", "seconds", "avg batch", "tokens", "tok/s", "first token", "latency", "failed")
"""The last one only where something failed: the table fits into 80 columns, as the screen before it does."""


def report_lines(arrivals: Arrivals, lanes: list[Lane], results: list[Result], glyphs: Glyphs, width: int) -> list[str]:
    """All there is to say, for people."""
    cost, cache = arrivals.cost, arrivals.config.cache
    name = clean(arrivals.name, ascii_only=glyphs.ascii, limit=60)
    rows: list[tuple[str, ...]] = [_HEADS]
    rows += [
        (
            r.policy,
            f"{r.steps:,}",
            f"{r.seconds:,.1f}",
            f"{r.average_batch:.2f}",
            f"{r.generated_tokens:,}",
            f"{r.tokens_per_s:,.1f}",
            f"{r.mean_first_token_s:.2f} s",
            f"{r.mean_latency_s:.2f} s",
            f"{r.failed:,}",
        )
        for r in results
    ]
    if not any(r.failed for r in results):
        rows = [row[:-1] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        f"{name}: {arrivals.workload.num_requests:,} requests, {cache.num_blocks:,} blocks of {cache.block_size}",
        f"a step takes {cost.seconds * 1e3:.2f} ms and {cost.seconds_per_token * 1e3:.3f} ms a token ({cost.source})",
        *(clean(note, ascii_only=glyphs.ascii, limit=200) for note in arrivals.notes),
        "",
    ]
    for row in rows:
        cells = [row[0].ljust(widths[0])] + [cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    lines += ["", *verdict(results), "", *chart_lines(lanes, results, glyphs, width)]
    return lines


def verdict(results: list[Result]) -> list[str]:
    """The last lane against the ones before it."""
    best = results[-1]
    against = [f"{speed_up(best, other):.2f} times {other.policy}" for other in results[:-1]]
    return [f"{best.policy} makes {' and '.join(against)} in tokens a second"] if against else []


def chart_lines(lanes: list[Lane], results: list[Result], glyphs: Glyphs, width: int) -> list[str]:
    """Requests in the batch over the time of the slowest, a line a lane, all on one scale."""
    seconds = max((result.seconds for result in results), default=0.0)
    label = max((len(lane.policy) for lane in lanes), default=0)
    columns = max(10, width - label - 2)
    series = [batch_over_time(lane, columns, seconds) for lane in lanes]
    most = max((float(values.max()) for values in series), default=0.0)
    if most <= 0:
        return []
    steps = len(glyphs.history) - 1
    lines = [f"requests in the batch over {seconds:,.1f} s, at most {most:.0f}"]
    for lane, values in zip(lanes, series, strict=True):
        levels = np.ceil(values / most * steps).astype(int)
        lines.append(f"{lane.policy:<{label}}  " + "".join(glyphs.history[level] for level in levels).rstrip())
    return lines
