"""What a screen draws from: an engine that runs, or a recording that is played."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from engine.trace.events import Header, StepTrace
    from engine.trace.state import PoolState


class Source(Protocol):
    """A trace with a position in it. The screen pulls: nothing here calls back.

    Attributes:
        header: The trace's header.
        state: The fold up to `position`; one object for as long as `generation` stays the same.
        live: Whether an engine is behind it.
        position: Index of the step shown; -1 before the first.
        length: Steps known so far.
        paused: Whether `poll` brings nothing unless `step` or `seek` asks for it.
        speed: Times real time; a live engine's own pace is 1, and it can only be slower.
        generation: Grows when the state jumped instead of growing step by step: redraw everything.
        error: Why the source ended badly, in one line.
    """

    @property
    def header(self) -> Header: ...  # noqa: D102 - see Attributes

    @property
    def state(self) -> PoolState: ...  # noqa: D102 - see Attributes

    @property
    def live(self) -> bool: ...  # noqa: D102 - see Attributes

    @property
    def position(self) -> int: ...  # noqa: D102 - see Attributes

    @property
    def length(self) -> int: ...  # noqa: D102 - see Attributes

    @property
    def paused(self) -> bool: ...  # noqa: D102 - see Attributes

    @property
    def speed(self) -> float: ...  # noqa: D102 - see Attributes

    @property
    def generation(self) -> int: ...  # noqa: D102 - see Attributes

    @property
    def error(self) -> str | None: ...  # noqa: D102 - see Attributes

    def poll(self) -> list[StepTrace]:
        """Apply what is due now; the steps applied since the last call, in order.

        After a jump (`generation` has grown) these are the last few hundred steps up to `position`, so that panels with
        a time axis have something to show.
        """
        ...

    def pause(self) -> None:
        """Stop moving on."""
        ...

    def resume(self) -> None:
        """Move on again."""
        ...

    def step(self, n: int) -> None:
        """Go n steps forward; backward (n < 0) where the source can."""
        ...

    def seek(self, step: int) -> None:
        """Show the state after a step; clamped to what exists."""
        ...

    def set_speed(self, speed: float) -> None:
        """Play at so many times real time."""
        ...

    def close(self, timeout: float) -> bool:
        """Let go of what is behind it; False where that takes longer than the timeout (seconds)."""
        ...
