"""A source that is moved from outside: what would move it by itself does nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.trace.damage import Damage
    from engine.trace.events import StepTrace


class MovedSource:
    """The part of a `Source` that plays and pauses, for those that do not play.

    Whoever derives from it brings `header`, `state`, `position`, `length`, `marks` and `context`, and moves the state.
    """

    live = False
    looking_back = False
    engine_paused = False
    num_arrived = 0
    first = 0
    speed = 1.0
    generation = 0
    window: tuple[int, int] | None = None
    error: str | None = None
    damage: Damage | None = None
    cut_off = False

    def poll(self) -> list[StepTrace]:
        """Nothing comes by itself."""
        return []

    def pause(self) -> None:
        """It is moved from outside."""

    def resume(self) -> None:
        """It is moved from outside."""

    def play(self) -> None:
        """It is moved from outside."""

    def hold(self) -> None:
        """It is moved from outside."""

    def follow(self) -> None:
        """It is moved from outside."""

    def step(self, n: int) -> None:
        """It is moved from outside."""

    def seek(self, step: int) -> None:
        """It is moved from outside."""

    def set_speed(self, speed: float) -> None:
        """It is moved from outside."""

    def set_window(self, window: tuple[int, int] | None) -> None:
        """It is moved from outside."""

    def close(self, timeout: float) -> bool:
        """Nothing is open."""
        return True
