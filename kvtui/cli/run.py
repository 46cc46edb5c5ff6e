"""`kvtui run`: a real model on screen, or without one."""

from __future__ import annotations

import contextlib
import enum
import json
import os
import signal
import sys
import threading
from pathlib import Path  # noqa: TC003 - Typer reads the annotations
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from engine.config import DEFAULT_MODEL, CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from kvtui.cli.errors import UsageError

if TYPE_CHECKING:
    from types import FrameType

    from engine.engine import PagedEngine
    from engine.trace.events import TraceMessage
    from kvtui.cli.session import Bound
    from kvtui.settings import Settings
    from kvtui.workloads.driver import WorkloadDriver

SIMULATED = "simulated"
"""`--model simulated` runs the whole engine without a model."""
SIMULATED_MODEL_LEN = 8192
"""Its tokens are short, many of them bytes, so that a text has several times as many as with a real tokenizer."""


class DTypeName(enum.StrEnum):
    """Of weights and activations."""

    auto = "auto"
    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"


class WeightsName(enum.StrEnum):
    """Of linear layers."""

    auto = "auto"
    full = "full"
    bf16 = "bf16"
    int8 = "int8"


class KVDTypeName(enum.StrEnum):
    """Of keys and values."""

    auto = "auto"
    bf16 = "bf16"
    fp8 = "fp8"
    int8 = "int8"


class PolicyName(enum.StrEnum):
    """Who runs when, and how memory is handed out."""

    paged = "paged"
    contiguous = "contiguous"
    static = "static"


class AttentionName(enum.StrEnum):
    """An implementation of the attention."""

    auto = "auto"
    reference = "reference"
    cpu = "cpu"
    triton = "triton"


class PreemptionName(enum.StrEnum):
    """What happens to the youngest request under pressure."""

    recompute = "recompute"
    swap = "swap"
    auto = "auto"


_ENGINE, _WORK, _SCREEN, _OUT = "The engine", "What it is asked", "The screen", "Recording and listening"
_cache, _scheduler = CacheConfig(), SchedulerConfig()


