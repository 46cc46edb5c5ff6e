"""A listener in a thread of its own: bound at once, stopped within a second."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import re
import socket
import threading
from typing import TYPE_CHECKING

from engine.serving.errors import ListenError

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.engine import PagedEngine

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8077
_BACKLOG = 128
_STOP_S = 0.4
"""What open connections get to end by themselves."""


def parse_address(text: str) -> tuple[str, int]:
    """`HOST:PORT`, `HOST`, `:PORT` or `PORT`, with the defaults for what is left out; an IPv6 host in brackets.

    Raises:
        ListenError: it is none of these.
    """
    found = re.fullmatch(r"(?:\[([0-9a-fA-F:.]+)\]|([^:\[\]\s]*))(?::(\d{1,5}))?", text.strip())
    if found is None:
        raise ListenError(
            f"{text!r} is not an address to listen on: write HOST:PORT, such as {DEFAULT_HOST}:{DEFAULT_PORT}"
        )
    host, port = found[1] or found[2] or "", found[3]
    if host.isdigit() and port is None:
        host, port = "", host
    number = DEFAULT_PORT if port is None else int(port)
    if number > 65535:
        raise ListenError(f"port {number} is not possible: the highest is 65535")
    return host or DEFAULT_HOST, number


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches that host."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens already: clients that come early wait for the listener to start.

    Raises:
        ListenError: the port is in use or the host is not one of this machine's.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ListenError(f"cannot listen on {host}: no such host") from error
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            other = f"--listen {host}:{port + 1 if port < 65535 else port - 1}"
            raise ListenError(
                f"port {port} on {host} is in use: end what listens there, or choose another with {other}"
            ) from error
        raise ListenError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    return sock


class Listener:
    """Serves a `PagedEngine` over HTTP.

    Attributes:
        url: Where it is reached.
    """

    def __init__(
        self,
        engine: PagedEngine,
        sock: socket.socket,
        *,
        token: str | None = None,
        failure: Callable[[], str | None] = lambda: None,
    ) -> None:
        """A listener on a socket from `bind`, not yet started.

        Args:
            engine: Takes the requests; something else steps it.
            sock: Where to listen; closed by `stop`.
            token: Asked of every caller; a must where other machines reach the socket.
            failure: Why the engine has ended, None while it lives.

        Raises:
            ListenError: other machines reach it and there is no token.
        """
        host, port = sock.getsockname()[:2]
        loopback = is_loopback(host)
        if not loopback and token is None:
            raise ListenError(f"listening on {host}, which other machines reach, needs a token")
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        self._engine = engine
        self._socket = sock
        self._token = token
        self._loopback = loopback
        self._failure = failure
        self._ready = threading.Event()
        self._stop: Callable[[], None] = lambda: None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Answer requests from now on, in a daemon thread."""
        self._thread = threading.Thread(target=self._run, name="kvtui-listener", daemon=True)
        self._thread.start()
        self._ready.wait(10)

    def stop(self) -> None:
        """Close every connection and the socket; open streams end with an error. Safe to call twice."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._stop()
            thread.join(_STOP_S + 1.0)
        self._socket.close()

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        import uvicorn

        from engine.serving.app import Api

        api = Api(self._engine, token=self._token, loopback_only=self._loopback, failure=self._failure)
        config = uvicorn.Config(
            api.app,
            lifespan="off",
            log_config=None,
            log_level="critical",
            access_log=False,
            server_header=False,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=1,
            ws="none",
        )
        server = uvicorn.Server(config)
        loop = asyncio.get_running_loop()
        stopping = asyncio.Event()

        def stop() -> None:
            with contextlib.suppress(RuntimeError):  # it has ended by itself
                loop.call_soon_threadsafe(stopping.set)

        self._stop = stop
        serving = asyncio.ensure_future(server.serve(sockets=[self._socket]))
        self._ready.set()
        await asyncio.wait({serving, asyncio.ensure_future(stopping.wait())}, return_when=asyncio.FIRST_COMPLETED)
        server.should_exit = True
        api.close()
        await asyncio.wait({serving}, timeout=_STOP_S)
        server.force_exit = True
        await asyncio.wait({serving}, timeout=_STOP_S)
