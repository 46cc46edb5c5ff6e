"""Drawing a token from logits: temperature, top-k, top-p over what top-k left, min-p, then one uniform number.

Every filter is a threshold, the smallest weight that stays, so tokens of equal weight stay or go together (as in
transformers' top-k). The draw is inverse-transform sampling over the tokens in order of their ids. So what a row draws
depends neither on how equal tokens happen to be sorted nor on the other rows.

There are two forms of the same: one for CPUs, in numpy, a row at a time while it is in the processor's cache, and one
for devices, in torch, all rows at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from engine.upload import upload

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from engine.request import SamplingParams

_LIKELY = 1e-3
"""Weight, the best token's being 1, from which a CPU looks at tokens first; most often they are few and enough."""

_NUCLEUS = 1024
"""How many of the likeliest tokens a device looks at first for top-p."""

_COLDEST = 1e-6
"""Temperatures below are as good as this one: it leaves only the most likely token, and float32 can divide by it."""

_STRIDE = 256
"""Tokens whose weights are summed before the sums are, so that only one such run is searched token by token."""


def draw_on_host(
    rows: Sequence[NDArray[np.float32]], params: Sequence[SamplingParams], uniform: NDArray[np.float64]
) -> list[int]:
    """Draw one token for each row; every temperature is above 0.

    Args:
        rows: float32 `[vocab]` each, with a finite largest one.
        params: Of each row.
        uniform: Of each row, in [0, 1).
    """
    scratch = np.empty_like(rows[0])  # new memory for each row would cost more than the arithmetic
    return [_draw_row(row, p, u, scratch) for row, p, u in zip(rows, params, uniform.tolist(), strict=True)]


def _draw_row(row: NDArray[np.float32], params: SamplingParams, uniform: float, scratch: NDArray[np.float32]) -> int:
    weights = np.subtract(row, row.max(), out=scratch)
    with np.errstate(over="ignore"):  # far below the best: minus infinity, and so a weight of 0
        weights /= np.float32(max(params.temperature, _COLDEST))
    np.exp(weights, out=weights)
    least, let_through = params.min_p, weights
    if 0 < params.top_k < len(weights):
        likely = weights[weights >= _LIKELY]
        among = likely if len(likely) >= params.top_k else weights
        place = len(among) - params.top_k
        kth = np.partition(among, place)[place]
        least = max(least, float(kth))
        let_through = among[among >= kth]
    if params.top_p < 1:
        least = max(least, _least_of_nucleus(let_through, params.top_p))
    if least > 0:
        weights *= weights >= least
    return _pick(weights, uniform)


def _least_of_nucleus(weights: NDArray[np.float32], mass: float) -> float:
    """Smallest weight of the nucleus: the fewest most likely tokens that hold the mass (Holtzman et al., 2020)."""
    goal = mass * float(weights.sum(dtype=np.float64))
    likely = weights[weights >= _LIKELY]
    if likely.sum(dtype=np.float64) < goal:
        likely = weights
    falling = np.sort(likely)[::-1]
    before = falling.cumsum(dtype=np.float64) - falling
    return float(falling[max(int((before < goal).sum()), 1) - 1])


def _pick(weights: NDArray[np.float32], uniform: float) -> int:
    """The token at which the running sum of weights passes that share of the total."""
    sums = np.add.reduceat(weights, np.arange(0, len(weights), _STRIDE), dtype=np.float64)
    ends = sums.cumsum()
    goal = uniform * ends[-1]
    # Rounding may lift a goal to the very end of the sums; the last one with any weight is meant then.
    run = min(int(ends.searchsorted(goal, side="right")), int(np.flatnonzero(sums)[-1]))
    part = weights[run * _STRIDE : (run + 1) * _STRIDE]
    place = int(part.cumsum(dtype=np.float64).searchsorted(goal - (ends[run] - sums[run]), side="right"))
    return run * _STRIDE + min(place, int(np.flatnonzero(part)[-1]))


def draw_on_device(
    logits: torch.Tensor, params: Sequence[SamplingParams], uniform: NDArray[np.float64]
) -> torch.Tensor:
    """The same for all rows at once, as a device wants it.

    Args:
        logits: float32 `[n, vocab]`.
        params: Of each row.
        uniform: Of each row, in [0, 1).

    Returns:
        int64 `[n]`.
    """
    n, vocab = logits.shape
    device = logits.device
    temperature = upload([max(p.temperature, _COLDEST) for p in params], device, np.float32)[:, None]
    # The largest becomes 0: no overflow, however small the temperature.
    scaled = (logits - logits.max(dim=-1, keepdim=True).values) / temperature
    threshold = torch.full((n,), -torch.inf, device=device)

    k_of = [p.top_k if 0 < p.top_k < vocab else 0 for p in params]
    if any(k_of):
        chosen = [i for i, k in enumerate(k_of) if k]
        rows = upload(chosen, device, np.int64)
        top = scaled[rows].topk(max(k_of), dim=-1).values
        kth = upload([k_of[i] - 1 for i in chosen], device, np.int64)[:, None]
        threshold[rows] = top.gather(1, kth).flatten()
    chosen = [i for i, p in enumerate(params) if p.top_p < 1]
    if chosen:
        rows = upload(chosen, device, np.int64)
        mass = upload([params[i].top_p for i in chosen], device, np.float64)
        threshold[rows] = _nucleus(scaled[rows], threshold[rows], mass)
    chosen = [i for i, p in enumerate(params) if p.min_p > 0]
    if chosen:
        rows = upload(chosen, device, np.int64)
        floor = upload([params[i].min_p for i in chosen], device, np.float32).log()
        threshold[rows] = torch.maximum(threshold[rows], floor)

    weights = scaled.exp().masked_fill_(scaled < threshold[:, None], 0.0)
    # A device adds in an order that depends on how many rows there are. In float32 that could be seen: one draw in some
    # millions would be another token, or one without any weight at which a sum is rounded otherwise than before it.
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    goal = upload(uniform, device)[:, None] * total
    # Rounding must not lift the goal to the total itself: past the last token with any weight lies nothing.
    goal = torch.minimum(goal, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, goal, right=True).flatten()


def _nucleus(scaled: torch.Tensor, threshold: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
    """Smallest logit of the nucleus: the fewest most likely tokens that together hold the mass (Holtzman et al., 2020).

    Args:
        scaled: `[n, vocab]`, the largest of each row 0.
        threshold: `[n]`, what an earlier filter lets through.
        mass: float64 `[n]`, share to keep of what is let through.

    Returns:
        `[n]`.
    """
    vocab = scaled.shape[-1]
    let_through = scaled.exp().masked_fill_(scaled < threshold[:, None], 0.0)
    goal = mass * let_through.sum(dim=-1, dtype=torch.float64)
    out = threshold.clone()
    open_rows = torch.arange(len(scaled), device=scaled.device)
    for size in (min(_NUCLEUS, vocab), vocab):
        top = scaled[open_rows].topk(size, dim=-1).values
        weight = top.exp().masked_fill_(top < threshold[open_rows, None], 0.0)
        before = weight.cumsum(dim=-1, dtype=torch.float64) - weight
        inside = (before < goal[open_rows, None]).sum(dim=-1).clamp(min=1)
        found = inside < size if size < vocab else torch.ones_like(inside, dtype=torch.bool)
        last = top.gather(1, (inside - 1)[:, None]).flatten()
        out[open_rows[found]] = torch.maximum(last[found], threshold[open_rows[found]])
        open_rows = open_rows[~found]
        if not len(open_rows):
            break
    return out
