"""Rotary positions and head norms inside the compiled attention equal those applied in front of it."""

from __future__ import annotations

import pytest
import torch
from test_cpu import LAYER, TOLERANCE, Batch, around

from engine.attention import cpu, cpu_plan, reference
from engine.attention.cpu import HeadNorm, Rotary
from engine.attention.metadata import positions_of

MAX_POSITIONS = 1200


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def rotary_of(head_dim, dtype, norms=False):
    generator = torch.Generator().manual_seed(5)
    frequencies = 10.0 ** -torch.linspace(0, 3, head_dim // 2)
    angles = torch.arange(MAX_POSITIONS)[:, None] * frequencies
    table = torch.cat((angles.cos(), angles.sin()), 1)
    if not norms:
        return Rotary(table)
    query, key = ((1 + 0.3 * torch.randn(head_dim, generator=generator)).to(dtype) for _ in range(2))
    return Rotary(table, HeadNorm(query, 1e-5), HeadNorm(key, 1e-3))


def plain(x, norm, angles, positions):
    """Heads `[T, H, D]` normed and turned, in float64."""
    x = x.double()
    if norm is not None:
        x = x / torch.sqrt((x * x).mean(-1, keepdim=True) + norm.eps) * norm.weight.double()
    half = x.shape[-1] // 2
    cos, sin = angles[positions][:, None].double().split(half, dim=-1)
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).float()


class RotaryBatch(Batch):
    """A batch whose rows still stand at no position."""

    def prepared(self, rotary):
        """Queries and keys as an attention without rotary positions takes them."""
        positions = positions_of(self.metadata.host_query_start_loc, self.metadata.host_seq_lens)
        return (
            plain(self.query, rotary.query_norm, rotary.angles, positions),
            plain(self.key, rotary.key_norm, rotary.angles, positions),
        )

    def attend_rotary(self, rotary, window=None, num_threads=2):
        rows = torch.cat((self.query, self.key, self.value), 1).flatten(1)
        torch.set_num_threads(num_threads)
        out = cpu.rotary_attention(
            rows, LAYER, self.metadata, rotary=rotary, scale=self.head_dim**-0.5, sliding_window=window
        )
        torch.set_num_threads(1)
        return out

    def check_rotary(self, rotary, window=None):
        query, key = self.prepared(rotary)
        cache = self._cache(self.cache.num_blocks, torch.float32)
        cache.data.copy_(self.cache.data)
        metadata = self._metadata(cache, self.metadata.host_block_table)
        if cpu_plan.multiplies_pairs(self.dtype, self.cache):
            query = query.to(self.dtype).float()
        rows = query, self.numbers(key), self.numbers(self.value)
        scale = self.head_dim**-0.5
        want = reference.paged_attention(*rows, LAYER, metadata, scale=scale, sliding_window=window)
        got = self.attend_rotary(rotary, window)
        assert got.dtype == self.dtype
        # A key near the middle of two elements of the cache may be rounded to the other one, and so may a query.
        loose = {torch.float32: 2e-5, torch.bfloat16: 2e-3, torch.float16: 3e-4}[self.dtype]
        tolerance = {**TOLERANCE[self.dtype], "atol": loose}
        torch.testing.assert_close(got.view(want.shape).float(), want, **tolerance)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize(
    ("head_dim", "group", "block_size"), [(64, 3, 16), (128, 1, 4), (80, 8, 3), (20, 2, 16), (2, 5, 1)]
)
def test_a_mixed_batch_agrees_with_positions_applied_in_front(dtype, norms, head_dim, group, block_size):
    batch = RotaryBatch(around(block_size), block_size=block_size, group=group, head_dim=head_dim, dtype=dtype)
    batch.check_rotary(rotary_of(head_dim, dtype, norms))


