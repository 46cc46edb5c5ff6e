from __future__ import annotations

import importlib
import inspect
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from kvtui import __version__
from kvtui.cli import doctor
from kvtui.cli.errors import UsageError, say
from kvtui.cli.main import COMMANDS, app

runner = CliRunner()

HEAVY = ("textual", "numpy", "torch", "transformers", "httpx", "rich", "mcap", "starlette", "asyncio", "numba")


def test_help_imports_nothing_heavy():
    code = (
        "import sys; sys.argv = ['kvtui', '--help']\n"
        "from kvtui.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        f"print('loaded:', [name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert "Commands:" in done.stdout
    assert done.stdout.splitlines()[-1] == "loaded: []"


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_help_lists_every_command_with_its_line(arguments):
    result = runner.invoke(app, arguments)

    assert result.exit_code == 0
    flat = " ".join(result.stdout.split())
    for name, line in COMMANDS.items():
        assert f"{name} {line}" in flat


@pytest.mark.parametrize("name", COMMANDS)
def test_a_commands_own_help_begins_with_its_line_and_has_an_example(name):
    function = getattr(importlib.import_module(f"kvtui.cli.{name}"), f"{name}_command")
    assert inspect.getdoc(function).splitlines()[0] == COMMANDS[name]

    result = runner.invoke(app, [name, "--help"], env={"COLUMNS": "120"})
    assert result.exit_code == 0
    assert f"Example: kvtui {name}" in result.stdout


def test_the_version_is_printed():
    assert runner.invoke(app, ["--version"]).stdout == f"kvtui {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["frobnicate"], "frobnicate"),
        (["run", "--frobnicate"], "--frobnicate"),
        (["run", "--num-blocks", "many"], "--num-blocks"),
        (["run", "--dtype", "int3"], "int3"),
        (["play", "a", "b"], "b"),
        (["play", "--speed", "100"], "--speed"),
    ],
)
def test_a_wrong_argument_is_named_and_exits_with_2(arguments, said):
    result = runner.invoke(app, arguments)

    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stdout == ""


def failing_with(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (UsageError("no such thing: name another"), 2, "kvtui: no such thing: name another\n"),
        (RuntimeError("bad\nluck"), 1, "kvtui: failed: RuntimeError: bad luck (KVTUI_DEBUG=1 shows where)\n"),
        (KeyboardInterrupt(), 130, ""),
        (typer.Exit(7), 7, ""),
    ],
)
def test_an_error_is_one_line_on_stderr_and_a_code(monkeypatch, error, code, line):
    monkeypatch.setattr(doctor, "examine", lambda: failing_with(error))
    result = runner.invoke(app, ["doctor"])

    assert result.exit_code == code
    assert (result.stdout, result.stderr) == ("", line)


def test_the_traceback_is_there_for_those_who_ask(monkeypatch):
    monkeypatch.setattr(doctor, "examine", lambda: failing_with(UsageError("no such thing")))
    result = runner.invoke(app, ["doctor"], env={"KVTUI_DEBUG": "1"})

    assert isinstance(result.exception, UsageError)


def test_what_an_error_quotes_cannot_steer_the_terminal(capsys):
    say("no file '\x1b[2J\x07evil'\nand more")

    assert capsys.readouterr().err == "kvtui: no file '\ufffd[2J\ufffdevil' and more\n"
