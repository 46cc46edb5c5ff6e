"""The real `Runner`: packs a scheduler's batch, runs the model over the paged cache, samples."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from engine.attention.metadata import PAD_SLOT, AttentionMetadata, positions_of
from engine.core.scheduler_output import BlockCopy, ScheduledRequest
from engine.deferred import DeferredStep
from engine.model.launched import DeviceStep, Draws, Samples, answer, filled_in, refer_to
from engine.model.sampler import choose, request_seed, sample
from engine.request import Request, SamplingParams
from engine.runner import RunnerError
from engine.trace.events import Op, Phase
from engine.upload import upload

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from engine.core.scheduler_output import SchedulerOutput
    from engine.kv_cache import KVCache
    from engine.model.decode_graphs import DecodeGraphs
    from engine.model.forward import Forward
    from engine.runner import LaunchedStep
    from engine.trace.events import ModelInfo


@dataclass(frozen=True, slots=True)
class _Packed:
    """A batch as arrays, with nothing in it that changes when its requests do.

    Attributes:
        token_ids: int64 `[T]`.
        query_start_loc: int32 `[n + 1]`.
        seq_lens: int32 `[n]`.
        block_table: int32 `[n, max_blocks]`.
        rows: int64, of the logits that are wanted.
        decodes: Whether each request computes one token and samples.
    """

    token_ids: NDArray[np.int64]
    query_start_loc: NDArray[np.int32]
    seq_lens: NDArray[np.int32]
    block_table: NDArray[np.int32]
    rows: NDArray[np.int64]
    decodes: bool


class ModelRunner:
    """`engine.runner.LaunchingRunner` over a model.

    Args:
        forward: The model.
        kv_cache: What the scheduler's block ids point into.
        model_info: Shapes and names.
        max_model_len: Longest sequence that the model's positions allow.
        eos_token_ids: Tokens with which the model ends an output.
        seed: Of the engine, for requests that bring none.
        graphs: Captured decode steps, where the device has them.
    """

    def __init__(
        self,
        forward: Forward,
        kv_cache: KVCache,
        *,
        model_info: ModelInfo,
        max_model_len: int,
        eos_token_ids: frozenset[int],
        seed: int = 0,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        self.forward = forward
        self.graphs = graphs
        self.kv_cache = kv_cache
        self.model_info = model_info
        self.max_model_len = max_model_len
        self.eos_token_ids = eos_token_ids
        self.last_execute_ns = 0
        self.last_sample_ns = 0
        self._seed = seed
        self._seeds: dict[int, int] = {}
        self._tables = _BlockTables()
        self._samples: Samples | None = None
        self._deferred: DeferredStep | None = None

    @torch.inference_mode()
    def execute(self, output: SchedulerOutput) -> list[int | None]:
        """Run the batch; see `Runner.execute`.

        Raises:
            RunnerError: Names the requests whose logits are not numbers.
        """
        began = time.perf_counter_ns()
        scheduled = output.scheduled
        samples = [s.samples for s in scheduled]
        logits = self._forward(scheduled, samples)
        sampling, again = _sampling(output, samples)
        if again is not None:
            logits = logits[upload(again, logits.device)]
        if logits.is_cuda:
            torch.cuda.synchronize(logits.device)
        computed = time.perf_counter_ns()
        self.last_execute_ns = computed - began
        chosen = iter(self._sample(logits, sampling) if sampling else ())
        tokens = [next(chosen) if wanted else None for wanted in samples]
        tokens += chosen
        self.last_sample_ns = time.perf_counter_ns() - computed
        return tokens

    @torch.inference_mode()
    def launch(self, output: SchedulerOutput) -> LaunchedStep:
        """Begin a step; see `LaunchingRunner.launch`. Without a CUDA device it is computed when it is waited for.

        On the device nothing waits for the host: arrays go there by way of pinned memory, and tokens that are not known
        are taken from the samples of the step before. Only drawing with top_p looks at values on the host, which makes
        this call wait for the step.
        """
        samples = [s.samples for s in output.scheduled]
        packed = self._pack(output.scheduled, samples)
        sampling, again = _sampling(output, samples)
        draws = self._draws(sampling)
        before, self._samples = self._samples, Samples({who: row for row, who in enumerate(draws.request_ids)})
        refers = refer_to(before, packed.token_ids, packed.query_start_loc, output.scheduled)
        mine, device = self._samples, self.kv_cache.device

        def compute() -> torch.Tensor | None:
            tokens = before.tokens if before is not None and refers else None
            if refers and tokens is None:
                raise RunnerError("the step before brought no tokens to go on from")
            logits = self._compute(packed, tokens)
            if not sampling:
                return None
            return logits if again is None else logits[upload(again, device)]

        if device.type == "cuda":
            return DeviceStep(
                device,
                compute,
                lambda logits: choose(logits, draws.params, draws.seeds, draws.positions),
                mine,
                draws,
                samples,
                self._took,
            )

        @torch.inference_mode()
        def work() -> list[int | None]:
            began = time.perf_counter_ns()
            logits = compute()
            computed = time.perf_counter_ns()
            tokens: list[int] = []
            bad: list[int] = []
            if logits is not None:
                tokens, bad = sample(logits, draws.params, draws.seeds, draws.positions)
                mine.tokens = torch.tensor(tokens, device=device)
            self._took(computed - began, time.perf_counter_ns() - computed)
            return answer(tokens, bad, draws, samples)

        self._deferred = DeferredStep(work, self._deferred)
        return self._deferred

    def _took(self, execute_ns: int, sample_ns: int) -> None:
        self.last_execute_ns, self.last_sample_ns = execute_ns, sample_ns

    @torch.inference_mode()
    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Move contents of blocks, after all that was launched; see `Runner.copy_blocks`."""
        if self._deferred is not None:
            self._deferred.run()
        self.kv_cache.move(copies)

    @torch.inference_mode()
    def preemption_costs(self) -> tuple[float, float]:
        """Measured: a few blocks copied out and back, and a short prefill, each the faster of two runs.

        Called before the first request, whose blocks may then be written to.
        """
        cache = self.kv_cache
        assert cache.host is not None
        blocks = range(min(cache.num_blocks, len(cache.host), 16))
        there = [BlockCopy(Op.SWAP_OUT, block, block) for block in blocks]
        back = [BlockCopy(Op.SWAP_IN, block, block) for block in blocks]
        n = min(64, cache.num_blocks * cache.block_size, self.max_model_len)
        table = list(range(-(-n // cache.block_size)))
        probe = Request(-1, "", [0] * n, SamplingParams())
        share = ScheduledRequest(probe, Phase.PREFILL, 0, n, table)
        copying = min(self._time(lambda: cache.move(there + back)) for _ in range(2))
        computing = min(self._time(lambda: self._forward([share], [True])) for _ in range(2))
        self._tables.forget(probe.request_id)
        return copying / (2 * len(blocks)), computing / n

    def _time(self, work: Callable[[], object]) -> int:
        began = time.perf_counter_ns()
        work()
        if self.kv_cache.device.type == "cuda":
            torch.cuda.synchronize(self.kv_cache.device)
        return time.perf_counter_ns() - began

    def forget(self, request_id: int) -> None:
        """Drop the request's seed and its row of the block tables."""
        self._seeds.pop(request_id, None)
        self._tables.forget(request_id)

    def _forward(self, scheduled: list[ScheduledRequest], samples: list[bool]) -> torch.Tensor:
        return self._compute(self._pack(scheduled, samples))

    def _pack(self, scheduled: list[ScheduledRequest], samples: list[bool]) -> _Packed:
        counts = np.array([s.num_scheduled for s in scheduled], dtype=np.int32)
        seq_lens = np.array([s.computed_before for s in scheduled], dtype=np.int32) + counts
        query_start_loc = np.zeros(len(scheduled) + 1, dtype=np.int32)
        np.cumsum(counts, out=query_start_loc[1:])
        token_ids: list[int] = []
        for s in scheduled:
            token_ids += s.token_ids
        # Where nothing is sampled one row of logits is computed all the same: no model has to cope with none.
        rows = query_start_loc[1:][samples] - 1 if any(samples) else query_start_loc[:1]
        return _Packed(
            token_ids=np.array(token_ids, dtype=np.int64),
            query_start_loc=query_start_loc,
            seq_lens=seq_lens,
            block_table=self._tables.of(scheduled),
            rows=rows.astype(np.int64),
            decodes=all(samples) and len(token_ids) == len(scheduled),
        )

    def _compute(self, packed: _Packed, before: torch.Tensor | None = None) -> torch.Tensor:
        """Logits of the wanted rows; `before` has the tokens that the batch refers to (`refer_to`)."""
        if self.graphs is not None and packed.decodes:
            logits = self.graphs.run(packed.token_ids, packed.seq_lens, packed.block_table, before)
            if logits is not None:
                return logits
        metadata = AttentionMetadata.build(
            query_start_loc=packed.query_start_loc,
            seq_lens=packed.seq_lens,
            block_table=packed.block_table,
            kv_cache=self.kv_cache,
        )
        device = self.kv_cache.device
        token_ids = upload(packed.token_ids, device)
        return self.forward.forward(
            token_ids if before is None else filled_in(token_ids, before),
            upload(positions_of(packed.query_start_loc, packed.seq_lens), device),
            upload(packed.rows, device),
            metadata,
        )

    def _draws(self, requests: list[Request]) -> Draws:
        params = [r.params for r in requests]
        if any(p.temperature > 0 for p in params):
            seeds = [self._seed_of(r.request_id, r.params.seed) for r in requests]
        else:
            seeds = [0] * len(requests)
        return Draws([r.request_id for r in requests], params, seeds, [r.num_tokens for r in requests])

    def _sample(self, logits: torch.Tensor, requests: list[Request]) -> list[int]:
        draws = self._draws(requests)
        tokens, bad = sample(logits, draws.params, draws.seeds, draws.positions)
        if bad:
            raise RunnerError("the model's logits are not numbers", [requests[i].request_id for i in bad])
        return tokens

    def _seed_of(self, request_id: int, own: int | None) -> int:
        if own is not None:
            return own
        seed = self._seeds.get(request_id)
        if seed is None:
            seed = self._seeds[request_id] = request_seed(self._seed, request_id)
        return seed


def _sampling(output: SchedulerOutput, samples: list[bool]) -> tuple[list[Request], list[int] | None]:
    """The requests that a token is sampled for, and the row of logits for each; None where it is simply the next."""
    sampling = [share.request for share, wanted in zip(output.scheduled, samples, strict=True) if wanted]
    if not output.forks:
        return sampling, None
    row_of = np.cumsum(samples) - 1
    rows = [*range(len(sampling)), *(int(row_of[fork.share]) for fork in output.forks)]
    return [*sampling, *(fork.request for fork in output.forks)], rows


@dataclass(slots=True)
class _Row:
    index: int
    block_ids: list[int]
    num_blocks: int


class _BlockTables:
    """The requests' block tables as rows of one array, of which a step writes only what is new.

    A block manager's list grows at its end and is replaced by another list when the request loses its blocks, so the
    list's identity tells whether a row still holds its beginning. A row keeps what a former owner left behind its end.
    Places behind a sliding window hold no block; no attention reads them, and so any block will do in the row.
    """

    def __init__(self) -> None:
        self._table: NDArray[np.int32] = np.full((8, 64), PAD_SLOT, dtype=np.int32)
        self._rows: dict[int, _Row] = {}
        self._free = list(range(len(self._table)))

    def of(self, scheduled: list[ScheduledRequest]) -> NDArray[np.int32]:
        """int32 `[n, max_blocks]` for a batch, a copy."""
        rows = [self._update(s.request.request_id, s.block_ids) for s in scheduled]
        width = max((row.num_blocks for row in rows), default=0)
        return self._table[[row.index for row in rows], :width]

    def forget(self, request_id: int) -> None:
        row = self._rows.pop(request_id, None)
        if row is not None:
            self._free.append(row.index)

    def _update(self, request_id: int, block_ids: list[int]) -> _Row:
        row = self._rows.get(request_id)
        if row is None:
            row = self._rows[request_id] = _Row(self._take(), block_ids, 0)
        elif row.block_ids is not block_ids:
            row.block_ids, row.num_blocks = block_ids, 0
        n = len(block_ids)
        if n > row.num_blocks:
            if n > self._table.shape[1]:
                self._grow(0, max(n, 2 * self._table.shape[1]) - self._table.shape[1])
            added = self._table[row.index, row.num_blocks : n]
            added[:] = block_ids[row.num_blocks :]
            np.maximum(added, 0, out=added)
        row.num_blocks = n
        return row

    def _take(self) -> int:
        if not self._free:
            n = len(self._table)
            self._free = list(range(n, 2 * n))
            self._grow(n, 0)
        return self._free.pop()

    def _grow(self, rows: int, columns: int) -> None:
        self._table = np.pad(self._table, ((0, rows), (0, columns)), constant_values=PAD_SLOT)
