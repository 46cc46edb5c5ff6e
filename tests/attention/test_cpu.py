"""The compiled CPU attention agrees with the float32 reference on every batch, and reads only what was written."""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from engine.attention import cpu, cpu_compile, cpu_plan, cpu_threads, reference
from engine.attention.metadata import PAD_SLOT, AttentionMetadata
from engine.attention.quantised import dequantise, quantise
from engine.kv_cache import KVCache

LAYERS = 2
LAYER = 1
KV_HEADS = 2
STALE = 2**31 - 1
"""What a block table holds past a sequence's blocks: reading it would be far outside the pool."""

# Against the reference on the same numbers in float32: sums in another order differ by some units in the last place of
# float32. Rounding the output to nearest adds half a unit in the last place: 2^-9 of a bfloat16, 2^-12 of a float16;
# each doubled, for the float32 difference may tip the rounding over.
TOLERANCE = {
    torch.float32: {"rtol": 2e-5, "atol": 2e-5},
    torch.bfloat16: {"rtol": 2**-8, "atol": 2e-5},
    torch.float16: {"rtol": 2**-11, "atol": 2e-5},
}

OPTIONS = {
    "plain": {},
    "window": {"sliding_window": 9},
    "window of one": {"sliding_window": 1},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": True},
    "everything": {"sliding_window": 20, "softcap": 3.0, "sinks": True},
}


@pytest.fixture(autouse=True)
def _one_thread():
    """Small operations of torch are faster on one thread; `Batch.attend` takes two."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass
class Batch:
    """A step over a poisoned pool whose blocks are handed out at random: `seqs` is (positions, query rows) of each."""

    seqs: list[tuple[int, int]]
    block_size: int = 16
    group: int = 3
    head_dim: int = 64
    dtype: torch.dtype = torch.float32
    seed: int = 0
    cache_dtype: torch.dtype | None = None
    cache: KVCache = field(init=False)
    metadata: AttentionMetadata = field(init=False)

    def __post_init__(self):
        rng = np.random.default_rng(self.seed)
        generator = torch.Generator().manual_seed(self.seed)
        needed = [-(-length // self.block_size) for length, _ in self.seqs]
        self.cache = self._cache(sum(needed) + 3, self.cache_dtype or self.dtype)
        order = rng.permutation(self.cache.num_blocks).astype(np.int32)
        table = np.full((len(self.seqs), max(needed) + 2), STALE, np.int32)
        start = 0
        for row, (length, queries), n in zip(table, self.seqs, needed, strict=True):
            row[:n] = order[start : start + n]
            start += n
            # What earlier steps wrote; this step's own rows and everything else stay NaN.
            old = np.arange(length - queries)
            past = torch.randn((len(old), LAYERS, 2, KV_HEADS, self.head_dim), generator=generator)
            self.put(row[old // self.block_size], old % self.block_size, past.to(self.dtype))
        self.metadata = self._metadata(self.cache, table)
        tokens, heads = self.metadata.num_tokens, KV_HEADS * self.group
        self.query = torch.randn((tokens, heads, self.head_dim), generator=generator).to(self.dtype)
        self.key = torch.randn((tokens, KV_HEADS, self.head_dim), generator=generator).to(self.dtype)
        self.value = torch.randn((tokens, KV_HEADS, self.head_dim), generator=generator).to(self.dtype)
        self.sinks = torch.randn(heads, generator=generator)

    def put(self, blocks, slots, rows):
        """Rows `[n, LAYERS, 2, KV_HEADS, head_dim]`, as the cache has them."""
        if self.cache.scales is None:
            self.cache.data[blocks, :, :, :, slots] = rows.to(self.cache.dtype)
        else:
            codes, scales = quantise(rows, self.cache.dtype)
            self.cache.data.view(torch.uint8)[blocks, :, :, :, slots] = codes.view(torch.uint8)
            self.cache.scales[blocks, :, :, :, slots] = scales

    def numbers(self, rows):
        """What rows are once they have been in the cache, in float32."""
        if self.cache.scales is None:
            return rows.to(self.cache.dtype).float()
        return dequantise(*quantise(rows, self.cache.dtype))

    def _cache(self, num_blocks, dtype):
        return KVCache(
            num_blocks=num_blocks,
            num_layers=LAYERS,
            num_kv_heads=KV_HEADS,
            block_size=self.block_size,
            head_dim=self.head_dim,
            dtype=dtype,
            poison=True,
        )

    def _metadata(self, cache, table):
        return AttentionMetadata.build(
            query_start_loc=np.cumsum([0, *(queries for _, queries in self.seqs)]).astype(np.int32),
            seq_lens=np.array([length for length, _ in self.seqs], np.int32),
            block_table=table,
            kv_cache=cache,
        )

    def options(self, name):
        options = dict(OPTIONS[name], scale=self.head_dim**-0.5)
        if "sinks" in options:
            options["sinks"] = self.sinks
        return options

    def attend(self, name="plain", num_threads=2):
        torch.set_num_threads(num_threads)
        try:
            return self._attend(name)
        finally:
            torch.set_num_threads(1)

    def _attend(self, name):
        return cpu.paged_attention(self.query, self.key, self.value, LAYER, self.metadata, **self.options(name))

    def expected(self, name="plain"):
        """The reference in float32, on a cache of its own."""
        cache = self._cache(self.cache.num_blocks, torch.float32)
        if self.cache.scales is None:
            cache.data.copy_(self.cache.data)
        else:
            cache.data.copy_(dequantise(self.cache.data, self.cache.scales))
        metadata = self._metadata(cache, self.metadata.host_block_table)
        rows = (self.query.float(), self.numbers(self.key), self.numbers(self.value))
        return reference.paged_attention(*rows, LAYER, metadata, **self.options(name))

    def check(self, name="plain"):
        expected = self.expected(name)
        out = self.attend(name)
        assert out.dtype == self.dtype
        assert out.is_contiguous()
        torch.testing.assert_close(out.float(), expected, **TOLERANCE[self.dtype])


CACHES = [
    (torch.float32, torch.int8),
    (torch.bfloat16, torch.int8),
    (torch.float32, torch.float8_e4m3fn),
    (torch.bfloat16, torch.float8_e4m3fn),
    (torch.float32, torch.bfloat16),
]
"""Element types of a model and of its cache, where they are not the same."""


def around(block_size):
    """Decodes, prefills and chunks in one batch, with lengths on both sides of every block's end."""
    n = block_size
    decodes = [(length, 1) for length in (1, n, n + 1, 2 * n, 2 * n + 1, 70)]
    chunks = [(2, 2), (n + 2, 2), (7, 7), (4 * n + 7, 7), (64, 64), (2 * n + 65, 64)]
    return decodes + chunks


