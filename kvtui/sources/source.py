"""What a screen draws from: an engine that runs, or a recording that is played."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from engine.trace.damage import Damage
    from engine.trace.events import Header, StepTrace
    from engine.trace.marks import Marks
    from engine.trace.state import PoolState
    from engine.trace.step_columns import StepColumns


class Source(Protocol):
    """A trace with a position in it. The screen pulls: nothing here calls back.

    Attributes:
        header: The trace's header.
        state: The fold up to `position`; one object for as long as `generation` stays the same.
        live: Whether an engine is behind it.
        looking_back: Whether an engine is behind it and another step than its newest is shown. The engine goes on.
        num_arrived: Requests that came since the last step; the engine's next one takes them in.
        engine_paused: Whether an engine is behind it and is held; looking back has no part in this.
        position: Index of the step shown; -1 before the first.
        first: The first step that can be shown; later than 0 where the oldest were let go.
        length: Steps known so far: the newest is length - 1.
        paused: Whether `poll` brings nothing unless `step` or `seek` asks for it.
        speed: Times real time; a live engine's own pace is 1, and it can only be slower.
        generation: Grows when the state jumped instead of growing step by step: redraw everything.
        marks: Where preemptions, evictions, refusals, copies and ends are.
        window: The first and the last step of what `play` plays again and again; None: it plays on.
        error: Why the source ended badly, in one line.
        damage: What of a recording cannot be read, where the step shown is the last one before it.
        cut_off: Whether the newest step is not the session's last, but the last one in a file that was cut off there.
    """

    @property
    def header(self) -> Header: ...  # noqa: D102 - see Attributes

    @property
    def state(self) -> PoolState: ...  # noqa: D102 - see Attributes

    @property
    def live(self) -> bool: ...  # noqa: D102 - see Attributes

    @property
    def looking_back(self) -> bool: ...  # noqa: D102 - see Attributes

    @property
    def num_arrived(self) -> int: ...  # noqa: D102 - see Attributes

    @property
    def engine_paused(self) -> bool: ...  # noqa: D102 - see Attributes

    @property
    def first(self) -> int: ...  # noqa: D102 - see Attributes

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
    def marks(self) -> Marks: ...  # noqa: D102 - see Attributes

    @property
    def window(self) -> tuple[int, int] | None: ...  # noqa: D102 - see Attributes

    @property
    def error(self) -> str | None: ...  # noqa: D102 - see Attributes

    @property
    def damage(self) -> Damage | None: ...  # noqa: D102 - see Attributes

    @property
    def cut_off(self) -> bool: ...  # noqa: D102 - see Attributes

    def poll(self) -> list[StepTrace]:
        """Apply what is due now; the steps applied since the last call, in order.

        After a jump (`generation` has grown) the step that was jumped to is the first of them; `context` has those
        before it.
        """
        ...

    def context(self, most: int) -> StepColumns:
        """At most so many steps up to `position`, for panels with a time axis."""
        ...

    def pause(self) -> None:
        """Hold the engine; without one, stop playing."""
        ...

    def resume(self) -> None:
        """Let the engine run; without one, play on."""
        ...

    def play(self) -> None:
        """Let the past move on from the step shown."""
        ...

    def hold(self) -> None:
        """Let the past stand still again."""
        ...

    def step(self, n: int) -> None:
        """Go n steps forward or backward; an engine whose newest step is shown is held and does n steps."""
        ...

    def seek(self, step: int) -> None:
        """Show the state after a step, clamped to what exists; with an engine, its newest step is the present again."""
        ...

    def follow(self) -> None:
        """Show the newest step; with an engine, the present from now on."""
        ...

    def set_speed(self, speed: float) -> None:
        """Play at so many times real time."""
        ...

    def set_window(self, window: tuple[int, int] | None) -> None:
        """Choose what is played again and again, or nothing."""
        ...

    def close(self, timeout: float) -> bool:
        """Let go of what is behind it; False where that takes longer than the timeout (seconds)."""
        ...
