"""Where the time of a decode step goes: `python -m engine.bench.steps`.

Runs the real model with 1, 8 and 32 requests and prints medians over the steps in which all of them decode: schedule
(deciding), pack (making the batch's tensors), model (the forward), sample, update (bookkeeping and text). Model and
sample are mostly compiled code; schedule, pack and update are this engine's own Python.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import TYPE_CHECKING, Any, get_args

from engine.config import DEFAULT_MODEL, CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, Weights
from engine.model import load_engine
from engine.request import SamplingParams
from engine.trace.events import Phase, StepTrace

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from engine.engine import PagedEngine
    from engine.model.forward import Forward
    from engine.trace.events import TraceMessage

_PROMPT = (
    "A paged cache keeps the keys and values of a sequence in blocks of fixed size, taken from one pool as the "
    "sequence grows; a block table says which block holds which part. Request {n} asks what this is good for. "
)


class TimedForward:
    """Stands in front of a model and notes how long it takes, so that packing can be told from it."""

    def __init__(self, inner: Forward) -> None:
        self._inner = inner
        self.last_ns = 0

    def forward(self, *args: Any) -> torch.Tensor:
        """As the model's."""
        began = time.perf_counter_ns()
        logits = self._inner.forward(*args)
        self.last_ns = time.perf_counter_ns() - began
        return logits


class Bench:
    """An engine whose steps are noted.

    Args:
        engine: Not run yet.
    """

    def __init__(self, engine: PagedEngine) -> None:
        self._engine = engine
        self._steps: list[tuple[StepTrace, int]] = []
        runner: Any = engine.runner
        self._timed = runner.forward = TimedForward(runner.forward)
        engine.add_sink(self._note)

    def measure(self, batch: int, num_tokens: int, context: int) -> dict[str, float]:
        """Median milliseconds of each part of a decode step.

        Args:
            batch: Requests that run at once.
            num_tokens: Generated for each.
            context: Prompt tokens of each.
        """
        engine = self._engine
        self._steps.clear()
        for n in range(batch):
            ids = engine.codec.encode(_PROMPT.format(n=n) * (context // 40 + 1))[:context]
            engine.add_request(ids, SamplingParams(max_tokens=num_tokens, ignore_eos=True))
        while engine.has_work:
            engine.step()
        decodes = [(s, m) for s, m in self._steps if _all_decode(s, batch)]
        parts = {
            "schedule": [s.schedule_ns for s, _ in decodes],
            "pack": [s.execute_ns - m for s, m in decodes],
            "model": [m for _, m in decodes],
            "sample": [s.sample_ns for s, _ in decodes],
            "update": [s.update_ns for s, _ in decodes],
        }
        out = {name: statistics.median(values) / 1e6 for name, values in parts.items()}
        out["total"] = sum(out.values())
        out["own_share"] = (out["schedule"] + out["pack"] + out["update"]) / out["total"]
        out["steps"] = len(decodes)
        return out

    def _note(self, message: TraceMessage) -> None:
        if isinstance(message, StepTrace):
            self._steps.append((message, self._timed.last_ns))


def _all_decode(step: StepTrace, batch: int) -> bool:
    return len(step.batch) == batch and all(member.phase == Phase.DECODE for member in step.batch)


def main(argv: Sequence[str] | None = None) -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description="Where the time of a decode step goes.")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto", choices=["auto", "bfloat16", "float16", "float32"])
    parser.add_argument("--attention", default="auto", choices=["auto", "reference", "cpu", "triton"])
    parser.add_argument("--weights", default="auto", choices=get_args(Weights))
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    config = EngineConfig(
        model=ModelConfig(
            model=args.model,
            device=args.device,
            dtype=args.dtype,
            attention=args.attention,
            weights=args.weights,
        ),
        cache=CacheConfig(num_blocks=2 * max(args.batch) * (args.context + args.tokens) // 16 + 16),
        scheduler=SchedulerConfig(max_num_seqs=max(args.batch)),
    )
    engine = load_engine(config)
    bench = Bench(engine)
    bench.measure(min(2, max(args.batch)), 3, 16)  # whatever is slow the first time only
    rows = {batch: bench.measure(batch, args.tokens, args.context) for batch in args.batch}
    if args.json:
        print(json.dumps({"model": engine.header.model.name, "dtype": engine.header.model.dtype, "batch": rows}))
        return
    info = engine.header.model
    print(f"{info.name} {info.device} {info.dtype}, attention {info.attention}, context {args.context}; milliseconds")
    print(f"{'batch':>5} {'schedule':>9} {'pack':>7} {'model':>8} {'sample':>7} {'update':>7} {'total':>8}  own  tok/s")
    for batch, row in rows.items():
        print(
            f"{batch:>5} {row['schedule']:>9.3f} {row['pack']:>7.3f} {row['model']:>8.2f} {row['sample']:>7.3f} "
            f"{row['update']:>7.3f} {row['total']:>8.2f} {row['own_share']:>4.1%} {1000 * batch / row['total']:>6.1f}"
        )


if __name__ == "__main__":
    main()
