"""Choosing the next tokens of a batch: greedy, or drawn after temperature, top-k, top-p and min-p.

Every filter is turned into one threshold per row, the smallest logit that stays; so tokens of equal logits stay or
go together, and what a row draws depends neither on the order of equal tokens nor on the other rows. The draw is
inverse-transform sampling with one uniform number per row, and that number depends on nothing but the request's seed
and the token's position: a request that was preempted and computed again, or batched otherwise, draws the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from engine.request import SamplingParams

_NUCLEUS = 1024
"""Largest logits looked at first for top-p; the rest is sorted only where they do not hold enough mass."""


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
    best, greedy = logits.max(dim=-1)
    bad = torch.nonzero(~torch.isfinite(best)).flatten().tolist()
    tokens: list[int] = greedy.tolist()
    drawn = [i for i, p in enumerate(params) if p.temperature > 0 and i not in bad]
    if drawn:
        chosen = logits if len(drawn) == len(tokens) else logits[drawn]
        uniform = uniforms([seeds[i] for i in drawn], [positions[i] for i in drawn])
        values = draw(chosen.float(), [params[i] for i in drawn], uniform).tolist()
        for i, token in zip(drawn, values, strict=True):
            tokens[i] = token
    return tokens, bad


def draw(logits: torch.Tensor, params: Sequence[SamplingParams], uniform: NDArray[np.float64]) -> torch.Tensor:
    """Draw one token for each row; every temperature is above 0.

    The filters apply in the usual order: temperature, top-k, top-p over what top-k left, min-p.

    Args:
        logits: float32 `[n, vocab]`.
        params: Of each row.
        uniform: `[n]` in [0, 1).

    Returns:
        int64 `[n]`.
    """
    n, vocab = logits.shape
    temperature = torch.tensor([p.temperature for p in params], dtype=torch.float32)[:, None].to(logits.device)
    # The largest becomes 0: no overflow, however small the temperature.
    scaled = (logits - logits.max(dim=-1, keepdim=True).values) / temperature
    threshold = torch.full((n,), -torch.inf, device=logits.device)

    k_of = [p.top_k if 0 < p.top_k < vocab else 0 for p in params]
    if any(k_of):
        rows = [i for i, k in enumerate(k_of) if k]
        top = scaled[rows].topk(max(k_of), dim=-1).values
        kth = torch.tensor([[k_of[i] - 1] for i in rows], device=logits.device)
        threshold[rows] = top.gather(1, kth).flatten()
    rows = [i for i, p in enumerate(params) if p.top_p < 1]
    if rows:
        mass = torch.tensor([params[i].top_p for i in rows], dtype=torch.float32, device=logits.device)
        threshold[rows] = _nucleus(scaled[rows], threshold[rows], mass)
    rows = [i for i, p in enumerate(params) if p.min_p > 0]
    if rows:
        floor = torch.tensor([params[i].min_p for i in rows], dtype=torch.float32, device=logits.device).log()
        threshold[rows] = torch.maximum(threshold[rows], floor)

    weights = scaled.exp().masked_fill_(scaled < threshold[:, None], 0.0)
    cumulative = weights.cumsum(dim=-1)
    total = cumulative[:, -1:]
    goal = torch.from_numpy(uniform).to(logits.device)[:, None] * total.double()
    # Rounding must not lift the goal to the total itself: past the last token with any weight lies nothing.
    goal = torch.minimum(goal.float(), torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, goal, right=True).flatten()


def _nucleus(scaled: torch.Tensor, threshold: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
    """Smallest logit of the nucleus: the fewest most likely tokens that together hold the mass (Holtzman et al., 2020).

    Args:
        scaled: `[n, vocab]`, the largest of each row 0.
        threshold: `[n]`, what an earlier filter lets through.
        mass: `[n]`, share to keep of what is let through.

    Returns:
        `[n]`.
    """
    vocab = scaled.shape[-1]
    goal = mass * scaled.exp().masked_fill_(scaled < threshold[:, None], 0.0).sum(dim=-1)
    out = threshold.clone()
    open_rows = torch.arange(len(scaled), device=scaled.device)
    for size in (min(_NUCLEUS, vocab), vocab):
        top = scaled[open_rows].topk(size, dim=-1).values
        weight = top.exp().masked_fill_(top < threshold[open_rows, None], 0.0)
        before = weight.cumsum(dim=-1) - weight
        inside = (before < goal[open_rows, None]).sum(dim=-1).clamp(min=1)
        found = inside < size if size < vocab else torch.ones_like(inside, dtype=torch.bool)
        last = top.gather(1, (inside - 1)[:, None]).flatten()
        out[open_rows[found]] = torch.maximum(last[found], threshold[open_rows[found]])
        open_rows = open_rows[~found]
        if not len(open_rows):
            break
    return out


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
