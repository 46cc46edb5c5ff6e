"""On a real (pseudo) terminal: what is written to it, and that it is given back whatever happens."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.request import SamplingParams
from engine.simulated import simulated_engine
from engine.trace.recording import RecordingWriter
from kvtui.terminal import terminal_problem

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs a POSIX terminal")

PROGRAM = """
import os, signal, sys, threading, time, warnings
from textual.drivers._writer_thread import WriterThread
from engine.config import EngineConfig
from engine.loop import EngineLoop
from engine.request import SamplingParams
from engine.simulated import simulated_engine
from kvtui.app import run_app
from kvtui.sources.live import LiveSource

what = sys.argv[1]
engine = simulated_engine(EngineConfig(), step_seconds=0.02)
loop = EngineLoop(engine)
source = LiveSource(engine, loop)
engine.add_request("some words to begin with", SamplingParams(max_tokens=1500, ignore_eos=True))
step = engine.step
count = 0
def tick():
    global count
    count += 1
    if what == "noise":
        print("PRINTED", count)
        warnings.warn(f"WARNED {count}")
        os.write(1, b"NATIVE1 \\x1b[31m\\r50%\\r100%\\n")
        os.write(2, b"NATIVE2\\n")
    if what == "dies" and count == 10:
        raise RuntimeError("the cache caught fire")
    if what == "stuck" and count == 10:
        time.sleep(600)
    return step()
engine.step = tick
if what == "continued while it writes":
    write, writes = WriterThread.write, 0
    def interrupted(thread, text):
        global writes
        writes += 1
        with thread._queue.mutex:
            if writes == 60:
                os.kill(os.getpid(), signal.SIGCONT)
        write(thread, text)
    WriterThread.write = interrupted
