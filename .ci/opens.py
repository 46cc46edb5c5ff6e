"""Whether a command opens a dashboard and `q` leaves it: `opens.py COLUMNS LINES WORDS... -- COMMAND...`.

All words must have been drawn before `q` is typed. Standard library alone: it runs where nothing is installed yet.
"""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import sys
import termios
import time

FIRST_SECONDS = 300
"""Until all words are there: a model is loaded and kernels are compiled first."""
LAST_SECONDS = 30
"""Until the command has ended."""
LEFT_SCREEN = b"\x1b[?1049l"


def main() -> int:
    """The exit status: 0 where everything was seen."""
    columns, lines, *rest = sys.argv[1:]
    at = rest.index("--")
    words, command = [word.encode() for word in rest[:at]], rest[at + 1 :]
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ.update(TERM="xterm-256color", COLORTERM="truecolor")
        os.environ.pop("NO_COLOR", None)
        os.execvp(command[0], command)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", int(lines), int(columns), 0, 0))
    began = time.monotonic()
    deadline, seen, asked_after = began + FIRST_SECONDS, b"", None
    while time.monotonic() < deadline:
        if select.select([terminal], [], [], 0.2)[0]:
            try:
                data = os.read(terminal, 65536)
            except OSError:
                break
            if not data:
                break
            seen += data
        if asked_after is None and all(word in seen for word in words):
            asked_after = time.monotonic() - began
            time.sleep(1)
            os.write(terminal, b"q")
            deadline = time.monotonic() + LAST_SECONDS
    else:
        os.kill(pid, 9)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    missing = [word.decode() for word in words if word not in seen]
    print(f"{' '.join(command)}: {len(seen)} bytes drawn, exit status {status}", end="")
    print(f", all words after {asked_after:.1f} s" if asked_after is not None else f", never seen: {missing}")
    if asked_after is None or status or LEFT_SCREEN not in seen:
        print(seen[-2000:].decode(errors="replace"), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
