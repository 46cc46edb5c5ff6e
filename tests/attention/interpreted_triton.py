"""The Triton kernels against the float32 reference, under Triton's interpreter.

Not collected by name: `test_triton.py` runs this file in a process of its own, since triton decides at its first
import whether kernels are interpreted. By hand:

    TRITON_INTERPRET=1 python -m pytest tests/attention/interpreted_triton.py
"""

import dataclasses

import numpy as np
import pytest
import torch

from engine.attention import reference, triton_cache
from engine.attention.metadata import PAD_SLOT, AttentionMetadata
from engine.attention.triton import INTERPRETED, TritonAttention, write_kv
from engine.attention.triton_tiles import Tile
from engine.bench.ahead_of_time import CONFIGURATIONS
from engine.bench.gpu_checks import check_configuration
from engine.bench.gpu_timing import Bench, Shape
from engine.kv_cache import KVCache

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1 before triton is imported")

CPU = torch.device("cpu")
NO_SUCH_BLOCK = 2**30
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# ‖out - reference‖ / ‖reference‖. The interpreter rounds to bfloat16 by cutting off, twice the hardware's error.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
LIMIT = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
# Small, so that short sequences cross every kind of boundary: blocks, key tiles, query tiles, splits.
SMALL = {"decode": Tile(16, 16, 4, 1), "prefill": Tile(16, 16, 4, 1), "decode_split_keys": 32}
# (query rows, positions in the cache): decodes first.
DECODES = [(1, 1), (1, 16), (1, 17), (1, 33), (1, 71)]
PREFILLS = [(2, 2), (16, 16), (7, 40)]


