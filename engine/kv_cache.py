"""The tensor that block ids point into.

Block-major: `[num_blocks, layers, 2, kv_heads, block_size, head_dim]`. One block is one contiguous row across all
layers, so copy-on-write and swapping move one row, and a block's keys and values of one head are contiguous.

A quantised cache (int8 or float8 e4m3) keeps a code for each element and, beside them in a tensor of the same order, a
float32 scale for each token and head: what one token writes never changes what another has written, and a block with
its scales is complete in itself (`engine.attention.quantised`).
"""

from __future__ import annotations

import bisect
import math
from typing import TYPE_CHECKING

import numpy as np
import torch

from engine.config import ConfigError
from engine.free_memory import free_memory
from engine.sizes import in_bytes
from engine.trace.events import Op
from engine.upload import upload

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from engine.core.scheduler_output import BlockCopy

_HEADROOM = 0.9
"""Share of the free memory that the cache may take; the rest is for activations."""

QUANTISED = (torch.int8, torch.float8_e4m3fn)
"""Element types that go with scales."""

SCALE_BYTES = 4
"""Of one token's and head's scale in a quantised cache, a float32."""

_PAGE, LARGE_PAGE = 4 << 10, 2 << 20
"""Sizes of memory pages in bytes, of most processors."""

_POISON_BYTE = 0x7F
"""The NaN of float8 e4m3; int8 has none, there the NaN of the scales must show."""


