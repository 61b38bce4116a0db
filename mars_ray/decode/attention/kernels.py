"""Attention of a few rows of each sequence over paged keys and values, in Triton.

A sequence's rows are cut into tiles. A program handles one tile and one key-value head, over one
share of the sequence's places in the order of its page table. It uses a running softmax as in
FlashAttention (arXiv 2205.14135). Several shares, as in Flash-Decoding, keep the device busy while
there are few sequences; a second kernel combines them. Every row carries what it sees
(`Tables.sight`), so trees of drafts and groups of masks need no mask in memory.

Shape suffixes: A tiles, M rows of a program (a tile's rows, each with the G query heads that share
the key-value head), C places of a step, D head size, N rows of the forward, S shares.
"""

import triton
import triton.language as tl


@triton.jit
def turn_and_store(
    qkv_ptr,  # (N, T, D): queries, keys and values; queries are turned in place
    cos_ptr,  # (N, D), rows turn_stride apart; the sines likewise
    sin_ptr,
    cache_ptr,  # (places, 2, H, D)
    place_ptr,  # (N): where a row's keys and values go; -1: nowhere
    turn_stride,
    QUERY_HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Apply rotary embeddings, and store keys and values; one program per row and head."""
    row, head = tl.program_id(0), tl.program_id(1)
    left_D = tl.arange(0, SIZE // 2)
    right_D = left_D + SIZE // 2
    at = qkv_ptr + (row * (QUERY_HEADS + 2 * KEY_HEADS) + head) * SIZE
    left, right = tl.load(at + left_D), tl.load(at + right_D)
    if head < QUERY_HEADS + KEY_HEADS:
        cos_ptr += row * turn_stride
        sin_ptr += row * turn_stride
        x, y = left.to(tl.float32), right.to(tl.float32)
        left = (x * tl.load(cos_ptr + left_D) + y * tl.load(sin_ptr + left_D)).to(left.dtype)
        right = (y * tl.load(cos_ptr + right_D) + x * tl.load(sin_ptr + right_D)).to(right.dtype)
    if head < QUERY_HEADS:
        tl.store(at + left_D, left)
        tl.store(at + right_D, right)
    else:
        place = tl.load(place_ptr + row)
        at = cache_ptr + place * (2 * KEY_HEADS * SIZE) + (head - QUERY_HEADS) * SIZE
        tl.store(at + left_D, left, mask=place >= 0)
        tl.store(at + right_D, right, mask=place >= 0)


@triton.jit
def _sees(place_C, here_C, own_M, clean_M, begin_M, bits_M):
    """Which row sees which place, (M, C)."""
    own_MC = (place_C[None, :] >= begin_M[:, None]) & (place_C[None, :] <= own_M[:, None])
    sees_MC = (place_C[None, :] < clean_M[:, None]) | own_MC
    if tl.max(bits_M, axis=0) > 0:
        bit_MC = tl.minimum(tl.maximum(place_C[None, :] - clean_M[:, None], 0), 63)
        sees_MC = sees_MC | (((bits_M[:, None] >> bit_MC) & 1) != 0)
    return sees_MC & here_C[None, :]


@triton.jit
def _add(out_MD, sum_M, top_M, score_MC, value_CD):
    """Add values to a running softmax: the weighted sum of values, the sum of weights, and the
    largest score."""
    new_M = tl.maximum(top_M, tl.max(score_MC, axis=1))
    # For a row that has seen nothing so far any number will do; infinities would give NaN.
    safe_M = tl.where(new_M == float("-inf"), 0.0, new_M)
    weight_MC = tl.exp(score_MC - safe_M[:, None])
    fade_M = tl.exp(top_M - safe_M)
    new_MD = tl.dot(weight_MC.to(value_CD.dtype), value_CD, input_precision="ieee")
    return out_MD * fade_M[:, None] + new_MD, sum_M * fade_M + tl.sum(weight_MC, axis=1), new_M


@triton.jit
def _over(
    query_MD,
    own_M,
    clean_M,
    begin_M,
    bits_M,
    start,
    end,
    cache_ptr,
    page_ptr,
    scale,
    KEY_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Attention over the places from `start` to `end` of one table; returns what `_add` does."""
    top_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
    sum_M = tl.zeros([BLOCK_M], tl.float32)
    out_MD = tl.zeros([BLOCK_M, SIZE], tl.float32)
    for first in range(start, end, BLOCK_C):
        place_C = first + tl.arange(0, BLOCK_C)
        here_C = place_C < end
        page_C = tl.load(page_ptr + place_C // PAGE, mask=here_C, other=0)
        at_C = (page_C * PAGE + place_C % PAGE) * (2 * KEY_HEADS * SIZE)
        at_CD = cache_ptr + at_C[:, None] + tl.arange(0, SIZE)[None, :]
        key_CD = tl.load(at_CD, mask=here_C[:, None], other=0.0)
        score_MC = tl.dot(query_MD, tl.trans(key_CD), input_precision="ieee") * scale
        sees_MC = _sees(place_C, here_C, own_M, clean_M, begin_M, bits_M)
        score_MC = tl.where(sees_MC, score_MC, float("-inf"))
        value_CD = tl.load(at_CD + KEY_HEADS * SIZE, mask=here_C[:, None], other=0.0)
        out_MD, sum_M, top_M = _add(out_MD, sum_M, top_M, score_MC, value_CD)
    return out_MD, sum_M, top_M


@triton.jit(do_not_specialize=["rows"])
def attend_tile(
    query_ptr,  # (N, T, D), rows query_stride apart
    cache_ptr,  # (places, 2, H, D)
    out_ptr,  # (N, T, D); with several shares float32 (S, N, T, D)
    log_sum_ptr,  # float32 (S, N, T), with several shares
    tile_ptr,  # (A, 3): sequence, first row in that order, number of rows; 0: nothing to do
    order_ptr,  # (N): the rows, sequence by sequence
    own_ptr,  # (N): a row's place
    clean_ptr,  # (N): it sees the places before this one,
    begin_ptr,  # (N): those from this one to its own,
    bits_ptr,  # (N): and of those from `clean` on the j-th if bit j is set
    page_ptr,  # (sequences, page_stride)
    query_stride,
    page_stride,
    rows,
    scale,
    KEY_HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    SIZE: tl.constexpr,
    PAGE: tl.constexpr,
    SHARES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    tile, head, share = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    sequence = tl.load(tile_ptr + 3 * tile)
    first = tl.load(tile_ptr + 3 * tile + 1)
    width = tl.load(tile_ptr + 3 * tile + 2)
    if width == 0:
        return
    index_M = tl.arange(0, BLOCK_M)
    real_M = index_M // SHARED < width
    row_M = tl.load(order_ptr + first + index_M // SHARED, mask=real_M, other=0)
    query_head_M = head * SHARED + index_M % SHARED
    own_M = tl.load(own_ptr + row_M, mask=real_M, other=-1)
    clean_M = tl.load(clean_ptr + row_M, mask=real_M, other=0)
    begin_M = tl.load(begin_ptr + row_M, mask=real_M, other=0)
    bits_M = tl.load(bits_ptr + row_M, mask=real_M, other=0)
    index_D = tl.arange(0, SIZE)
    at_MD = (row_M * query_stride + query_head_M * SIZE)[:, None] + index_D[None, :]
    query_MD = tl.load(query_ptr + at_MD, mask=real_M[:, None], other=0.0)
    length = tl.max(own_M, axis=0) + 1
    part = tl.cdiv(tl.cdiv(length, BLOCK_C), SHARES) * BLOCK_C
    start = share * part
    end = tl.minimum(start + part, length)
    out_MD, sum_M, top_M = _over(
        query_MD, own_M, clean_M, begin_M, bits_M, start, end, cache_ptr + head * SIZE,
        page_ptr + sequence * page_stride, scale, KEY_HEADS, SIZE, PAGE, BLOCK_M, BLOCK_C,
    )  # fmt: skip
    real_sum_M = tl.where(sum_M == 0.0, 1.0, sum_M)  # zero where a row saw nothing in this share
    out_MD = out_MD / real_sum_M[:, None]
    line_M = row_M * (KEY_HEADS * SHARED) + query_head_M
    if SHARES > 1:
        line_M += share * rows * (KEY_HEADS * SHARED)
        tl.store(log_sum_ptr + line_M, top_M + tl.log(real_sum_M), mask=real_M)
    tl.store(
        out_ptr + line_M[:, None] * SIZE + index_D[None, :],
        out_MD.to(out_ptr.dtype.element_ty),
        mask=real_M[:, None],
    )


@triton.jit(do_not_specialize=["lines"])
def join_shares(
    part_ptr,  # float32 (S, N * T, D)
    log_sum_ptr,  # float32 (S, N * T)
    out_ptr,  # (N * T, D)
    lines,  # N * T
    SHARES: tl.constexpr,
    SIZE: tl.constexpr,
):
    line = tl.program_id(0)
    index_S = tl.arange(0, SHARES)
    index_D = tl.arange(0, SIZE)
    # A share in which the row saw nothing has -inf. The row's own place lies in some share.
    log_sum_S = tl.load(log_sum_ptr + index_S * lines + line)
    weight_S = tl.exp(log_sum_S - tl.max(log_sum_S, axis=0))
    at_S = (index_S * lines + line) * SIZE
    part_SD = tl.load(part_ptr + at_S[:, None] + index_D[None, :])
    out_D = tl.sum(part_SD * weight_S[:, None], axis=0) / tl.sum(weight_S, axis=0)
    tl.store(out_ptr + line * SIZE + index_D, out_D.to(out_ptr.dtype.element_ty))
