"""What stands before every route: who may speak to this listener, and how much it may say."""

from __future__ import annotations

import asyncio
import secrets
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from starlette.requests import ClientDisconnect

from engine.serving.errors import ApiError

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

MAX_BODY_BYTES = 4 * 2**20
BODY_TIMEOUT_S = 30.0
LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})


class Guard:
    """ASGI middleware: checks Host, Origin and token, and turns any error into one without a traceback.

    A page in a browser can reach a loopback port by pointing a name of its own at 127.0.0.1 (DNS rebinding), or by
    sending a form there. The first is seen by its Host header, the second by its Origin and by a body that is not
    JSON.
    """

    def __init__(self, app: ASGIApp, *, token: str | None, loopback_only: bool) -> None:
        self._app = app
        self._token = token
        self._loopback_only = loopback_only

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            return
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            self._check(scope)
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        try:
            await self._app(scope, receive, watched)
        except ApiError as error:
            if not started:
                await error.response()(scope, receive, send)
        except ClientDisconnect:
            return
        except Exception:
            # Logged and, where nothing had been sent, answered by the application, which raises it on all the same.
            return

    def _check(self, scope: Scope) -> None:
        headers = {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}
        if self._loopback_only:
            host = _host_of("//" + headers.get(b"host", ""))
            if host not in LOOPBACK_NAMES:
                raise ApiError("this listener answers to localhost and 127.0.0.1 alone (Host header)", status=403)
        origin = headers.get(b"origin")
        if origin is not None and _host_of(origin) not in LOOPBACK_NAMES:
            raise ApiError("requests from other web pages are not served (Origin header)", status=403)
        if self._token is not None and scope["path"] != "/health":
            scheme, _, given = headers.get(b"authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not secrets.compare_digest(
                given.strip().encode("latin-1"), self._token.encode()
            ):
                raise ApiError(
                    "a token is needed: send the header Authorization: Bearer TOKEN", status=401, code="invalid_api_key"
                )


def _host_of(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None


async def read_json_body(request: Request) -> bytes:
    """The body, bounded in size and time.

    Raises:
        ApiError: it is not said to be JSON, is too large, or does not come.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError("the body must be JSON: send the header Content-Type: application/json", status=415)
    too_large = ApiError(f"the body is larger than {MAX_BODY_BYTES // 2**20} MiB", status=413)
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > MAX_BODY_BYTES:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for part in request.stream():
                body += part
                if len(body) > MAX_BODY_BYTES:
                    raise too_large
    except TimeoutError as error:
        raise ApiError(f"the body did not come within {BODY_TIMEOUT_S:.0f} s", status=408) from error
    return bytes(body)
