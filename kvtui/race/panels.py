"""The parts of the race's screen: a timeline for each lane, the time, and the keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtui.widgets.batch_timeline import BatchTimeline
from kvtui.widgets.line import Line
from kvtui.widgets.line_panel import LinePanel

if TYPE_CHECKING:
    from textual.strip import Strip

    from kvtui.race.playing import LanePlayer
    from kvtui.view import View

_KEYS = (
    ("space", "pause"),
    ("{left} {right}", "step"),
    ("home end", "start, finish"),
    ("[ ]", "speed"),
    ("?", "help"),
    ("tab", "lanes"),
    ("t", "theme"),
    ("q", "quit"),
)


class LaneTimeline(BatchTimeline):
    """One lane's batches; its title says how far it is."""

    DEFAULT_CSS = """
    LaneTimeline { height: 1fr; border: round $kv-border; border-title-color: $foreground;
        border-title-background: $background; }
    LaneTimeline:focus { border: round $kv-focus; }
    LaneTimeline.-ascii { border: ascii $kv-border; }
    LaneTimeline.-ascii:focus { border: ascii $kv-focus; }
    """

    def __init__(self, player: LanePlayer) -> None:
        super().__init__(id=f"lane-{player.lane.policy}")
        self.player = player

    def set_title(self, *parts: str, separator: str = " ") -> None:
        """Say how far the lane is; what the timeline would say about itself has no place here."""
        if self.view is None:
            return
        moment, glyphs, result = self.player.moment, self.view.glyphs, self.player.result
        words = [
            f"{self.player.lane.policy} {glyphs.horizontal} average batch {moment.average_batch:.2f}",
            f"{moment.tokens_per_s:,.1f} tokens/s",
            f"{moment.steps:,} steps",
        ]
        if self.player.done:
            words.insert(2, f"done after {result.seconds:,.1f} s")
        super().set_title(*words, separator=f" {glyphs.dot} ")


class RaceBar(LinePanel, can_focus=False):
    """The time of the race; once all are done, who made how much of it."""

    DEFAULT_CSS = """
    RaceBar { height: 1; }
    """

    def __init__(self) -> None:
        super().__init__(id="race-bar")
        self.facts: tuple[float, float, float, bool, str] = (0.0, 0.0, 1.0, True, "")

    def rows(self, view: View, width: int, height: int) -> list[tuple[float, float, float, bool, str]]:
        """The one line there is."""
        return [self.facts]

    def draw(self, view: View, key: tuple[float, float, float, bool, str], width: int) -> Strip:  # type: ignore[override]
        """The time, a bar and, at the end, the verdict."""
        seconds, total, speed, paused, verdict = key
        palette, glyphs = view.palette, view.glyphs
        line = Line(width, palette.blank).gap()
        line.add(glyphs.paused if paused else glyphs.playing, palette.accent).gap()
        line.add(f"{seconds:,.1f} / {total:,.1f} s", palette.strong).gap()
        line.add(f"{speed:g}{glyphs.times}", palette.muted).gap(2)
        room = line.room - (len(verdict) + 3 if verdict else 1)
        if room >= 10:
            done = round(room * seconds / total) if total > 0 else 0
            line.add(glyphs.bar * done, palette.accent).add(glyphs.bar_empty * (room - done), palette.faint)
        if verdict:
            line.gap(2).add(verdict, palette.strong)
        return line.strip()


class RaceFooter(LinePanel, can_focus=False):
    """The keys."""

    DEFAULT_CSS = """
    RaceFooter { height: 1; }
    """

    def rows(self, view: View, width: int, height: int) -> list[tuple[str, ...]]:
        """The one line there is."""
        return [("keys",)]

    def draw(self, view: View, key: tuple[str, ...], width: int) -> Strip:  # type: ignore[override]
        """Keys stand out, words explain; the way out stays where there is too little room."""
        palette, glyphs = view.palette, view.glyphs
        hints = [(k.format(left=glyphs.arrow_left, right=glyphs.arrow_right), word) for k, word in _KEYS]
        while len(hints) > 1 and sum(len(k) + len(word) + 4 for k, word in hints) > width:
            del hints[-2]
        line = Line(width, palette.raised).add(" ", palette.raised)
        for shown, word in hints:
            line.add(shown, palette.accent + palette.raised)
            line.add(f" {word}   ", palette.muted + palette.raised)
        return line.strip()
