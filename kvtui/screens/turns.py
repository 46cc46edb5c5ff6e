"""Whose turn it is to be drawn: the grid in every frame, panels of numbers and words a few times a second.

The eye follows what moves, and reads what stands. So while steps stream by, what is read is brought up to date one
panel after the other, the one that has waited longest first, few in a frame: a frame stays short, and so does the time
for which it keeps the engine waiting. Where nothing streams by, or somebody waits for an answer, all are drawn at once,
and every panel shows the same step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.trace.events import StepTrace
    from kvtui.view import Panel

BAR_SECONDS = 0.5
"""How often the position bar is drawn while steps stream by: with its marks it is the line that takes most to write."""

UNHURRIED_SECONDS = {
    "batch": 0.15,
    "legend": 0.2,
    "requests": 0.3,
    "inspector": 0.25,
    "header": 0.3,
    "pool": 0.4,
    "prefixes": 0.3,
    "old-way": 0.3,
    "footer": 0.3,
    "formulas": 0.5,
    "transport": BAR_SECONDS,
}
"""Panels that can wait, by their ids, and how long they do where frames are cheap."""

_MOST_IN_A_FRAME = 2


@dataclass(slots=True)
class Later:
    """A panel that is not drawn in every frame.

    Attributes:
        panel: Which.
        interval: Seconds between two times.
        due: When it may be drawn next.
        steps: What it has not been told of yet.
    """

    panel: Panel
    interval: float
    due: float = 0.0
    steps: list[StepTrace] = field(default_factory=list)


class Turns:
    """The panels that can wait.

    Args:
        panels: All there are, by id.

    Attributes:
        slowness: How many times as long they wait; see `kvtui.pace.Pace`.
    """

    def __init__(self, panels: dict[str, Panel]) -> None:
        self._later = {panels[name]: Later(panels[name], s) for name, s in UNHURRIED_SECONDS.items() if name in panels}
        self._hurried = False
        self.slowness = 1.0

    @property
    def behind(self) -> bool:
        """Whether a panel has not been told of the last steps yet."""
        return any(later.steps for later in self._later.values())

    def hurry(self) -> None:
        """Make all of them due in the next frame."""
        self._hurried = True

    def later(self, panel: Panel) -> Later | None:
        """What is kept of a panel that can wait; None of one that is drawn in every frame."""
        return self._later.get(panel)

    def forget(self, panel: Panel) -> None:
        """A panel will be told everything when it comes into sight."""
        if panel in self._later:
            self._later[panel].steps = []

    def take(self, waiting: Sequence[Later], now: float, at_once: bool) -> list[Later]:
        """Those whose turn it is among panels that are in sight.

        Args:
            waiting: Them.
            now: The time, in seconds.
            at_once: All of them, whether due or not.
        """
        if not (at_once or self._hurried):
            due = sorted((later for later in waiting if now >= later.due), key=lambda later: later.due)
            waiting = due[:_MOST_IN_A_FRAME]
        self._hurried = False
        for later in waiting:
            later.due = now + later.interval * self.slowness
        return list(waiting)
