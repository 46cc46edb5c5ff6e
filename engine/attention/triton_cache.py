"""The GPU's side of the cache: writing keys and values into their slots, and the 8-bit forms they may have there.

A quantised cache keeps a code for each element and one scale for each token and head, of keys and values each: what
one token writes never changes what another has written, and a block is still complete in itself.
"""

# ruff: noqa: N803, SIM108 - constants in capitals, and branches on them spelt out, as Triton has it
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

import triton
import triton.language as tl

PLAIN = tl.constexpr(0)
"""Cache in a float type."""
INT8 = tl.constexpr(1)
"""Cache in int8, a scale for each token and head."""
FP8 = tl.constexpr(2)
"""Cache in float8 e4m3, converted by the hardware."""
FP8_BITS = tl.constexpr(3)
"""Cache in float8 e4m3, converted by its bits, for hardware without the type."""

_INT8_MAX = tl.constexpr(127.0)
_FP8_MAX = tl.constexpr(448.0)
_ROUND = tl.constexpr(12582912.0)
"""1.5 * 2**23: adding it to a small float32 and taking it off again rounds to the nearest integer, ties to even."""


@triton.jit(do_not_specialize=["layer", "num_kv_heads"])
def write_kv_kernel(
    key,
    value,
    cache,
    scales,
    slot_mapping,
    layer,
    num_kv_heads,
    cache_block_stride,
    scale_block_stride,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    KIND: tl.constexpr,
):
    """Put one token's keys and values of BLOCK_HEADS heads into its slot; a negative slot writes nothing.

    Grid: (tokens, head groups). `cache` is `[blocks, layers, 2, heads, BLOCK_SIZE, HEAD_DIM]` and `scales`
    `[blocks, layers, 2, heads, BLOCK_SIZE]`; both are written by a quantised cache, `cache` alone by a plain one.
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if slot < 0:
        return
    heads = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    dims = tl.arange(0, PADDED_DIM)
    head_mask = heads < num_kv_heads
    mask = head_mask[:, None] & (dims < HEAD_DIM)[None, :]
    k = tl.load(key + token * key_token_stride + heads[:, None] * key_head_stride + dims[None, :], mask, 0.0)
    v = tl.load(value + token * value_token_stride + heads[:, None] * value_head_stride + dims[None, :], mask, 0.0)

    block = slot // BLOCK_SIZE
    row = (layer * 2 * num_kv_heads + heads) * BLOCK_SIZE + slot % BLOCK_SIZE
    values_on = num_kv_heads * BLOCK_SIZE
    target = cache + block * cache_block_stride + row[:, None] * HEAD_DIM + dims[None, :]
    if KIND == PLAIN:
        tl.store(target, k.to(cache.dtype.element_ty), mask)
        tl.store(target + values_on * HEAD_DIM, v.to(cache.dtype.element_ty), mask)
    else:
        scale_target = scales + block * scale_block_stride + row
        k, k_scale = _quantise(k, scales.dtype.element_ty, KIND)
        v, v_scale = _quantise(v, scales.dtype.element_ty, KIND)
        tl.store(target, k, mask)
        tl.store(target + values_on * HEAD_DIM, v, mask)
        tl.store(scale_target, k_scale, head_mask)
        tl.store(scale_target + values_on, v_scale, head_mask)


@triton.jit
def _quantise(x, scale_type: tl.constexpr, KIND: tl.constexpr):
    """Rows of x `[n, dims]` as 8-bit codes and one scale each; see `engine.attention.quantised.quantise`."""
    x = x.to(tl.float32)
    largest = tl.max(tl.abs(x), axis=1)
    limit = _INT8_MAX if KIND == INT8 else _FP8_MAX
    # The codes are made with the scale as it is stored.
    scale = (largest / limit).to(scale_type)
    scale = tl.where(scale == 0.0, 1.0, scale).to(scale_type)
    # A maximum passes over NaN, and codes have none: the scale must show it.
    finite = tl.sum((tl.abs(x) < float("inf")).to(tl.int32), axis=1) == x.shape[1]
    scale = tl.where(finite, scale, float("nan")).to(scale_type)
    scaled = x / scale.to(tl.float32)[:, None]
    scaled = tl.minimum(tl.maximum(scaled, -limit), limit)
    if KIND == INT8:
        code = ((scaled + _ROUND) - _ROUND).to(tl.int8)
    else:
        code = _to_fp8(scaled)
    return code, scale


@triton.jit
def _to_fp8(x):
    """Float32 within ±448 as the bits of float8 e4m3 (uint8), rounded to nearest, ties to even.

    In integers because sm_80 has no such type: below 2**-6 the result is subnormal with steps of 2**-9, and adding
    2**14 rounds to such a step (the last bit of a float32 near 2**14); above, the mantissa is cut from 23 bits to 3.
    """
    bits = x.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = bits & 0x7FFFFFFF
    small = (tl.abs(x) + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000  # bits of 16384.0
    large = (magnitude - 0x3C000000 + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20  # exponent bias 127 to 7
    return (tl.where(magnitude < 0x3C800000, small, large) | sign).to(tl.uint8)  # 2**-6


@triton.jit
def dequantise(x, dtype: tl.constexpr, KIND: tl.constexpr):
    """Codes of the cache as numbers of `dtype`; their scales are applied to scores and weights, not here.

    Every code is exact in bfloat16 and float16, so nothing is lost before the scale.
    """
    if KIND == FP8:
        return x.to(tl.float8e4nv, bitcast=True).to(tl.float16).to(dtype)
    if KIND == FP8_BITS:
        # The same fields in float16's places; its exponent bias is 8 larger, and its subnormals serve for these.
        bits = x.to(tl.uint16)
        half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
        return (half.to(tl.float32) * 256.0).to(dtype)
    return x.to(dtype)