@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128])
@pytest.mark.parametrize("block_size", [1, 3, 16, 32])
def test_a_mixed_batch_agrees_with_the_reference(block_size, head_dim, group):
    for dtype in (torch.float32, torch.bfloat16):
        Batch(around(block_size), block_size=block_size, group=group, head_dim=head_dim, dtype=dtype).check()


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("block_size", "head_dim", "group"), [(1, 64, 1), (3, 80, 8), (16, 64, 3), (32, 128, 2)])
def test_every_option_agrees_with_the_reference(block_size, head_dim, group, options):
    batch = Batch(around(block_size), block_size=block_size, group=group, head_dim=head_dim, dtype=torch.bfloat16)
    batch.check(options)


@pytest.mark.parametrize("head_dim", [64, 20])
def test_float16_agrees_with_the_reference_down_to_its_subnormals(head_dim):
    batch = Batch([(70, 1), (20, 20)], dtype=torch.float16, head_dim=head_dim)
    batch.check("everything")
    small = Batch([(20, 20)], dtype=torch.float16, head_dim=head_dim)
    small.value *= 2**-18
    # Half the distance of float16's subnormals.
    torch.testing.assert_close(small.attend().float(), small.expected(), rtol=0, atol=2**-25 * 1.01)


@pytest.mark.parametrize("length", [255, 256, 257, 513, 1100])
@pytest.mark.parametrize("options", ["plain", "window", "everything"])
def test_contexts_longer_than_one_tile_keep_their_softmax_whole(length, options):
    Batch([(length, 1), (length - 100, 1), (length, 50)], block_size=16, dtype=torch.bfloat16).check(options)


