"""The reference attention agrees with attention written out key by key, whatever the cache holds elsewhere."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from engine.attention.metadata import AttentionMetadata, positions_of, slots_of
from engine.attention.reference import paged_attention
from engine.config import ConfigError
from engine.kv_cache import KVCache

LAYERS = 2
DIM = 8


class Sequences:
    """Sequences with known keys and values, whose tokens reach a poisoned cache chunk by chunk."""

    def __init__(self, lengths: list[int], *, block_size: int, num_heads: int = 4, num_kv_heads: int = 2) -> None:
        rng = np.random.default_rng(block_size + 17 * len(lengths))
        self.lengths = lengths
        self.num_heads, self.group = num_heads, num_heads // num_kv_heads
        self.keys = [torch.from_numpy(rng.normal(size=(n, num_kv_heads, DIM))).float() for n in lengths]
        self.values = [torch.from_numpy(rng.normal(size=(n, num_kv_heads, DIM))).float() for n in lengths]
        self.queries = [torch.from_numpy(rng.normal(size=(n, num_heads, DIM))).float() * 2 for n in lengths]
        width = -(-max(lengths) // block_size)
        self.cache = KVCache(
            num_blocks=width * len(lengths) + 1,
            num_layers=LAYERS,
            num_kv_heads=num_kv_heads,
            block_size=block_size,
            head_dim=DIM,
            dtype=torch.float32,
            poison=True,
        )
        # Rows end in stale entries: blocks of others, or none at all.
        self.table = rng.permutation(self.cache.num_blocks)[: width * len(lengths)].reshape(-1, width).astype(np.int32)
        self.seen = np.full((len(lengths), width + 2), 10**9, dtype=np.int32)
        for i, n in enumerate(lengths):
            used = -(-n // block_size)
            self.seen[i, :used] = self.table[i, :used]
            self.seen[i, used:width] = self.table[(i + 1) % len(lengths), : width - used]
        self.done = [0] * len(lengths)

    def step(self, counts: list[int], **options: object) -> dict[tuple[int, int], torch.Tensor]:
        """Attend to the next counts[i] tokens of each sequence; outputs by (sequence, position)."""
        live = [i for i, n in enumerate(counts) if n]
        ends = [self.done[i] + counts[i] for i in live]
        loc = np.cumsum([0, *(counts[i] for i in live)]).astype(np.int32)
        metadata = AttentionMetadata.build(
            query_start_loc=loc,
            seq_lens=np.array(ends, np.int32),
            block_table=self.seen[live],
            kv_cache=self.cache,
        )
        parts = [slice(self.done[i], end) for i, end in zip(live, ends, strict=True)]
        query, key, value = (
            torch.cat([source[i][part] for i, part in zip(live, parts, strict=True)])
            for source in (self.queries, self.keys, self.values)
        )
        out = paged_attention(query, key, value, 1, metadata, **options)  # type: ignore[arg-type]
        where = [(i, p) for i, part in zip(live, parts, strict=True) for p in range(part.start, part.stop)]
        for i, end in zip(live, ends, strict=True):
            self.done[i] = end
        return dict(zip(where, out, strict=True))

    def expected(
        self,
        sequence: int,
        position: int,
        *,
        scale: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Written out with Python floats: one head, one key at a time."""
        out = torch.zeros(self.num_heads, DIM)
        first = 0 if sliding_window is None else max(0, position - sliding_window + 1)
        for head in range(self.num_heads):
            query = self.queries[sequence][position, head]
            scores = []
            for p in range(first, position + 1):
                score = scale * sum(a * b for a, b in zip(query.tolist(), self.key(sequence, p, head), strict=True))
                scores.append(softcap * math.tanh(score / softcap) if softcap else score)
            weights = [math.exp(s) for s in scores]
            total = sum(weights) + (math.exp(float(sinks[head])) if sinks is not None else 0.0)
            for weight, p in zip(weights, range(first, position + 1), strict=True):
                out[head] += weight / total * self.values[sequence][p, head // self.group]
        return out

    def key(self, sequence: int, position: int, head: int) -> list[float]:
        row: list[float] = self.keys[sequence][position, head // self.group].tolist()
        return row


OPTIONS = {
    "plain": {},
    "window": {"sliding_window": 5},
    "window of one": {"sliding_window": 1},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    "all": {"sliding_window": 6, "softcap": 2.0, "sinks": torch.tensor([1.0, 0.3, -2.0, 1.5])},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_chunked_prefill_and_decode_agree_with_attention_written_out(block_size: int, options: dict) -> None:
    sequences = Sequences([1, 9, 17, 4], block_size=block_size)
    got = sequences.step([1, 4, 8, 3], scale=0.4, **options)
    got |= sequences.step([0, 5, 8, 1], scale=0.4, **options)
    got |= sequences.step([0, 0, 1, 0], scale=0.4, **options)
    assert len(got) == 1 + 9 + 17 + 4
    for (sequence, position), out in got.items():
        want = sequences.expected(sequence, position, scale=0.4, **options)
        torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-4, msg=f"sequence {sequence}, position {position}")


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(3, 3), (6, 2), (4, 1)])
def test_query_heads_read_their_own_kv_head(num_heads: int, num_kv_heads: int) -> None:
    sequences = Sequences([6], block_size=4, num_heads=num_heads, num_kv_heads=num_kv_heads)
    for (_, position), out in sequences.step([6], scale=0.3).items():
        torch.testing.assert_close(out, sequences.expected(0, position, scale=0.3), atol=1e-5, rtol=1e-4)


