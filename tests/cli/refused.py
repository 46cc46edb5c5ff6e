"""How every command that cannot be done says so."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from click.testing import Result


def refused(result: Result) -> str:
    """The one line that a command says instead of doing anything; it ends with exit code 2 and prints nothing else."""
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("kvtui: ")
    assert result.stderr.count("\n") == 1
    return result.stderr
