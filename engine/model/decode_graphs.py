"""Decode steps as CUDA graphs: the whole forward is launched at once instead of operation by operation.

A decode's operations take the device less time than Python takes to launch them. A graph, captured once for a number
of requests, is replayed with one call; what differs from step to step (tokens, positions, lengths, block tables) lies
in tensors that keep their place. A batch smaller than its graph is padded: a padded row has no positions and writes to
no slot. Grids depend on the longest sequence, so a graph is made for a reach, and serves all shorter ones.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from engine.attention.metadata import PAD_SLOT, AttentionMetadata, slots_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from engine.kv_cache import KVCache
    from engine.model.forward import Forward

logger = logging.getLogger("engine")

Capture = Callable[[Callable[[], torch.Tensor]], tuple[Callable[[], None], torch.Tensor]]
"""Records a function once; gives what runs it again, and the tensor in which its result then lies."""

_LEAST_REACH = 1024
_ALIGNMENT = 64


class DecodeGraphs:
    """Captured decodes of one model over one cache.

    Args:
        forward: The model.
        kv_cache: The cache.
        max_num_seqs: The largest batch to serve.
        max_model_len: The longest sequence to serve.
        capture: How a function is recorded.
    """

    def __init__(
        self, forward: Forward, kv_cache: KVCache, max_num_seqs: int, max_model_len: int, capture: Capture | None = None
    ) -> None:
        self._forward = forward
        self._cache = kv_cache
        self._max_num_seqs = max_num_seqs
        self._max_model_len = max_model_len
        self._capture = capture or _CudaCapture()
        self._graphs: dict[tuple[int, int], _Graph] = {}
        self._broken = False

    def run(
        self, token_ids: list[int], seq_lens: NDArray[np.int32], block_table: NDArray[np.int32]
    ) -> torch.Tensor | None:
        """One decode step, a token of each sequence.

        Args:
            token_ids: The token that each sequence computes.
            seq_lens: int32 `[n]`, positions of each sequence, the token's included.
            block_table: int32 `[n, max_blocks]`.

        Returns:
            Logits `[n, vocab]`, valid until the next call; None if no graph serves this batch.
        """
        n, longest = len(token_ids), int(seq_lens.max(initial=0))
        if self._broken or n > self._max_num_seqs or longest > self._max_model_len:
            return None
        key = (graph_size(n, self._max_num_seqs), min(_reach(longest), self._max_model_len))
        graph = self._graphs.get(key)
        if graph is None:
            try:
                graph = self._graphs[key] = self._make(*key)
            except RuntimeError as error:
                # Some models look at values on the host in the middle of a forward, which a graph cannot.
                logger.warning("decode steps run without CUDA graphs: %s", str(error).splitlines()[0][:200])
                self._broken = True
                self._graphs.clear()
                return None
        graph.inputs.fill(token_ids, seq_lens, block_table, self._cache.block_size)
        graph.replay()
        return graph.logits[:n]

    def _make(self, size: int, reach: int) -> _Graph:
        inputs = _Inputs(size, -(-reach // self._cache.block_size), self._cache.device)
        inputs.fill([], np.zeros(0, np.int32), np.zeros((0, 0), np.int32), self._cache.block_size)
        metadata = inputs.metadata(self._cache, reach)

        def forward() -> torch.Tensor:
            return self._forward.forward(inputs.token_ids, inputs.positions, inputs.rows, metadata)

        replay, logits = self._capture(forward)
        return _Graph(inputs, replay, logits)


def graph_size(n: int, largest: int) -> int:
    """The batch that serves n requests: powers of two up to 8, multiples of 8 up to 64, of 32 beyond."""
    if n <= 8:
        size = 1 << (n - 1).bit_length()
    else:
        step = 8 if n <= 64 else 32
        size = -(-n // step) * step
    return min(size, largest)


def _reach(longest: int) -> int:
    return max(_LEAST_REACH, 1 << (longest - 1).bit_length())


@dataclass(frozen=True, slots=True)
class _Graph:
    """A recording; whatever tensor it reads must live as long as it does, hence in its inputs."""

    inputs: _Inputs
    replay: Callable[[], None]
    logits: torch.Tensor


class _Inputs:
    """What a graph reads, in one piece of memory, so that a step copies it to the device at once.

    Args:
        size: Sequences.
        max_blocks: Columns of the block table.
        device: Where the graph runs.
    """

    def __init__(self, size: int, max_blocks: int, device: torch.device) -> None:
        self._size = size
        self._max_blocks = max_blocks
        layout = [(np.int64, size), (np.int64, size), (np.int64, size), (np.int32, size), (np.int32, size * max_blocks)]
        num_bytes = sum(_aligned(np.dtype(dtype).itemsize * n) for dtype, n in layout)
        self._host = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._device = self._host.to(device, copy=True)
        host: list[NDArray[Any]] = []
        there: list[torch.Tensor] = []
        start = 0
        for dtype, n in layout:
            end = start + np.dtype(dtype).itemsize * n
            host.append(self._host[start:end].numpy().view(dtype))
            there.append(self._device[start:end].view(torch.int64 if dtype is np.int64 else torch.int32))
            start = _aligned(end)
        self._token_ids, self._positions, self._slots, self._seq_lens, table = host
        self._table = table.reshape(size, max_blocks)
        self.token_ids, self.positions, self._slots_there, self._seq_lens_there, self._table_there = there
        self.rows = torch.arange(size, device=device)
        self._query_start_loc = torch.arange(size + 1, dtype=torch.int32, device=device)

    def fill(
        self,
        token_ids: list[int],
        seq_lens: NDArray[np.int32],
        block_table: NDArray[np.int32],
        block_size: int,
    ) -> None:
        """Put a batch in; the rows after it are padding."""
        n, width = len(token_ids), block_table.shape[1]
        positions = seq_lens.astype(np.int64) - 1
        self._token_ids[:n] = token_ids
        self._token_ids[n:] = 0
        self._positions[:n] = positions
        self._positions[n:] = 0
        self._slots[:n] = slots_of(positions, np.ones(n, np.int32), block_table, block_size)
        self._slots[n:] = PAD_SLOT
        self._seq_lens[:n] = seq_lens
        self._seq_lens[n:] = 0
        self._table[:n, :width] = block_table
        self._device.copy_(self._host, non_blocking=True)

    def metadata(self, kv_cache: KVCache, reach: int) -> AttentionMetadata:
        """The batch as attention sees it; lengths up to `reach`."""
        host_loc = np.arange(self._size + 1, dtype=np.int32)
        return AttentionMetadata(
            query_start_loc=self._query_start_loc,
            seq_lens=self._seq_lens_there,
            block_table=self._table_there.view(self._size, self._max_blocks),
            slot_mapping=self._slots_there,
            host_query_start_loc=host_loc,
            host_seq_lens=self._seq_lens,
            host_block_table=self._table,
            host_slot_mapping=self._slots,
            num_seqs=self._size,
            num_tokens=self._size,
            max_query_len=1,
            max_seq_len=reach,
            num_decodes=self._size,
            kv_cache=kv_cache,
        )


class _CudaCapture:
    """Records with torch's CUDA graphs; all of them share their scratch memory, since one runs at a time."""

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, function: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        # Kernels are compiled, and libraries make their handles, in a first run: neither can be captured.
        stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            function()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits = function()
        self._pool = graph.pool()
        return graph.replay, logits


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
