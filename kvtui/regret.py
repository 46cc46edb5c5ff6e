"""Regret in words: what a prompt computed again although the cache had had it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.sizes import counted

if TYPE_CHECKING:
    from engine.trace.state import PoolState, RequestState


def regret_words(request: RequestState, block_size: int) -> str | None:
    """Such as `96 tokens of its prefix were evicted 41 steps before …: 6 blocks computed again`; None without any."""
    blocks = request.regret_blocks
    if not blocks:
        return None
    ago = max(0, request.admitted_step - request.regret_step)
    when = f"{counted(ago, 'step')} before it was admitted" if ago else "in the step that admitted it"
    last = ", the last of them " if blocks > 1 else " "
    tokens = f"{blocks * block_size:,} tokens of its prefix were evicted"
    return f"{tokens}{last}{when}: {counted(blocks, 'block')} computed again"


def session_regret_words(state: PoolState) -> str | None:
    """The same over all requests; None where nothing was computed again."""
    blocks = state.regret_blocks
    if not blocks:
        return None
    since = f" since step {state.regret_since:,}" if state.regret_since else ""
    return f"{counted(blocks, 'evicted block')} computed again ({blocks * state.header.block_size:,} tokens){since}"
