"""What `run` puts together around an engine, with or without a screen, and takes down again in order."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import secrets
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtui.cli.errors import UsageError, say
from kvtui.own_command import inject_command, own_command

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from engine.config import EngineConfig
    from engine.engine import PagedEngine
    from engine.serving.listener import Listener
    from engine.trace.recording import RecordingWriter
    from kvtui.workloads.workload import Workload

    Bound = tuple[socket.socket, str | None]
    """A socket that listens, and the token that callers need."""

_SERVING_PACKAGES = ("starlette", "uvicorn")
_INSTALL = "pip install 'kvtui[engine]'"


@dataclass(frozen=True, slots=True)
class ListenOn:
    """Where to listen.

    Attributes:
        address: `HOST:PORT` as it was given; None means the default address, and no complaint where it is taken.
        token: Asked of every caller.
    """

    address: str | None
    token: str | None = None


def open_engine(config: EngineConfig, title: str, description: str) -> PagedEngine:
    """Load the model and build the engine around it, with a line of progress on stderr.

    Raises:
        ConfigError: packages are not installed, the model is unknown, or the settings do not go with it.
    """
    if config.model.model == "simulated":
        from engine.simulated import simulated_engine

        return simulated_engine(
            config, title=title, description=description, step_seconds=0.02, seconds_per_token=0.0002
        )
    with _progress_line() as progress:
        progress("loading the engine")
        from engine.model import load_engine

        return load_engine(config, progress=progress, title=title, description=description)


@contextlib.contextmanager
def _progress_line() -> Iterator[Callable[[str], None]]:
    """One line on stderr that is written over; plain lines where stderr is no terminal."""
    on_terminal = sys.stderr.isatty()

    def progress(text: str) -> None:
        line = "".join(c if c.isprintable() else " " for c in text)[:200]
        print(
            f"\r\x1b[2K{line} …" if on_terminal else line, end="" if on_terminal else "\n", file=sys.stderr, flush=True
        )

    try:
        yield progress
    finally:
        if on_terminal:
            print("\r\x1b[2K", end="", file=sys.stderr, flush=True)


def bind_listener(listen: ListenOn) -> Bound | None:
    """A socket to listen on and the token that callers need, before the model is loaded; None where there is none.

    Raises:
        ListenError: the address that was asked for cannot be had.
        UsageError: the listener's packages are not installed.
    """
    missing = [name for name in _SERVING_PACKAGES if importlib.util.find_spec(name) is None]
    if missing and listen.address is None:
        return None
    if missing:
        raise UsageError(f"--listen needs {', '.join(missing)}: {_INSTALL}")
    from engine.serving.errors import ListenError
    from engine.serving.listener import DEFAULT_HOST, DEFAULT_PORT, bind, is_loopback, parse_address

    if listen.address is None:
        try:
            return bind(DEFAULT_HOST, DEFAULT_PORT), listen.token
        except ListenError:
            say(f"port {DEFAULT_PORT} is in use, so this session takes no requests from outside (--listen HOST:PORT)")
            return None
    host, port = parse_address(listen.address)
    sock = bind(host, port)
    token = listen.token
    if token is None and not is_loopback(sock.getsockname()[0]):
        token = secrets.token_urlsafe(16)
    return sock, token


def open_recording(path: Path, *, force: bool) -> None:
    """Check, before the model is loaded, that a recording can be written there.

    Raises:
        UsageError: there is a file already, or the folder cannot be written.
    """
    if path.is_dir():
        raise UsageError(f"--record {path}: is a folder; name a file, such as {path / 'session.mcap'}")
    if path.exists() and not force:
        raise UsageError(f"--record {path}: the file exists; name another, or write over it with --force")
    folder = path.parent
    if not folder.is_dir():
        raise UsageError(f"--record {path}: there is no folder {folder}")
    if not os.access(folder, os.W_OK):
        raise UsageError(f"--record {path}: the folder {folder} cannot be written")


@dataclass(slots=True)
class Attached:
    """What is attached to an engine.

    Attributes:
        listener: Serving already; None without one.
        token: What its callers must send.
        recorder: Takes the trace; None without a recording.
        path: Where the recording goes.
    """

    engine: PagedEngine
    listener: Listener | None = None
    token: str | None = None
    recorder: RecordingWriter | None = None
    path: Path | None = None

    @property
    def public_url(self) -> str | None:
        """What to hand to `kvtui inject --url`, the token with it."""
        if self.listener is None:
            return None
        return self.listener.url + (f" --token {self.token}" if self.token else "")

    @property
    def inject_hint(self) -> str | None:
        """The command that sends requests to this session from another terminal."""
        if self.listener is None:
            return None
        return inject_command(self.public_url or "", "--workload burst")

    def close(self) -> None:
        """Stop listening and finish the recording; whoever steps the engine has stopped already."""
        if self.listener is not None:
            self.listener.stop()
        if self.recorder is not None and self.path is not None:
            self.recorder.close()
            size = self.path.stat().st_size
            say(f"recorded {size / 1024:,.0f} KiB to {self.path}; see it with: {own_command()} play {self.path}")
            self.recorder = None


def attach(
    engine: PagedEngine,
    bound: Bound | None,
    record: Path | None,
    failure: Callable[[], str | None],
) -> Attached:
    """Start recording and listening; before the engine's first step."""
    attached = Attached(engine, path=record)
    if record is not None:
        from engine.trace.recording import RecordingWriter

        attached.recorder = RecordingWriter(record, engine.header)
        engine.add_sink(attached.recorder)
    if bound is not None:
        from engine.serving.listener import Listener

        attached.listener = Listener(engine, bound[0], token=bound[1], failure=failure)
        attached.token = bound[1]
        attached.listener.start()
        asks = f", callers need the token {bound[1]}" if bound[1] else ""
        say(f"listening on {attached.listener.url}{asks}; try: {attached.inject_hint}")
    return attached


def prepared(
    reference: str, *, rate: float | None, num: int | None, seed: int, max_model_len: int | None
) -> Workload | None:
    """The workload that is asked for, made to fit; None for `none`.

    Raises:
        WorkloadError: there is none of this name, or its file is wrong.
    """
    from kvtui.workloads.catalog import load_workload

    if reference == "none":
        return None
    workload = load_workload(reference)
    if num is not None:
        workload = workload.take(num)
    if rate is not None:
        workload = workload.arriving("poisson", rate, seed)
    return workload.seeded(seed).fitted(max_model_len)
