"""A quantised cache: what its codes stand for, that a block takes its scales along, and that the reference reads it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.attention.metadata import PAD_SLOT, AttentionMetadata
from engine.attention.quantised import dequantise, quantise
from engine.attention.reference import paged_attention, write_kv
from engine.core.scheduler_output import BlockCopy
from engine.kv_cache import KVCache
from engine.trace.events import Op

FORMS = [torch.int8, torch.float8_e4m3fn]
# Half a step: of int8 1/127 of the largest; of float8 1/8 of the element, or 1/8 of 2**-6 of 1/448 of the largest.
RELATIVE = {torch.int8: 0.0, torch.float8_e4m3fn: 1 / 16}
OF_LARGEST = {torch.int8: 0.5 / 127, torch.float8_e4m3fn: 2**-10 / 448}


def cache_of(dtype: torch.dtype, num_blocks: int = 9, block_size: int = 4, num_cpu_blocks: int = 0) -> KVCache:
    return KVCache(
        num_blocks=num_blocks,
        num_layers=2,
        num_kv_heads=2,
        block_size=block_size,
        head_dim=8,
        dtype=dtype,
        poison=True,
        num_cpu_blocks=num_cpu_blocks,
    )


def fill(cache: KVCache, generator: torch.Generator) -> None:
    assert cache.scales is not None
    for data, scales in ((cache.data, cache.scales), (cache.host, cache.host_scales)):
        if data is not None and scales is not None:
            data.view(torch.uint8).random_(0, 0x7E, generator=generator)
            scales.uniform_(generator=generator)


@pytest.mark.parametrize("form", FORMS)
def test_codes_are_within_half_a_step_of_the_numbers(form: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(200, 3, 64, generator=generator) * 10.0 ** torch.linspace(-20, 20, 200)[:, None, None]
    codes, scales = quantise(rows, form)
    assert codes.dtype == form
    assert scales.shape == (200, 3)
    error = (dequantise(codes, scales) - rows).abs()
    allowed = rows.abs() * RELATIVE[form] + rows.abs().amax(-1, keepdim=True) * OF_LARGEST[form]
    assert (error <= allowed * 1.001).all()


@pytest.mark.parametrize("form", FORMS)
def test_rows_without_a_scale_of_their_own_are_zeros_and_rows_that_are_no_numbers_show(form: torch.dtype) -> None:
    rows = torch.ones(5, 8)
    rows[0] = 0.0
    rows[1] = 1e-45
    rows[2, 3] = float("nan")
    rows[3, 4] = float("-inf")
    numbers = dequantise(*quantise(rows, form))
    assert (numbers[:2] == 0).all()
    assert numbers[2:4].isnan().any(-1).all()
    assert (numbers[4] == 1).all()


@pytest.mark.parametrize("form", FORMS)
def test_a_block_counts_its_scales(form: torch.dtype) -> None:
    cache = cache_of(form)
    assert cache.scales is not None
    assert cache.block_bytes == 2 * 2 * 2 * 4 * (8 + 4)
    assert cache.num_bytes == cache.data.nbytes + cache.scales.nbytes


@pytest.mark.parametrize("form", FORMS)
def test_copied_and_moved_blocks_take_their_scales_along(form: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        cache = cache_of(form, num_blocks=5, num_cpu_blocks=3)
        fill(cache, generator)
        assert cache.scales is not None
        assert cache.host is not None
        assert cache.host_scales is not None
        ours = [cache.data.view(torch.uint8).clone(), cache.scales.clone()]
        hosts = [cache.host.view(torch.uint8).clone(), cache.host_scales.clone()]
        moves: list[BlockCopy] = []
        for _ in range(12):
            op = (Op.COPY, Op.SWAP_OUT, Op.SWAP_IN)[int(torch.randint(3, (), generator=generator))]
            read, written = {Op.COPY: (ours, ours), Op.SWAP_OUT: (ours, hosts), Op.SWAP_IN: (hosts, ours)}[op]
            a = int(torch.randint(len(read[0]), (), generator=generator))
            b = int(torch.randint(len(written[0]), (), generator=generator))
            for source, target in zip(read, written, strict=True):
                target[b] = source[a].clone()
            moves.append(BlockCopy(op, a, b))
        cache.move(moves)
        assert torch.equal(cache.data.view(torch.uint8), ours[0])
        assert torch.equal(cache.scales, ours[1])
        assert torch.equal(cache.host.view(torch.uint8), hosts[0])
        assert torch.equal(cache.host_scales, hosts[1])


@pytest.mark.parametrize("form", [*FORMS, torch.bfloat16])
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_the_reference_over_codes_is_the_reference_over_what_they_stand_for(form: torch.dtype, block_size: int) -> None:
    rng = np.random.default_rng(block_size)
    generator = torch.Generator().manual_seed(block_size)
    cache, plain = (cache_of(dtype, num_blocks=60, block_size=block_size) for dtype in (form, torch.float32))
    table = rng.permutation(60)[:54].reshape(2, 27).astype(np.int32)
    for start, end in ((0, 9), (9, 16), (16, 17)):
        ends = np.array([end, end + 10], np.int32)
        starts = np.array([start, 0 if start == 0 else start + 10], np.int32)
        loc = np.cumsum([0, *(ends - starts)]).astype(np.int32)
        query, key, value = (torch.randn(int(loc[-1]), heads, 8, generator=generator) for heads in (4, 2, 2))
        of = [
            AttentionMetadata.build(query_start_loc=loc, seq_lens=ends, block_table=table, kv_cache=c)
            for c in (cache, plain)
        ]
        got = paged_attention(query, key, value, 1, of[0], scale=0.4)
        rounded = [
            rows.bfloat16().float() if form == torch.bfloat16 else dequantise(*quantise(rows, form))
            for rows in (key, value)
        ]
        want = paged_attention(query, *rounded, 1, of[1], scale=0.4)
        assert not torch.isnan(got).any()
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_codes_and_scales_go_to_their_slots_and_nowhere_else(form: torch.dtype) -> None:
    cache = cache_of(form)
    assert cache.scales is not None
    key, value = torch.randn(2, 6, 2, 8, generator=torch.Generator().manual_seed(2))
    metadata = AttentionMetadata.build(
        query_start_loc=np.array([0, 6]),
        seq_lens=np.array([6]),
        block_table=np.array([[7, 2]]),
        kv_cache=cache,
    )
    metadata.host_slot_mapping[4] = PAD_SLOT
    write_kv(key, value, 1, metadata)
    written = torch.zeros_like(cache.scales, dtype=torch.bool)
    for row in (0, 1, 2, 3, 5):
        block, offset = (7, 2)[row // 4], row % 4
        written[block, 1, :, :, offset] = True
        numbers = dequantise(cache.data[block, 1, :, :, offset], cache.scales[block, 1, :, :, offset])
        torch.testing.assert_close(numbers, torch.stack((key[row], value[row])), rtol=0.07, atol=0.03)
    assert torch.equal(cache.scales.isnan(), ~written)
