"""The tensor of the KV cache: where it lies in memory."""

from __future__ import annotations

import pytest
import torch

from engine import kv_cache
from engine.config import ConfigError
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


SMALL = {"num_layers": 1, "num_kv_heads": 1, "block_size": 16, "head_dim": 32, "dtype": torch.float32}  # 4 KiB a block


def test_a_cpu_pool_that_does_not_fit_beside_the_cache_is_refused_with_what_would(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kv_cache, "free_memory", lambda device: 100 * 4096)
    with pytest.raises(ConfigError, match=r"31 blocks of 4.0 KiB take 124 KiB, .* use at most 30 \(--cpu-blocks\)"):
        KVCache(num_blocks=60, num_cpu_blocks=31, **SMALL)
    assert KVCache(num_blocks=60, num_cpu_blocks=30, **SMALL).host is not None


def test_pinned_memory_is_counted_as_torch_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(num_cpu_blocks: int) -> None:
        KVCache(num_blocks=4, **SMALL)._check_host(num_cpu_blocks, pinned=True)

    monkeypatch.setattr(kv_cache, "free_memory", lambda device: 100 * 4096)
    asked(64)
    with pytest.raises(ConfigError, match=r"65 blocks .* take 512 KiB \(pinned.* use at most 64 \(--cpu-blocks\)"):
        asked(65)


def test_of_a_quantised_pool_elements_and_scales_are_pinned_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = KVCache(num_blocks=4, **(SMALL | {"dtype": torch.int8}))  # a KiB of codes a block, and 128 bytes of scales
    monkeypatch.setattr(kv_cache, "free_memory", lambda device: 100 * 1024)
    cache._check_host(64, pinned=True)
    with pytest.raises(ConfigError, match=r"65 blocks .* take 144 KiB \(pinned.* use at most 64 \(--cpu-blocks\)"):
        cache._check_host(65, pinned=True)
