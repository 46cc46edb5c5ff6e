"""What a request is called: the same in every panel, so that one does not have to learn two names for one thing.

That is its own name, which callers give. The number is added where another request had the name before, and stands
alone where there is none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtui.safe_text import clean, fit
from kvtui.safe_text import width as cells_of

if TYPE_CHECKING:
    from engine.trace.events import RequestArrived
    from engine.trace.state import RequestState

MOST_CHARACTERS = 60
"""Of a name; the rest of it is in the trace alone."""

_MOST_LABELS = 8192


class Names:
    """The labels of the requests of one trace. A label stays as it is for as long as its request is known.

    Attributes:
        longest: Cells of the longest label given so far.
    """

    def __init__(self) -> None:
        self._labels: dict[int, tuple[str, str]] = {}
        self._first_with: dict[str, int] = {}
        self.longest = 0

    def follow(self, requests: dict[int, RequestState] | dict[int, RequestArrived]) -> None:
        """Take in requests that have arrived; costs nothing where none has.

        Args:
            requests: By number, in order of arrival.
        """
        new: list[RequestState | RequestArrived] = []
        for number in reversed(requests):
            if number in self._labels:
                break
            new.append(requests[number])
        if len(self._labels) + len(new) > _MOST_LABELS:
            self.clear()
            new = [requests[number] for number in reversed(requests)]
        for request in reversed(new):
            self._add(request.request, request.name)

    def _add(self, number: int, raw: str) -> None:
        name = clean(raw, limit=MOST_CHARACTERS).strip()
        first = self._first_with.setdefault(name, number)
        # A name may not pretend to be a number.
        suffix = "" if name and first == number and not name.startswith("#") else f"#{number}"
        self._labels[number] = (name, suffix)
        self.longest = max(self.longest, cells_of(self.of(number)))

    def clear(self) -> None:
        """Forget everything: the trace jumped."""
        self._labels.clear()
        self._first_with.clear()
        self.longest = 0

    def of(self, request: int) -> str:
        """The label, such as `burst-08`, `burst-08 #31` or `#31`; safe to draw where Unicode is."""
        name, suffix = self._labels.get(request, ("", f"#{request}"))
        return f"{name} {suffix}" if name and suffix else name or suffix

    def full(self, request: int) -> str:
        """The label with the number in any case."""
        name, _ = self._labels.get(request, ("", ""))
        return f"{name} #{request}" if name else f"#{request}"

    def fitted(self, request: int, cells: int, *, ascii_only: bool) -> str:
        """The label exactly so many cells wide. Its end survives: that is where names of one kind differ."""
        label = self.of(request)
        return fit(label, cells, keep="tail" if cells_of(label) > cells else "head", ascii_only=ascii_only)
