"""The routes: `/v1/completions`, `/v1/chat/completions`, `/v1/models` and `/health`."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Route

from engine.request import RequestError
from engine.serving.errors import ApiError, json_response
from engine.serving.generation import EventStream, Generation, unless_gone
from engine.serving.guard import Guard, read_json_body
from engine.serving.protocol import AnswerForm, ChatBody, CompletionBody, GenerationBody, decode_body

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.requests import Request
    from starlette.types import ASGIApp

    from engine.engine import PagedEngine

_log = logging.getLogger(__name__)

MAX_OPEN_REQUESTS = 512
COMPLETION_MAX_TOKENS = 16
"""What the API gives a completion that does not say."""


class Api:
    """The listener's routes over one engine.

    Attributes:
        app: The ASGI application.
    """

    def __init__(
        self,
        engine: PagedEngine,
        *,
        token: str | None = None,
        loopback_only: bool = True,
        failure: Callable[[], str | None] = lambda: None,
    ) -> None:
        """Routes over `engine`.

        Args:
            engine: Takes the requests; something else steps it.
            token: Asked of every caller, where there is one.
            loopback_only: Answer only to requests whose Host is the loopback.
            failure: Why the engine has ended, None while it lives.
        """
        self._engine = engine
        self._failure = failure
        self._open: set[Generation] = set()
        self._created = int(time.time())
        routes = [
            Route("/health", self._health),
            Route("/v1/models", self._models),
            Route("/v1/models/{model:path}", self._model),
            Route("/v1/completions", self._completions, methods=["POST"]),
            Route("/v1/chat/completions", self._chat_completions, methods=["POST"]),
        ]
        starlette = Starlette(routes=routes, exception_handlers=_HANDLERS)
        self.app: ASGIApp = Guard(starlette, token=token, loopback_only=loopback_only)

    @property
    def num_open(self) -> int:
        """Requests that are being answered."""
        return len(self._open)

    def close(self) -> None:
        """End every open request; called in the event loop."""
        for generation in tuple(self._open):
            generation.close()

    async def _health(self, request: Request) -> Response:
        failure = self._failure()
        if failure is not None:
            return json_response({"status": "failed", "error": failure}, 503)
        return json_response({"status": "ok", "model": self._model_id, "open_requests": len(self._open)})

    async def _models(self, request: Request) -> Response:
        return json_response({"object": "list", "data": [self._card()]})

    async def _model(self, request: Request) -> Response:
        self._check_model(request.path_params["model"])
        return json_response(self._card())

    async def _completions(self, request: Request) -> Response | EventStream:
        body = decode_body(await read_json_body(request), CompletionBody)
        prompt = body.single_prompt(self._engine.header.model.vocab_size)
        if isinstance(prompt, str):
            prompt = await asyncio.to_thread(self._engine.codec.encode, prompt)
        return await self._answer(request, body, prompt, COMPLETION_MAX_TOKENS, chat=False)

    async def _chat_completions(self, request: Request) -> Response | EventStream:
        body = decode_body(await read_json_body(request), ChatBody)
        prompt = await asyncio.to_thread(self._engine.codec.encode_chat, body.conversation())
        header = self._engine.header
        room = min(header.max_model_len, header.num_blocks * header.block_size) - len(prompt)
        return await self._answer(request, body, prompt, max(1, room), chat=True)

    async def _answer(
        self, request: Request, body: GenerationBody, prompt: list[int], default_max_tokens: int, *, chat: bool
    ) -> Response | EventStream:
        self._check_model(body.model)
        if not prompt:
            raise ApiError("prompt: is empty; send at least one token", param="messages" if chat else "prompt")
        if len(self._open) >= MAX_OPEN_REQUESTS:
            raise ApiError(
                f"{MAX_OPEN_REQUESTS} requests are open already; wait for some to end",
                status=429,
                kind="rate_limit_error",
            )
        params = body.params(default_max_tokens)
        generation = Generation(self._engine, self._failure)
        self._open.add(generation)
        form = AnswerForm(
            f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}", self._model_id, int(time.time()), chat=chat
        )
        handed_over = False
        try:
            generation.start(prompt, params, body.name)
            # The first output is awaited even for a stream, so that a refusal is an error status and not an event.
            work: asyncio.Task[Any] = asyncio.ensure_future(generation.next() if body.stream else generation.whole())
            if not await unless_gone(request.receive, work):
                return Response(status_code=499)
            if body.stream:
                first = work.result()
                handed_over = True
                return EventStream(
                    generation,
                    form,
                    first,
                    include_usage=body.include_usage,
                    done=lambda: self._open.discard(generation),
                )
            return json_response(form.whole(work.result()))
        finally:
            if not handed_over:
                generation.abandon()
                self._open.discard(generation)

    @property
    def _model_id(self) -> str:
        return self._engine.header.model.name

    def _check_model(self, asked: str | None) -> None:
        if asked is not None and asked != self._model_id:
            raise ApiError(
                f"model {asked[:80]!r} is not served here; {self._model_id!r} is (GET /v1/models)",
                status=404,
                param="model",
                code="model_not_found",
            )

    def _card(self) -> dict[str, Any]:
        header = self._engine.header
        return {
            "id": self._model_id,
            "object": "model",
            "created": self._created,
            "owned_by": "kvtui",
            "max_model_len": header.max_model_len,
            "vocab_size": header.model.vocab_size,
            "kv_cache": {"block_size": header.block_size, "num_blocks": header.num_blocks},
        }


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    known = {404: "there is no such address", 405: "this address does not take that method"}
    message = f"{known.get(error.status_code, error.detail)}: {request.method} {request.url.path[:80]}"
    return ApiError(message, status=error.status_code).response()


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _request_error(request: Request, error: Exception) -> Response:
    return ApiError(str(error)).response()


async def _unexpected(request: Request, error: Exception) -> Response:
    # Here and not where it is raised on to: by then the caller has the answer, and may look for the reason in vain.
    _log.error("%s %s failed: %s: %s", request.method, request.url.path, type(error).__name__, error)
    return ApiError("the server failed at this request", status=500, kind="server_error").response()


_HANDLERS = {
    HTTPException: _http_error,
    ApiError: _api_error,
    RequestError: _request_error,
    Exception: _unexpected,
}
