"""Under `textual serve` the screen goes to a browser, over the protocol of Textual's web driver."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time

import pytest

PATIENCE_S = 60.0


def packet(kind: bytes, payload: bytes) -> bytes:
    return kind + len(payload).to_bytes(4, "big") + payload


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        (("play", "under-pressure", "--start", "200"), ("Physical blocks", "Requests", "▪")),
        (("race", "--workload", "chat", "--num", "2"), ("static", "paged", "▪")),
    ],
)
def test_it_is_drawn_for_a_browser_and_ends_when_that_leaves(command: tuple[str, ...], shown: tuple[str, ...]) -> None:
    environment = os.environ | {
        "TEXTUAL_DRIVER": "textual.drivers.web_driver:WebDriver",
        "TEXTUAL_COLOR_SYSTEM": "truecolor",
        "COLUMNS": "120",
        "ROWS": "36",
        "TERM": "dumb",
    }
    environment.pop("NO_COLOR", None)
    process = subprocess.Popen(
        [sys.executable, "-m", "kvtui.cli.main", *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    output, deadline = b"", time.monotonic() + PATIENCE_S
    try:
        while not all(words.encode() in output for words in shown):
            assert time.monotonic() < deadline, output[-2000:]
            if select.select([process.stdout], [], [], 1.0)[0]:
                data = os.read(process.stdout.fileno(), 1 << 16)
                assert data, process.stderr and process.stderr.read()
                output += data
        assert output.startswith(b"__GANGLION__\n")
        process.stdin.write(packet(b"M", json.dumps({"type": "quit"}).encode()))
        process.stdin.flush()
        process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0
    finally:
        process.kill()
