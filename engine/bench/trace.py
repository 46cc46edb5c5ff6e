"""What tracing costs: `python -m engine.bench.trace`.

Measures, on a schedule of 32 running requests with the text statistics of a real model, what a step costs the thread
that makes it, what the recording's own thread adds, how large the file gets, how fast it is read and checked, and how
long a recording of 600,000 steps takes to open and to seek in. No model is needed.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from engine.bench.report import Figure, show
from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.engine import PagedEngine
from engine.request import SamplingParams
from engine.simulated import SIMULATED_MODEL
from engine.trace.events import (
    BlockOp,
    Header,
    Op,
    RequestArrived,
    StepTrace,
    TraceMessage,
)
from engine.trace.invariants import check
from engine.trace.reader import Recording
from engine.trace.recording import RecordingWriter
from engine.trace.state import PoolState

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from engine.core.scheduler_output import BlockCopy, SchedulerOutput

VOCABULARY = 49_152
"""Of SmolLM2."""
STEP_NS = 60_000_000
"""Duration of a decode step of SmolLM2 with 32 requests on a few CPU cores, about."""
STEPS_PER_FLUSH = 33
"""Steps of that duration in the two seconds after which a recording is written out."""


class _Clock:
    """Time that passes by as much as it is told to, with noise, so that the same seed gives the same trace."""

    def __init__(self, rng: random.Random) -> None:
        self.now = 0
        self._rng = rng

    def __call__(self) -> int:
        self.now += self._rng.randint(20_000, 400_000)
        return self.now


class ZipfText:
    """Token ids as frequent as words are (Zipf), about 11 bits each, and made-up text for each id."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        weights = 1 / (np.arange(VOCABULARY) + 2.7)
        self._cumulated = np.cumsum(weights / weights.sum())
        letters = random.Random(seed)
        self._texts = [
            letters.choice(("", " ", " ")) + "".join(letters.choices("etaoinshrdlucm", k=letters.randint(1, 8)))
            for _ in range(VOCABULARY)
        ]

    def draw(self, n: int) -> list[int]:
        """Some token ids."""
        ids: list[int] = np.minimum(np.searchsorted(self._cumulated, self._rng.random(n)), VOCABULARY - 1).tolist()
        return ids

    def encode(self, text: str) -> list[int]:
        """As many ids as the text has words."""
        return self.draw(len(text.split()))

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """As many ids as there are words."""
        return [token_id for message in messages for token_id in self.encode(message["content"])]

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """The text of each id."""
        return [self._texts[token_id] for token_id in token_ids]

    def stream(self, prompt_token_ids: Sequence[int]) -> _Stream:
        """Text of ids as they come."""
        return _Stream(self._texts)


class _Stream:
    def __init__(self, texts: list[str]) -> None:
        self._texts = texts

    def push(self, token_id: int) -> str:
        return self._texts[token_id]

    def flush(self) -> str:
        return ""


class _ZipfRunner:
    """Draws tokens and says that it took as long as a model."""

    max_model_len = 2048
    eos_token_ids: frozenset[int] = frozenset()

    def __init__(self, text: ZipfText, clock: _Clock, rng: random.Random) -> None:
        self._text = text
        self._clock = clock
        self._rng = rng
        self.last_execute_ns = 0
        self.last_sample_ns = 0
        self.model_info = msgspec.structs.replace(
            SIMULATED_MODEL, name="zipf", architecture="none", vocab_size=VOCABULARY
        )

    def execute(self, output: SchedulerOutput) -> list[int | None]:
        """Draw a token for each request whose known tokens are all computed."""
        self.last_execute_ns = int(self._rng.gauss(0.9, 0.03) * STEP_NS)
        self.last_sample_ns = self._rng.randint(600_000, 3_000_000)
        self._clock.now += self.last_execute_ns + self.last_sample_ns
        drawn = self._text.draw(len(output.scheduled))
        return [token_id if share.samples else None for share, token_id in zip(output.scheduled, drawn, strict=True)]

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """There is nothing to move."""

    def preemption_costs(self) -> tuple[float, float]:
        """There is no CPU pool."""
        return 0.0, 0.0

    def forget(self, request_id: int) -> None:
        """Nothing is kept."""


