"""What `run` is asked to play: a workload that ends, or the stream that does not, and the driver that plays it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtui.cli.errors import UsageError, say
from kvtui.cli.session import prepared
from kvtui.workloads.catalog import STREAM

if TYPE_CHECKING:
    from engine.engine import PagedEngine
    from kvtui.workloads.driver import WorkloadDriver
    from kvtui.workloads.workload import Workload

ENDING_WORKLOAD = "chat"
"""What plays where nobody looks, or an end or a rate is asked for, and no workload is."""
REPEAT_AFTER_S = 5.0
"""Pause of a dashboard session between the end of its workload and starting it again."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What is to be played.

    Attributes:
        workload: With an end; None is the stream.
        seed: Of the stream.
        num: Sessions of the stream; None: no end.
        on_screen: Whether somebody looks.
        once: Whether a workload is not started again on screen.
    """

    workload: Workload | None
    seed: int
    num: int | None
    on_screen: bool
    once: bool

    @property
    def title(self) -> str:
        """Of a recording of it."""
        from kvtui.workloads.stream import TITLE

        return TITLE if self.workload is None else self.workload.title

    def driver(self, engine: PagedEngine) -> WorkloadDriver:
        """What adds its requests; says on stderr what was cut, and what goes on without end."""
        from kvtui.workloads.driver import WorkloadDriver
        from kvtui.workloads.stream_driver import WATCHED_S, stream_driver

        if self.workload is None:
            if self.on_screen:
                say("example requests keep coming and give way to your own (w holds them, --workload none omits them)")
            return stream_driver(engine, self.seed, num=self.num, watched=WATCHED_S if self.on_screen else None)
        workload = self.workload.fitted(engine.header.max_model_len)
        for note in workload.notes:
            say(note)
        repeats = self.on_screen and not self.once
        if repeats:
            say(f"{workload.name} plays again and again (--once plays it once, --workload none leaves it out)")
        return WorkloadDriver(engine, workload, repeat_after=REPEAT_AFTER_S if repeats else None)


def asked_for(
    reference: str | None,
    *,
    rate: float | None,
    num: int | None,
    seed: int,
    max_model_len: int | None,
    steps: int | None,
    on_screen: bool,
    once: bool,
) -> Asked | None:
    """What the options of `run` ask for; None for `none`.

    Raises:
        UsageError: the options contradict the stream, which has neither an end nor times of its own.
        WorkloadError: there is no such workload, or its file is wrong.
    """
    if reference is None:
        reference = STREAM if on_screen and not once and rate is None else ENDING_WORKLOAD
    if reference != STREAM:
        workload = prepared(reference, rate=rate, num=num, seed=seed, max_model_len=max_model_len)
        return None if workload is None else Asked(workload, seed, num, on_screen, once)
    if once:
        raise UsageError(f"--workload {STREAM} never ends, so --once cannot be kept: say how many sessions with --num")
    if rate is not None:
        raise UsageError(
            f"--workload {STREAM} goes by how fast answers come: leave out --rate, or name another workload"
        )
    if not on_screen and num is None and steps is None:
        raise UsageError(f"--workload {STREAM} never ends: with --headless, say when to stop with --num or --steps")
    return Asked(None, seed, num, on_screen, once)