@pytest.mark.parametrize("seqs", [[(1100, 1), (300, 1)], [(600, 50), (40, 1)]])
def test_long_contexts_and_windows_agree(seqs):
    batch = RotaryBatch(seqs, dtype=torch.float32)
    batch.check_rotary(rotary_of(64, torch.float32), window=37)


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn, None])
@pytest.mark.parametrize("seqs", [[(20, 1), (5, 1)], [(37, 37), (5, 2), (9, 1)]])
def test_what_is_written_is_what_attention_without_positions_writes(cache_dtype, seqs):
    dtype = torch.float16 if cache_dtype == torch.float16 else torch.float32
    ours = RotaryBatch(seqs, block_size=3, dtype=dtype, cache_dtype=cache_dtype)
    theirs = Batch(seqs, block_size=3, dtype=dtype, cache_dtype=cache_dtype)
    rotary = rotary_of(64, dtype, norms=True)
    theirs.query, theirs.key = (x.to(dtype) for x in ours.prepared(rotary))
    ours.attend_rotary(rotary)
    theirs.attend()
    numbers, expected = (each.cache.data.float() for each in (ours, theirs))
    if ours.cache.scales is None:
        assert torch.equal(numbers.isnan(), expected.isnan())
        unit = {torch.bfloat16: 2**-7, torch.float16: 2**-10}.get(ours.cache.dtype, 1e-5)
        torch.testing.assert_close(numbers, expected, rtol=unit, atol=2e-6, equal_nan=True)
    else:
        torch.testing.assert_close(ours.cache.scales, theirs.cache.scales, rtol=1e-5, atol=0, equal_nan=True)
        written = ~theirs.cache.scales.isnan()
        # A code beside a tie may be the next one: of eight bits, or of three behind the point.
        apart = (numbers - expected).abs()[written] / expected.abs()[written].clamp(min=8)
        assert apart.max() <= 1 / 8
        assert (apart > 0).float().mean() < 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_is_the_same_alone_and_among_others(dtype):
    rotary = rotary_of(64, dtype, norms=True)
    batch = RotaryBatch([(n, 1) for n in range(1, 200, 7)], dtype=dtype)
    outputs = []
    for threads in (1, 2, 5):
        batch.metadata = batch._metadata(batch.cache, batch.metadata.host_block_table)
        outputs.append(batch.attend_rotary(rotary, num_threads=threads))
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])
    for i in (0, 3, 20):
        alone = RotaryBatch([batch.seqs[i]], dtype=dtype)
        alone.cache.data = batch.cache.data
        alone.cache.num_blocks = batch.cache.num_blocks
        alone.metadata = alone._metadata(alone.cache, batch.metadata.host_block_table[i : i + 1])
        alone.query, alone.key, alone.value = (x[i : i + 1] for x in (batch.query, batch.key, batch.value))
        assert torch.equal(alone.attend_rotary(rotary)[0], outputs[0][i])


def test_a_nan_in_one_sequence_stays_in_it_and_shows():
    rotary = rotary_of(64, torch.float32, norms=True)
    batch = RotaryBatch([(40, 1), (40, 1), (9, 9)])
    clean = batch.attend_rotary(rotary)
    batch.key[1, :, 3] = float("nan")
    out = batch.attend_rotary(rotary)
    assert out[1].isnan().all()
    others = [0, *range(2, 11)]
    assert torch.equal(out[others], clean[others])


def test_what_does_not_fit_is_refused():
    batch = RotaryBatch([(20, 1), (30, 3)])
    rotary = rotary_of(64, torch.float32)
    with pytest.raises(ValueError, match="position 29 is beyond the 29"):
        batch.attend_rotary(Rotary(rotary.angles[:29]))
    batch.query = batch.query[:, :5]
    with pytest.raises(ValueError, match="5 query heads cannot share 2 KV heads"):
        batch.attend_rotary(rotary)
    batch.query = batch.query[:, :0]
    with pytest.raises(ValueError, match="0 query heads"):
        batch.attend_rotary(rotary)
    odd = RotaryBatch([(20, 1)], head_dim=33)
    with pytest.raises(ValueError, match="heads of even size"):
        odd.attend_rotary(rotary)
    few = RotaryBatch([(20, 1)])
    with pytest.raises(ValueError, match="do not fit 1 tokens"):
        cpu.rotary_attention(torch.zeros(0, 10 * 64), LAYER, few.metadata, rotary=rotary, scale=1.0)
    with pytest.raises(ValueError, match="layer 7 is outside"):
        cpu.rotary_attention(torch.zeros(1, 10 * 64), 7, few.metadata, rotary=rotary, scale=1.0)