def realistic_trace(
    num_steps: int, *, seed: int = 0, prefix_caching: bool = True, drain: bool = False
) -> tuple[Header, list[RequestArrived | StepTrace]]:
    """Header and messages of a schedule that always has more than 32 requests to run, some with a shared prefix.

    Args:
        num_steps: How many at least.
        seed: Equal seeds give equal traces.
        prefix_caching: As in the configuration.
        drain: Go on until all requests have ended.
    """
    rng = random.Random(seed)
    clock = _Clock(rng)
    text = ZipfText(seed)
    config = EngineConfig(
        cache=CacheConfig(num_blocks=640, prefix_caching=prefix_caching), scheduler=SchedulerConfig(max_num_seqs=32)
    )
    engine = PagedEngine(config, _ZipfRunner(text, clock, rng), text, title="bench", clock=clock)
    messages: list[TraceMessage] = []
    engine.add_sink(messages.append)
    shared = text.draw(100)
    while len(messages) < num_steps or (drain and engine.has_work):
        while len(engine.scheduler.waiting) < 2 and len(messages) < num_steps:
            prompt = text.draw(rng.randint(20, 200))
            params = SamplingParams(max_tokens=rng.randint(50, 300))
            engine.add_request(shared + prompt if rng.random() < 0.3 else prompt, params, name=f"chat-{len(messages)}")
            engine.step()
        engine.step()
    return engine.header, [message for message in messages if not isinstance(message, Header)]


_OF_A_REQUEST = frozenset(map(int, (Op.ALLOCATE, Op.SHARE, Op.FILL, Op.RELEASE)))
"""Operations whose b is a request."""


def repeated(messages: list[RequestArrived | StepTrace], num_steps: int) -> Iterator[RequestArrived | StepTrace]:
    """A drained trace without prefix caching over and over again, as one trace of so many steps.

    Its requests are others each time, as those of a session are.
    """
    index = offset_ns = new = 0
    while True:
        start_ns, first = offset_ns, new
        for message in messages:
            if isinstance(message, RequestArrived):
                new = max(new, first + message.request + 1)
                yield msgspec.structs.replace(
                    message, time_ns=message.time_ns + start_ns, request=message.request + first
                )
                continue
            yield msgspec.structs.replace(
                _of_later_requests(message, first), index=index, start_ns=message.start_ns + start_ns
            )
            offset_ns = message.start_ns + start_ns + STEP_NS
            index += 1
            if index == num_steps:
                return


def _of_later_requests(step: StepTrace, by: int) -> StepTrace:
    """A step with every request's number so much larger."""
    if not by:
        return step
    return msgspec.structs.replace(
        step,
        batch=[member._replace(request=member.request + by) for member in step.batch],
        ops=[BlockOp(op, a, b + by if op in _OF_A_REQUEST else b, c) for op, a, b, c in step.ops],
        tokens=[token._replace(request=token.request + by) for token in step.tokens],
        finished=[finish._replace(request=finish.request + by) for finish in step.finished],
        decisions=[decision._replace(request=decision.request + by) for decision in step.decisions],
    )


