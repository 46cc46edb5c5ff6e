"""What the GPU bench has found, taken in piece by piece and written to a JSON and a markdown file from the first on."""

from __future__ import annotations

import json
import math
import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

Row = dict[str, Any]
"""One line of a table: column name to text or number."""


@dataclass(frozen=True, slots=True)
class Check:
    """One comparison.

    Attributes:
        name: What was compared.
        error: Largest relative error of a row, or 0 and 1 for equal and different.
        limit: What it may be.
        note: Why there is no error to give.
    """

    name: str
    error: float
    limit: float
    note: str = ""

    @property
    def passed(self) -> bool:
        """Whether it is close enough; a NaN is not."""
        return not self.note and self.error <= self.limit

    def __str__(self) -> str:
        text = self.note or f"error {self.error:.1e}, limit {self.limit:.1e}"
        return f"{'ok  ' if self.passed else 'FAIL'} {self.name}: {text}"


@dataclass(frozen=True, slots=True)
class Measured:
    """A row of a table."""

    title: str
    row: Row

    def __str__(self) -> str:
        return f"{self.title}: " + ", ".join(f"{name} {_text(value)}" for name, value in self.row.items())


@dataclass(frozen=True, slots=True)
class Fact:
    """Something about the machine."""

    name: str
    value: object

    def __str__(self) -> str:
        return f"{self.name}: {self.value}"


@dataclass(frozen=True, slots=True)
class LeftOut:
    """What could not be had, and why."""

    text: str

    def __str__(self) -> str:
        return self.text


Finding = Check | Measured | Fact | LeftOut


class Report:
    """What has been found so far, within a time that is not to be exceeded.

    Args:
        seconds: After this a section is not begun, and a running one ends with the row it is at.
        tell: Told every finding as it comes.
        clock: Seconds from anywhere.

    Attributes:
        finished: Whether nothing is to come.
    """

    def __init__(
        self,
        seconds: float,
        tell: Callable[[Finding], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.machine: dict[str, Any] = {}
        self.checks: list[Check] = []
        self.tables: dict[str, list[Row]] = {}
        self.skipped: list[str] = []
        self.finished = False
        self._tell = tell
        self._clock = clock
        self._began = clock()
        self._limit = seconds

    @property
    def elapsed(self) -> float:
        """Seconds since it began."""
        return self._clock() - self._began

    @property
    def left(self) -> float:
        """Seconds that are left; negative where it is over."""
        return self._limit - self.elapsed

    @property
    def late(self) -> bool:
        """Whether the time is spent."""
        return self.left <= 0

    def take(self, finding: Finding) -> None:
        """Take one thing in."""
        match finding:
            case Check():
                self.checks.append(finding)
            case Measured(title, row):
                self.tables.setdefault(title, []).append(row)
            case Fact(name, value):
                self.machine[name] = value
            case LeftOut(text):
                self.skipped.append(text)
        self._tell(finding)

    def check(self, checks: Iterable[Check]) -> None:
        """Take in checks."""
        for check in checks:
            self.take(check)

    def section(self, title: str, rows: Iterable[Callable[[], Row | Iterable[Row]]]) -> None:
        """Fill a table row by row; a row that fails is named, and the rest goes on."""
        for i, make in enumerate(rows):
            if self.late:
                self.take(LeftOut(f"{title}: from row {i + 1} on, no time left"))
                return
            try:
                made = make()
                several: Iterable[Row] = [made] if isinstance(made, dict) else made
                for row in several:
                    self.take(Measured(title, row))
                    if several is made and self.left <= 0:
                        self.take(LeftOut(f"{title}: row {i + 1}, no time left for what may follow in it"))
                        break
            except Exception as error:  # one figure that cannot be had is no reason to lose the others
                self.take(LeftOut(f"{title}: row {i + 1}, {one_line(error)}"))

    @property
    def failed(self) -> list[Check]:
        """The checks that did not pass."""
        return [check for check in self.checks if not check.passed]

    @property
    def name(self) -> str:
        """Of its files: the card's."""
        return re.sub(r"[^a-z0-9]+", "-", str(self.machine.get("card", "unknown card")).lower()).strip("-")

    def write(self, folder: Path) -> None:
        """Write both files; whoever reads one at any time finds a whole one."""
        for suffix, text in ((".json", self.as_json()), (".md", self.as_markdown())):
            new = folder / f".{self.name}{suffix}.new"
            new.write_text(text, encoding="utf-8")
            new.replace(folder / f"{self.name}{suffix}")

    def as_json(self) -> str:
        """The report for programs; a number that is none is null."""
        checks = [
            {"name": c.name, "passed": c.passed, "error": c.error, "limit": c.limit, "note": c.note}
            for c in self.checks
        ]
        report = {
            "machine": self.machine,
            "checks": checks,
            "tables": self.tables,
            "skipped": self.skipped,
            "seconds": round(self.elapsed, 1),
            "finished": self.finished,
        }
        return json.dumps(_numbers(report), indent=1, allow_nan=False) + "\n"

    def as_markdown(self) -> str:
        """The report for people."""
        machine = ", ".join(f"{name} {value}" for name, value in self.machine.items() if name != "card")
        lines = [f"# GPU kernels on {self.machine.get('card', 'an unknown card')}", "", f"{machine}.", ""]
        lines += ["`python -m engine.bench.gpu`; medians; a row's error is its largest relative difference.", ""]
        if not self.finished:
            lines += [f"**Not finished**: what was found in the first {self.elapsed:.0f} s.", ""]
        passed = len(self.checks) - len(self.failed)
        lines += [f"## Checks: {passed} of {len(self.checks)} passed", ""]
        lines += _table(
            {
                "check": c.name,
                "result": "passed" if c.passed else "**failed**",
                "error": c.note or f"{c.error:.1e}",
                "limit": f"{c.limit:.1e}",
            }
            for c in self.checks
        )
        for title, rows in self.tables.items():
            lines += ["", f"## {title}", "", *_table(rows)]
        if self.skipped:
            lines += ["", "## Left out", "", *(f"- {line}" for line in self.skipped)]
        return "\n".join(lines) + "\n"


def one_line(error: BaseException) -> str:
    """An exception's kind and the first line of its text."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


def _numbers(value: Any) -> Any:
    """The same with None where a number is none that JSON has."""
    if isinstance(value, dict):
        return {key: _numbers(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_numbers(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _table(rows: Iterable[Row]) -> list[str]:
    rows = list(rows)
    if not rows:
        return []
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = ["| " + " | ".join(names) + " |", "| " + " | ".join("---" for _ in names) + " |"]
    lines += ["| " + " | ".join(_text(row.get(name, "")).replace("|", "\\|") for name in names) + " |" for row in rows]
    return lines


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return str(value)
