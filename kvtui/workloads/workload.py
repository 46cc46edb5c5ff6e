"""What a workload is: sessions that arrive at given times, each one request or a conversation of several."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from engine.request import SamplingParams

Arrival = Literal["poisson", "constant", "burst"]
"""How sessions are spread over time when a rate is asked for."""

TRACE_BLOCK_TOKENS = 512
"""Tokens of a prompt that one hash id of a Mooncake trace stands for."""


class WorkloadError(ValueError):
    """A workload that cannot be run. Its text is one line that names the file, the line and the field."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation.

    Attributes:
        role: `system`, `user` or `assistant`.
        content: Its text.
    """

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class SyntheticPrompt:
    """A prompt known by its length alone, made of arbitrary tokens when it is sent.

    Attributes:
        num_tokens: How long it is.
        block_ids: One for each `block_tokens` tokens; equal ids in equal places give equal tokens, so that prefixes are
            shared as they were in the traced service.
        block_tokens: Tokens of one block.
        salt: Keeps prompts without block ids apart from each other.
    """

    num_tokens: int
    block_ids: tuple[int, ...] = ()
    block_tokens: int = TRACE_BLOCK_TOKENS
    salt: int = 0

    def token_ids(self, vocab_size: int) -> list[int]:
        """The prompt for a model of this vocabulary: the same every time, special tokens (the low ids) left out."""
        low = min(100, vocab_size // 2)
        ids: list[int] = []
        block = 0
        while len(ids) < self.num_tokens:
            known = block < len(self.block_ids)
            key = f"block {self.block_ids[block]}" if known else f"prompt {self.salt} block {block}"
            source = random.Random(key)
            ids.extend(source.choices(range(low, vocab_size), k=min(self.block_tokens, self.num_tokens - len(ids))))
            block += 1
        return ids


@dataclass(frozen=True, slots=True)
class Session:
    """One caller: a prompt to continue, or a conversation whose next message waits for the answer to the last.

    Attributes:
        name: Shown on screen.
        at: Seconds after the workload's start.
        prompt: Text, token ids or a length to continue; None for a conversation.
        messages: The conversation up to where the model answers first.
        follow_ups: What the user says next, one message after each answer.
        pause: Seconds from an answer to the next message.
        params: How each answer is sampled.
    """

    name: str
    at: float
    params: SamplingParams
    prompt: str | tuple[int, ...] | SyntheticPrompt | None = None
    messages: tuple[Message, ...] = ()
    follow_ups: tuple[str, ...] = ()
    pause: float = 0.0

    @property
    def num_requests(self) -> int:
        """Requests that this session sends in all."""
        return 1 + len(self.follow_ups)

    def conversation(self, answers: list[str]) -> list[dict[str, str]]:
        """The messages to send once these answers have come."""
        sent = [{"role": m.role, "content": m.content} for m in self.messages]
        for answer, follow_up in zip(answers, self.follow_ups, strict=False):
            sent.append({"role": "assistant", "content": answer})
            sent.append({"role": "user", "content": follow_up})
        return sent


@dataclass(frozen=True, slots=True)
class Workload:
    """Sessions in order of arrival.

    Attributes:
        name: Of the built-in one, or the file's.
        title: One line for people.
        sessions: Sorted by `at`.
        notes: What was changed to make it run here (lengths clipped, ...), one line each.
    """

    name: str
    title: str
    sessions: tuple[Session, ...]
    notes: tuple[str, ...] = field(default=())

    @property
    def num_requests(self) -> int:
        """Requests of all sessions."""
        return sum(session.num_requests for session in self.sessions)

    def take(self, num_sessions: int) -> Workload:
        """The first sessions; where more are asked for than there are, it starts over under new names."""
        if not self.sessions:
            return self
        taken: list[Session] = []
        span = self.sessions[-1].at + 1.0
        for index in range(num_sessions):
            lap, place = divmod(index, len(self.sessions))
            session = self.sessions[place]
            if lap:
                session = replace(session, name=f"{session.name}/{lap + 1}", at=session.at + lap * span)
            taken.append(session)
        return replace(self, sessions=tuple(taken))

    def arriving(self, arrival: Arrival, rate: float, seed: int = 0) -> Workload:
        """The same sessions at new times: `rate` sessions a second in the mean, or all at once (`burst`).

        A Poisson process has independent, exponentially distributed gaps.
        """
        if arrival != "burst" and not rate > 0:
            raise WorkloadError(f"a rate of {rate} is not possible: ask for more than 0 sessions a second")
        source = random.Random(seed)
        at, sessions = 0.0, []
        for session in self.sessions:
            sessions.append(replace(session, at=at))
            if arrival == "poisson":
                at += source.expovariate(rate)
            elif arrival == "constant":
                at += 1.0 / rate
        return replace(self, sessions=tuple(sessions))

    def seeded(self, seed: int) -> Workload:
        """Every sampled session gets a seed of its own made from this one, unless it has one."""
        sessions = tuple(
            session
            if session.params.seed is not None or session.params.temperature == 0
            else replace(session, params=replace(session.params, seed=random.Random(f"{seed} {index}").getrandbits(31)))
            for index, session in enumerate(self.sessions)
        )
        return replace(self, sessions=sessions)

    def fitted(
        self, max_model_len: int | None = None, max_tokens: int | None = None, length_scale: float = 1.0
    ) -> Workload:
        """Made to fit: outputs of at most `max_tokens`, and traced lengths scaled and then clipped to the model.

        Only prompts of token ids or of a bare length are cut, at their end, so that shared prefixes stay shared; text
        is sent as it is, and refused by the engine where it is too long.
        """
        if not length_scale > 0:
            raise WorkloadError(f"a length scale of {length_scale} is not possible: use more than 0")
        sessions, clipped = [], 0
        for session in self.sessions:
            wanted, prompt = session.params.max_tokens, session.prompt
            if isinstance(prompt, SyntheticPrompt) and length_scale != 1.0:
                wanted = max(1, round(wanted * length_scale))
                prompt = replace(
                    prompt,
                    num_tokens=max(1, round(prompt.num_tokens * length_scale)),
                    block_tokens=max(1, round(prompt.block_tokens * length_scale)),
                )
            if max_tokens is not None:
                wanted = min(wanted, max_tokens)
            if max_model_len is not None and isinstance(prompt, tuple | SyntheticPrompt):
                length = prompt.num_tokens if isinstance(prompt, SyntheticPrompt) else len(prompt)
                if length + wanted > max_model_len:
                    clipped += 1
                    wanted = max(1, min(wanted, max_model_len // 4))
                    length = max(1, min(length, max_model_len - wanted))
                    prompt = (
                        replace(prompt, num_tokens=length) if isinstance(prompt, SyntheticPrompt) else prompt[:length]
                    )
            sessions.append(replace(session, prompt=prompt, params=replace(session.params, max_tokens=wanted)))
        notes = self.notes
        if clipped:
            what = f"{clipped:,} of {len(sessions):,} requests of {self.name} were cut"
            notes += (
                f"{what} to the {max_model_len:,} tokens that the model takes (--length-scale F shrinks all alike)",
            )
        return replace(self, sessions=tuple(sessions), notes=notes)
