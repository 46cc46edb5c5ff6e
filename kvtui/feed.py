"""What brings requests to a live session by itself, as the screen sees it."""

from __future__ import annotations

from typing import Protocol


class Feed(Protocol):
    """A workload that plays in this process.

    Attributes:
        held: Whether it adds nothing until `toggle`.
        done: Whether nothing comes any more.
        state: What it does, in a few words.
    """

    held: bool

    @property
    def done(self) -> bool: ...  # noqa: D102 - see Attributes

    @property
    def state(self) -> str: ...  # noqa: D102 - see Attributes

    def welcome(self, key: str) -> str:
        """What to say of it when the screen opens, `key` being the one that holds it; empty where that is nothing."""
        ...

    def toggle(self) -> None:
        """Add nothing more, or go on."""
        ...