def run_command(
    model: Annotated[
        str,
        typer.Option(help="smollm2, a Hugging Face id, a folder, or 'simulated' (no model).", rich_help_panel=_ENGINE),
    ] = DEFAULT_MODEL,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...", rich_help_panel=_ENGINE)] = "auto",
    dtype: Annotated[DTypeName, typer.Option(help="Of the model.", rich_help_panel=_ENGINE)] = DTypeName.auto,
    kv_dtype: Annotated[
        KVDTypeName,
        typer.Option(
            help="Of the KV cache: the model's, bfloat16, or 8 bits with a scale for each token and head.",
            rich_help_panel=_ENGINE,
        ),
    ] = KVDTypeName.auto,
    weights: Annotated[
        WeightsName,
        typer.Option(
            help="Of linear layers: the fewest bytes that lose nothing, all, rounded to bf16, or int8 (inputs too).",
            rich_help_panel=_ENGINE,
        ),
    ] = WeightsName.auto,
    attention: Annotated[
        AttentionName, typer.Option(help="Attention implementation.", rich_help_panel=_ENGINE)
    ] = AttentionName.auto,
    cuda_graphs: Annotated[
        bool,
        typer.Option(
            "--cuda-graphs/--no-cuda-graphs",
            help="On a CUDA device, launch each decode step as one graph.",
            rich_help_panel=_ENGINE,
        ),
    ] = False,
    async_scheduling: Annotated[
        bool | None,
        typer.Option(
            "--async-scheduling/--no-async-scheduling",
            help="Schedule the next step while the device computes one. (default: off, until it has been measured on a "
            "card)",
            show_default=False,
            rich_help_panel=_ENGINE,
        ),
    ] = None,
    policy: Annotated[
        PolicyName,
        typer.Option(
            help="paged; or the old way: memory reserved in one piece (contiguous), and batches that run until all of "
            "them is done (static).",
            rich_help_panel=_ENGINE,
        ),
    ] = PolicyName.paged,
    block_size: Annotated[int, typer.Option(help="Tokens a block holds.", rich_help_panel=_ENGINE)] = _cache.block_size,
    num_blocks: Annotated[int, typer.Option(help="Blocks in the pool.", rich_help_panel=_ENGINE)] = _cache.num_blocks,
    prefix_caching: Annotated[
        bool,
        typer.Option("--prefix-caching/--no-prefix-caching", help="Share equal prefixes.", rich_help_panel=_ENGINE),
    ] = True,
    cpu_blocks: Annotated[
        int,
        typer.Option(help="Blocks in the host's memory, for what is evicted or swapped out.", rich_help_panel=_ENGINE),
    ] = _cache.num_cpu_blocks,
    preemption: Annotated[
        PreemptionName,
        typer.Option(
            help="Of the youngest under pressure: compute its blocks again, swap them to the CPU pool, or (auto) "
            "what costs less.",
            rich_help_panel=_ENGINE,
        ),
    ] = PreemptionName.recompute,
    max_num_seqs: Annotated[
        int, typer.Option(help="Requests running at once.", rich_help_panel=_ENGINE)
    ] = _scheduler.max_num_seqs,
    max_num_batched_tokens: Annotated[
        int, typer.Option(help="Tokens computed in one iteration.", rich_help_panel=_ENGINE)
    ] = _scheduler.max_num_batched_tokens,
    max_prefill_chunk: Annotated[
        int, typer.Option(help="Of one prompt in one iteration; 0: no limit.", rich_help_panel=_ENGINE)
    ] = _scheduler.max_prefill_chunk,
    max_model_len: Annotated[
        int | None,
        typer.Option(
            help=f"Longest request, prompt and output. (default: {_scheduler.max_model_len}; simulated: "
            f"{SIMULATED_MODEL_LEN})",
            show_default=False,
            rich_help_panel=_ENGINE,
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of sampling and arrivals.", rich_help_panel=_ENGINE)] = 0,
    workload: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help="chat, rag, burst, long, fork, a file, none, or stream: requests of all kinds without end, which give "
            "way to those from outside. (default: stream; headless or with --once or --rate: chat)",
            show_default=False,
            rich_help_panel=_WORK,
        ),
    ] = None,
    rate: Annotated[
        float | None, typer.Option(help="Sessions a second (Poisson) instead of its own times.", rich_help_panel=_WORK)
    ] = None,
    num: Annotated[
        int | None, typer.Option(min=1, help="Only so many sessions, or more than it has.", rich_help_panel=_WORK)
    ] = None,
    once: Annotated[
        bool, typer.Option("--once", help="On screen: do not start the workload again.", rich_help_panel=_WORK)
    ] = False,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Stop after so many iterations (on screen: pause).", rich_help_panel=_WORK)
    ] = None,
    headless: Annotated[
        bool, typer.Option("--headless", help="No screen: a line a second and a summary.", rich_help_panel=_SCREEN)
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="With --headless: the summary as JSON.", rich_help_panel=_SCREEN)
    ] = False,
    exit_when_done: Annotated[
        bool,
        typer.Option("--exit-when-done", help="Headless, listening: end with the workload.", rich_help_panel=_SCREEN),
    ] = False,
    theme: Annotated[str | None, typer.Option(help="Name of a theme.", rich_help_panel=_SCREEN)] = None,
    ascii_only: Annotated[
        bool, typer.Option("--ascii", help="Draw with ASCII characters alone.", rich_help_panel=_SCREEN)
    ] = False,
    record: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Record the session (.mcap).", rich_help_panel=_OUT)
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Let --record write over a file.", rich_help_panel=_OUT)
    ] = False,
    title: Annotated[str, typer.Option(help="The recording's title.", rich_help_panel=_OUT)] = "",
    description: Annotated[str, typer.Option(help="The recording's description.", rich_help_panel=_OUT)] = "",
    listen: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Take requests over HTTP here. On screen the default is 127.0.0.1:8077, where it is free.",
            rich_help_panel=_OUT,
        ),
    ] = None,
    no_listen: Annotated[
        bool, typer.Option("--no-listen", help="Take no requests from outside.", rich_help_panel=_OUT)
    ] = False,
    token: Annotated[
        str | None,
        typer.Option(
            envvar="KVTUI_TOKEN",
            show_default=False,
            help="What callers must send; made up where other machines can reach the address.",
            rich_help_panel=_OUT,
        ),
    ] = None,
) -> None:
    """Run a model over a paged cache and watch it.

    Example requests keep coming, drawn with --seed; the key w holds them.

    Send your own from another terminal with [bold]kvtui inject[/]: the examples give way to them.

    Example: kvtui run --num-blocks 96 --workload burst --record burst.mcap
    """
    config = EngineConfig(
        model=ModelConfig(
            model=model,
            device=device,
            dtype=dtype.value,
            attention=attention.value,
            cuda_graphs=cuda_graphs,
            weights=weights.value,
        ),
        cache=CacheConfig(
            block_size=block_size,
            num_blocks=num_blocks,
            prefix_caching=prefix_caching,
            num_cpu_blocks=cpu_blocks,
            kv_dtype=kv_dtype.value,
        ),
        scheduler=SchedulerConfig(
            preemption=preemption.value,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_prefill_chunk=max_prefill_chunk,
            max_model_len=_model_len(model, max_model_len),
            policy=policy.value,
            async_scheduling=async_scheduling,
        ),
        seed=seed,
    )
    from kvtui.cli.asked import asked_for
    from kvtui.cli.own_settings import settings_for
    from kvtui.cli.session import ListenOn, bind_listener, open_engine, open_recording

    if listen is not None and no_listen:
        raise UsageError("--listen and --no-listen exclude each other: give one of them")
    if not headless:
        for flag, given in (("--json", as_json), ("--exit-when-done", exit_when_done)):
            if given:
                raise UsageError(f"{flag} goes with --headless: add it, or leave {flag} out")
        _require_terminal()
    settings = settings_for(theme)
    asked = asked_for(
        workload,
        rate=rate,
        num=num,
        seed=seed,
        max_model_len=config.scheduler.max_model_len,
        steps=steps,
        on_screen=not headless,
        once=once,
    )
    if headless and asked is None and listen is None:
        raise UsageError("there would be nothing to do: give a --workload, or an address to --listen on")
    if record is not None:
        open_recording(record, force=force)
    on = None if no_listen or (headless and listen is None) else ListenOn(listen, token)
    bound = bind_listener(on) if on is not None else None
    from kvtui.unheard_keys import unheard_keys

    try:
        with contextlib.nullcontext() if headless else unheard_keys():
            engine = open_engine(config, title or (asked.title if asked else ""), description)
            if not headless:
                import kvtui.app  # noqa: F401 (takes a while, and the keys are still to be dropped)
    except BaseException:
        if bound is not None:
            bound[0].close()
        raise
    driver = asked.driver(engine) if asked is not None else None
    if headless:
        serving = bound is not None and not exit_when_done
        _headless(engine, driver, bound, record, serving=serving, steps=steps, as_json=as_json)
    else:
        _on_screen(engine, driver, bound, record, steps=steps, theme=theme, ascii_only=ascii_only, settings=settings)


