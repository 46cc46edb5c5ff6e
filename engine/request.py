"""A request on its way through the engine: what was asked for, how far it is, and how it ended."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field

MAX_CHOICES = 128
"""Outputs of one request at most, as in the OpenAI API."""


class RequestError(ValueError):
    """A request that cannot be served. Its text says what was wrong with it and what would be accepted."""


class RequestStatus(enum.IntEnum):
    """Where a request is. Everything from FINISHED_STOPPED on has ended."""

    WAITING = 0
    RUNNING = 1
    PREEMPTED = 2
    FINISHED_STOPPED = 3
    FINISHED_LENGTH = 4
    FINISHED_ABORTED = 5
    FINISHED_REFUSED = 6
    FINISHED_ERROR = 7

    @property
    def is_finished(self) -> bool:
        """Whether the request has ended, well or badly."""
        return self >= RequestStatus.FINISHED_STOPPED


class FinishReason(enum.StrEnum):
    """Why a request ended; `stop` and `length` are the OpenAI API's words."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    REFUSED = "refused"
    ERROR = "error"

    @property
    def status(self) -> RequestStatus:
        """The status of a request that ended for this reason."""
        return _STATUS_OF_REASON[self]


_STATUS_OF_REASON = {
    FinishReason.STOP: RequestStatus.FINISHED_STOPPED,
    FinishReason.LENGTH: RequestStatus.FINISHED_LENGTH,
    FinishReason.ABORT: RequestStatus.FINISHED_ABORTED,
    FinishReason.REFUSED: RequestStatus.FINISHED_REFUSED,
    FinishReason.ERROR: RequestStatus.FINISHED_ERROR,
}


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen and when to stop.

    Attributes:
        max_tokens: Most tokens to generate.
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_k: Keep the k most likely tokens; 0 keeps all.
        top_p: Keep the smallest set of tokens whose probabilities sum to at least p (Holtzman et al., 2020).
        min_p: Keep tokens at least this fraction as likely as the likeliest.
        seed: Of this request alone; equal seeds give equal outputs whatever else is in the batch.
        stop: Strings that end the output; they are not part of it.
        stop_token_ids: Tokens that end the output.
        ignore_eos: Generate on past the model's end-of-sequence token.
        cache_salt: Requests share cached prefixes only with requests of an equal salt.
        n: How many outputs to generate. The prompt is computed once, and its blocks are shared by all of them. Choice
            k of a request with a seed is sampled with seed + k.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    cache_salt: str | None = None
    n: int = 1

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise RequestError(f"max_tokens {self.max_tokens} is not possible: ask for at least 1")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise RequestError(f"temperature {self.temperature} is not possible: use 0 (greedy) or more")
        if self.top_k < 0:
            raise RequestError(f"top_k {self.top_k} is not possible: use 0 (all) or more")
        if not 0 < self.top_p <= 1:
            raise RequestError(f"top_p {self.top_p} is not possible: use more than 0 and at most 1")
        if not 0 <= self.min_p <= 1:
            raise RequestError(f"min_p {self.min_p} is not possible: use 0 to 1")
        if any(not s for s in self.stop):
            raise RequestError("an empty stop string is not possible: it would end every output at once")
        if not 1 <= self.n <= MAX_CHOICES:
            raise RequestError(f"n {self.n} is not possible: ask for 1 to {MAX_CHOICES} outputs")


@dataclass(slots=True, eq=False)
class Request:
    """One sequence of tokens and how far its keys and values are computed.

    Known tokens are the prompt and what was generated; computed tokens are those whose keys and values are in the
    cache. A running request has at least one known token that is not computed yet.

    Attributes:
        request_id: Small integer, unique in the engine's life, in order of arrival; what the trace calls `request`.
        name: The caller's own name for it, shown and returned; need not be unique.
        prompt_token_ids: Never empty.
        params: How to sample and when to stop.
        arrival_ns: On the engine's monotonic clock.
        parent: The request that it was forked from.
        index: Which of the choices that were asked for together it is.
        forks: Those other choices, up to when the prompt is computed and they are forked from this one.
    """

    request_id: int
    name: str
    prompt_token_ids: list[int]
    params: SamplingParams
    arrival_ns: int = 0
    parent: int | None = None
    index: int = 0
    forks: list[Request] = field(default_factory=list)
    status: RequestStatus = RequestStatus.WAITING
    output_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    """Tokens that the first admission found in the prefix cache."""
    num_preemptions: int = 0
    finish_reason: FinishReason | None = None
    error: str | None = None
    outgrew_pool: bool = False

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and output."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    def token_at(self, position: int) -> int:
        """The known token at a position, prompt and output counted through."""
        n = len(self.prompt_token_ids)
        return self.prompt_token_ids[position] if position < n else self.output_token_ids[position - n]

    def tokens(self, start: int, stop: int) -> list[int]:
        """The known tokens at positions start to stop - 1."""
        n = len(self.prompt_token_ids)
        if stop <= n:
            return self.prompt_token_ids[start:stop]
        if start >= n:
            return self.output_token_ids[start - n : stop - n]
        return self.prompt_token_ids[start:] + self.output_token_ids[: stop - n]


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What one step brought for one request; handed to the caller once, never again.

    Attributes:
        request_id: The engine's number for it; for each of several choices the one that `add_request` returned.
        text: New text, safe to show: no half character, nothing that may yet turn out to be a stop string.
        token_ids: New tokens (may come without text, and text may come later).
        finish_reason: Set on the last output of a request.
        error: One line, where the reason is `refused` or `error`.
        num_prompt_tokens: For the usage report.
        num_output_tokens: Generated so far.
        num_cached_tokens: Prompt tokens that came from the prefix cache.
        index: Which of the n choices it belongs to, 0 to n - 1.
        outgrew_pool: The error is that the whole pool has no room for its next token; what it has is right.
    """

    request_id: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    error: str | None
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    index: int = 0
    outgrew_pool: bool = False
