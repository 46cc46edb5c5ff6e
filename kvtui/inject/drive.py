"""Sends a workload: every session at its time, each next message after the last answer."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtui.inject.client import Client, Outcome, Server
    from kvtui.workloads.workload import Session, Workload


async def send_workload(
    client: Client, server: Server, workload: Workload, on_outcome: Callable[[Outcome], None]
) -> None:
    """Send all of it and wait for the last answer; each request's outcome is handed over as it ends.

    A session whose request fails sends no more.
    """
    start = asyncio.get_running_loop().time()

    async def run(session: Session) -> None:
        await asyncio.sleep(start + session.at - asyncio.get_running_loop().time())
        answers: list[str] = []
        for turn in range(session.num_requests):
            if turn:
                await asyncio.sleep(session.pause)
            outcome = await client.ask(session, answers, server)
            on_outcome(outcome)
            if outcome.error is not None:
                return
            answers.append("".join(outcome.text))

    async with asyncio.TaskGroup() as group:
        for session in workload.sessions:
            group.create_task(run(session))
