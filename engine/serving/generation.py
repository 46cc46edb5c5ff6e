"""One request, with its choices, on its way through the engine, seen from the listener's event loop."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from engine.request import FinishReason, RequestError, RequestOutput, SamplingParams
from engine.serving.errors import ApiError

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import Receive, Scope, Send

    from engine.engine import PagedEngine
    from engine.serving.protocol import AnswerForm

_CHECK_S = 1.0
"""How often a request that waits looks whether the engine still lives."""


class Generation:
    """Outputs of one request, handed over from the engine's thread.

    Attributes:
        finished: Whether every choice has had its last output.
    """

    def __init__(self, engine: PagedEngine, failure: Callable[[], str | None]) -> None:
        self.finished = False
        self._num_open = 1
        self._engine = engine
        self._failure = failure
        self._loop = asyncio.get_running_loop()
        self._outputs: asyncio.Queue[RequestOutput | None] = asyncio.Queue()
        self._request_id: int | None = None

    def start(self, prompt: str | list[int], params: SamplingParams, name: str) -> None:
        """Hand the request to the engine.

        Raises:
            ApiError: the engine cannot take it.
        """
        self._num_open = params.n
        try:
            self._request_id = self._engine.add_request(prompt, params, name=name, on_output=self._receive)
        except RequestError as error:
            raise ApiError(str(error)) from error

    async def next(self) -> RequestOutput:
        """The next output, of any choice.

        Raises:
            ApiError: the request was refused or failed, the engine ended, or the listener closes.
        """
        while True:
            try:
                async with asyncio.timeout(_CHECK_S):
                    output = await self._outputs.get()
            except TimeoutError:
                if (failure := self._failure()) is not None:
                    raise ApiError(f"the engine ended: {failure}", status=503, kind="server_error") from None
                continue
            if output is None:
                raise ApiError("the session ended before the answer did", status=503, kind="server_error")
            self._num_open -= output.finish_reason is not None
            self.finished = self._num_open == 0
            if output.finish_reason is FinishReason.REFUSED:
                raise ApiError(output.error or "the request was refused", code="refused")
            if output.outgrew_pool:
                return _cut_off(output)
            if output.finish_reason is FinishReason.ERROR:
                raise ApiError(output.error or "the request failed", status=500, kind="server_error")
            return output

    async def whole(self) -> list[tuple[str, RequestOutput]]:
        """All the text and the last output of each choice, in order."""
        pieces: dict[int, list[str]] = {}
        last: dict[int, RequestOutput] = {}
        while not self.finished:
            output = await self.next()
            pieces.setdefault(output.index, []).append(output.text)
            last[output.index] = output
        return [("".join(pieces[index]), last[index]) for index in sorted(last)]

    def close(self) -> None:
        """End it from this side: whoever waits for an output gets an error."""
        self._outputs.put_nowait(None)

    def abandon(self) -> None:
        """Nobody waits for it any more; the engine drops it unless it has ended."""
        if self._request_id is not None and not self.finished:
            self._engine.abort(self._request_id)

    def _receive(self, output: RequestOutput) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
            self._loop.call_soon_threadsafe(self._outputs.put_nowait, output)


def _cut_off(output: RequestOutput) -> RequestOutput:
    """What a request came to that the pool has no more room for: `length`, as at any other limit.

    Raises:
        ApiError: it came to nothing.
    """
    if not output.num_output_tokens:
        raise ApiError(output.error or "the pool has no room for the request", code="refused")
    return replace(output, finish_reason=FinishReason.LENGTH, error=None)


async def until_gone(receive: Receive) -> None:
    """Return when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(receive: Receive, work: asyncio.Task[Any]) -> bool:
    """Wait for `work`; False, with `work` cancelled, where the client leaves first."""
    gone = asyncio.ensure_future(until_gone(receive))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        return work.done()
    finally:
        for task in (gone, work):
            task.cancel()


class EventStream:
    """An ASGI answer: the rest of a generation as server-sent events."""

    def __init__(
        self,
        generation: Generation,
        form: AnswerForm,
        first: RequestOutput,
        *,
        include_usage: bool,
        done: Callable[[], None],
    ) -> None:
        self._generation = generation
        self._form = form
        self._first = first
        self._include_usage = include_usage
        self._done = done

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it, until it ends or the client leaves."""
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        try:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            writing = asyncio.ensure_future(self._write(send))
            if await unless_gone(receive, writing):
                writing.result()
        finally:
            self._generation.abandon()
            self._done()

    async def _write(self, send: Send) -> None:
        async def event(value: object) -> None:
            data = value if isinstance(value, bytes) else msgspec.json.encode(value)
            await send({"type": "http.response.body", "body": b"data: " + data + b"\n\n", "more_body": True})

        output = self._first
        opened: set[int] = set()
        last: dict[int, RequestOutput] = {}
        try:
            while True:
                if output.index not in opened:
                    opened.add(output.index)
                    if (opening := self._form.opening(output.index)) is not None:
                        await event(opening)
                if output.text or output.finish_reason is not None:
                    await event(self._form.chunk(output.text, output.finish_reason, output.index))
                if output.finish_reason is not None:
                    last[output.index] = output
                if self._generation.finished:
                    break
                output = await self._generation.next()
            if self._include_usage:
                await event(self._form.closing_usage([last[index] for index in sorted(last)]))
            await event(b"[DONE]")
        except ApiError as error:
            await event(error.body)
        await send({"type": "http.response.body", "body": b"", "more_body": False})
