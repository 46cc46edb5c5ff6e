"""What attention needs to know of a packed batch, and the signature that every implementation shares.

The batch is packed: the query tokens of all sequences lie one after the other, T in all, without padding. The names
are the field's own (vLLM's): sequence `i` owns the query rows `query_start_loc[i] : query_start_loc[i + 1]`; its
first `seq_lens[i]` positions are in the cache once the rows' own keys and values are written; row `r` of it stands
at position `seq_lens[i] - query_len + r`; position `p` lies in block `block_table[i, p // block_size]`, slot
`p % block_size`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from engine.upload import upload

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from engine.kv_cache import KVCache

PAD_SLOT = -1
"""A slot mapping entry that writes nothing; also "no block" in a block table."""


@dataclass(frozen=True, slots=True, eq=False)
class AttentionMetadata:
    """One step's batch, on the device as tensors and on the host as numpy arrays.

    The host arrays (`host_*`) are the same values: on the CPU they share the tensors' memory, so compiled code reads
    them in every layer without a conversion.

    Attributes:
        query_start_loc: int32 `[n + 1]`, first query row of each sequence, and T at the end.
        seq_lens: int32 `[n]`, positions in the cache once this step's are written.
        block_table: int32 `[n, max_blocks]`, block ids; entries past a sequence's blocks are stale or -1, never read.
        slot_mapping: int64 `[T]`, `block * block_size + offset` where each row's key and value go; -1 writes nothing.
        num_seqs: n.
        num_tokens: T.
        max_query_len: Longest query of the batch; 1 means that all are decodes.
        max_seq_len: Longest of `seq_lens`.
        num_decodes: How many sequences at the front of the batch have exactly one query row.
        kv_cache: Where keys and values are kept.
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    host_query_start_loc: NDArray[np.int32]
    host_seq_lens: NDArray[np.int32]
    host_block_table: NDArray[np.int32]
    host_slot_mapping: NDArray[np.int64]
    num_seqs: int
    num_tokens: int
    max_query_len: int
    max_seq_len: int
    num_decodes: int
    kv_cache: KVCache

    @property
    def block_size(self) -> int:
        """Tokens of one block."""
        return self.kv_cache.block_size

    @classmethod
    def build(
        cls,
        *,
        query_start_loc: NDArray[np.int32],
        seq_lens: NDArray[np.int32],
        block_table: NDArray[np.int32],
        slot_mapping: NDArray[np.int64] | None = None,
        kv_cache: KVCache,
    ) -> AttentionMetadata:
        """Make the metadata of a step from host arrays; the tensors are put on the cache's device.

        Args:
            query_start_loc: int32 `[n + 1]`.
            seq_lens: int32 `[n]`.
            block_table: int32 `[n, max_blocks]`.
            slot_mapping: int64 `[T]`; by default worked out from the others.
            kv_cache: The cache that the table points into.
        """
        query_start_loc = np.ascontiguousarray(query_start_loc, dtype=np.int32)
        seq_lens = np.ascontiguousarray(seq_lens, dtype=np.int32)
        block_table = np.ascontiguousarray(block_table, dtype=np.int32)
        query_lens = np.diff(query_start_loc)
        if slot_mapping is None:
            positions = positions_of(query_start_loc, seq_lens)
            slot_mapping = slots_of(positions, query_lens, block_table, kv_cache.block_size)
        slot_mapping = np.ascontiguousarray(slot_mapping, dtype=np.int64)
        longer = np.flatnonzero(query_lens != 1)
        device = kv_cache.device
        return cls(
            query_start_loc=upload(query_start_loc, device),
            seq_lens=upload(seq_lens, device),
            block_table=upload(block_table, device),
            slot_mapping=upload(slot_mapping, device),
            host_query_start_loc=query_start_loc,
            host_seq_lens=seq_lens,
            host_block_table=block_table,
            host_slot_mapping=slot_mapping,
            num_seqs=len(seq_lens),
            num_tokens=int(query_start_loc[-1]),
            max_query_len=int(query_lens.max(initial=0)),
            max_seq_len=int(seq_lens.max(initial=0)),
            num_decodes=int(longer[0]) if len(longer) else len(query_lens),
            kv_cache=kv_cache,
        )


class PagedAttention(Protocol):
    """One implementation of attention over the paged cache."""

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: int,
        metadata: AttentionMetadata,
        *,
        scale: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write the rows' keys and values into the cache, then attend causally over each row's sequence.

        Args:
            query: `[T, Hq, D]`, positions already applied; may be a strided view with a dense last axis.
            key: `[T, Hkv, D]`, heads not repeated; query head `h` reads KV head `h // (Hq // Hkv)`.
            value: `[T, Hkv, D]`.
            layer: Index of the layer in the cache.
            metadata: The batch.
            scale: Factor on the scores before anything else.
            sliding_window: A row at position p sees only positions greater than p - sliding_window.
            softcap: Scores become `softcap * tanh(scores / softcap)`.
            sinks: `[Hq]`, one extra score per head that takes part in the softmax and has no value.

        Returns:
            `[T, Hq, D]` in the query's dtype; rows that belong to no sequence are undefined.
        """
        ...


def positions_of(query_start_loc: NDArray[np.int32], seq_lens: NDArray[np.int32]) -> NDArray[np.int64]:
    """Position of every query row in its sequence, int64 `[T]`."""
    query_lens = np.diff(query_start_loc)
    first = seq_lens - query_lens - query_start_loc[:-1]
    return np.arange(query_start_loc[-1], dtype=np.int64) + np.repeat(first, query_lens)


def slots_of(
    positions: NDArray[np.int64], query_lens: NDArray[np.int32], block_table: NDArray[np.int32], block_size: int
) -> NDArray[np.int64]:
    """Slot of every query row, `block * block_size + offset`, int64 `[T]`."""
    rows = np.repeat(np.arange(len(query_lens)), query_lens)
    return block_table[rows, positions // block_size].astype(np.int64) * block_size + positions % block_size
