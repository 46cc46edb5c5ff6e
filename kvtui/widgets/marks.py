"""What a request does, as a glyph and a word: the same in the table and on the timeline."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.request import RequestStatus
from engine.trace.events import Phase
from kvtui.history import Mark

if TYPE_CHECKING:
    from engine.trace.state import RequestState
    from kvtui.glyphs import Glyphs

_WORD_OF_STATUS = {
    RequestStatus.WAITING: "waiting",
    RequestStatus.PREEMPTED: "preempted",
    RequestStatus.FINISHED_STOPPED: "finished",
    RequestStatus.FINISHED_LENGTH: "at limit",
    RequestStatus.FINISHED_ABORTED: "aborted",
    RequestStatus.FINISHED_REFUSED: "refused",
    RequestStatus.FINISHED_ERROR: "failed",
}
_WORD_OF_PHASE = {Phase.PREFILL: "prefill", Phase.DECODE: "decode", Phase.RECOMPUTE: "recompute"}
_MARK_OF_END = {
    RequestStatus.FINISHED_STOPPED: Mark.ENDED,
    RequestStatus.FINISHED_LENGTH: Mark.ENDED,
    RequestStatus.FINISHED_ABORTED: Mark.ABORTED,
}
_MARK_OF_PHASE = {Phase.PREFILL: Mark.PREFILL, Phase.DECODE: Mark.DECODE, Phase.RECOMPUTE: Mark.RECOMPUTE}


def glyph_of(mark: int, glyphs: Glyphs) -> str:
    """The glyph of a `Mark`, one cell wide."""
    return mark_row(glyphs)[mark] if 0 <= mark < len(Mark) else " "


def mark_row(glyphs: Glyphs) -> str:
    """The glyphs of all marks, in the order of their codes."""
    end, bad, redone, aborted = ("|", "!", "X", "/") if glyphs.ascii else ("▌", "!", "◈", "/")
    running = glyphs.prefill + glyphs.decode + glyphs.recompute
    return " " + glyphs.dot + running + glyphs.evicted + end + bad + redone + aborted + "~"


def mark_of(request: RequestState) -> Mark:
    """What a request does now."""
    status = request.status
    if status == RequestStatus.RUNNING:
        return (
            _MARK_OF_PHASE.get(Phase(request.last_phase), Mark.DECODE)
            if request.last_phase in _PHASES
            else Mark.WAITING
        )
    if status == RequestStatus.WAITING:
        return Mark.WAITING
    if status == RequestStatus.PREEMPTED:
        return Mark.PREEMPTED
    return _MARK_OF_END.get(status, Mark.ENDED_BADLY)


def word_of(request: RequestState) -> str:
    """The word for what a request does now, at most nine letters."""
    if request.status == RequestStatus.RUNNING:
        return _WORD_OF_PHASE[Phase(request.last_phase)] if request.last_phase in _PHASES else "running"
    return _WORD_OF_STATUS[request.status]


_PHASES = frozenset(int(phase) for phase in Phase)
