"""The GPU kernels of paged attention: attention itself, and the pass that joins split sequences.

One attention kernel serves prefill, decode and mixed batches. A program computes one tile of query rows against one
KV head: the `GROUP` query heads that share this KV head lie in the M dimension beside the tile's tokens (row m is
token m // GROUP, head m % GROUP), so that keys and values are read once for all of them and a decode, too, fills a
matrix instruction. Keys are walked in tiles of `BLOCK_N` positions; each position finds its block by
`position // BLOCK_SIZE`, so that the tile is chosen for the machine and the block for the pool.

The softmax is online (Milakov and Gimelshein 2018), as in FlashAttention-2 (Dao 2023), in base 2 so that each
exponential is one instruction. A sequence longer than `split_keys` is cut into splits that run side by side
(Flash-Decoding, Dao et al. 2023). The cut depends on the sequence's own length alone and is worked out on the device:
the grid stays the same while lengths grow, as a CUDA graph needs, and a decode's result does not depend on what else
is in the batch.

What is never read: slots past a sequence's end, table entries past its blocks, anything of a padded sequence
(`seq_len` 0 or no query rows). Masked values are loaded as 0, since a weight of 0 times a NaN is NaN.
"""

# ruff: noqa: N803, N806, SIM102 - constants in capitals, and conditions on them kept apart, as Triton has it
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

import triton
import triton.language as tl

from engine.attention.triton_cache import PLAIN, dequantise

_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _find_sequence(query_start_loc, first_seq, num_seqs, tile, BLOCK_Q: tl.constexpr):
    """The sequence that a prefill tile belongs to, and its first tile, by bisection.

    Sequence i is given the tiles from (start_i - start_first) // BLOCK_Q + (i - first) on: at least as many as it
    needs, and a number known from the token count without looking at any length (as vLLM's unified kernel does it).
    """
    first_row = tl.load(query_start_loc + first_seq)
    low = first_seq
    high = first_seq + num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        start = tl.load(query_start_loc + middle)
        begins = (start - first_row) // BLOCK_Q + middle - first_seq
        if begins <= tile:
            low = middle
        else:
            high = middle
    start = tl.load(query_start_loc + low)
    return low, (start - first_row) // BLOCK_Q + low - first_seq


@triton.jit
def _locate(query_start_loc, seq_lens, first_seq, num_seqs, BLOCK_Q: tl.constexpr, DECODE: tl.constexpr):
    """What this program's tile is: sequence, its first row in the batch, its lengths, first token of the tile."""
    if DECODE:
        seq = first_seq + tl.program_id(0)
        first_token = 0
    else:
        # The last tiles of a prompt see the most keys: start with them.
        tile = tl.num_programs(0) - 1 - tl.program_id(0)
        seq, begins = _find_sequence(query_start_loc, first_seq, num_seqs, tile, BLOCK_Q)
        first_token = (tile - begins) * BLOCK_Q
    start = tl.load(query_start_loc + seq)
    query_len = tl.load(query_start_loc + seq + 1) - start
    seq_len = tl.load(seq_lens + seq)
    return seq, start, query_len, seq_len, first_token


@triton.jit
def _key_range(query_len, seq_len, first_token, BLOCK_Q: tl.constexpr, WINDOW: tl.constexpr):
    """Positions that a tile's rows may see, [first, end), and the positions of its first and last row."""
    first_position = seq_len - query_len + first_token
    last_position = tl.minimum(first_position + BLOCK_Q, seq_len) - 1
    first_key = 0
    if WINDOW > 0:
        first_key = tl.maximum(first_position - WINDOW + 1, 0)
    return first_key, last_position + 1, first_position, last_position


@triton.jit
def _mask(rows, dims, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr):
    """Which elements of a tile to touch; one column where that says it all, since a mask takes registers."""
    mask = rows[:, None]
    if HEAD_DIM < PADDED_DIM:
        mask = mask & (dims < HEAD_DIM)[None, :]
    return mask


