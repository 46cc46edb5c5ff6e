"""Where a request's time went: queued, prefill, decode, preempted, computing again; together its whole latency.

From its arrival to its end, or to the last step while it lives, a request is in one of five parts at any time:

- queued: until the start of the step that first admits it;
- preempted: from the start of a step that takes its blocks to the start of the one that gives it others;
- recompute: from there until what it had lost is computed again (nothing where it was swapped in);
- prefill: the rest up to the end of the step that brings its first token;
- decode: the rest after it.

The first token's latency (TTFT) and the mean time of each token after it (TPOT) are as serving benchmarks count them:
from the arrival, and with all that held the request up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from engine.trace.request_state import UNKNOWN

if TYPE_CHECKING:
    from engine.trace.request_state import RequestState
    from engine.trace.state import PoolState

PARTS = ("queued", "prefill", "decode", "preempted", "recompute")
"""Names of the parts, in the order of `Latency.parts`."""


class Latency(NamedTuple):
    """The split of one request's time, in nanoseconds.

    Attributes:
        parts: By `PARTS`; they add up to `total_ns`.
        total_ns: From its arrival to its end, or to the end of the last step.
        first_token_ns: From its arrival to its first token; -1 before it.
        per_token_ns: Mean time of each token after the first one; -1 before the second.
        exact: False where the recording did not keep how long a preempted request was held up: prefill and decode have
            that time in them.
    """

    parts: tuple[int, int, int, int, int]
    total_ns: int
    first_token_ns: int
    per_token_ns: int
    exact: bool

    def share(self, part: int) -> float:
        """One part of the whole, 0 to 1."""
        return self.parts[part] / self.total_ns if self.total_ns else 0.0


def latency_of(request: RequestState, now_ns: int) -> Latency:
    """Split a request's time up to its end, or up to now.

    Args:
        request: As the fold has it.
        now_ns: End of the last step, since the trace began; see `end_of`.
    """
    arrived = request.arrival_ns
    end = max(request.finished_ns if request.status.is_finished else now_ns, arrived)
    # Choices of one prompt arrive in the step that runs them already.
    admitted = min(max(request.admitted_ns, arrived), end) if request.admitted_ns >= 0 else end
    first = min(max(request.first_token_ns, admitted), end) if request.first_token_ns >= 0 else -1
    exact = UNKNOWN not in (request.preempted_ns, request.recompute_ns, request.early_stall_ns)
    preempted = recompute = early = 0
    if exact:
        preempted, recompute, early = request.preempted_ns, request.recompute_ns, request.early_stall_ns
        if request.stalled_since_ns >= 0:
            preempted += max(0, end - request.stalled_since_ns)
        if request.recompute_since_ns >= 0:
            recompute += max(0, end - request.recompute_since_ns)
    if first < 0:
        early = preempted + recompute
    prefill = max(0, (first if first >= 0 else end) - admitted - early)
    decode = max(0, end - first - (preempted + recompute - early)) if first >= 0 else 0
    num_later = request.num_output_tokens - 1
    return Latency(
        (admitted - arrived, prefill, decode, preempted, recompute),
        end - arrived,
        first - arrived if first >= 0 else -1,
        (end - first) // num_later if first >= 0 and num_later > 0 else -1,
        exact,
    )


def end_of(state: PoolState) -> int:
    """The end of the last step applied, since the trace began; its start where only that is known."""
    step = state.last_step
    if step is None:
        return state.time_ns
    return step.start_ns + step.schedule_ns + step.execute_ns + step.sample_ns + step.update_ns
