"""The command line. A command's module is imported when that command is called, so that this is quick to start."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from kvtui import __version__
from kvtui.cli.errors import reported

COMMANDS = {
    "run": "Run a model over a paged cache and watch it.",
    "play": "Play a recording. It needs no model and no torch.",
    "race": "Race static batching, contiguous memory and paging on the same requests.",
    "recordings": "List the packaged recordings.",
    "inject": "Send requests to a running session and report latency and throughput.",
    "inspect": "Report on a recording: its header, its counts, and whether the invariants hold after every step.",
    "shot": "Draw a recording at one step into an SVG file.",
    "bench": "Measure this machine: throughput beside the peers, attention, pool, trace, quality, screen, GPU.",
    "doctor": "Say what kvtui finds on this machine, and what to do about what is missing.",
}
"""Each command's one line; command `x` is `x_command` in `kvtui.cli.x`."""

_WITHOUT_A_MODEL = frozenset({"play", "race", "recordings", "inspect", "shot"})
"""These compute no product of matrices, for which numpy would start a thread a core as it is imported."""


class LazyCommands(TyperGroup):
    """The commands, imported one by one as they are called; errors become one line.

    The list is written plainly, without Rich, whose import takes longer than everything else here.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**(settings | {"rich_markup_mode": None}))

    def list_commands(self, ctx: Any) -> list[str]:
        """Names, in the order of the list."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of that name, imported now."""
        if cmd_name not in COMMANDS:
            return None
        if cmd_name in _WITHOUT_A_MODEL:
            os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        single = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)
        single.command(cmd_name)(getattr(import_module(f"kvtui.cli.{cmd_name}"), f"{cmd_name}_command"))
        return typer.main.get_command(single)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the list."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        with reported():
            return super().invoke(ctx)


app = typer.Typer(
    name="kvtui",
    cls=LazyCommands,
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"kvtui {__version__}")
        raise typer.Exit


@app.callback()
def _kvtui(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Watch a paged KV cache at work: every block, every request, every iteration.

    Start with `kvtui run` (a real model) or `kvtui play` (a recording, no torch needed). In a second terminal,
    `kvtui inject --workload burst` sends requests into the running session.
    """
    if ctx.invoked_subcommand is None:
        print(ctx.get_help())


def main() -> None:
    """The console script."""
    # Typer's traceback boxes hide the line that matters; KVTUI_DEBUG=1 asks for the plain one.
    os.environ.setdefault("TYPER_STANDARD_TRACEBACK", "1")
    app()


if __name__ == "__main__":
    main()