@triton.jit
def _attend_tile(
    acc,
    largest,
    total,
    query,
    keys,
    values,
    key_scales,
    value_scales,
    table_row,
    only_block,
    cache_block_stride,
    scale_block_stride,
    n,
    end,
    position,
    qk_scale,
    softcap,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    KIND: tl.constexpr,
    PAGED: tl.constexpr,
    PRECISION: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Take the keys at [n, n + BLOCK_N) into the running softmax; without MASKED every row sees all of them."""
    key_position = n + tl.arange(0, BLOCK_N)
    dims = tl.arange(0, PADDED_DIM)
    written = key_position < end
    if PAGED:
        if MASKED:
            block = tl.load(table_row + key_position // BLOCK_SIZE, written, 0).to(tl.int64)
        else:
            block = tl.load(table_row + key_position // BLOCK_SIZE).to(tl.int64)
        slot = key_position % BLOCK_SIZE
    else:
        block = tl.full([BLOCK_N], 0, tl.int64) + only_block
        slot = key_position
    offset = block * cache_block_stride + slot * HEAD_DIM
    key_at = keys + offset[None, :] + dims[:, None]
    wanted = _mask(written, dims, HEAD_DIM, PADDED_DIM)
    if MASKED:
        k = tl.load(key_at, tl.trans(wanted), 0)
    elif HEAD_DIM < PADDED_DIM:
        k = tl.load(key_at, (dims < HEAD_DIM)[:, None], 0)
    else:
        k = tl.load(key_at)

    scores = tl.dot(query, dequantise(k, query.dtype, KIND), input_precision=PRECISION)
    if KIND != PLAIN:
        scale_at = block * scale_block_stride + slot
        scores *= tl.load(key_scales + scale_at, written, 0.0).to(tl.float32)[None, :]
    if SOFTCAP:
        # tanh(x) = 1 - 2 / (exp(2x) + 1); qk_scale holds scale / softcap.
        capped = 1.0 - 2.0 / (tl.exp2(scores * (qk_scale * 2.0 * _LOG2E)) + 1.0)
        scores = capped * (softcap * _LOG2E)
    else:
        scores *= qk_scale * _LOG2E
    if MASKED:
        visible = written[None, :] & (key_position[None, :] <= position[:, None])
        if WINDOW > 0:
            visible = visible & (key_position[None, :] > position[:, None] - WINDOW)
        scores = tl.where(visible, scores, float("-inf"))
    new_largest = tl.maximum(largest, tl.max(scores, axis=1))
    reference = new_largest
    if MASKED:
        # A row that has seen no key yet: -inf minus -inf would be NaN.
        reference = tl.where(new_largest == float("-inf"), 0.0, new_largest)
    weights = tl.exp2(scores - reference[:, None])
    fade = tl.exp2(largest - reference)
    total = total * fade + tl.sum(weights, axis=1)
    if KIND != PLAIN:
        weights *= tl.load(value_scales + scale_at, written, 0.0).to(tl.float32)[None, :]
    # Loaded late: outside a pipelined loop the values would wait in registers.
    value_at = values + offset[:, None] + dims[None, :]
    if MASKED:
        v = tl.load(value_at, wanted, 0)
    elif HEAD_DIM < PADDED_DIM:
        v = tl.load(value_at, (dims < HEAD_DIM)[None, :], 0)
    else:
        v = tl.load(value_at)
    v = dequantise(v, query.dtype, KIND)
    acc = tl.dot(weights.to(query.dtype), v, acc * fade[:, None], input_precision=PRECISION)
    return acc, new_largest, total


@triton.jit(do_not_specialize=["layer", "first_seq", "num_seqs", "table_stride", "split_keys"])
def attention_kernel(
    out,
    partial_out,
    partial_lse,
    query,
    cache,
    scales,
    sinks,
    block_table,
    query_start_loc,
    seq_lens,
    layer,
    first_seq,
    num_seqs,
    table_stride,
    split_keys,
    cache_block_stride,
    scale_block_stride,
    query_token_stride,
    query_head_stride,
    qk_scale,
    softcap,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    KIND: tl.constexpr,
    PAGED: tl.constexpr,
    DECODE: tl.constexpr,
    SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Attention of one tile of query rows with one KV head, over one split of the keys.

    Grid: (decodes or prefill tiles, KV heads, splits). Sequences [first_seq, first_seq + num_seqs) of the batch;
    `out` is `[T, heads, HEAD_DIM]`. Where a sequence needs more than one split, the split's own softmax goes to
    `partial_out` `[rows, heads, splits, HEAD_DIM]` (float32) and the base-2 logarithm of its sum to `partial_lse`
    `[rows, heads, splits]`; `combine_kernel` joins them.
    """
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    seq, start, query_len, seq_len, first_token = _locate(
        query_start_loc, seq_lens, first_seq, num_seqs, BLOCK_Q, DECODE
    )
    if seq_len == 0:
        return
    if first_token >= query_len:
        return
    first_key, end_key, first_position, last_position = _key_range(query_len, seq_len, first_token, BLOCK_Q, WINDOW)
    begin = first_key
    end = end_key
    if SPLIT:
        begin = first_key + tl.program_id(2) * split_keys
        end = tl.minimum(begin + split_keys, end_key)
        if begin >= end_key:
            return

    kv_head = tl.program_id(1)
    num_kv_heads = tl.num_programs(1)
    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, PADDED_DIM)
    token = first_token + rows // GROUP
    head = kv_head * GROUP + rows % GROUP
    row_mask = (rows < BLOCK_Q * GROUP) & (token < query_len)
    mask = _mask(row_mask, dims, HEAD_DIM, PADDED_DIM)
    row = (start + token).to(tl.int64)
    position = seq_len - query_len + token
    q = tl.load(
        query + row[:, None] * query_token_stride + head[:, None] * query_head_stride + dims[None, :], mask, 0.0
    )
    if WIDEN:
        # The interpreter would multiply the bits of bfloat16.
        q = q.to(tl.float32)

    plane = (layer * 2 * num_kv_heads + kv_head).to(tl.int64) * BLOCK_SIZE
    keys = cache + plane * HEAD_DIM
    values = keys + num_kv_heads * BLOCK_SIZE * HEAD_DIM
    key_scales = scales
    value_scales = scales
    if KIND != PLAIN:
        key_scales = scales + plane
        value_scales = key_scales + num_kv_heads * BLOCK_SIZE
    table_row = block_table + seq.to(tl.int64) * table_stride
    only_block = tl.full([], 0, tl.int64)
    if not PAGED:
        only_block = tl.load(table_row).to(tl.int64)

    acc = tl.full([BLOCK_M, PADDED_DIM], 0.0, tl.float32)
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.full([BLOCK_M], 0.0, tl.float32)
    if SINKS:
        # A score without a value: it takes part once, in the first split.
        if begin == first_key:
            largest = tl.load(sinks + head, row_mask, 0.0).to(tl.float32) * _LOG2E
            total = tl.full([BLOCK_M], 1.0, tl.float32)

    # Three runs of tiles: those that the window cuts, those that every row sees whole, those that the diagonal or the
    # end cuts. A decode's range begins at its window, so it has no first run.
    whole = begin
    if WINDOW > 0 and not DECODE:
        cut = tl.minimum(last_position - WINDOW + 1, end) - begin
        whole = begin + tl.cdiv(tl.maximum(cut, 0), BLOCK_N) * BLOCK_N
        for n in range(begin, whole, BLOCK_N):
            acc, largest, total = _attend_tile(
                acc, largest, total, q, keys, values, key_scales, value_scales, table_row, only_block,
                cache_block_stride, scale_block_stride, n, end, position, qk_scale, softcap,
                HEAD_DIM, PADDED_DIM, BLOCK_SIZE, BLOCK_N, WINDOW, SOFTCAP, KIND, PAGED, PRECISION, MASKED=True,
            )  # fmt: skip
    seen_whole = tl.maximum(tl.minimum(first_position + 1, end) - whole, 0)
    tail = whole + seen_whole // BLOCK_N * BLOCK_N
    for n in range(whole, tail, BLOCK_N):
        acc, largest, total = _attend_tile(
            acc, largest, total, q, keys, values, key_scales, value_scales, table_row, only_block,
            cache_block_stride, scale_block_stride, n, end, position, qk_scale, softcap,
            HEAD_DIM, PADDED_DIM, BLOCK_SIZE, BLOCK_N, WINDOW, SOFTCAP, KIND, PAGED, PRECISION, MASKED=False,
        )  # fmt: skip
    for n in range(tail, end, BLOCK_N):
        acc, largest, total = _attend_tile(
            acc, largest, total, q, keys, values, key_scales, value_scales, table_row, only_block,
            cache_block_stride, scale_block_stride, n, end, position, qk_scale, softcap,
            HEAD_DIM, PADDED_DIM, BLOCK_SIZE, BLOCK_N, WINDOW, SOFTCAP, KIND, PAGED, PRECISION, MASKED=True,
        )  # fmt: skip

    num_heads = num_kv_heads * GROUP
    # A prefill row may see nothing of this split: its weight is 0, and 0 / 0 must not be stored.
    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    result_row = row * num_heads + head
    if SPLIT:
        if end_key - first_key > split_keys:
            partial_row = result_row * tl.num_programs(2) + tl.program_id(2)
            tl.store(partial_out + partial_row[:, None] * HEAD_DIM + dims[None, :], result, mask)
            lse = tl.where(total == 0.0, float("-inf"), largest + tl.log2(total))
            tl.store(partial_lse + partial_row, lse, row_mask)
            return
    tl.store(out + result_row[:, None] * HEAD_DIM + dims[None, :], result.to(out.dtype.element_ty), mask)


