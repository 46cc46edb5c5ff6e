"""Runs a workload on an engine in the same process: each session's next message waits for its last answer."""

from __future__ import annotations

import heapq
import itertools
import queue
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.request import FinishReason, RequestError, RequestOutput
from kvtui.workloads.workload import Session, SyntheticPrompt, Workload

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.engine import PagedEngine


@dataclass(slots=True, eq=False)
class Talk:
    """One session on its way: the answers so far, and the one being written."""

    session: Session
    answers: list[str] = field(default_factory=list)
    writing: list[str] = field(default_factory=list)
    num_open: int = 0
    failed: bool = False


class WorkloadDriver:
    """Adds a workload's requests to an engine when they are due.

    It owns no thread: whoever runs it calls `poll` before each step, or `run_in_thread` for a live session. Answers
    come in from the engine's thread through a queue.

    Attributes:
        num_sent: Requests added.
        num_done: Requests that ended.
        num_failed: Of those, how many were refused, aborted or ended with an error.
        held: Whether nothing is added until `toggle`, in a live session.
        name: The workload's.
    """

    def __init__(
        self,
        engine: PagedEngine,
        workload: Workload,
        *,
        repeat_after: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """A driver for `workload`.

        Args:
            engine: What the requests are added to.
            workload: Sessions in order of arrival.
            repeat_after: Start over this many seconds after the last answer; None runs the workload once.
            clock: Seconds, never going back.
        """
        self.num_sent = 0
        self.num_done = 0
        self.num_failed = 0
        self.held = False
        self.name = workload.name
        self._engine = engine
        self._workload = workload
        self._repeat_after = repeat_after
        self._clock = clock
        self._ended: queue.SimpleQueue[Talk] = queue.SimpleQueue()
        self._due: list[tuple[float, int, Talk]] = []
        self._order = itertools.count()
        self._open = 0
        self._asked: list[Talk] = []
        """Those that wait for an answer."""
        self._start_lap(clock())

    @property
    def done(self) -> bool:
        """Whether every session has had its last answer and none will start again."""
        return self._open == 0

    @property
    def num_asked(self) -> int:
        """Outputs that are waited for: never fewer than the engine has open for this driver."""
        return sum(talk.num_open for talk in self._asked)

    @property
    def state(self) -> str:
        """In words, for people."""
        if self.done:
            return f"{self.name} has ended"
        return f"{self.name} held" if self.held else f"{self.name} goes on"

    def welcome(self, key: str) -> str:
        """What to say of it when a screen opens: nothing, for who named the workload knows."""
        return ""

    def toggle(self) -> None:
        """Add nothing more to a live session, or go on; what was added is answered."""
        self.held = not self.held

    def poll(self) -> float | None:
        """Add what is due; seconds until the next request is, or None while all wait for answers."""
        self._take_in()
        return self._send_due(self._clock())

    def _take_in(self) -> None:
        """Go on with the sessions whose answers have come."""
        while True:
            try:
                talk = self._ended.get_nowait()
            except queue.Empty:
                return
            self._asked.remove(talk)
            self._advance(talk)

    def _send_due(self, now: float) -> float | None:
        while self._due and self._due[0][0] <= now:
            self._send(heapq.heappop(self._due)[2])
        return max(0.0, self._due[0][0] - now) if self._due else None

    def run_in_thread(self, stop: threading.Event, paused: Callable[[], bool] = lambda: False) -> threading.Thread:
        """Poll from a daemon thread until `stop` is set or all is done; nothing is added while paused or held."""

        def run() -> None:
            while not stop.is_set() and not self.done:
                wait = None if paused() or self.held else self.poll()
                stop.wait(0.05 if wait is None else min(0.05, wait))

        thread = threading.Thread(target=run, name="kvtui-workload", daemon=True)
        thread.start()
        return thread

    def _start_lap(self, now: float) -> None:
        for session in self._workload.sessions:
            heapq.heappush(self._due, (now + session.at, next(self._order), Talk(session)))
        self._open += len(self._workload.sessions)

    def _send(self, talk: Talk) -> None:
        name = talk.session.name
        if talk.session.follow_ups:
            name += f" turn {len(talk.answers) + 1}"
        talk.writing = []
        talk.num_open = talk.session.params.n
        self._asked.append(talk)
        self.num_sent += 1

        def receive(output: RequestOutput) -> None:
            if output.index == 0:
                # Of several choices a conversation goes on from the first.
                talk.writing.append(output.text)
            if output.finish_reason is not None:
                talk.failed |= output.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH)
                talk.num_open -= 1
                if talk.num_open == 0:
                    self._ended.put(talk)

        try:
            self._engine.add_request(self._prompt(talk), talk.session.params, name=name, on_output=receive)
        except RequestError:
            talk.failed = True
            self._ended.put(talk)

    def _prompt(self, talk: Talk) -> str | list[int]:
        prompt = talk.session.prompt
        if prompt is None:
            return self._engine.codec.encode_chat(talk.session.conversation(talk.answers))
        if isinstance(prompt, SyntheticPrompt):
            return prompt.token_ids(self._engine.header.model.vocab_size)
        return prompt if isinstance(prompt, str) else list(prompt)

    def _advance(self, talk: Talk) -> None:
        self.num_done += 1
        self.num_failed += talk.failed
        talk.answers.append("".join(talk.writing))
        now = self._clock()
        if not talk.failed and len(talk.answers) <= len(talk.session.follow_ups):
            heapq.heappush(self._due, (now + talk.session.pause, next(self._order), talk))
            return
        self._open -= 1
        if self._open == 0 and self._repeat_after is not None:
            self._start_lap(now + self._repeat_after)
