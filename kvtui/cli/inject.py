"""`kvtui inject`: requests into a running session."""

from __future__ import annotations

import enum
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from kvtui.cli.errors import FAILED, INTERRUPTED, UsageError, say

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtui.inject.client import Client, Outcome, Server
    from kvtui.workloads.workload import Workload


class ArrivalName(enum.StrEnum):
    """How sessions are spread over time."""

    poisson = "poisson"
    constant = "constant"
    burst = "burst"


def inject_command(
    workload: Annotated[
        str | None,
        typer.Option(metavar="NAME|FILE", help="chat, rag, burst, long, fork, or a file.", show_default=False),
    ] = None,
    prompt: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Ask this instead, and print the answer.", show_default=False)
    ] = None,
    url: Annotated[str, typer.Option(help="Where the session listens.")] = "http://127.0.0.1:8077",
    token: Annotated[
        str | None, typer.Option(envvar="KVTUI_TOKEN", help="If the session asks for one.", show_default=False)
    ] = None,
    rate: Annotated[
        float | None, typer.Option(help="Sessions a second, instead of the workload's own times.", show_default=False)
    ] = None,
    arrival: Annotated[
        ArrivalName | None, typer.Option(help="How they are spread; poisson where there is a rate.", show_default=False)
    ] = None,
    num: Annotated[
        int | None, typer.Option(min=1, help="Only so many sessions, or more than it has.", show_default=False)
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="At most so many tokens an answer.", show_default=False)
    ] = None,
    temperature: Annotated[float | None, typer.Option(min=0, help="0 is greedy.", show_default=False)] = None,
    length_scale: Annotated[float, typer.Option(help="Shrink the lengths of a trace by this factor.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of arrivals and sampling.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="The report as JSON.")] = False,
) -> None:
    """Send requests to a running session and report latency and throughput.

    Example: kvtui inject --workload burst --rate 2 --num 20

    Example: kvtui inject --prompt "Why is the sky blue?" --max-tokens 60
    """
    from kvtui.workloads.catalog import load_workload

    if (workload is None) == (prompt is None):
        raise UsageError("give one of --workload NAME|FILE and --prompt TEXT")
    if arrival in (ArrivalName.poisson, ArrivalName.constant) and rate is None:
        raise UsageError(f"--arrival {arrival.value} needs a --rate, in sessions a second")
    if prompt is not None:
        asked = _single(prompt, max_tokens)
    else:
        asked = load_workload(workload or "")
        if num is not None:
            asked = asked.take(num)
        if rate is not None or arrival is not None:
            asked = asked.arriving((arrival or ArrivalName.poisson).value, rate or 1.0, seed)
    if temperature is not None:
        sessions = (replace(s, params=replace(s.params, temperature=temperature)) for s in asked.sessions)
        asked = replace(asked, sessions=tuple(sessions))
    asked = asked.seeded(seed)
    import asyncio

    outcomes: list[Outcome] = []
    interrupted = False
    try:
        if prompt is not None:
            asyncio.run(_ask(url, token, asked, outcomes))
        else:
            asyncio.run(_send(url, token, asked, max_tokens, length_scale, outcomes))
    except KeyboardInterrupt:
        interrupted = True
    if outcomes:
        _report(asked, outcomes, as_json=as_json, answered=prompt is not None)
    if interrupted:
        raise typer.Exit(INTERRUPTED)
    if any(outcome.error for outcome in outcomes):
        raise typer.Exit(FAILED)


def _single(prompt: str, max_tokens: int | None) -> Workload:
    from engine.request import SamplingParams
    from kvtui.workloads.workload import Message, Session, Workload

    if not prompt.strip():
        raise UsageError("--prompt is empty: say what to ask")
    params = SamplingParams(max_tokens=max_tokens or 200, temperature=0.6, top_p=0.9)
    session = Session(name="prompt", at=0.0, params=params, messages=(Message("user", prompt),))
    return Workload(name="prompt", title="", sessions=(session,))


async def _ask(url: str, token: str | None, asked: Workload, outcomes: list[Outcome]) -> None:
    from kvtui.inject.client import Client
    from kvtui.safe_text import clean

    def show(text: str) -> None:
        # Line breaks are the answer's own; everything else that could steer a terminal is made visible.
        print("\n".join(clean(line, limit=10_000) for line in text.split("\n")), end="", flush=True)

    async with Client(url, token) as client:
        server = await client.server()
        outcomes.append(await client.ask(asked.sessions[0], [], server, show))
    print(flush=True)


async def _send(
    url: str,
    token: str | None,
    asked: Workload,
    max_tokens: int | None,
    length_scale: float,
    outcomes: list[Outcome],
) -> None:
    from kvtui.inject.client import Client
    from kvtui.inject.drive import send_workload

    async with Client(url, token) as client:
        server: Server = await client.server()
        fitted = asked.fitted(server.max_model_len, max_tokens, length_scale)
        for note in fitted.notes:
            say(note)
        if not sys.stderr.isatty():
            await send_workload(client, server, fitted, outcomes.append)
            return
        await _send_with_progress(client, server, fitted, outcomes, send_workload)


async def _send_with_progress(
    client: Client, server: Server, fitted: Workload, outcomes: list[Outcome], send: Callable[..., object]
) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[failed]} failed · {task.fields[tokens]:,} tokens"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(fitted.name, total=fitted.num_requests, failed=0, tokens=0)

        def took(outcome: Outcome) -> None:
            outcomes.append(outcome)
            failed = sum(o.error is not None for o in outcomes)
            progress.update(task, advance=1, failed=failed, tokens=sum(o.output_tokens for o in outcomes))

        await send(client, server, fitted, took)  # type: ignore[misc]


def _report(asked: Workload, outcomes: list[Outcome], *, as_json: bool, answered: bool) -> None:
    from kvtui.inject.report import as_json as report_json
    from kvtui.inject.report import as_text, summarise

    report = summarise(asked.name, outcomes)
    for error, count in report.errors.items():
        say(f"{count} failed: {error}")
    if not report.completed and not as_json:
        return  # times and rates of nothing say nothing
    text = report_json(report) if as_json else as_text(report)
    # An answer has stdout for itself.
    print(text, file=sys.stderr if answered and not as_json else sys.stdout, flush=True)