class KVCache:
    """Keys and values of every layer, in fixed blocks.

    Memory is not cleared: a slot holds whatever was there until it is written, and attention must mask it so that not
    even a NaN gets through.

    Attributes:
        data: `[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]`; index 2 is 0 for keys, 1 for values.
        scales: float32 `[num_blocks, num_layers, 2, num_kv_heads, block_size]`, by which the codes in `data` are to be
            multiplied; None where `data` holds the numbers themselves.
        host: The CPU pool, shaped as `data`, pinned where the cache is on a CUDA device; None where there is none.
        host_scales: Its scales, where there are any.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        num_layers: int,
        num_kv_heads: int,
        block_size: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        poison: bool = False,
        num_cpu_blocks: int = 0,
    ) -> None:
        """Allocate the cache.

        Args:
            num_blocks: Blocks in the pool.
            num_layers: Attention layers of the model.
            num_kv_heads: Key and value heads of one layer.
            block_size: Tokens of one block.
            head_dim: Size of one head.
            dtype: Element type: a float type, or one of `QUANTISED`.
            device: Where.
            poison: Fill with NaN, so that a test sees any slot read before it is written.
            num_cpu_blocks: Blocks of the twin in the host's memory.

        Raises:
            ConfigError: It does not fit into the memory that is free now.
        """
        device = torch.device(device)
        self.num_blocks = num_blocks
        self.num_layers = num_layers
        self.num_kv_heads = num_kv_heads
        self.block_size = block_size
        self.head_dim = head_dim
        self.dtype = dtype
        self.device = device
        rows = num_layers * 2 * num_kv_heads * block_size
        self._scale_bytes = rows * SCALE_BYTES if dtype in QUANTISED else 0
        self.block_bytes = rows * head_dim * dtype.itemsize + self._scale_bytes
        self._check_size()
        try:
            self.data, self.scales = self._allocate(num_blocks, device=device)
        except (RuntimeError, MemoryError) as error:
            raise ConfigError(self._too_large(free_memory(device))) from error
        self.host: torch.Tensor | None = None
        self.host_scales: torch.Tensor | None = None
        if num_cpu_blocks:
            pinned = device.type == "cuda"
            self._check_host(num_cpu_blocks, pinned=pinned)
            try:
                self.host, self.host_scales = self._allocate(num_cpu_blocks, pin_memory=pinned)
            except (RuntimeError, MemoryError) as error:
                size = f"{num_cpu_blocks} blocks of {in_bytes(self.block_bytes)}"
                raise ConfigError(f"the CPU pool does not fit into memory: {size}; use fewer (--cpu-blocks)") from error
        if poison:
            _poison(self.data, self.scales)
            if self.host is not None:
                _poison(self.host, self.host_scales)

    @property
    def num_bytes(self) -> int:
        """Size of the whole cache in bytes."""
        return self.num_blocks * self.block_bytes

    def keys(self, layer: int) -> torch.Tensor:
        """Keys of one layer, a view `[num_blocks, num_kv_heads, block_size, head_dim]`."""
        return self.data[:, layer, 0]

    def values(self, layer: int) -> torch.Tensor:
        """Values of one layer, a view `[num_blocks, num_kv_heads, block_size, head_dim]`."""
        return self.data[:, layer, 1]

    def copy_blocks(
        self, source: Sequence[int] | NDArray[np.int64], destination: Sequence[int] | NDArray[np.int64]
    ) -> None:
        """Copy whole blocks, all layers at once; a source may be named more than once, a destination may not.

        Args:
            source: Block ids to read.
            destination: Block ids to overwrite, as many.
        """
        if len(source) != len(destination):
            raise ValueError(f"{len(source)} source blocks for {len(destination)} destinations: give as many of each")
        if len(source) == 0:
            return
        src, dst = upload(source, self.device, np.int64), upload(destination, self.device, np.int64)
        for tensor in _parts(self.data, self.scales):
            tensor.index_copy_(0, dst, tensor.index_select(0, src))

    def move(self, copies: Sequence[BlockCopy]) -> None:
        """Move contents as if one after the other, as many at once as do not depend on each other.

        Args:
            copies: In order. Only COPY is possible where there is no CPU pool.
        """
        source: list[int] = []
        destination: list[int] = []
        written: set[int] = set()
        kind = Op.COPY
        for op, a, b in copies:
            # All of a group are read before any is written.
            if source and (op != kind or b in written or (op == Op.COPY and a in written)):
                self._move_group(kind, source, destination)
                source, destination, written = [], [], set()
            kind = op
            source.append(a)
            destination.append(b)
            written.add(b)
        if source:
            self._move_group(kind, source, destination)

    def _move_group(self, op: Op, source: list[int], destination: list[int]) -> None:
        if op == Op.COPY:
            self.copy_blocks(source, destination)
            return
        assert self.host is not None, "a block is to be swapped, but there is no CPU pool"
        parts = zip(_parts(self.data, self.scales), _parts(self.host, self.host_scales), strict=True)
        for ours, hosts in parts:
            self._transfer(*((ours, hosts) if op == Op.SWAP_OUT else (hosts, ours)), source, destination)

    def _transfer(self, read: torch.Tensor, written: torch.Tensor, source: list[int], destination: list[int]) -> None:
        if self.device.type == "cpu":
            rows = read.index_select(0, torch.tensor(source))
            written.index_copy_(0, torch.tensor(destination), rows)
            return
        # One transfer for each run of neighbours; all on one stream, so that each comes after those before it and the
        # host need not wait: pinned memory is only read and written by these transfers.
        start = 0
        for end in range(1, len(source) + 1):
            if end < len(source) and (
                source[end] == source[end - 1] + 1 and destination[end] == destination[end - 1] + 1
            ):
                continue
            a, b, n = source[start], destination[start], end - start
            written[b : b + n].copy_(read[a : a + n], non_blocking=True)
            start = end

    def _allocate(
        self, num_blocks: int, *, device: torch.device | None = None, pin_memory: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Elements and scales of so many blocks."""
        shape = (num_blocks, self.num_layers, 2, self.num_kv_heads, self.block_size)
        if device is not None and device.type == "cpu":
            data = _on_pages((*shape, self.head_dim), self.dtype)
        else:
            data = torch.empty((*shape, self.head_dim), dtype=self.dtype, device=device, pin_memory=pin_memory)
        if self.dtype not in QUANTISED:
            return data, None
        return data, torch.empty(shape, dtype=torch.float32, device=device, pin_memory=pin_memory)

    def _check_size(self) -> None:
        free = free_memory(self.device)
        if free is not None and self.num_bytes > free * _HEADROOM:
            raise ConfigError(self._too_large(free))

    def _check_host(self, num_cpu_blocks: int, *, pinned: bool) -> None:
        """Refuse a CPU pool before the system ends the process for it: pinned memory is taken at once.

        torch pins a power of two of bytes, so that a pool may take nearly twice its size.
        """
        free = free_memory(torch.device("cpu"))
        if free is None:
            return
        # The other pool in the same memory has been allocated, but most of it is taken only when it is written.
        room = int(free * _HEADROOM) - (0 if pinned else self.num_bytes)

        def taken(num_blocks: int) -> int:
            scales = num_blocks * self._scale_bytes
            sizes = num_blocks * self.block_bytes - scales, scales
            return sum(1 << (size - 1).bit_length() if pinned and size else size for size in sizes)

        if taken(num_cpu_blocks) <= room:
            return
        needs = f"{num_cpu_blocks} blocks of {in_bytes(self.block_bytes)} take {in_bytes(taken(num_cpu_blocks))}"
        if pinned:
            needs += " (pinned, and so a power of two)"
        fit = max(0, bisect.bisect_right(range(num_cpu_blocks), room, key=taken) - 1)
        advice = f"use at most {fit} (--cpu-blocks)"
        raise ConfigError(f"the CPU pool does not fit into memory: {needs}, {in_bytes(free)} are free; {advice}")

    def _too_large(self, free: int | None) -> str:
        size = f"{self.num_blocks} blocks of {in_bytes(self.block_bytes)} take {in_bytes(self.num_bytes)}"
        if free is None:
            return f"the KV cache does not fit on {self.device}: {size}; use fewer (--num-blocks)"
        fit = int(free * _HEADROOM) // self.block_bytes
        advice = f"use at most {fit} (--num-blocks)" if fit else "use smaller blocks (--block-size) or a smaller model"
        return f"the KV cache does not fit on {self.device}: {size}, {in_bytes(free)} are free; {advice}"


def _on_pages(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """An empty tensor in main memory that begins where a page does, a large one if it is as large.

    A block of whole pages then touches no other page: to find one costs a processor as much as to read a line from it.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    page = LARGE_PAGE if num_bytes >= LARGE_PAGE else _PAGE
    room = torch.empty(num_bytes + page, dtype=torch.uint8)
    first = -room.data_ptr() % page
    return room[first : first + num_bytes].view(dtype).view(shape)


def _parts(data: torch.Tensor, scales: torch.Tensor | None) -> Iterator[torch.Tensor]:
    """What has to be moved of a block; float8 as its bytes, since not every operation knows the type."""
    yield data.view(torch.uint8) if data.dtype == torch.float8_e4m3fn else data
    if scales is not None:
        yield scales


def _poison(data: torch.Tensor, scales: torch.Tensor | None) -> None:
    if scales is None:
        data.fill_(float("nan"))
    else:
        data.view(torch.uint8).fill_(_POISON_BYTE)
        scales.fill_(float("nan"))
