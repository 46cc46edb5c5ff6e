"""`kvtui bench`: measure this machine."""

from __future__ import annotations

import enum
from importlib import import_module
from typing import Annotated

import typer

from kvtui.cli.errors import UsageError


class BenchName(enum.StrEnum):
    """What is measured."""

    engine = "engine"
    attention = "attention"
    pool = "pool"
    trace = "trace"
    quality = "quality"
    screen = "screen"
    seek = "seek"
    attached = "attached"
    gpu = "gpu"


MODULES = {
    BenchName.engine: "engine.bench.engine",
    BenchName.attention: "engine.bench.attention",
    BenchName.pool: "engine.bench.pool",
    BenchName.trace: "engine.bench.trace",
    BenchName.quality: "engine.bench.agreement",
    BenchName.screen: "kvtui.bench.screen",
    BenchName.seek: "kvtui.bench.seek",
    BenchName.attached: "kvtui.bench.attached",
    BenchName.gpu: "engine.bench.gpu",
}


def bench_command(
    name: Annotated[BenchName, typer.Argument(help="What is measured: see above.")],
    options: Annotated[
        list[str] | None, typer.Argument(metavar="[-- OPTIONS]", help="Of the benchmark; '-- --help' lists them.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Measure this machine: throughput beside the peers, attention, pool, trace, quality, screen, GPU.

    [bold]engine[/]: tokens a second beside transformers, vLLM, OpenVINO GenAI

    [bold]attention[/]: what paging costs the kernel

    [bold]pool[/]: blocks and scheduler steps

    [bold]trace[/]: tracing, recording, seeking

    [bold]quality[/]: agreement of tokens with transformers

    [bold]screen[/]: drawing

    [bold]seek[/]: from a key to the picture of another step

    [bold]attached[/]: what the dashboard costs the engine

    [bold]gpu[/]: the kernels and whole models on a GPU

    Example: kvtui bench engine -- --workload mixed.json --rounds 3
    """
    try:
        module = import_module(MODULES[name])
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] in ("engine", "kvtui"):
            raise
        raise UsageError(f"bench {name.value} needs {error.name}: pip install 'kvtui[engine]'") from error
    status = module.main([*(options or []), *(["--json"] if as_json else [])])
    if status:
        raise typer.Exit(status)