def _model_len(model: str, asked: int | None) -> int:
    if asked is not None:
        return asked
    return SIMULATED_MODEL_LEN if model == SIMULATED else _scheduler.max_model_len


def _require_terminal() -> None:
    from kvtui.terminal import terminal_problem

    problem = terminal_problem()
    if problem is not None:
        raise UsageError(problem)


def _headless(
    engine: PagedEngine,
    driver: WorkloadDriver | None,
    bound: Bound | None,
    record: Path | None,
    *,
    serving: bool,
    steps: int | None,
    as_json: bool,
) -> None:
    from kvtui.cli.headless import RunStats, lines_to, run_headless, summary_text
    from kvtui.cli.session import attach

    stats = RunStats()
    engine.add_sink(stats)
    attached = attach(engine, bound, record, lambda: None)
    caught: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        # The step under way is finished first; whoever asks a second time does not wait for it.
        caught.append(number)
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    try:
        run_headless(
            engine,
            stats,
            driver,
            serving=serving,
            max_steps=steps,
            lines=lines_to(as_json=as_json),
            stopped=lambda: bool(caught),
        )
    finally:
        attached.close()
    summary = {"model": engine.header.model.name, "workload": driver.name if driver else None} | stats.summary()
    print(json.dumps(summary, indent=2) if as_json else summary_text(summary), flush=True)
    if caught:
        raise typer.Exit(128 + caught[0])


def _on_screen(
    engine: PagedEngine,
    driver: WorkloadDriver | None,
    bound: Bound | None,
    record: Path | None,
    *,
    steps: int | None,
    theme: str | None,
    ascii_only: bool,
    settings: Settings,
) -> None:
    from engine.loop import EngineLoop
    from engine.trace.events import StepTrace
    from kvtui.app import run_app
    from kvtui.cli.session import attach
    from kvtui.sources.live import LiveSource

    loop = EngineLoop(engine)
    source = LiveSource(engine, loop)

    def pause_after(message: TraceMessage) -> None:
        if steps is not None and isinstance(message, StepTrace) and message.index + 1 >= steps:
            loop.pause()

    if steps is not None:
        engine.add_sink(pause_after)
    attached = attach(engine, bound, record, lambda: source.error)
    stopping = threading.Event()
    if driver is not None:
        driver.run_in_thread(stopping, lambda: loop.paused)
    loop.start()

    def close() -> None:
        stopping.set()
        loop.stop()
        attached.close()

    _leave(
        run_app(
            source,
            feed=driver,
            listen_url=attached.public_url,
            theme=theme,
            ascii=ascii_only,
            settings=settings,
            before_exit=close,
        )
    )


def _leave(code: int) -> NoReturn:
    """End the process without the interpreter's teardown.

    Native libraries of the model's side report leaks, and can crash, when they are taken down under threads that were
    stopped in the middle of something; all that must be finished is finished by now.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