@pytest.mark.parametrize("head_dim", [1, 4, 8, 12, 20, 32, 33, 96, 256])
@pytest.mark.parametrize("group", [2, 5, 60])
def test_head_sizes_and_groups_that_fill_no_vector_or_tile(head_dim, group):
    Batch([(40, 1), (18, 9)], head_dim=head_dim, group=group, dtype=torch.bfloat16).check("everything")


@pytest.mark.parametrize(("dtype", "cache_dtype"), CACHES, ids=str)
@pytest.mark.parametrize(("block_size", "head_dim", "group"), [(1, 64, 1), (3, 80, 8), (16, 64, 3), (32, 128, 2)])
def test_a_cache_of_another_type_agrees_with_the_reference_over_its_numbers(
    block_size, head_dim, group, dtype, cache_dtype
):
    shape = {"block_size": block_size, "head_dim": head_dim, "group": group}
    for options in ("plain", "everything"):
        Batch(around(block_size), dtype=dtype, cache_dtype=cache_dtype, **shape).check(options)
    Batch([(1100, 1), (300, 50), (513, 1)], dtype=dtype, cache_dtype=cache_dtype, **shape).check("window")


@pytest.mark.parametrize("cache_dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("head_dim", [1, 12, 33, 64])
def test_codes_and_scales_are_the_definitions_bit_by_bit_and_go_nowhere_else(cache_dtype, head_dim):
    batch = Batch([(20, 1), (37, 37), (5, 2)], block_size=3, head_dim=head_dim, cache_dtype=cache_dtype)
    # From rows that have no scale of their own to the largest, and elements down to float8's subnormals.
    batch.key *= 10.0 ** torch.linspace(-46, 38, 40)[:, None, None]
    batch.value *= 10.0 ** torch.linspace(-7, 0, head_dim)
    batch.value[3, 1] = 0.0
    skipped = 4
    batch.metadata.host_slot_mapping[skipped] = PAD_SLOT
    data, scales = batch.cache.data.view(torch.uint8).clone(), batch.cache.scales.clone()
    batch.attend()
    for row, slot in enumerate(batch.metadata.host_slot_mapping):
        if slot != PAD_SLOT:
            block, offset = divmod(int(slot), batch.block_size)
            for i, rows in enumerate((batch.key, batch.value)):
                codes, row_scales = quantise(rows[row], cache_dtype)
                data[block, LAYER, i, :, offset] = codes.view(torch.uint8)
                scales[block, LAYER, i, :, offset] = row_scales
    assert torch.equal(batch.cache.data.view(torch.uint8), data)
    assert torch.equal(batch.cache.scales.isnan(), scales.isnan())
    assert torch.equal(batch.cache.scales.nan_to_num(), scales.nan_to_num())


@pytest.mark.parametrize("cache_dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_no_number_shows_through_a_quantised_cache(cache_dtype, bad):
    batch = Batch([(40, 1), (40, 1), (9, 9)], cache_dtype=cache_dtype)
    clean = batch.attend()
    batch.value[1, 0, 5] = bad
    out = batch.attend()
    assert out[1, : batch.group, 5].isnan().all()
    others = [0, *range(2, 11)]
    assert torch.equal(out[others], clean[others])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_keys_and_values_are_written_to_their_slots_and_nowhere_else(dtype):
    batch = Batch([(20, 1), (37, 37), (5, 2)], block_size=3, dtype=dtype)
    skipped = 4  # a row of the second sequence; later rows must not need it
    batch.metadata.host_slot_mapping[skipped] = PAD_SLOT
    expected = batch.cache.data.clone()
    for row, slot in enumerate(batch.metadata.host_slot_mapping):
        if slot != PAD_SLOT:
            block, offset = divmod(int(slot), batch.block_size)
            expected[block, LAYER, 0, :, offset] = batch.key[row]
            expected[block, LAYER, 1, :, offset] = batch.value[row]
    batch.attend()
    assert torch.equal(batch.cache.data.isnan(), expected.isnan())
    assert torch.equal(batch.cache.data.nan_to_num(), expected.nan_to_num())


def test_layers_of_one_step_are_kept_apart():
    batch = Batch([(33, 1), (20, 20)])
    batch.cache.data[:, 0] = batch.cache.data[:, 1].flip(-1)
    expected = batch.expected()
    for layer in (0, LAYER, 0):
        out = cpu.paged_attention(batch.query, batch.key, batch.value, layer, batch.metadata, **batch.options("plain"))
        assert torch.allclose(out, expected, atol=2e-5) == (layer == LAYER)


def test_a_decode_continues_what_a_prefill_wrote():
    prefill = Batch([(30, 30), (18, 18)], block_size=4, dtype=torch.bfloat16)
    whole = prefill.attend()
    step = Batch([(30, 1), (18, 1)], block_size=4, dtype=torch.bfloat16)
    step.cache.data.copy_(prefill.cache.data)
    step.metadata = step._metadata(step.cache, prefill.metadata.host_block_table)
    last = [29, 47]
    step.query, step.key, step.value = prefill.query[last], prefill.key[last], prefill.value[last]
    torch.testing.assert_close(step.attend(), whole[last], rtol=2**-8, atol=1e-5)


def test_scores_far_apart_neither_overflow_nor_vanish():
    batch = Batch([(300, 1), (80, 80)], dtype=torch.float32)
    batch.query *= 300
    out, expected = batch.attend(), batch.expected()
    # Scores are some hundreds here, with a rounding error of 2^-24 of that each.
    torch.testing.assert_close(out, expected, rtol=0, atol=2e-3)
    batch.check("softcap")


def test_a_nan_in_one_sequence_stays_in_it_and_shows():
    batch = Batch([(40, 1), (40, 1), (9, 9)])
    clean = batch.attend()
    batch.key[1] = float("nan")
    out = batch.attend()
    assert out[1].isnan().all()
    assert torch.equal(out[[0, *range(2, 11)]], clean[[0, *range(2, 11)]])


def test_an_infinite_score_shows_as_nan_as_in_the_reference():
    batch = Batch([(40, 1), (40, 1)])
    batch.key[0] = float("inf")
    out, expected = batch.attend(), batch.expected()
    assert expected[0].isnan().any()
    assert torch.equal(out.isnan(), expected.isnan())


def test_rows_may_be_strided_views():
    batch = Batch(around(16), dtype=torch.bfloat16)
    expected = batch.attend()
    joined = torch.cat([batch.query, batch.key, batch.value], dim=1)
    heads = KV_HEADS * batch.group
    batch.query, batch.key, batch.value = joined.split([heads, KV_HEADS, KV_HEADS], dim=1)
    assert torch.equal(batch.attend(), expected)
    batch.query, batch.key, batch.value = (
        t.transpose(0, 1).contiguous().transpose(0, 1) for t in (batch.query, batch.key, batch.value)
    )
    assert torch.equal(batch.attend(), expected)
    batch.query, batch.key, batch.value = (
        t.transpose(1, 2).contiguous().transpose(1, 2) for t in (batch.query, batch.key, batch.value)
    )
    assert torch.equal(batch.attend(), expected)


def test_sequences_without_rows_are_left_alone():
    batch = Batch([(1, 0), (20, 1), (30, 0), (12, 5)])
    batch.metadata.host_block_table[[0, 2]] = STALE
    batch.check()


def test_the_number_of_threads_changes_nothing():
    batch = Batch(around(16), dtype=torch.bfloat16)
    decodes = Batch([(n, 1) for n in range(1, 200, 7)], dtype=torch.bfloat16)
    outputs = []
    for threads in (1, 2, 5):
        for each in (batch, decodes):
            # New metadata, as in a new step: threads are chosen once a step.
            each.metadata = each._metadata(each.cache, each.metadata.host_block_table)
        outputs.append(torch.cat([each.attend(num_threads=threads) for each in (batch, decodes)]))
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


def test_python_threads_do_where_no_openmp_library_is_found(monkeypatch):
    monkeypatch.setattr(cpu_threads, "_openmp_libraries", list)
    cpu_threads._gomp_parallel.cache_clear()
    try:
        assert cpu_threads.description() == "Python threads"
        Batch(around(16)).check()
    finally:
        cpu_threads._gomp_parallel.cache_clear()


def test_a_worker_is_made_once_by_whoever_asks_first_and_what_cannot_be_made_is_not_tried_again():
    made, answers = [], []

    def make(form):
        made.append(form)
        if form == "bad":
            raise cpu_compile.CompileError("no such processor")
        time.sleep(0.01)
        return object()

    once = cpu_compile.compiled_once(make)
    threads = [threading.Thread(target=lambda: answers.append(once("good"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for _ in range(3):
        with pytest.raises(cpu_compile.CompileError, match="no such processor"):
            once("bad")
    assert made == ["good", "bad"]
    assert answers == [once("good")] * 4


def test_what_cannot_be_compiled_without_the_cache_either_says_so(monkeypatch, tmp_path):
    def fail(worker, folder):
        raise OSError("unknown target")

    monkeypatch.setenv("KVTUI_CACHE", str(tmp_path))
    monkeypatch.setattr(cpu_compile, "_compile", fail)
    with pytest.raises(cpu_compile.CompileError, match="OSError: unknown target"):
        cpu_compile.Compiled(lambda: lambda address: None)


def test_two_engines_may_attend_at_once():
    batches = [Batch([(200 + i, 1)] * 20, seed=i) for i in range(3)]
    expected = [batch.expected() for batch in batches]
    outputs = [[] for _ in batches]

    def work(i):
        outputs[i] = [batches[i]._attend("plain") for _ in range(20)]

    torch.set_num_threads(2)
    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for want, got in zip(expected, outputs, strict=True):
        assert len(got) == 20
        for out in got:
            torch.testing.assert_close(out, want, **TOLERANCE[torch.float32])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda b: b.metadata.host_block_table.__setitem__((1, 1), STALE), "table of sequence 1 is outside"),
        (lambda b: b.metadata.host_block_table.__setitem__((0, 0), -1), "block -1 in the table of sequence 0"),
        (lambda b: b.metadata.host_slot_mapping.__setitem__(0, 10**6), "slot mapping does not fit"),
        (lambda b: b.metadata.host_seq_lens.__setitem__(1, 10**6), "too short"),
        (lambda b: b.metadata.host_seq_lens.__setitem__(1, 2), "3 query rows and 2 positions"),
        (lambda b: setattr(b, "query", b.query[:, :5]), "5 query heads cannot share 2 KV heads"),
        (lambda b: setattr(b, "query", b.query[..., :8]), "do not fit"),
        (lambda b: setattr(b, "key", b.key[:1]), r"keys \[1, 2, 64\]"),
        (lambda b: setattr(b, "value", b.value.double()), "values torch.float64 are to be torch.float32"),
    ],
)
def test_what_would_leave_the_cache_is_refused_with_its_place(spoil, message):
    batch = Batch([(20, 1), (30, 3)])
    spoil(batch)
    with pytest.raises(ValueError, match=message):
        batch.attend()


def test_a_layer_outside_the_cache_is_refused():
    batch = Batch([(20, 1)])
    with pytest.raises(ValueError, match="layer 2 is outside"):
        cpu.paged_attention(batch.query, batch.key, batch.value, LAYERS, batch.metadata, scale=1.0)


def test_an_unknown_element_type_is_refused_by_name():
    with pytest.raises(ValueError, match=r"does not know torch\.float64: use one of bfloat16, float16, float32"):
        cpu.warmup(torch.float64)
    with pytest.raises(
        ValueError, match=r"a cache of torch\.float32: use one of float16, bfloat16, int8, float8_e4m3fn"
    ):
        cpu.warmup(torch.float16, torch.float32)


def test_compiled_code_is_kept_in_the_folder_that_the_user_names_for_each_state_of_its_sources(monkeypatch, tmp_path):
    monkeypatch.setenv("KVTUI_CACHE", str(tmp_path))
    source = tmp_path / "source.py"
    source.write_text("first")
    first = cpu_compile.cache_dir([source])
    assert first.is_relative_to(tmp_path / "numba")
    assert cpu_compile.cache_dir([source]) == first
    source.write_text("second")
    assert cpu_compile.cache_dir([source]) != first


@pytest.mark.parametrize("options", ["plain", "window"])
def test_more_kv_heads_than_are_taken_together_agree_with_the_reference(monkeypatch, options):
    monkeypatch.setattr(sys.modules[__name__], "KV_HEADS", 6)
    batch = Batch([(n, 1) for n in range(1, 600, 45)], head_dim=128, dtype=torch.float32)
    assert 1 < cpu_plan._heads_together(batch.cache) < 6
    batch.check(options)
