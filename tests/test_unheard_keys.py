"""Keys typed while something loads, on a terminal of the test's own."""

from __future__ import annotations

import os
import pty
import select
import signal
import sys
import termios
import time

import pytest

CHILD = """
import select, sys, time
from kvtui.unheard_keys import unheard_keys
try:
    with unheard_keys():
        print("loading", flush=True)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and "go" not in open(sys.argv[1]).read():
            time.sleep(0.02)
        if "raise" in open(sys.argv[1]).read():
            raise ValueError("it did not load")
finally:
    print("heard" if select.select([0], [], [], 0.2)[0] else "silence", flush=True)
"""
PATIENCE = 60.0


class Child:
    """A process that loads until it is told to go on."""

    def __init__(self, told) -> None:
        self.told = told
        told.write_text("")
        self.pid, self.terminal = pty.fork()
        if self.pid == 0:
            os.execv(sys.executable, [sys.executable, "-c", CHILD, str(told)])
        self.seen = ""
        self.wait_for("loading")

    def wait_for(self, words: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while words not in self.seen:
            assert time.monotonic() < deadline, self.seen
            if select.select([self.terminal], [], [], 0.1)[0]:
                self.seen += os.read(self.terminal, 4096).decode()

    @property
    def echoes(self) -> bool:
        return bool(termios.tcgetattr(self.terminal)[3] & termios.ECHO)

    def until(self, echoes: bool) -> None:
        deadline = time.monotonic() + PATIENCE
        while self.echoes != echoes:
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def press(self, keys: bytes) -> None:
        os.write(self.terminal, keys)

    def ended(self) -> int:
        """Signal or exit code, as a shell would tell it; negative for a signal."""
        _, status = os.waitpid(self.pid, 0)
        return os.waitstatus_to_exitcode(status)


@pytest.fixture
def child(tmp_path):
    made = Child(tmp_path / "told")
    yield made
    os.close(made.terminal)
    try:
        os.kill(made.pid, signal.SIGKILL)
        os.waitpid(made.pid, 0)
    except (ProcessLookupError, ChildProcessError):
        pass


@pytest.mark.parametrize("told", ["go", "go raise"])
def test_what_is_typed_while_it_loads_is_neither_seen_nor_heard_later(child, told):
    assert not child.echoes
    child.press(b"5ooq\n7q")
    time.sleep(0.2)
    child.told.write_text(told)
    child.wait_for("silence")
    assert child.echoes
    assert "ooq" not in child.seen
    assert "7q" not in child.seen


@pytest.mark.parametrize("key", [b"\x03", b"\x1c"], ids=["ctrl+c", "ctrl+backslash"])
def test_keys_that_end_it_still_do_and_the_terminal_is_as_it_was(child, key):
    child.press(key)
    assert child.ended() in ({-signal.SIGINT, 1} if key == b"\x03" else {-signal.SIGQUIT})
    assert child.echoes


def test_a_signal_ends_it_and_the_terminal_is_as_it_was(child):
    os.kill(child.pid, signal.SIGTERM)
    assert child.ended() == -signal.SIGTERM
    assert child.echoes


def test_while_it_is_stopped_the_terminal_is_as_it_was_and_silent_again_afterwards(child):
    for _ in range(2):
        # The process leads its session, where ctrl+z stops nobody: it is told by the signal alone.
        os.kill(child.pid, signal.SIGTSTP)
        child.until(echoes=False)
    child.told.write_text("go")
    child.wait_for("silence")
    assert child.echoes


def test_without_a_terminal_nothing_happens(monkeypatch):
    from kvtui import unheard_keys

    monkeypatch.setattr(unheard_keys.os, "isatty", lambda fd: False)
    before = signal.getsignal(signal.SIGTERM)
    with unheard_keys.unheard_keys():
        assert signal.getsignal(signal.SIGTERM) is before
    unheard_keys.drop_typed()
