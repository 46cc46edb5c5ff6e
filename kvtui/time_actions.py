"""Moving in time: the keys and commands that act on the source, the same in recordings and in live sessions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from textual.binding import Binding

from engine.trace.marks import ALL_KINDS, MarkKind
from kvtui.themed_app import ThemedApp

if TYPE_CHECKING:
    from textual.binding import BindingType

    from kvtui.sources.source import Source

SPEEDS = (1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0, 2.0, 4.0, 8.0, 16.0)

TIME_BINDINGS: list[BindingType] = [
    Binding("space", "toggle_pause", "Pause or resume", id="app.pause"),
    Binding("r", "toggle_play", "Play the past from here, or hold it", id="app.play"),
    Binding("right", "step(1)", "One step forward", id="app.step"),
    Binding("left", "step(-1)", "One step back", id="app.back"),
    Binding("shift+right", "step(10)", "Ten steps forward", id="app.step-ten"),
    Binding("shift+left", "step(-10)", "Ten steps back", id="app.back-ten"),
    Binding("home", "seek_start", "To the first step", id="app.start"),
    Binding("end,L", "seek_end", "To the last step; live: back to the present", id="app.end"),
    Binding("full_stop", "mark(1)", "To the next mark", id="app.next-mark"),
    Binding("comma", "mark(-1)", "To the mark before", id="app.previous-mark"),
    Binding("m", "mark_kind", "Marks: of all kinds or of one", id="app.mark-kind"),
    Binding("a", "window_start", "Window: play again and again from this step", id="app.window-start"),
    Binding("b", "window_end", "Window: play again and again to this step", id="app.window-end"),
    Binding("c", "window_clear", "Window: none", id="app.window-clear"),
    Binding("right_square_bracket", "faster", "Faster", id="app.faster"),
    Binding("left_square_bracket", "slower", "Slower", id="app.slower"),
]

_MARK_WORDS = {ALL_KINDS: "mark of any kind"} | {
    1 << kind: word
    for kind, word in {
        MarkKind.PREEMPTED: "preemption",
        MarkKind.EVICTED: "eviction",
        MarkKind.REFUSED: "refusal or failure",
        MarkKind.COPIED: "copy or swap",
        MarkKind.FINISHED: "finished request",
    }.items()
}
"""What the kinds that are shown are called, in the order in which a key goes through them."""


class TimeActions(ThemedApp):
    """What the keys do to the source.

    Attributes:
        source: What is paused, stepped and played.
        mark_kinds: The kinds of marks that are shown, as bits.
    """

    source: Source
    mark_kinds: int

    def hurry(self) -> None:
        """Show the answer to a key without waiting for the next frame."""
        raise NotImplementedError

    def action_toggle_pause(self) -> None:
        """Pause or resume: the engine where there is one, whatever is shown, or else the playing."""
        source = self.source
        held = source.engine_paused if source.live else source.paused
        (source.resume if held else source.pause)()
        self.hurry()

    def action_toggle_play(self) -> None:
        """Play the past from the step shown, or hold it; the engine has no part in it."""
        source = self.source
        if source.live and not source.looking_back and source.window is None:
            self._say("the present moves by itself: look back first (left, home, or a press on the bar)")
        else:
            (source.play if source.paused or (source.live and not source.looking_back) else source.hold)()
        self.hurry()

    def action_window_start(self) -> None:
        """Let the window begin at the step shown; it ends where it did, or at the newest step."""
        source, step = self.source, max(self.source.position, self.source.first)
        end = source.window[1] if source.window is not None else -1
        self._set_window(step, end if end > step else source.length - 1)

    def action_window_end(self) -> None:
        """Let the window end at the step shown; it begins where it did, or at the first step."""
        source, step = self.source, max(self.source.position, self.source.first)
        start = source.window[0] if source.window is not None else step
        self._set_window(start if start < step else source.first, step)

    def _set_window(self, start: int, end: int) -> None:
        self.source.set_window((start, end))
        self._say(f"window: steps {start:,} to {end:,}; r plays it again and again, c clears it")
        self.hurry()

    def action_window_clear(self) -> None:
        """Play on, not again and again."""
        self._say("no window" if self.source.window is None else "the window is cleared")
        self.source.set_window(None)
        self.hurry()

    def action_step(self, n: int) -> None:
        """Go n steps forward or backward; in a recording this pauses, a live engine steps from its newest step on."""
        source = self.source
        before = source.position
        source.step(n)
        if n < 0 and source.position == before and before == source.first - 1 and source.first > 0:
            self._say(f"history begins at step {source.first:,}: what was before was let go")
        self.hurry()

    def action_seek_start(self) -> None:
        """Go to before the first step."""
        if not self.source.live:
            self.source.pause()
        self.go_to(self.source.first - 1)

    def action_seek_end(self) -> None:
        """Go to the last step; live, the present again."""
        if not self.source.live:
            self.source.pause()
        self.source.follow()
        self.hurry()

    def go_to(self, step: int) -> None:
        """Show a step, in a recording or in the past of a live session."""
        self.source.seek(step)
        self.hurry()

    def action_mark(self, by: int) -> None:
        """Go to the next mark (1) or the one before (-1), of the kinds that are shown."""
        source, kinds = self.source, self.mark_kinds
        name = _MARK_WORDS.get(kinds, "mark")
        where = "after" if by > 0 else "before"
        try:
            step = source.marks.find(source.position, kinds, by > 0, first=source.first)
        except TimeoutError:
            self._say(f"still looking for {name} {where} step {source.position:,}: try again in a moment")
            return
        if step is None:
            self._say(f"no {name} {where} step {max(0, source.position):,}")
            return
        if not source.live:
            source.pause()
        self.go_to(step)

    def action_mark_kind(self) -> None:
        """Show the marks of the next kind alone, then those of all kinds again."""
        order = list(_MARK_WORDS)
        at = order.index(self.mark_kinds) if self.mark_kinds in order else -1
        self.show_marks(order[(at + 1) % len(order)])

    def show_marks(self, kinds: int) -> None:
        """Show the marks of some kinds (bits) on the position bar."""
        self.mark_kinds = kinds
        counts = self.source.marks.counts
        steps = "" if kinds == ALL_KINDS else f" in {counts[kinds.bit_length() - 1]:,} steps"
        if self.source.marks.known < 1:
            steps += " so far"
        self._say(f"marks: {_MARK_WORDS.get(kinds, 'some')}{steps}; , and . go to them")
        self.hurry()

    def action_faster(self) -> None:
        """One notch faster."""
        self._shift_speed(1)

    def action_slower(self) -> None:
        """One notch slower."""
        self._shift_speed(-1)

    def _shift_speed(self, by: int) -> None:
        speed = self.source.speed
        nearest = min(range(len(SPEEDS)), key=lambda i: abs(SPEEDS[i] - speed))
        self.source.set_speed(SPEEDS[max(0, min(len(SPEEDS) - 1, nearest + by))])
        self._say(f"speed {self.source.speed:g}{self.glyphs.times}")
        self.hurry()

    def _say(self, message: str) -> None:
        """Say what a key did, in the place of what the one before it did: several would cover the panels."""
        for said in [said for said in self._notifications if said.severity == "information"]:
            self._unnotify(said, refresh=False)
        self.notify(message, timeout=2, markup=False)