class Case:
    """A batch over a cache that is NaN wherever nothing was written, with random tables, and its float32 twin."""

    def __init__(
        self, batch, *, block_size=16, kv_heads=1, group=2, head_dim=64, dtype=torch.float32, cache_dtype=None,
        scale_dtype=torch.float32, seed=0,
    ):  # fmt: skip
        rng = np.random.default_rng(seed)
        generator = torch.Generator().manual_seed(seed)
        query_lens, seq_lens = (np.array(column, np.int32) for column in zip(*batch, strict=True))
        needed = -(-seq_lens // block_size)
        num_blocks = int(needed.sum()) + 3
        layers = 2
        self.layer = 1
        quantised = cache_dtype in LIMIT
        self.cache = KVCache(
            num_blocks=num_blocks, num_layers=layers, num_kv_heads=kv_heads, block_size=block_size,
            head_dim=head_dim, dtype=cache_dtype or dtype, poison=True,
        )  # fmt: skip
        if quantised:
            self.cache.scales = self.cache.scales.to(scale_dtype)
        table = np.full((len(batch), max(1, int(needed.max()))), NO_SUCH_BLOCK, np.int32)
        ids = rng.permutation(num_blocks).astype(np.int32)
        for row, count, first in zip(table, needed, np.cumsum(needed) - needed, strict=True):
            row[:count] = ids[first : first + count]
        starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
        self.metadata = AttentionMetadata.build(
            query_start_loc=starts, seq_lens=seq_lens, block_table=table, kv_cache=self.cache
        )
        tokens = int(starts[-1])
        # One fused projection, as in the model: query, key and value are strided views of it.
        heads = kv_heads * (group + 2)
        rows = torch.randn(tokens, heads, head_dim, generator=generator).to(dtype)
        self.query, self.key, self.value = rows.split([kv_heads * group, kv_heads, kv_heads], dim=1)

        # What earlier steps wrote: every position before this step's rows.
        history = AttentionMetadata.build(
            query_start_loc=np.concatenate([[0], np.cumsum(seq_lens)]).astype(np.int32),
            seq_lens=seq_lens, block_table=table, kv_cache=self.cache,
        )  # fmt: skip
        shape = (int(seq_lens.sum()), kv_heads, head_dim)
        keys, values = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
        if quantised:
            for i, rows in enumerate((keys, values)):
                self.put_codes(rows.float(), i, history.slot_mapping)
        else:
            reference.write_kv(keys, values, self.layer, history)
        slots = self.metadata.slot_mapping
        written = self.cache.scales if quantised else self.cache.data
        written[slots // block_size, :, :, :, slots % block_size] = float("nan")

    def put_codes(self, rows, i, slots):
        limit = LIMIT[self.cache.data.dtype]
        scales = (rows.abs().amax(-1) / limit).to(self.cache.scales.dtype)
        codes = (rows / scales.float()[..., None]).clamp(-limit, limit)
        codes = codes.round() if self.cache.data.dtype == torch.int8 else codes
        block, offset = slots // self.cache.block_size, slots % self.cache.block_size
        self.cache.scales[block, self.layer, i, :, offset] = scales
        self.cache.data[block, self.layer, i, :, offset] = codes.to(self.cache.data.dtype)

    def expected(self, **options):
        """The reference in float32, on a dequantised copy of the cache after the kernel has written to it."""
        twin = KVCache(
            num_blocks=self.cache.num_blocks, num_layers=self.cache.num_layers, num_kv_heads=self.cache.num_kv_heads,
            block_size=self.cache.block_size, head_dim=self.cache.head_dim, dtype=torch.float32,
        )  # fmt: skip
        twin.data.copy_(self.cache.data.float())
        key, value = self.key.float(), self.value.float()
        if self.cache.scales is not None:
            twin.data.mul_(self.cache.scales.float()[..., None])
        if self.cache.dtype != self.key.dtype:
            # As they were rounded; the interpreter rounds to bfloat16 in its own way.
            slots = self.metadata.slot_mapping
            block, offset = slots // self.cache.block_size, slots % self.cache.block_size
            key, value = (twin.data[block, self.layer, i, :, offset] for i in range(2))
        metadata = AttentionMetadata.build(
            query_start_loc=self.metadata.host_query_start_loc, seq_lens=self.metadata.host_seq_lens,
            block_table=self.metadata.host_block_table, slot_mapping=self.metadata.host_slot_mapping, kv_cache=twin,
        )  # fmt: skip
        return reference.paged_attention(self.query.float(), key, value, self.layer, metadata, **options)

    def check(self, attention=None, **options):
        options = {"scale": self.query.shape[-1] ** -0.5, **options}
        attention = attention or TritonAttention(**SMALL)
        out = attention(self.query, self.key, self.value, self.layer, self.metadata, **options)
        assert out.dtype == self.query.dtype
        expected = self.expected(**options)
        error = (out.float() - expected).flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1)
        assert error.max() < TOLERANCE[out.dtype], f"row {int(error.argmax())} of {len(error)}: {float(error.max())}"
        return out


@pytest.mark.parametrize(
    ("dtype", "head_dim", "block_size", "kv_heads", "group"),
    [
        ("fp32", 64, 16, 2, 3),
        ("fp32", 64, 1, 1, 2),
        ("bf16", 64, 8, 1, 4),
        ("bf16", 128, 16, 1, 1),
        ("fp16", 80, 32, 1, 2),
        ("fp32", 96, 24, 1, 1),
        ("fp32", 16, 128, 1, 16),
    ],
)
def test_a_mixed_batch_equals_the_reference(dtype, head_dim, block_size, kv_heads, group):
    case = Case(
        DECODES + PREFILLS, block_size=block_size, kv_heads=kv_heads, group=group, head_dim=head_dim,
        dtype=DTYPES[dtype],
    )  # fmt: skip
    case.check()


@pytest.mark.parametrize("window", [1, 16, 33])
def test_a_sliding_window_hides_what_lies_before_it(window):
    Case([(1, 1), (1, 16), (1, 50), (3, 3), (20, 75)], block_size=8).check(sliding_window=window)


def test_blocks_before_the_window_are_never_read():
    case = Case([(1, 60), (9, 60)], block_size=8)
    for row in case.metadata.host_block_table:
        row[:4] = NO_SUCH_BLOCK  # positions below 32: the ninth row from the end begins at 52 - 20 = 32
    out = TritonAttention(**SMALL)(
        case.query, case.key, case.value, 1, case.metadata, scale=0.125, sliding_window=20
    )  # fmt: skip
    case.metadata.host_block_table[:, :4] = case.metadata.host_block_table[:, 4:5]
    torch.testing.assert_close(out, case.expected(scale=0.125, sliding_window=20), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("batch", [[(1, 1), (1, 40)], [(2, 2), (7, 40)]], ids=["decode", "prefill"])
@pytest.mark.parametrize(
    "options",
    [{"softcap": 3.0}, {"sinks": True}, {"softcap": 3.0, "sinks": True, "sliding_window": 19, "scale": 0.3}],
    ids=["softcap", "sinks", "all"],
)
def test_scores_are_capped_and_sinks_take_their_share(batch, options):
    if "sinks" in options:
        options = {**options, "sinks": torch.tensor([1.5, -0.5])}
    Case(batch).check(**options)


@pytest.mark.parametrize("softcap", [0.01, 1000.0])
def test_the_cap_holds_at_both_ends_of_its_range(softcap):
    Case([(1, 20), (3, 9)]).check(softcap=softcap, scale=8.0)


@pytest.mark.parametrize(
    ("cache_dtype", "dtype", "scale_dtype"),
    [
        (torch.int8, torch.float32, torch.float32),
        (torch.int8, torch.bfloat16, torch.float16),
        (torch.float8_e4m3fn, torch.float32, torch.float32),
        (torch.float8_e4m3fn, torch.float16, torch.float32),
    ],
    ids=["int8", "int8-half-scales", "fp8", "fp8-half"],
)
def test_a_quantised_cache_is_read_with_its_scales(cache_dtype, dtype, scale_dtype):
    batch = [(1, 1), (1, 70), (5, 20)]
    Case(batch, block_size=8, dtype=dtype, cache_dtype=cache_dtype, scale_dtype=scale_dtype).check(sliding_window=50)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_bfloat16_cache_serves_a_model_in_another_type(dtype):
    Case([(1, 1), (1, 70), (5, 20)], block_size=8, dtype=dtype, cache_dtype=torch.bfloat16).check(sliding_window=50)


def test_float8_is_read_alike_by_type_and_by_bits(monkeypatch):
    case = Case([(1, 40), (5, 21)], cache_dtype=torch.float8_e4m3fn)
    by_type = case.check()
    monkeypatch.setattr("engine.attention.triton_tiles.Target.has_float8", False)
    assert torch.equal(case.check(), by_type)


@pytest.mark.parametrize("cache_dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantised_keys_are_the_nearest_codes(cache_dtype):
    limit = LIMIT[cache_dtype]
    case = Case([(16, 16), (1, 1)], kv_heads=3, group=1, head_dim=80, cache_dtype=cache_dtype)
    spread = 10.0 ** torch.linspace(-6, 3, 80)  # down to codes that are subnormal in float8
    key, value = case.key * spread, case.value * spread.flip(0)
    value[3, 1] = 0.0
    write_kv(key, value, 0, case.metadata)
    slots = case.metadata.slot_mapping
    block, offset = slots // 16, slots % 16
    for i, rows in enumerate((key, value)):
        scales = case.cache.scales[block, 0, i, :, offset]
        codes = case.cache.data[block, 0, i, :, offset]
        expected = rows.abs().amax(-1) / limit
        expected[expected == 0.0] = 1.0
        torch.testing.assert_close(scales, expected, rtol=1e-6, atol=0)
        scaled = (rows / scales[..., None]).clamp(-limit, limit)
        exact = scaled.round() if cache_dtype == torch.int8 else scaled.to(cache_dtype).float()
        assert torch.equal(codes.float(), exact)


@pytest.mark.parametrize("cache_dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_is_no_number_shows_in_its_scale(cache_dtype, bad):
    case = Case([(4, 4)], kv_heads=3, group=1, cache_dtype=cache_dtype)
    case.key[1, 2, 5] = bad
    write_kv(case.key, case.value, 0, case.metadata)
    slots = case.metadata.slot_mapping
    keys, values = (case.cache.scales[slots // 16, 0, i, :, slots % 16] for i in range(2))
    assert keys.isfinite().logical_not().nonzero().tolist() == [[1, 2]]
    assert values.isfinite().all()


def test_only_the_slots_of_a_step_are_written():
    case = Case([(1, 17), (5, 9)], kv_heads=3, group=1)
    slots = case.metadata.host_slot_mapping
    slots[[0, 3]] = PAD_SLOT
    before = case.cache.data.clone()
    write_kv(case.key, case.value, 0, case.metadata)
    expected = before
    kept = [1, 2, 4, 5]
    at = torch.from_numpy(slots[kept])
    expected[at // 16, 0, 0, :, at % 16] = case.key[kept]
    expected[at // 16, 0, 1, :, at % 16] = case.value[kept]
    assert torch.equal(case.cache.data.view(torch.int32), expected.view(torch.int32))  # as bits: NaN is equal to NaN


def test_padding_is_neither_read_nor_written():
    case = Case([(1, 20), (1, 40)])
    real = case.metadata
    # As in a captured graph: more rows than sequences, with no length, no slot and a table of nonsense.
    padded = AttentionMetadata.build(
        query_start_loc=np.arange(6, dtype=np.int32),
        seq_lens=np.array([20, 40, 0, 0, 0], np.int32),
        block_table=np.concatenate([real.host_block_table, np.full((3, 3), NO_SUCH_BLOCK, np.int32)]),
        slot_mapping=np.concatenate([real.host_slot_mapping, np.full(3, PAD_SLOT)]),
        kv_cache=case.cache,
    )
    # And the grid is laid out once, for the longest sequence that may ever come.
    padded = dataclasses.replace(padded, max_seq_len=200)
    rows = [torch.cat([t, torch.full((3, *t.shape[1:]), float("nan"))]) for t in (case.query, case.key, case.value)]
    before = case.cache.data.clone()
    out = TritonAttention(**SMALL)(*rows, 1, padded, scale=0.125)
    torch.testing.assert_close(out[:2], case.expected(scale=0.125), rtol=1e-5, atol=1e-6)
    slots = real.slot_mapping
    before[slots // 16, 1, 0, :, slots % 16] = case.key
    before[slots // 16, 1, 1, :, slots % 16] = case.value
    assert torch.equal(case.cache.data.view(torch.int32), before.view(torch.int32))


def test_a_prefill_of_no_rows_is_passed_over():
    case = Case([(3, 3), (5, 20)])
    real = case.metadata
    padded = AttentionMetadata.build(
        query_start_loc=np.array([0, 3, 3, 8, 8], np.int32),
        seq_lens=np.array([3, 0, 20, 0], np.int32),
        block_table=np.insert(real.host_block_table, [1, 2], NO_SUCH_BLOCK, axis=0),
        slot_mapping=real.host_slot_mapping,
        kv_cache=case.cache,
    )
    out = TritonAttention(**SMALL)(case.query, case.key, case.value, 1, padded, scale=0.125)
    torch.testing.assert_close(out, case.expected(scale=0.125), rtol=1e-5, atol=1e-6)


def test_one_block_per_sequence_needs_no_gather():
    """The contiguous layout: a table of one column."""
    Case([(1, 1), (1, 70), (9, 60)], block_size=160).check()


def test_a_small_prefill_over_a_long_context_is_split():
    case = Case([(1, 20), (9, 75), (3, 3)], group=1)
    attention = TritonAttention(**SMALL, prefill_split_keys=16, num_processors=64)
    case.check(attention, sinks=torch.tensor([0.7]), sliding_window=60)


def test_a_decode_does_not_depend_on_its_neighbours():
    case = Case([(1, 70), (1, 3), (1, 33)], kv_heads=2)
    together = case.check()
    table = case.metadata.host_block_table
    for i in range(3):
        alone = AttentionMetadata.build(
            query_start_loc=np.array([0, 1], np.int32), seq_lens=case.metadata.host_seq_lens[i : i + 1],
            block_table=table[i : i + 1], kv_cache=case.cache,
        )  # fmt: skip
        row = slice(i, i + 1)
        out = TritonAttention(**SMALL)(case.query[row], case.key[row], case.value[row], 1, alone, scale=0.125)
        assert torch.equal(out, together[row])


def test_blocks_beyond_two_to_the_31_elements_are_reached():
    width = 256
    blocks = 2**31 // (2 * 16 * width) + 2
    cache = KVCache(
        num_blocks=blocks, num_layers=1, num_kv_heads=1, block_size=16, head_dim=width, dtype=torch.int8
    )  # fmt: skip
    cache.scales = torch.empty(cache.data.shape[:-1])
    metadata = AttentionMetadata.build(
        query_start_loc=np.array([0, 3], np.int32), seq_lens=np.array([3], np.int32),
        block_table=np.array([[blocks - 1, -1]], np.int32), kv_cache=cache,
    )  # fmt: skip
    query, key, value = torch.randn(3, 3, 1, width)
    out = TritonAttention(**SMALL)(query, key, value, 0, metadata, scale=0.1)
    exact = torch.nn.functional.scaled_dot_product_attention(
        *(t.transpose(0, 1) for t in (query, key, value)), is_causal=True, scale=0.1
    ).transpose(0, 1)
    torch.testing.assert_close(out, exact, rtol=0.05, atol=0.05)


def test_the_cut_chosen_for_a_device_gives_the_same(monkeypatch):
    Case([(1, 5), (40, 70)], dtype=torch.bfloat16, group=3).check(TritonAttention())


def test_what_the_kernels_cannot_do_is_said():
    case = Case([(1, 3)], group=3)
    case.cache.num_kv_heads = 2
    with pytest.raises(ValueError, match="3 query heads do not divide among 2"):
        TritonAttention().attend(case.query, 0, case.metadata, scale=1.0)
    case = Case([(1, 3)], cache_dtype=torch.int8)
    case.cache.scales = None
    with pytest.raises(ValueError, match="needs scales"):
        case.check()


def test_a_step_of_no_tokens_is_nothing_to_do():
    case = Case([(1, 3)])
    metadata = AttentionMetadata.build(
        query_start_loc=np.zeros(1, np.int32), seq_lens=np.zeros(0, np.int32),
        block_table=np.zeros((0, 1), np.int32), kv_cache=case.cache,
    )  # fmt: skip
    out = TritonAttention()(case.query[:0], case.key[:0], case.value[:0], 0, metadata, scale=1.0)
    assert out.shape == (0, 2, 64)


def test_the_kinds_of_cache_have_different_numbers():
    kinds = [triton_cache.PLAIN, triton_cache.INT8, triton_cache.FP8, triton_cache.FP8_BITS]
    assert len({int(kind.value) for kind in kinds}) == 4


CONFIGURATION = {configuration.name: configuration for configuration in CONFIGURATIONS}
LENGTHS = [(1, 1), (1, 35), (3, 3), (5, 21)]


@pytest.mark.parametrize("name", ["padded heads", "window and sinks", "int8 cache, wide", "contiguous"])
def test_the_checks_of_the_gpu_bench_pass(name):
    for check in check_configuration(CONFIGURATION[name], CPU, TritonAttention(**SMALL), LENGTHS):
        assert check.note == ""
        assert 0 < check.error < 2 * check.limit  # the interpreter rounds bfloat16 by cutting off


def test_the_checks_of_the_gpu_bench_find_a_wrong_kernel():
    class Blind(TritonAttention):
        def __call__(self, query, key, value, layer, metadata, **options):
            out = TritonAttention.__call__(self, query, key, value, layer, metadata, **options)
            out[-1] *= 1.1  # one row, as if it had missed keys
            return out

    [check] = check_configuration(CONFIGURATION["padded heads"], CPU, Blind(**SMALL), LENGTHS)
    assert not check.passed
    assert check.error > 5 * check.limit


def test_a_check_that_breaks_is_a_failure_and_not_the_end():
    broken = TritonAttention(decode=Tile(16, 24, 4, 1))
    [check] = check_configuration(CONFIGURATION["padded heads"], CPU, broken, LENGTHS)
    assert not check.passed
    assert check.note != ""


def test_the_timings_of_the_gpu_bench_run_through():
    runs = []

    def timer(function):
        function()
        runs.append(function)
        return 0.5

    bench = Bench(CPU, timer, least_bytes=1)
    shape = Shape("small", 1, 2, 16)
    row = bench.decode(shape, 2, 40)
    assert row["us"] == 5e5
    assert row["GB/s"] == pytest.approx(2 * 40 * 2 * 16 * 2 / 0.5 / 1e9)  # 2 requests, K and V, 2 bytes
    assert row["torch / ours"] == 1.0
    row = bench.prefill(shape, 1, 4, 20)
    assert row["TFLOP/s"] == pytest.approx(4 * 16 * 2 * (17 + 18 + 19 + 20) / 0.5 / 1e12)
    costs = list(bench.paging(shape, 2, 20, [8]))
    assert [(c["block size"], c["table"]) for c in costs] == [
        ("contiguous", "one block each"), (8, "identity"), (8, "shuffled"),
    ]  # fmt: skip
    assert [r["cache"] for r in bench.quantised(shape, 1, 20)] == ["bfloat16", "int8", "float8"]
    assert bench.write(shape, 5)["GB/s"] > 0
    tiles = [Tile(16, 16, 4, 1), Tile(16, 24, 4, 1)]
    notes = [r["note"] for r in bench.tune(shape, [(1, 20)], tiles)]
    assert notes[0] == ""
    assert notes[1] != ""
    assert bench.copy_bandwidth(1000) == 4000
    assert len(runs) == 12