@triton.jit(do_not_specialize=["first_seq", "num_seqs", "split_keys", "num_splits"])
def combine_kernel(
    out,
    partial_out,
    partial_lse,
    query_start_loc,
    seq_lens,
    first_seq,
    num_seqs,
    split_keys,
    num_splits,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    WINDOW: tl.constexpr,
    DECODE: tl.constexpr,
):
    """Join the splits of one tile: their results weighted by their sums. Grid: (tiles, KV heads, row groups).

    The tiles are those of `attention_kernel`; a sequence that fitted into one split is finished already.
    """
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    _seq, start, query_len, seq_len, first_token = _locate(
        query_start_loc, seq_lens, first_seq, num_seqs, BLOCK_Q, DECODE
    )
    if seq_len == 0:
        return
    if first_token >= query_len:
        return
    first_key, end_key, _, _ = _key_range(query_len, seq_len, first_token, BLOCK_Q, WINDOW)
    used = tl.cdiv(end_key - first_key, split_keys)
    if used <= 1:
        return
    rows = tl.program_id(2) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    dims = tl.arange(0, PADDED_DIM)
    token = first_token + rows // GROUP
    head = tl.program_id(1) * GROUP + rows % GROUP
    row_mask = (rows < BLOCK_Q * GROUP) & (token < query_len)
    mask = _mask(row_mask, dims, HEAD_DIM, PADDED_DIM)
    result_row = (start + token).to(tl.int64) * (tl.num_programs(1) * GROUP) + head

    acc = tl.full([BLOCK_ROWS, PADDED_DIM], 0.0, tl.float32)
    largest = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    total = tl.full([BLOCK_ROWS], 0.0, tl.float32)
    for split in range(used):
        partial_row = result_row * num_splits + split
        lse = tl.load(partial_lse + partial_row, row_mask, 0.0)
        part = tl.load(partial_out + partial_row[:, None] * HEAD_DIM + dims[None, :], mask, 0.0)
        new_largest = tl.maximum(largest, lse)
        reference = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weight = tl.exp2(lse - reference)
        fade = tl.exp2(largest - reference)
        acc = acc * fade[:, None] + part * weight[:, None]
        total = total * fade + weight
        largest = new_largest
    result = acc / total[:, None]
    tl.store(out + result_row[:, None] * HEAD_DIM + dims[None, :], result.to(out.dtype.element_ty), mask)
