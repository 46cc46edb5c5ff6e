"""Whether the GPU kernels compute the reference's numbers, on the device at hand."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import torch

from engine.attention import reference
from engine.attention.metadata import PAD_SLOT
from engine.attention.triton import TritonAttention, paged_attention, write_kv
from engine.bench.gpu_batch import Batch, in_float32, make_batch
from engine.bench.gpu_report import Check, one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from engine.attention.metadata import AttentionMetadata
    from engine.bench.ahead_of_time import Configuration

_DTYPE = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_CACHE: dict[str | None, Any] = {None: None, "int8": torch.int8, "float8": torch.float8_e4m3fn}
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Largest allowed ‖out - reference‖ / ‖reference‖ of a row; rounding the output alone costs up to a fifth of it."""

ROUNDING = {torch.int8: 0.02, torch.float8_e4m3fn: 0.05}
"""The same for keys and values in a quantised cache: some twice what rounding costs a row of normal numbers."""

MIXED = [
    *[(1, n) for n in (1, 15, 16, 17, 63, 64, 65, 255, 256, 257, 1000, 3001)],
    *[(2, 2), (16, 16), (130, 130), (7, 500), (64, 1100), (300, 300)],
]
"""(query rows, positions) around the boundaries of blocks, key tiles, query tiles and splits."""


def check_configuration(
    configuration: Configuration,
    device: torch.device,
    attention: TritonAttention = paged_attention,
    lengths: Sequence[tuple[int, int]] = MIXED,
) -> list[Check]:
    """One configuration in a batch of decodes and prefills; of a quantised cache also what was written to it."""
    c = configuration
    checks = [_guarded(c.name, functools.partial(_compare, c, device, attention, lengths))]
    if c.cache:
        checks.append(_guarded(f"{c.name}: what is written", functools.partial(_compare_written, c, device)))
    return checks


def check_graph(device: torch.device, attention: TritonAttention, batch_size: int = 16) -> Check:
    """A decode captured once for a padded batch, replayed for other lengths, tables and numbers of sequences."""
    return _guarded("captured decode, replayed for another batch", lambda: _replay(device, attention, batch_size))


def check_independence(device: torch.device, attention: TritonAttention) -> Check:
    """A decode alone and among others: not one bit may differ."""
    return _guarded("a decode alone and among others", lambda: _alone(device, attention))


def _guarded(name: str, compare: Callable[[], tuple[float, float]]) -> Check:
    try:
        return Check(name, *compare())
    except Exception as error:  # the report is to say of every check how it went
        return Check(name, float("nan"), 0.0, one_line(error))


def _batch(c: Configuration, device: torch.device, lengths: Sequence[tuple[int, int]]) -> Batch:
    block_size = c.block_size if c.paged else max(256, *(n for _, n in lengths))
    return make_batch(
        lengths, kv_heads=2, group=c.group, head_dim=c.head_dim, block_size=block_size, dtype=_DTYPE[c.dtype],
        device=device, quantised=_CACHE[c.cache], layer=1, num_layers=2,
    )  # fmt: skip


def _compare(
    c: Configuration, device: torch.device, attention: TritonAttention, lengths: Sequence[tuple[int, int]]
) -> tuple[float, float]:
    dtype = _DTYPE[c.dtype]
    batch = _batch(c, device, lengths)
    options: dict[str, Any] = {"scale": c.head_dim**-0.5}
    if c.window:
        options["sliding_window"] = min(c.window, 200)
    if c.softcap:
        options["softcap"] = 5.0
    if c.sinks:
        options["sinks"] = torch.linspace(-2, 2, 2 * c.group, device=device).to(dtype)
    out = attention(batch.query, batch.key, batch.value, 1, batch.metadata, **options)
    exact = in_float32(batch, 1)
    expected = reference.paged_attention(exact.query, exact.key, exact.value, 1, exact.metadata, **options)
    return relative_error(out, expected), TOLERANCE[dtype]


def _compare_written(c: Configuration, device: torch.device) -> tuple[float, float]:
    batch = _batch(c, device, [(1, 1), (40, 40)])
    write_kv(batch.key, batch.value, 1, batch.metadata)
    stored = in_float32(batch, 1)
    errors = (relative_error(stored.key, batch.key), relative_error(stored.value, batch.value))
    return max(errors), ROUNDING[_CACHE[c.cache]]


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest ‖out - expected‖ / ‖expected‖ of a row and head."""
    difference = (out.float() - expected.float()).norm(dim=-1)
    return float((difference / expected.float().norm(dim=-1)).max())


def _replay(device: torch.device, attention: TritonAttention, batch_size: int) -> tuple[float, float]:
    shape: dict[str, Any] = {"kv_heads": 2, "group": 4, "head_dim": 128, "block_size": 16, "dtype": torch.bfloat16}
    longest = 2000
    first = make_batch([(1, longest)] * batch_size, device=device, seed=1, **shape)
    other = make_batch([(1, 1 + 97 * i) for i in range(batch_size - 3)], device=device, seed=2, **shape)
    # The captured batch's own tensors, over the other batch's cache; a static bound stands for its lengths.
    static = dataclasses.replace(first.metadata, kv_cache=other.metadata.kv_cache, max_seq_len=longest)
    query, key, value = rows = (first.query.contiguous(), first.key.contiguous(), first.value.contiguous())
    _fill(static, other.metadata)
    attention(query, key, value, 0, static, scale=0.09)  # compiles, which a capture cannot
    graph = torch.cuda.CUDAGraph()
    static.seq_lens.zero_()
    static.slot_mapping.fill_(PAD_SLOT)
    with torch.cuda.graph(graph):
        out = attention(query, key, value, 0, static, scale=0.09)
    real = batch_size - 3
    for row, source in zip(rows, (other.query, other.key, other.value), strict=True):
        row.fill_(float("nan"))
        row[:real] = source
    _fill(static, other.metadata)
    graph.replay()
    torch.cuda.synchronize()
    exact = in_float32(other, 0)
    expected = reference.paged_attention(exact.query, exact.key, exact.value, 0, exact.metadata, scale=0.09)
    return relative_error(out[:real], expected), TOLERANCE[torch.bfloat16]


def _fill(static: AttentionMetadata, batch: AttentionMetadata) -> None:
    """Put a smaller batch into the tensors of a captured one; what is left over is padding."""
    n = batch.num_seqs
    static.seq_lens.zero_()[:n] = batch.seq_lens
    static.slot_mapping.fill_(PAD_SLOT)[:n] = batch.slot_mapping
    static.block_table.fill_(-1)[:n, : batch.block_table.shape[1]] = batch.block_table


def _alone(device: torch.device, attention: TritonAttention) -> tuple[float, float]:
    lengths = [(1, 700), (1, 33), (1, 2500), (1, 256)]
    batch = make_batch(lengths, kv_heads=2, group=4, head_dim=128, block_size=16, dtype=torch.bfloat16, device=device)
    together = attention(batch.query, batch.key, batch.value, 0, batch.metadata, scale=0.09)
    m = batch.metadata
    different = 0
    for i in range(len(lengths)):
        alone = type(m).build(
            query_start_loc=m.host_query_start_loc[:2],
            seq_lens=m.host_seq_lens[i : i + 1],
            block_table=m.host_block_table[i : i + 1],
            kv_cache=m.kv_cache,
        )
        row = slice(i, i + 1)
        out = attention(batch.query[row], batch.key[row], batch.value[row], 0, alone, scale=0.09)
        different += not torch.equal(out, together[row])
    return float(different), 0.0
