"""Decode steps as CUDA graphs: the whole forward is launched at once instead of operation by operation.

A decode's operations take the device less time than Python takes to launch them. A graph, captured once for a number
of requests, is replayed with one call; what differs from step to step (tokens, positions, lengths, block tables) lies
in tensors that keep their place. A batch smaller than its graph is padded: a padded row has no positions and writes to
no slot. Grids depend on the longest sequence, so a graph is made for a reach, and serves all shorter ones.
"""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from engine.attention.metadata import PAD_SLOT, AttentionMetadata, slots_of
from engine.model.launched import filled_in

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

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
        self._capture = capture or CudaCapture(kv_cache.device)
        self._graphs: dict[tuple[int, int], _Graph] = {}
        self._broken = False

    def run(
        self,
        token_ids: Sequence[int] | NDArray[np.int64],
        seq_lens: NDArray[np.int32],
        block_table: NDArray[np.int32],
        before: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """One decode step, a token of each sequence.

        Args:
            token_ids: The token that each sequence computes; `-1 - row` refers to a row of `before`.
            seq_lens: int32 `[n]`, positions of each sequence, the token's included.
            block_table: int32 `[n, max_blocks]`.
            before: int64, tokens on the device that were not known when the batch was put together.

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
                logger.warning("decode steps run without CUDA graphs: %s", _first_cause(error))
                self._broken = True
                self._graphs.clear()
                return None
        graph.inputs.fill(token_ids, seq_lens, block_table, self._cache.block_size)
        if before is not None:
            graph.inputs.token_ids.copy_(filled_in(graph.inputs.token_ids, before))
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


@dataclass(frozen=True, slots=True)
class _Host:
    """A piece of the host's memory, and the arrays in it."""

    piece: torch.Tensor
    token_ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    slots: NDArray[np.int64]
    seq_lens: NDArray[np.int32]
    table: NDArray[np.int32]


class _Inputs:
    """What a graph reads, in one piece of memory, so that a step copies it to the device at once.

    For a CUDA device there are two pieces on the host, filled in turn: the copy of a step that was launched and not
    waited for may still have to read one. The step before that one has been waited for.

    Args:
        size: Sequences.
        max_blocks: Columns of the block table.
        device: Where the graph runs.
    """

    def __init__(self, size: int, max_blocks: int, device: torch.device) -> None:
        self._size = size
        self._max_blocks = max_blocks
        layout = [(np.int64, size), (np.int64, size), (np.int64, size), (np.int32, size), (np.int32, size * max_blocks)]
        spans: list[tuple[int, int]] = []
        num_bytes = 0
        for dtype, n in layout:
            spans.append((num_bytes, num_bytes + np.dtype(dtype).itemsize * n))
            num_bytes = _aligned(spans[-1][1])
        pinned = device.type == "cuda"
        pieces = [torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(2 if pinned else 1)]
        self._device = pieces[0].to(device, copy=True)
        self._hosts: list[_Host] = []
        for piece in pieces:
            token_ids, positions, slots, seq_lens, table = (
                piece[a:b].numpy().view(dtype) for (dtype, _), (a, b) in zip(layout, spans, strict=True)
            )
            self._hosts.append(_Host(piece, token_ids, positions, slots, seq_lens, table.reshape(size, max_blocks)))
        there = [
            self._device[a:b].view(torch.int64 if dtype is np.int64 else torch.int32)
            for (dtype, _), (a, b) in zip(layout, spans, strict=True)
        ]
        self.token_ids, self.positions, self._slots_there, self._seq_lens_there, self._table_there = there
        self.rows = torch.arange(size, device=device)
        self._query_start_loc = torch.arange(size + 1, dtype=torch.int32, device=device)

    def fill(
        self,
        token_ids: Sequence[int] | NDArray[np.int64],
        seq_lens: NDArray[np.int32],
        block_table: NDArray[np.int32],
        block_size: int,
    ) -> None:
        """Put a batch in; the rows after it are padding."""
        # A table may go on behind the reach: memory that is reserved for tokens to come.
        n, width = len(token_ids), min(block_table.shape[1], self._max_blocks)
        positions = seq_lens.astype(np.int64) - 1
        self._hosts.reverse()
        host = self._hosts[0]
        host.token_ids[:n] = token_ids
        host.token_ids[n:] = 0
        host.positions[:n] = positions
        host.positions[n:] = 0
        host.slots[:n] = slots_of(positions, np.ones(n, np.int32), block_table, block_size)
        host.slots[n:] = PAD_SLOT
        host.seq_lens[:n] = seq_lens
        host.seq_lens[n:] = 0
        host.table[:n, :width] = block_table[:, :width]
        self._device.copy_(host.piece, non_blocking=True)

    def metadata(self, kv_cache: KVCache, reach: int) -> AttentionMetadata:
        """The batch as attention sees it; lengths up to `reach`."""
        host = self._hosts[0]
        host_loc = np.arange(self._size + 1, dtype=np.int32)
        return AttentionMetadata(
            query_start_loc=self._query_start_loc,
            seq_lens=self._seq_lens_there,
            block_table=self._table_there.view(self._size, self._max_blocks),
            slot_mapping=self._slots_there,
            host_query_start_loc=host_loc,
            host_seq_lens=host.seq_lens,
            host_block_table=host.table,
            host_slot_mapping=host.slots,
            num_seqs=self._size,
            num_tokens=self._size,
            max_query_len=1,
            max_seq_len=reach,
            num_decodes=self._size,
            kv_cache=kv_cache,
        )


class CudaCapture:
    """Records with torch's CUDA graphs; all of them share their scratch memory, since one runs at a time.

    Args:
        device: Where the function's work is; it need not be the current device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = None
        self._pool: Any = None

    def __call__(self, function: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        """See `Capture`."""
        with torch.cuda.device(self._device):
            # One stream for all: each that multiplies matrices keeps a workspace for good, on some cards 32 MiB.
            if self._stream is None:
                self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            stream, current = self._stream, torch.cuda.current_stream()
            graph = torch.cuda.CUDAGraph()
            stream.wait_stream(current)
            # Around the capture as well: where that fails, torch's own context leaves its stream the current one.
            with torch.cuda.stream(stream):
                # Kernels are compiled, and libraries make their handles, in a first run: neither can be captured.
                function()
                current.wait_stream(stream)
                with _no_collection(), torch.cuda.graph(graph, pool=self._pool, stream=stream):
                    logits = function()
        self._pool = graph.pool()
        return graph.replay, logits


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Garbage stays: events, graphs and pinned memory in it make calls as they go that end a capture with an error."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _first_cause(error: BaseException) -> str:
    """One line of what went wrong first: that the capture could not be ended is only what follows."""
    while isinstance(error.__context__, RuntimeError):
        error = error.__context__
    lines = str(error).splitlines()
    return lines[0][:200] if lines else type(error).__name__


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
