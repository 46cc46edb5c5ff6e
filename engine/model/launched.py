"""Steps of a model that are in flight: on a CUDA device, and on a CPU, where they are computed when waited for.

What the next step needs of them stays where it was sampled: `Samples` has the tokens as a tensor, and a request's row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from engine.runner import UNKNOWN_TOKEN, RunnerError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from engine.core.scheduler_output import ScheduledRequest
    from engine.request import SamplingParams


@dataclass(frozen=True, slots=True)
class Draws:
    """What sampling needs to know, as it is when a step is launched; one entry for each row of logits.

    Attributes:
        request_ids: Whose token.
        params: How.
        seeds: 64-bit; 0 where the temperature is 0.
        positions: Of the token, in its sequence.
    """

    request_ids: list[int]
    params: list[SamplingParams]
    seeds: list[int]
    positions: list[int]


@dataclass(slots=True)
class Samples:
    """The tokens that a step samples.

    Attributes:
        row_of: By request.
        tokens: int64 `[rows]` on the model's device; None as long as they are not computed, or where that failed.
    """

    row_of: dict[int, int]
    tokens: torch.Tensor | None = None


def refer_to(
    samples: Samples | None,
    token_ids: NDArray[np.int64],
    query_start_loc: NDArray[np.int32],
    scheduled: Sequence[ScheduledRequest],
) -> bool:
    """Put `-1 - row` of the samples where a token is not known yet; `filled_in` replaces it on the device.

    Args:
        samples: Of the step launched before.
        token_ids: int64 `[T]`, changed in place; an unknown one is the last of its request.
        query_start_loc: int32 `[n + 1]`.
        scheduled: The n requests.

    Returns:
        Whether there are any.
    """
    unknown = np.flatnonzero(token_ids == UNKNOWN_TOKEN)
    if not len(unknown):
        return False
    assert samples is not None
    whose = np.searchsorted(query_start_loc, unknown, side="right") - 1
    token_ids[unknown] = [-1 - samples.row_of[scheduled[at].request.request_id] for at in whose.tolist()]
    return True


def filled_in(token_ids: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Tokens with those that were not known taken from the samples of the step before, all on the device."""
    rows = (-1 - token_ids).clamp_(min=0)
    return torch.where(token_ids < 0, tokens.index_select(0, rows), token_ids)


def answer(tokens: Sequence[int], bad: Sequence[int], draws: Draws, wanted: Sequence[bool]) -> list[int | None]:
    """What `Runner.execute` returns.

    Raises:
        RunnerError: names the requests of the bad rows.
    """
    if bad:
        raise RunnerError("the model's logits are not numbers", [draws.request_ids[row] for row in bad])
    rest = iter(tokens)
    return [*(next(rest) if samples else None for samples in wanted), *rest]


class DeviceStep:
    """A step on a CUDA device. All its work is in the device's current stream, and so behind what was launched before.

    Args:
        device: Where.
        compute: Launches the forward; gives the logits of the rows that sample, or None where none does.
        choose: Launches the sampling: int64 tokens and the mask of rows without a number, both `[rows]`.
        samples: Gets the tokens.
        draws: Whose tokens.
        wanted: Of each member of the batch, whether it samples.
        done: Told what the forward and the sampling took, in ns.
    """

    def __init__(
        self,
        device: torch.device,
        compute: Callable[[], torch.Tensor | None],
        choose: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
        samples: Samples,
        draws: Draws,
        wanted: Sequence[bool],
        done: Callable[[int, int], None],
    ) -> None:
        self._draws, self._wanted, self._done = draws, wanted, done
        events: list[Any] = [torch.cuda.Event(enable_timing=True) for _ in range(3)]  # type: ignore[no-untyped-call]
        self._began, self._computed, self._sampled = events
        stream = torch.cuda.current_stream(device)
        self._began.record(stream)
        logits = compute()
        self._computed.record(stream)
        self._host: torch.Tensor | None = None
        if logits is not None:
            samples.tokens, bad = choose(logits)
            both = torch.stack((samples.tokens, bad.to(torch.int64)))
            # Read only after the event that follows the copy in the stream.
            self._host = torch.empty(both.shape, dtype=torch.int64, pin_memory=True)
            self._host.copy_(both, non_blocking=True)
        self._sampled.record(stream)

    def wait(self) -> list[int | None]:
        """See `LaunchedStep.wait`."""
        self._sampled.synchronize()
        self._done(
            int(self._began.elapsed_time(self._computed) * 1e6), int(self._computed.elapsed_time(self._sampled) * 1e6)
        )
        if self._host is None:
            return [None] * len(self._wanted)
        tokens, bad = self._host.numpy()
        return answer(tokens.tolist(), np.flatnonzero(bad).tolist(), self._draws, self._wanted)