loop.start()
code = run_app(source, theme="dark", before_exit=None if what == "silent" else lambda: print("CLOSED RECORDING"))
sys.exit(code)
"""

RACE = ("-m", "kvtui.cli.main", "race", "--workload", "chat", "--num", "2")

PATIENCE = 60.0
ALTERNATE_SCREEN = b"\x1b[?1049h"


class Terminal:
    """kvtui in a terminal of its own, which reads along unless told not to."""

    def __init__(
        self, what: str, size: tuple[int, int] = (100, 30), command: tuple[str, ...] = (), **environment: str
    ) -> None:
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", size[1], size[0], 0, 0))
        self.attributes = termios.tcgetattr(slave)
        variables = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLORTERM")}
        variables |= {"TERM": "xterm-256color", "LANG": "C.UTF-8", "LC_ALL": "C.UTF-8", **environment}
        self.process = subprocess.Popen(
            [sys.executable, *(command or ("-c", PROGRAM, what))],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=variables,
            start_new_session=True,
        )
        self.slave = slave
        self.output = b""

    def read(self, seconds: float) -> bytes:
        """What comes within a time."""
        got = b""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if select.select([self.master], [], [], left)[0]:
                got += os.read(self.master, 65536)
        self.output += got
        return got

    def read_until(self, wanted: bytes) -> None:
        deadline = time.monotonic() + PATIENCE
        while wanted not in self.output:
            assert time.monotonic() < deadline, f"no {wanted!r} in {self.output[-2000:]!r}"
            self.read(0.05)

    def read_until_entered(self, times: int) -> None:
        """Until the other screen was entered so often: what is typed before is dropped, as typed for the shell."""
        deadline = time.monotonic() + PATIENCE
        while self.output.count(ALTERNATE_SCREEN) < times:
            assert time.monotonic() < deadline, "it hangs"
            self.read(0.1)

    def press(self, keys: bytes) -> None:
        os.write(self.master, keys)

    def end(self) -> int:
        """Read until the process has ended; its exit code."""
        deadline = time.monotonic() + PATIENCE
        while self.process.poll() is None:
            assert time.monotonic() < deadline, "it does not end"
            self.read(0.05)
        self.read(0.1)
        return self.process.returncode

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.slave)
        os.close(self.master)

    @property
    def after(self) -> str:
        """What was written once the shell had the screen again."""
        return self.output.rpartition(b"\x1b[?1049l")[2].decode()

    def check_given_back(self) -> None:
        """Main screen, cursor, mouse, bracketed paste and line discipline are as before."""
        for on, off in (("?1049h", "?1049l"), ("?25l", "?25h"), ("?1000h", "?1000l"), ("?2004h", "?2004l")):
            assert self.output.rfind(f"\x1b[{on}".encode()) < self.output.rfind(f"\x1b[{off}".encode()), on
        assert termios.tcgetattr(self.slave) == self.attributes


@pytest.fixture
def terminal():
    opened: list[Terminal] = []

    def start(what: str, **settings) -> Terminal:
        if what == "race":
            settings["command"] = RACE
        opened.append(Terminal(what, **settings))
        opened[-1].read_until({"dies": ALTERNATE_SCREEN, "race": b"prefill"}.get(what, b"Physical blocks"))
        return opened[-1]

    yield start
    for each in opened:
        each.close()


def test_quitting_gives_the_terminal_back_and_exits_zero(terminal) -> None:
    session = terminal("runs")
    session.press(b"q")
    assert session.end() == 0
    session.check_given_back()
    assert "CLOSED RECORDING" in session.after


def test_quitting_a_race_gives_the_terminal_back_and_prints_its_result_there(terminal) -> None:
    session = terminal("race")
    session.press(b"q")
    assert session.end() == 0
    session.check_given_back()
    assert "paged" in session.after


def test_an_engine_that_dies_gives_the_terminal_back_says_why_and_exits_one(terminal) -> None:
    session = terminal("dies")
    assert session.end() == 1
    session.check_given_back()
    assert "kvtui: the engine ended: RuntimeError: the cache caught fire" in session.after


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("what", ["runs", "race"])
def test_a_signal_gives_the_terminal_back_says_which_and_exits_with_its_code(terminal, what, number) -> None:
    session = terminal(what)
    session.process.send_signal(number)
    assert session.end() == 128 + number
    session.check_given_back()
    assert f"kvtui: ended by {number.name}" in session.after


@pytest.mark.parametrize("what", ["silent", "race"])
def test_a_terminal_that_goes_away_without_a_signal_ends_the_session(terminal, what) -> None:
    session = terminal(what)
    os.close(session.slave)
    os.close(session.master)
    session.master, session.slave = pty.openpty()
    assert session.process.wait(PATIENCE) == 128 + signal.SIGHUP


def test_a_shell_that_exports_another_size_does_not_make_it_one(terminal) -> None:
    session = terminal("runs", size=(130, 40), COLUMNS="80", LINES="24")
    session.read_until(b"Batch per iteration")  # a panel that a width of 80 has no room for beside the others
    session.press(b"q")
    assert session.end() == 0


def test_a_process_that_was_stopped_and_continued_still_gives_the_terminal_back(terminal) -> None:
    session = terminal("runs")
    session.process.send_signal(signal.SIGSTOP)
    os.waitpid(session.process.pid, os.WUNTRACED)
    drawn_again = session.output.count(ALTERNATE_SCREEN) + 1
    session.process.send_signal(signal.SIGCONT)
    session.read_until_entered(drawn_again)
    session.press(b"q")
    assert session.end() == 0
    session.check_given_back()


def test_a_process_that_is_continued_in_the_middle_of_a_write_goes_on(terminal) -> None:
    session = terminal("continued while it writes")
    session.read_until_entered(session.output.count(ALTERNATE_SCREEN) + 1)
    session.press(b"q")
    assert session.end() == 0
    session.check_given_back()


def test_a_process_that_was_stopped_while_paused_draws_all_of_the_screen_again(terminal) -> None:
    session = terminal("runs")
    session.press(b" ")
    session.read_until(b"PAUSED")
    while session.read(0.5):
        pass
    session.process.send_signal(signal.SIGSTOP)
    os.waitpid(session.process.pid, os.WUNTRACED)
    session.output = b""
    session.process.send_signal(signal.SIGCONT)
    session.read_until(b"Physical blocks")
    session.read_until(b"PAUSED")
    session.press(b"q")
    assert session.end() == 0


def test_quitting_in_the_middle_of_a_step_does_not_wait_for_it(terminal) -> None:
    session = terminal("stuck")
    session.read(1.0)
    session.press(b"q")
    assert session.end() == 0
    session.check_given_back()
    assert "CLOSED RECORDING" in session.after


def test_what_the_process_prints_never_reaches_the_screen_but_the_log_panel(terminal) -> None:
    session = terminal("noise", size=(80, 24))
    session.read(0.5)
    for words in (b"PRINTED", b"WARNED", b"NATIVE1", b"NATIVE2"):
        assert words not in session.output.partition(ALTERNATE_SCREEN)[2]
    session.press(b"6")
    session.output = b""
    for words in (b"PRINTED", b"WARNED", b"NATIVE2", b"100%"):
        session.read_until(words)
    session.press(b"q")
    assert session.end() == 0
    session.check_given_back()


def test_nothing_is_written_while_paused_and_next_to_nothing_computed(terminal) -> None:
    session = terminal("runs")
    session.press(b" ")
    session.read_until(b"PAUSED")
    session.read(2.5)
    before = cpu_seconds(session.process.pid)
    assert session.read(2.0) == b""
    assert cpu_seconds(session.process.pid) - before <= 0.05, "waking up five times a second is all there is to do"
    session.press(b"q")
    assert session.end() == 0


def cpu_seconds(process: int) -> float:
    """Time that a process has computed for; 0 where the system does not tell."""
    stat = Path(f"/proc/{process}/stat")
    if not stat.exists():
        return 0.0
    ticks = stat.read_text().rpartition(")")[2].split()[11:13]
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


def test_a_terminal_that_takes_nothing_does_not_keep_one_from_quitting(terminal) -> None:
    session = terminal("runs", size=(200, 50))
    time.sleep(1.0)
    session.press(b"q")
    deadline = time.monotonic() + PATIENCE
    while session.process.poll() is None:
        assert time.monotonic() < deadline, "it does not end"
        time.sleep(0.05)


def test_a_slow_terminal_is_not_sent_stale_frames(terminal) -> None:
    session = terminal("runs", size=(200, 50))
    for _ in range(40):
        select.select([session.master], [], [], 0.05)
        session.output += os.read(session.master, 512)
        time.sleep(0.03)
    session.press(b"q")
    before = len(session.output)
    assert session.end() == 0
    # One frame may be on its way when the key comes; dozens have been drawn meanwhile.
    assert len(session.output) - before < 100_000


@pytest.mark.parametrize("name", ["dumb", "unknown"])
def test_a_dumb_terminal_is_refused_with_what_to_do_instead(monkeypatch, name) -> None:
    monkeypatch.setenv("TERM", name)
    problem = terminal_problem()
    assert problem is not None
    assert name in problem
    assert "--headless" in problem


def test_without_a_terminal_it_is_refused_with_what_to_do_instead() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "runs"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 2
    assert "not a terminal" in done.stderr
    assert "--headless" in done.stderr


def test_nothing_is_written_while_one_looks_back_and_the_engine_is_paused(terminal) -> None:
    session = terminal("")
    session.press(b" \x1b[D")
    session.read_until(b"LOOKING BACK")
    settle(session)
    assert session.read(2) == b""
    session.press(b"q")
    assert session.end() == 0


def test_nothing_is_written_while_a_recording_is_paused(terminal, tmp_path) -> None:
    engine = simulated_engine(EngineConfig())
    path = tmp_path / "r.mcap"
    with RecordingWriter(path, engine.header) as writer:
        engine.add_sink(writer)
        engine.add_request("some words", SamplingParams(max_tokens=20))
        while engine.has_work:
            engine.step()
    session = terminal("", command=("-m", "kvtui.cli.main", "play", str(path), "--paused", "--start", "9"))
    settle(session)
    assert session.read(2) == b""
    session.press(b"q")
    assert session.end() == 0


def settle(session: Terminal) -> None:
    """Read until a second passes without anything."""
    deadline = time.monotonic() + PATIENCE
    while session.read(1):
        assert time.monotonic() < deadline, "it goes on writing"
