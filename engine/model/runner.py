"""The real `Runner`: packs a scheduler's batch, runs the model over the paged cache, samples."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from engine.attention.metadata import PAD_SLOT, AttentionMetadata, positions_of
from engine.core.scheduler_output import BlockCopy, ScheduledRequest
from engine.model.sampler import request_seed, sample
from engine.request import Request, SamplingParams
from engine.runner import RunnerError
from engine.trace.events import Op, Phase

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from engine.core.scheduler_output import SchedulerOutput
    from engine.kv_cache import KVCache
    from engine.model.decode_graphs import DecodeGraphs
    from engine.model.forward import Forward
    from engine.trace.events import ModelInfo


class ModelRunner:
    """`engine.runner.Runner` over a model.

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
        sampling = [s.request for s in scheduled if s.samples]
        if output.forks:
            row_of = np.cumsum(samples) - 1
            rows = [*range(len(sampling)), *(int(row_of[fork.share]) for fork in output.forks)]
            logits = logits[torch.tensor(rows, device=logits.device)]
            sampling += [fork.request for fork in output.forks]
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
    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Move contents of blocks; see `Runner.copy_blocks`."""
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
        counts = np.array([s.num_scheduled for s in scheduled], dtype=np.int32)
        seq_lens = np.array([s.computed_before for s in scheduled], dtype=np.int32) + counts
        query_start_loc = np.zeros(len(scheduled) + 1, dtype=np.int32)
        np.cumsum(counts, out=query_start_loc[1:])
        token_ids: list[int] = []
        for s in scheduled:
            token_ids += s.token_ids
        block_table = self._tables.of(scheduled)
        if self.graphs is not None and all(samples) and len(token_ids) == len(scheduled):
            logits = self.graphs.run(token_ids, seq_lens, block_table)
            if logits is not None:
                return logits
        # Where nothing is sampled one row of logits is computed all the same: no model has to cope with none.
        rows = query_start_loc[1:][samples] - 1 if any(samples) else query_start_loc[:1]
        metadata = AttentionMetadata.build(
            query_start_loc=query_start_loc,
            seq_lens=seq_lens,
            block_table=block_table,
            kv_cache=self.kv_cache,
        )
        device = self.kv_cache.device
        return self.forward.forward(
            torch.tensor(token_ids, dtype=torch.int64).to(device),
            torch.from_numpy(positions_of(query_start_loc, seq_lens)).to(device),
            torch.from_numpy(rows.astype(np.int64)).to(device),
            metadata,
        )

    def _sample(self, logits: torch.Tensor, requests: list[Request]) -> list[int]:
        params = [r.params for r in requests]
        if any(p.temperature > 0 for p in params):
            seeds = [self._seed_of(r.request_id, r.params.seed) for r in requests]
        else:
            seeds = [0] * len(requests)
        tokens, bad = sample(logits, params, seeds, [r.num_tokens for r in requests])
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
