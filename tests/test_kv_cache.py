"""The tensor of the KV cache: where it lies in memory."""

from __future__ import annotations

import pytest
import torch

from engine.kv_cache import KVCache


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("num_blocks", [1, 3, 700])
def test_blocks_of_whole_pages_touch_no_other_page(num_blocks: int, dtype: torch.dtype) -> None:
    """Finding a page costs as much as reading a line of it: a block should lie on as few as hold it."""
    cache = KVCache(num_blocks=num_blocks, num_layers=2, num_kv_heads=4, block_size=16, head_dim=64, dtype=dtype)

    block_bytes = cache.data[0].nbytes
    assert block_bytes % 4096 == 0
    for block in {0, num_blocks // 2, num_blocks - 1}:
        assert cache.data[block].data_ptr() % 4096 == 0
    assert cache.data.is_contiguous()
    assert cache.data.dtype == dtype
    assert cache.data.shape == (num_blocks, 2, 2, 4, 16, 64)
    if cache.data.nbytes >= 2 << 20:
        assert cache.data.data_ptr() % (2 << 20) == 0, "a large cache begins where a large page can"
