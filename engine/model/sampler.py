"""Choosing the next tokens of a batch: greedy, or drawn after temperature, top-k, top-p and min-p.

A draw is decided by one uniform number, and that depends on nothing but the request's seed and the token's position:
a request that was preempted and computed again, or batched otherwise, draws the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from engine.model.draw import draw_on_device, draw_on_host
from engine.upload import upload

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from numpy.typing import NDArray

    from engine.request import SamplingParams


def sample(
    logits: torch.Tensor, params: Sequence[SamplingParams], seeds: Sequence[int], positions: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Choose one token for each row.

    Args:
        logits: `[n, vocab]`, any float dtype, not changed.
        params: Of each row.
        seeds: 64-bit, of each row's request; not read where the temperature is 0.
        positions: Of the token to be chosen, in its sequence.

    Returns:
        The tokens, and the rows whose logits hold no largest finite number (NaN or all minus infinity): their
        tokens mean nothing.
    """
    if logits.device.type == "cpu":
        # numpy's argmax is vectorised and torch's is not: ten times as fast.
        host = logits.float().numpy()
        greedy = host.argmax(axis=-1)
        best = host[np.arange(len(host)), greedy]
    else:
        top = logits.max(dim=-1)
        greedy, best = top.indices.cpu().numpy(), top.values.float().cpu().numpy()
    bad: list[int] = np.flatnonzero(~np.isfinite(best)).tolist()
    tokens: list[int] = greedy.tolist()
    drawn = [i for i, p in enumerate(params) if p.temperature > 0 and i not in bad]
    if drawn:
        chosen = [params[i] for i in drawn]
        uniform = uniforms([seeds[i] for i in drawn], [positions[i] for i in drawn])
        if logits.device.type == "cpu":
            values = draw_on_host([host[i] for i in drawn], chosen, uniform)
        else:
            values = draw_on_device(logits[drawn].float(), chosen, uniform).tolist()
        for i, token in zip(drawn, values, strict=True):
            tokens[i] = token
    return tokens, bad


def choose(
    logits: torch.Tensor, params: Sequence[SamplingParams], seeds: Sequence[int], positions: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """`sample` without the host: the same tokens, which stay on the logits' device.

    Returns:
        int64 `[n]`, and the mask `[n]` of the rows without a largest finite number.
    """
    top = logits.max(dim=-1)
    tokens = top.indices
    drawn = [i for i, p in enumerate(params) if p.temperature > 0]
    if drawn:
        uniform = uniforms([seeds[i] for i in drawn], [positions[i] for i in drawn])
        rows = upload(drawn, logits.device, np.int64)
        values = draw_on_device(logits.index_select(0, rows).float(), [params[i] for i in drawn], uniform)
        # What is drawn from a row without numbers may lie outside the vocabulary, and the next step looks it up.
        tokens = tokens.index_copy(0, rows, values.clamp_(max=logits.shape[-1] - 1))
    return tokens, ~top.values.isfinite()


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> NDArray[np.float64]:
    """One number in [0, 1) for each seed and position: 53 bits of a SplitMix64 hash of both (Steele et al., 2014)."""
    seed = np.array([s & 0xFFFFFFFFFFFFFFFF for s in seeds], dtype=np.uint64)
    position = np.array(positions, dtype=np.uint64)
    bits = _mix(_mix(seed) + position * np.uint64(0x9E3779B97F4A7C15))
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def request_seed(engine_seed: int, request_id: int) -> int:
    """Seed of a request that brings none: its own, and the same in every run of the engine with this seed."""
    pair = np.array([engine_seed & 0xFFFFFFFFFFFFFFFF, request_id], dtype=np.uint64)
    first, second = _mix(pair)
    return int(_mix(np.array([first ^ (second << np.uint64(1))], dtype=np.uint64))[0])


def _mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's step: a bijection of 64-bit numbers in which every bit of the input reaches every bit out."""
    z = state + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
