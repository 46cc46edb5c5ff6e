"""`kvtui race`: the same requests under the old policies and the new one."""

from __future__ import annotations

import contextlib
import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from kvtui.cli.errors import UsageError, say
from kvtui.cli.own_settings import settings_for

if TYPE_CHECKING:
    from textual.driver import Driver

    from kvtui.capture_output import OutputCapture
    from kvtui.glyphs import Glyphs
    from kvtui.race.arrivals import Arrivals
    from kvtui.race.lane import Lane
    from kvtui.race.report import Result
    from kvtui.settings import Settings

DEFAULT_WORKLOAD = "burst"
DEFAULT_BLOCKS = 256
SIMULATED_MODEL_LEN = 8192
"""Made-up tokens are short, so that a text has several times as many as with a real tokenizer."""

_cache, _scheduler = CacheConfig(), SchedulerConfig()


def race_command(
    recording: Annotated[
        str | None,
        typer.Argument(
            metavar="RECORDING", help="Race its requests: a packaged recording, or a file.", show_default=False
        ),
    ] = None,
    workload: Annotated[
        str | None,
        typer.Option(metavar="NAME|FILE", help="Race a workload instead. (default: burst)", show_default=False),
    ] = None,
    num_blocks: Annotated[
        int | None,
        typer.Option(help="Blocks in the pool of each. (default: 256, or the recording's)", show_default=False),
    ] = None,
    block_size: Annotated[
        int | None, typer.Option(help="Tokens a block holds. (default: 16, or the recording's)", show_default=False)
    ] = None,
    max_num_seqs: Annotated[
        int | None,
        typer.Option(help="Requests running at once. (default: 32, or the recording's)", show_default=False),
    ] = None,
    num: Annotated[int | None, typer.Option(min=1, help="Of a workload, only so many sessions, or more.")] = None,
    seed: Annotated[int, typer.Option(help="Of a workload's sampling.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="No screen: the result as JSON.")] = False,
    as_text: Annotated[bool, typer.Option("--text", help="No screen: the result in lines.")] = False,
    speed: Annotated[float, typer.Option(min=0.25, max=16.0, help="Of the screen: times real time.")] = 1.0,
    theme: Annotated[str | None, typer.Option(help="Name of a theme.")] = None,
    ascii_only: Annotated[bool, typer.Option("--ascii", help="Draw with ASCII characters alone.")] = False,
) -> None:
    """Race static batching, contiguous memory and paging on the same requests.

    All have the same memory. The whole engine runs without a model, in a time that is reckoned: a step costs so much,
    and each token in it so much. Of a recording it takes the requests, their lengths, the pool and the cost of its
    steps. Without a terminal, or with --text or --json, the result is printed.

    Example: kvtui race under-pressure
    """
    from kvtui.race.lane import POLICIES, run_lane
    from kvtui.race.report import as_json as json_of
    from kvtui.race.report import result_of
    from kvtui.unheard_keys import unheard_keys

    on_screen = not as_json and not as_text and _can_draw()
    settings = settings_for(theme) if on_screen else None
    if recording is not None and workload is not None:
        raise UsageError("a RECORDING and --workload exclude each other: race one of them")
    if recording is not None and num is not None:
        raise UsageError("--num goes with --workload: a recording's requests are raced all")
    arrivals = _arrivals(recording, workload or DEFAULT_WORKLOAD, num_blocks, block_size, max_num_seqs, num, seed)
    on_terminal = sys.stderr.isatty()
    lanes: list[Lane] = []
    with unheard_keys() if on_screen else contextlib.nullcontext():
        for policy in POLICIES:

            def progress(steps: int, policy: str = policy) -> None:
                if on_terminal:
                    print(f"\r\x1b[2Krunning {policy}: step {steps:,}", end="", file=sys.stderr, flush=True)

            lanes.append(run_lane(arrivals, policy, progress))
    if on_terminal:
        print("\r\x1b[2K", end="", file=sys.stderr, flush=True)
    results = [result_of(lane) for lane in lanes]
    if as_json:
        print(json.dumps(json_of(arrivals, results), indent=2))
        return
    if settings is not None:
        _on_screen(arrivals, lanes, settings, speed=speed, theme=theme, ascii_only=ascii_only)
        if _served():
            return  # Standard output leads to a browser, which takes nothing but the screen.
    _print(arrivals, lanes, results, ascii_only)


def _arrivals(
    recording: str | None,
    workload: str,
    num_blocks: int | None,
    block_size: int | None,
    max_num_seqs: int | None,
    num: int | None,
    seed: int,
) -> Arrivals:
    from dataclasses import replace

    from kvtui.race.arrivals import RaceError, from_recording, from_workload, require_room

    if recording is not None:
        from engine.trace.reader import Recording
        from kvtui.cli.recordings import find_recording

        path = find_recording(recording)
        with Recording.open(path) as opened:
            if not opened.complete:
                say(f"{path} was cut off; the requests that it still has are raced")
            arrivals = from_recording(opened, path.stem)
        config = arrivals.config
        cache = replace(
            config.cache,
            num_blocks=config.cache.num_blocks if num_blocks is None else num_blocks,
            block_size=config.cache.block_size if block_size is None else block_size,
        )
        scheduler = config.scheduler
        if max_num_seqs is not None:
            scheduler = replace(scheduler, max_num_seqs=max_num_seqs)
        arrivals = replace(arrivals, config=replace(config, cache=cache, scheduler=scheduler))
    else:
        from kvtui.cli.session import prepared

        config = EngineConfig(
            cache=CacheConfig(
                num_blocks=DEFAULT_BLOCKS if num_blocks is None else num_blocks,
                block_size=_cache.block_size if block_size is None else block_size,
            ),
            scheduler=SchedulerConfig(
                max_num_seqs=_scheduler.max_num_seqs if max_num_seqs is None else max_num_seqs,
                max_model_len=SIMULATED_MODEL_LEN,
            ),
            seed=seed,
        )
        asked = prepared(workload, rate=None, num=num, seed=seed, max_model_len=SIMULATED_MODEL_LEN)
        if asked is None:
            raise RaceError("there is nothing to race: name a workload or a recording")
        arrivals = from_workload(asked, config)
    require_room(arrivals)
    return arrivals


def _can_draw() -> bool:
    from kvtui.terminal import terminal_problem

    return _served() or (sys.stdout.isatty() and terminal_problem() is None)


def _served() -> bool:
    from kvtui.terminal import served

    return served()


def _glyphs(ascii_only: bool) -> Glyphs:
    from kvtui.glyphs import ASCII, UNICODE

    return ASCII if ascii_only or "utf" not in (sys.stdout.encoding or "").lower() else UNICODE


def _width() -> int:
    import shutil

    return min(200, shutil.get_terminal_size((100, 24)).columns)


def _print(arrivals: Arrivals, lanes: list[Lane], results: list[Result], ascii_only: bool) -> None:
    from kvtui.race.report import report_lines

    print("\n".join(report_lines(arrivals, lanes, results, _glyphs(ascii_only), _width())))


def _on_screen(
    arrivals: Arrivals, lanes: list[Lane], settings: Settings, *, speed: float, theme: str | None, ascii_only: bool
) -> None:
    from kvtui.on_terminal import run_on_terminal
    from kvtui.race.app import RaceApp
    from kvtui.race.playing import LanePlayer
    from kvtui.safe_text import clean

    name = clean(arrivals.name, ascii_only=ascii_only, limit=60)
    cache = arrivals.config.cache
    title = f"{name}: {arrivals.workload.num_requests:,} requests, {cache.num_blocks:,} blocks of {cache.block_size}"
    players = [LanePlayer(lane) for lane in lanes]

    def race(capture: OutputCapture | None, driver_class: type[Driver] | None) -> RaceApp:
        app = RaceApp(
            players,
            title,
            theme=theme,
            ascii_only=ascii_only,
            settings=settings,
            capture=capture,
            driver_class=driver_class,
        )
        app.speed = speed
        return app

    code = run_on_terminal(race)
    if code:
        raise typer.Exit(code)
