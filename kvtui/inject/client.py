"""One session's requests over HTTP, streamed and timed. Speaks to any server of the OpenAI form."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httpx
import msgspec

from kvtui.own_command import own_command
from kvtui.workloads.workload import SyntheticPrompt

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtui.workloads.workload import Session

DEFAULT_URL = "http://127.0.0.1:8077"
_CONNECT_S = 5.0
_FIRST_ANSWER_S = 60.0
"""A session listens before its model is loaded, and answers after."""
_MAX_EVENT_BYTES = 2**20
_FALLBACK_VOCABULARY = 32_000
"""For a server that does not tell the size of its vocabulary."""


class ServerError(Exception):
    """A server that cannot be used: not there, not of this kind, or not open to us. One line that says what to do."""


@dataclass(frozen=True, slots=True)
class Server:
    """What a server says about itself.

    Attributes:
        model: Served model's id.
        vocab_size: Of its tokenizer.
        max_model_len: Longest request in tokens, where it is told.
    """

    model: str
    vocab_size: int
    max_model_len: int | None


@dataclass(slots=True)
class Outcome:
    """One request as its caller saw it; times in seconds on one clock.

    Attributes:
        name: The request's name.
        sent: When it was sent.
        first: When the first text came.
        last: When the answer ended.
        prompt_tokens: As the server counts.
        cached_tokens: Of those, found in the prefix cache.
        output_tokens: As the server counts.
        error: Why it failed; None where it did not.
    """

    name: str
    sent: float
    first: float | None = None
    last: float | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None
    text: list[str] = field(default_factory=list)

    @property
    def ttft(self) -> float | None:
        """Time to the first token, in seconds."""
        return None if self.first is None else self.first - self.sent

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first, in seconds."""
        if self.first is None or self.last is None or self.output_tokens < 2:
            return None
        return (self.last - self.first) / (self.output_tokens - 1)

    @property
    def latency(self) -> float | None:
        """From sending to the end of the answer, in seconds."""
        return None if self.last is None or self.error is not None else self.last - self.sent


class Client:
    """Sends requests to one server. Use it as an async context manager."""

    def __init__(self, url: str, token: str | None = None, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        headers = {"authorization": f"Bearer {token}"} if token else {}
        # No time limit on reading: a request may wait long for its turn, and the server says when it gives up.
        self._http = httpx.AsyncClient(
            base_url=self.url,
            headers=headers,
            timeout=httpx.Timeout(None, connect=_CONNECT_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
            transport=transport,
            trust_env=False,
        )

    async def __aenter__(self) -> Client:
        """The client."""
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Close its connections."""
        await self._http.aclose()

    async def server(self) -> Server:
        """What the server is.

        Raises:
            ServerError: it is not there, wants a token, or is not of the OpenAI form.
        """
        try:
            answer = await self._http.get("/v1/models", timeout=_FIRST_ANSWER_S)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise ServerError(
                f"nothing answers at {self.url}: start a session in another terminal with `{own_command()} run`, "
                "or name its address with --url"
            ) from error
        except httpx.ReadTimeout as error:
            raise ServerError(
                f"{self.url} takes connections and does not answer: is it still loading its model? Try again"
            ) from error
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            raise ServerError(f"{self.url} cannot be used: {error or type(error).__name__}") from error
        if answer.status_code in (401, 403):
            raise ServerError(f"{self.url} refuses: {_error_text(answer.content)} (--token TOKEN, or KVTUI_TOKEN)")
        try:
            card = msgspec.json.decode(answer.content)["data"][0]
            return Server(str(card["id"]), int(card.get("vocab_size", _FALLBACK_VOCABULARY)), card.get("max_model_len"))
        except (msgspec.DecodeError, KeyError, IndexError, TypeError, ValueError) as error:
            raise ServerError(
                f"{self.url} is not a server of the OpenAI form: /v1/models answered {answer.status_code}"
            ) from error

    async def ask(
        self,
        session: Session,
        answers: list[str],
        server: Server,
        on_text: Callable[[str], None] = lambda text: None,
    ) -> Outcome:
        """Send a session's next request and read its answer to the end. Never raises for what the server does."""
        path, body = request_body(session, answers, server)
        outcome = Outcome(body["metadata"]["name"], time.monotonic())
        try:
            async with self._http.stream("POST", path, json=body) as answer:
                if answer.status_code != 200:
                    outcome.error = _error_text(await answer.aread()) or f"HTTP status {answer.status_code}"
                else:
                    await _read_events(answer, outcome, on_text)
        except httpx.HTTPError as error:
            outcome.error = f"connection lost: {error or type(error).__name__}"
        outcome.last = time.monotonic()
        return outcome


def request_body(session: Session, answers: list[str], server: Server) -> tuple[str, dict[str, Any]]:
    """Where a session's next request goes, and its body."""
    params = session.params
    name = session.name + (f" turn {len(answers) + 1}" if session.follow_ups else "")
    body: dict[str, Any] = {
        "model": server.model,
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "stream": True,
        "stream_options": {"include_usage": True},
        "metadata": {"name": name},
    }
    extras = {
        "top_k": params.top_k,
        "min_p": params.min_p,
        "seed": params.seed,
        "stop": list(params.stop),
        "ignore_eos": params.ignore_eos,
        "cache_salt": params.cache_salt,
        "n": params.n if params.n > 1 else None,
    }
    body |= {key: value for key, value in extras.items() if value}
    prompt = session.prompt
    if prompt is None:
        return "/v1/chat/completions", body | {"messages": session.conversation(answers)}
    if isinstance(prompt, SyntheticPrompt):
        return "/v1/completions", body | {"prompt": prompt.token_ids(server.vocab_size)}
    return "/v1/completions", body | {"prompt": prompt if isinstance(prompt, str) else list(prompt)}


async def _read_events(answer: httpx.Response, outcome: Outcome, on_text: Callable[[str], None]) -> None:
    ended = False
    async for line in answer.aiter_lines():
        if not line.startswith("data:") or len(line) > _MAX_EVENT_BYTES:
            continue
        data = line[5:].strip()
        if data == "[DONE]":
            ended = True
            break
        try:
            event = msgspec.json.decode(data)
        except msgspec.DecodeError:
            outcome.error = "the server sent an event that is not JSON"
            return
        if error := event.get("error"):
            outcome.error = str(error.get("message", error) if isinstance(error, dict) else error)
            return
        for choice in event.get("choices", ()):
            text = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
            if text:
                if outcome.first is None:
                    outcome.first = time.monotonic()
                # Of several choices a conversation goes on from the first.
                if not choice.get("index"):
                    outcome.text.append(text)
                    on_text(text)
        if counts := event.get("usage"):
            outcome.prompt_tokens = counts.get("prompt_tokens", 0)
            outcome.output_tokens = counts.get("completion_tokens", 0)
            outcome.cached_tokens = (counts.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    if not ended:
        outcome.error = "the server ended the answer early"


def _error_text(body: bytes) -> str:
    try:
        return str(msgspec.json.decode(body)["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return body[:200].decode("utf-8", "replace")
