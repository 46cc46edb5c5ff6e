"""From a key to the picture of another step: `kvtui bench seek`, or `python -m kvtui.bench.seek [FILE]`.

The dashboard at 200x50, without a terminal, over a recording. What was read before is forgotten before each jump; a
picture is done when every line of the screen has been drawn anew. Times are CPU times of the thread that draws.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from engine.bench.report import Figure, show
from engine.bench.trace import realistic_trace, repeated
from engine.trace.reader import Recording
from engine.trace.recording import RecordingWriter
from kvtui.app import KvtuiApp
from kvtui.sources.recorded import RecordingSource

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


async def jumps(path: Path, rounds: int) -> list[Figure]:
    """Jumps anywhere, and one step back after each."""
    taken: dict[str, list[float]] = {"jump anywhere": [], "one step back": []}
    with Recording.open(path) as recording:
        source = RecordingSource(recording)
        source.pause()
        app = KvtuiApp(source, theme="dark")
        rng = random.Random(1)
        async with app.run_test(size=(200, 50)) as pilot:
            while source.marks.look(1.0):
                pass
            await asyncio.sleep(2)  # By then the app has settled.

            def timed(name: str, move: Callable[[], None]) -> None:
                began = time.thread_time_ns()
                move()
                app.hurry()
                list(app.screen._compositor.render_strips())
                taken[name].append((time.thread_time_ns() - began) / 1e6)

            for number in range(rounds):
                step = rng.randrange(recording.num_steps) if number else recording.num_steps - 1
                recording.forget()
                timed("jump anywhere", lambda step=step: source.seek(step))  # type: ignore[misc]
                await pilot.pause()
                timed("one step back", lambda: source.step(-1))
                await pilot.pause()
        num_steps = recording.num_steps
    return [
        Figure(f"{name}, {kind}", value, "ms", f"of {num_steps:,} steps")
        for name, values in taken.items()
        for kind, value in (("median", statistics.median(values)), ("longest", max(values)))
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m kvtui.bench.seek", description=__doc__)
    parser.add_argument("recording", nargs="?", type=Path, help="a file; without one, a long recording is made first")
    parser.add_argument("--steps", type=int, default=100_000, help="of the recording that is made")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        path = options.recording
        if path is None:
            path = Path(folder) / "long.mcap"
            header, messages = realistic_trace(min(2600, options.steps), prefix_caching=False, drain=True)
            with RecordingWriter(path, header) as writer:
                for message in repeated(messages, options.steps):
                    writer(message)
        figures = asyncio.run(jumps(path, options.rounds))
    show("seek", figures, as_json=options.json, about="to the picture of another step at 200x50, CPU time")


if __name__ == "__main__":
    main()
