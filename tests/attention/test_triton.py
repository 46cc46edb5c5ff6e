import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

INTERPRETED = Path(__file__).with_name("interpreted_triton.py")


@pytest.mark.timeout(900)
def test_every_kernel_equals_the_float32_reference_under_the_interpreter():
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(INTERPRETED)]
    run = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    passed = re.search(r"(\d+) passed", run.stdout)
    assert passed is not None
    assert int(passed[1]) >= 35, "were they skipped?"


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter takes CPU tensors")
def test_a_cpu_tensor_is_refused_with_what_to_use_instead():
    from engine.attention.metadata import AttentionMetadata
    from engine.attention.triton import paged_attention
    from engine.kv_cache import KVCache

    cache = KVCache(num_blocks=2, num_layers=1, num_kv_heads=1, block_size=4, head_dim=16, dtype=torch.float32)
    metadata = AttentionMetadata.build(
        query_start_loc=np.array([0, 1], np.int32),
        seq_lens=np.array([1], np.int32),
        block_table=np.array([[0, 1]], np.int32),
        kv_cache=cache,
    )
    query, key, value = torch.randn(3, 1, 1, 16)
    with pytest.raises(ValueError, match="not on cpu: use --attention cpu"):
        paged_attention(query, key, value, 0, metadata, scale=1.0)
