"""A lane's batches over the race's time: how many were computed together, and below it a row for each request."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvtui.widgets.batch_timeline import BatchTimeline, draw_request
from kvtui.widgets.line import Line

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from textual.strip import Strip

    from kvtui.race.playing import LanePlayer
    from kvtui.race.race_time import RaceTime
    from kvtui.view import View

_ROOMY = 100
"""Cells from which on a title has whole words."""


class LaneTimeline(BatchTimeline):
    """One lane; its title has its figures up to now, and once it is done those of all of it.

    Attributes:
        player: The lane.
        most: Requests in a batch that fill the curve of the batch: the same in every lane, so that they compare.
        against: The slowest lane up to now and how many times its tokens a second this one makes; None where there is
            nothing to compare yet.
    """

    DEFAULT_CSS = """
    LaneTimeline { height: 1fr; border: round $kv-border; border-title-color: $foreground;
        border-title-background: $background; }
    LaneTimeline:focus { border: round $kv-focus; }
    LaneTimeline.-ascii { border: ascii $kv-border; }
    LaneTimeline.-ascii:focus { border: ascii $kv-focus; }
    """

    def __init__(self, player: LanePlayer, time: RaceTime, most: int) -> None:
        super().__init__(id=f"lane-{player.lane.policy}")
        self.player = player
        self.most = most
        self.against: tuple[str, float] | None = None
        self._time = time

    # -- rows ----------------------------------------------------------------------------------------------------

    def rows(self, view: View, width: int, height: int) -> Sequence[Hashable]:
        """The curve of the batch, and the requests that there is room for."""
        axis, now = self._time.axis(width), self._time.now
        there = self.player.marks_in_time.requests(axis.start, now)
        self._above = 1
        room = max(0, height - self._above)
        self._choose(view, there, room)
        self._name_figures(view, len(there) - len(self._shown))
        if axis.columns < 1:
            return []
        edges = axis.edges
        passed = edges[:-1] < now
        levels = len(view.glyphs.history) - 1
        means = self.player.batch.mean(np.minimum(edges, max(now, axis.start)))
        batch = np.ceil(np.where(passed, means, 0.0) / max(1, self.most) * levels - 1e-9).clip(0, levels)
        ended = axis.column_of(self.player.result.seconds) + 1 if self.player.done else -1
        keys: list[Hashable] = [("batch", batch.astype(np.uint8).tobytes(), ended, self._time.label)]
        for request, live in self._shown:
            marks = self.player.marks_in_time.columns(request, edges, now).tobytes()
            keys.append((request, live, view.selected_request, marks, view.names.of(request), self._time.label))
        return keys

    def _choose(self, view: View, there: list[tuple[int, bool]], room: int) -> None:
        """As in every batch timeline; once the lane is done from the first request on, the same in every lane."""
        super()._choose(view, there, room)
        if self._offset is None and self.player.done:
            self._shown = there[:room]

    def scroll_rows(self, rows: int) -> None:
        """Move the window; see `BatchTimeline.scroll_rows`."""
        if self._offset is None and self.player.done:
            self._offset = 0
        super().scroll_rows(rows)

    def _name_figures(self, view: View, hidden: int) -> None:
        moment, glyphs, done = self.player.moment, view.glyphs, self.player.done
        roomy = self.outer_size.width >= _ROOMY
        batch = f"{'average' if roomy else 'avg'} batch {moment.average_batch:.2f}"
        words = [
            f"{self.player.lane.policy} {glyphs.horizontal} {batch}{' so far' if roomy and not done else ''}",
            f"{moment.tokens_per_s:,.1f} {'tokens/s' if roomy else 'tok/s'}",
        ]
        if self.against is not None:
            slowest, times = self.against
            itself = slowest == self.player.lane.policy
            words.append("the slowest" if itself else f"{times:.2f}{glyphs.times} {slowest}")
        if done:
            words.append(f"done {'after ' if roomy else ''}{self.player.result.seconds:,.1f} s")
        words.append(f"{moment.steps:,} steps")
        if hidden > 0:
            words.append(f"{hidden:,} more requests: {'j k' if self.has_focus else 'tab here, then j k'}")
        self.set_title(*words, separator=f" {glyphs.dot} ")

    # -- drawing -------------------------------------------------------------------------------------------------

    def draw(self, view: View, key: Hashable, width: int) -> Strip:
        """The curve, or one request."""
        assert isinstance(key, tuple)
        if key[0] != "batch":
            return draw_request(view, key[0], key[1], key[3], key[5], width)
        _, levels, ended, label = key
        palette, glyphs = view.palette, view.glyphs
        line = Line(width, palette.blank).add("batch".rjust(label), palette.muted).gap()
        shown = levels if ended < 0 else levels[:ended]
        line.add("".join(glyphs.history[level] for level in shown), palette.accent)
        words = f" {glyphs.vertical} done after {self.player.result.seconds:,.1f} s"
        if ended >= 0 and line.room > len(words):
            line.add(words, palette.good)
        return line.strip()
