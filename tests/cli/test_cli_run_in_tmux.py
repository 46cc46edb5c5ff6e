"""`kvtui run` in a shell in a terminal, from its start to the shell's next line."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

TMUX = shutil.which("tmux")
pytestmark = pytest.mark.skipif(TMUX is None, reason="tmux is not installed")

PATIENCE = 60.0
RUN = shlex.join(
    [sys.executable, "-m", "kvtui.cli.main", "run", "--model", "simulated", "--workload", "burst", "--no-listen"]
)
PANELS = {
    "7": "Prefix tree",
    "8": "The old way",
    "9": "Formulas",
    "2": "Requests",
    "3": "Pool",
    "4": "Batch per iteration",
    "5": "Inspector",
    "6": "Log",
}
"""By its key, what stands in a panel's border."""


class Shell:
    """A shell in a tmux server of its own."""

    def __init__(self, width: int, height: int) -> None:
        self.socket = f"kvtui-{os.getpid()}-{time.monotonic_ns()}"
        variables = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "TMUX", "TERM")}
        self._environment = variables | {"LC_ALL": "C.UTF-8", "TERM": "xterm-256color"}
        self.tmux("-f", os.devnull, "new-session", "-d", "-x", str(width), "-y", str(height), "sh")
        self.press("PS1='sh''ell> '; clear", "Enter")  # As it is typed it is not yet what is waited for.
        self.wait_for("shell>")

    def tmux(self, *arguments: str) -> str:
        assert TMUX is not None
        return subprocess.run(
            [TMUX, "-u", "-L", self.socket, *arguments],
            env=self._environment,
            capture_output=True,
            text=True,
            check=True,
            timeout=PATIENCE,
        ).stdout

    def press(self, *keys: str) -> None:
        self.tmux("send-keys", *keys)

    @property
    def screen(self) -> list[str]:
        return self.tmux("capture-pane", "-p").splitlines()

    def wait_for(self, *wanted: str) -> list[str]:
        """Wait until all of it is on the screen at once; the screen."""
        deadline = time.monotonic() + PATIENCE
        while True:
            screen = self.screen
            if all(any(words in line for line in screen) for words in wanted):
                return screen
            assert time.monotonic() < deadline, f"no {wanted} in\n" + "\n".join(screen)
            time.sleep(0.03)

    def terminal_state(self) -> str:
        """Alternate screen, cursor, mouse and keypad, as the terminal has them."""
        flags = "#{alternate_on} #{cursor_flag} #{mouse_any_flag} #{mouse_sgr_flag} #{keypad_flag} #{insert_flag}"
        return self.tmux("display-message", "-p", flags).strip()


@pytest.fixture
def shell() -> Iterator[Shell]:
    opened = Shell(80, 24)
    yield opened
    opened.tmux("kill-server")


def test_it_starts_leads_through_every_panel_at_two_sizes_and_leaves_the_shell_as_it_was(shell: Shell) -> None:
    shell.press("echo 'written before'", "Enter")
    shell.wait_for("shell>", "written before")
    before = shell.terminal_state()
    shell.press(f'{RUN}; echo "ended with $?"', "Enter")
    shell.wait_for("Physical blocks", "LIVE", "q quit")
    for key, title in PANELS.items():
        shell.press(key)
        shell.wait_for(f"─ {title}")
    shell.press("1")
    shell.wait_for("Physical blocks")
    shell.tmux("resize-window", "-x", "200", "-y", "50")
    shell.wait_for("Physical blocks", "Requests", "Pool", "Batch per iteration")
    shell.tmux("resize-window", "-x", "80", "-y", "24")
    deadline = time.monotonic() + PATIENCE
    while len(screen := shell.wait_for("Physical blocks", "q quit")) != 24 or "Requests ─" in "".join(screen):
        assert time.monotonic() < deadline
    shell.press("q")
    screen = shell.wait_for("ended with 0")
    assert "written before" in screen, "the shell's own screen is back"
    assert not any("│" in line or "Physical" in line for line in screen)
    assert shell.terminal_state() == before
    shell.press("echo still", "Space", "typed", "Enter")
    screen = shell.wait_for("shell> echo still typed")
    ended = next(at for at, line in enumerate(screen) if line == "ended with 0")
    assert [line for line in screen[ended + 1 :] if line] == ["shell> echo still typed", "still typed", "shell>"]


def test_control_c_leaves_as_q_does(shell: Shell) -> None:
    shell.tmux("resize-window", "-x", "200", "-y", "50")
    shell.wait_for("shell>")
    before = shell.terminal_state()
    shell.press(f'{RUN}; echo "ended with $?"', "Enter")
    shell.wait_for("Physical blocks", "Batch per iteration")
    shell.press("C-c")
    screen = shell.wait_for("ended with 0")
    assert shell.terminal_state() == before
    assert not any("Traceback" in line or "│" in line for line in screen)