def test_keys_and_values_go_to_their_slots_and_nowhere_else() -> None:
    sequences = Sequences([5, 7], block_size=3)
    sequences.step([5, 7], scale=1.0)
    written = torch.zeros_like(sequences.cache.data, dtype=torch.bool)
    for i, length in enumerate(sequences.lengths):
        for position in range(length):
            block, offset = sequences.table[i, position // 3], position % 3
            torch.testing.assert_close(sequences.cache.keys(1)[block, :, offset], sequences.keys[i][position])
            torch.testing.assert_close(sequences.cache.values(1)[block, :, offset], sequences.values[i][position])
            written[block, 1, :, :, offset] = True
    assert torch.isnan(sequences.cache.data[~written]).all()


def test_a_row_with_a_negative_slot_writes_nothing() -> None:
    sequences = Sequences([2], block_size=2)
    metadata = AttentionMetadata.build(
        query_start_loc=np.array([0, 2]),
        seq_lens=np.array([2]),
        block_table=sequences.table,
        slot_mapping=np.array([int(sequences.table[0, 0]) * 2, -1]),
        kv_cache=sequences.cache,
    )
    paged_attention(sequences.queries[0], sequences.keys[0], sequences.values[0], 0, metadata, scale=1.0)
    assert int((~torch.isnan(sequences.cache.keys(0))).any(-1).all(1).sum()) == 1


def test_the_result_has_the_models_dtype() -> None:
    cache = KVCache(
        num_blocks=2, num_layers=1, num_kv_heads=1, block_size=2, head_dim=DIM, dtype=torch.bfloat16, poison=True
    )
    metadata = AttentionMetadata.build(
        query_start_loc=np.array([0, 3]), seq_lens=np.array([3]), block_table=np.array([[1, 0]]), kv_cache=cache
    )
    q, k, v = (torch.randn(3, heads, DIM).bfloat16() for heads in (2, 1, 1))
    out = paged_attention(q, k, v, 0, metadata, scale=0.5)
    assert out.dtype == torch.bfloat16
    assert out.shape == (3, 2, DIM)
    # Its first row sees itself only.
    torch.testing.assert_close(out[0], v[0].expand(2, DIM))


def test_metadata_counts_the_decodes_in_front() -> None:
    cache = KVCache(num_blocks=9, num_layers=1, num_kv_heads=1, block_size=4, head_dim=2, dtype=torch.float32)
    metadata = AttentionMetadata.build(
        query_start_loc=np.array([0, 1, 2, 5, 6]),
        seq_lens=np.array([9, 1, 8, 2]),
        block_table=np.array([[0, 1, 2], [3, -1, -1], [4, 5, -1], [6, -1, -1]]),
        kv_cache=cache,
    )
    assert (metadata.num_seqs, metadata.num_tokens, metadata.num_decodes) == (4, 6, 2)
    assert (metadata.max_query_len, metadata.max_seq_len) == (3, 9)
    assert metadata.slot_mapping.tolist() == [2 * 4 + 0, 3 * 4 + 0, 5 * 4 + 1, 5 * 4 + 2, 5 * 4 + 3, 6 * 4 + 1]


def test_positions_and_slots_of_a_packed_batch() -> None:
    loc, lens = np.array([0, 2, 3], np.int32), np.array([7, 1], np.int32)
    assert positions_of(loc, lens).tolist() == [5, 6, 0]
    table = np.array([[8, 3, 5], [1, -1, -1]], np.int32)
    assert slots_of(positions_of(loc, lens), np.diff(loc), table, 3).tolist() == [3 * 3 + 2, 5 * 3 + 0, 1 * 3 + 0]


def test_whole_blocks_are_copied_in_all_layers() -> None:
    cache = KVCache(num_blocks=5, num_layers=3, num_kv_heads=2, block_size=2, head_dim=4, dtype=torch.float32)
    cache.data.copy_(torch.randn(cache.data.shape))
    before = cache.data.clone()
    cache.copy_blocks([0, 0, 3], [4, 1, 2])
    torch.testing.assert_close(cache.data, before[[0, 0, 3, 3, 0]])
    cache.copy_blocks([], [])
    with pytest.raises(ValueError, match="2 source blocks for 1"):
        cache.copy_blocks([0, 1], [2])


def test_a_cache_larger_than_memory_is_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match=r"does not fit on cpu: 1000000000 blocks of 36\.0 MiB.*--num-blocks"):
        KVCache(
            num_blocks=10**9,
            num_layers=32,
            num_kv_heads=9,
            block_size=256,
            head_dim=64,
            dtype=torch.float32,
        )