def measure(num_steps: int, long_steps: int, folder: Path) -> dict[str, float]:
    """All figures by name; times are CPU times of the thread that did the work, in the unit that the name ends in."""
    figures: dict[str, float] = {"python_loop_ns": _loop_ns()}
    header, messages = realistic_trace(num_steps)
    steps = [message for message in messages if isinstance(message, StepTrace)]
    prompt_tokens = sum(len(m.prompt_token_ids) for m in messages if isinstance(m, RequestArrived))
    tokens = sum(len(step.tokens) for step in steps)
    figures["steps"] = len(steps)
    figures["mean_running"] = sum(len(step.batch) for step in steps) / len(steps)
    figures["mean_ops"] = sum(len(step.ops) for step in steps) / len(steps)

    path = folder / "bench.mcap"
    sink: list[float] = []
    written_ns = waited = 0
    with RecordingWriter(path, header) as writer:
        for message in messages:
            began = time.perf_counter_ns()
            writer(message)
            sink.append(time.perf_counter_ns() - began)
            waited += isinstance(message, StepTrace)
            if waited == STEPS_PER_FLUSH:
                waited = 0
                began = time.thread_time_ns()
                writer._write_pending(final=False)
                written_ns += time.thread_time_ns() - began
    figures["sink_call_us"] = statistics.median(sink) / 1e3
    figures["writer_thread_us_per_step"] = written_ns / len(steps) / 1e3
    figures["share_of_60_ms_step_percent"] = 100 * (written_ns / len(steps) + statistics.mean(sink)) / STEP_NS
    size = path.stat().st_size
    figures["bytes_per_step"] = size / len(steps)
    figures["bytes_per_step_over_4_per_new_token"] = (size - 4 * tokens) / len(steps)
    figures["bytes_per_step_over_4_per_token"] = (size - 4 * (tokens + prompt_tokens)) / len(steps)

    with Recording.open(path) as recording:
        began = time.thread_time_ns()
        for _ in recording.messages():
            pass
        figures["read_us_per_step"] = (time.thread_time_ns() - began) / len(steps) / 1e3
    state = PoolState(header)
    fold_ns = check_ns = 0
    for message in messages:
        began = time.thread_time_ns()
        state.apply(message)
        middle = time.thread_time_ns()
        check(state)
        fold_ns += middle - began
        check_ns += time.thread_time_ns() - middle
    figures["fold_us_per_step"] = fold_ns / len(steps) / 1e3
    figures["check_us_per_step"] = check_ns / len(messages) / 1e3
    figures |= _seeks("", path)

    if long_steps:
        header, messages = realistic_trace(2600, prefix_caching=False, drain=True)
        long_path = folder / "long.mcap"
        with RecordingWriter(long_path, header) as writer:
            for message in repeated(messages, long_steps):
                writer(message)
        figures["long_steps"] = long_steps
        figures["long_mb"] = long_path.stat().st_size / 1e6
        figures |= _seeks("long_", long_path)
    return figures


def _loop_ns() -> float:
    """What an empty turn of a Python loop takes: how busy the machine is. About 15 where it is idle."""
    began = time.thread_time_ns()
    for _ in range(1_000_000):
        pass
    return (time.thread_time_ns() - began) / 1e6


def _seeks(prefix: str, path: Path) -> dict[str, float]:
    opens: list[float] = []
    seeks: list[float] = []
    rng = random.Random(1)
    for _ in range(7):
        began = time.thread_time_ns()
        recording = Recording.open(path)
        opens.append((time.thread_time_ns() - began) / 1e6)
        with recording:
            for step in (recording.num_steps - 1, *(rng.randrange(recording.num_steps) for _ in range(4))):
                recording.forget()
                began = time.thread_time_ns()
                recording.state_at(step)
                seeks.append((time.thread_time_ns() - began) / 1e6)
    return {
        f"{prefix}open_ms": statistics.median(opens),
        f"{prefix}seek_ms_median": statistics.median(seeks),
        f"{prefix}seek_ms_max": max(seeks),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m engine.bench.trace", description=__doc__)
    parser.add_argument("--steps", type=int, default=3000, help="steps of the realistic recording")
    parser.add_argument("--long-steps", type=int, default=600_000, help="steps of the long one; 0 leaves it out")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(options.steps, options.long_steps, Path(folder))
    shown = [_figure(name, value) for name, value in figures.items() if name != "python_loop_ns"]
    show("trace", shown, as_json=options.json, about=f"{options.steps:,} steps of 32 running requests, CPU time")


_UNITS = {"_us": "µs", "_ms": "ms", "_ns": "ns", "_mb": "MB", "_percent": "%"}


def _figure(name: str, value: float) -> Figure:
    """The unit is in the name."""
    found = [unit for part, unit in _UNITS.items() if name.endswith(part) or f"{part}_" in name]
    unit = found[0] if found else "bytes" if name.startswith("bytes") else ""
    words = name
    for part in _UNITS:
        words = words.replace(f"{part}_", "_").removesuffix(part)
    return Figure(words.replace("_", " "), value, unit)


if __name__ == "__main__":
    main()
