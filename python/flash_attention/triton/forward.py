"""Forward: one program owns BLOCK_Q queries of one head and loops over the keys with the online softmax.

    for each tile of keys:                      m = running row maximum, l = running row sum
        S  = Q K^T * scale
        m' = max(m, rowmax(S));  P = exp(S - m')
        l  = l * exp(m - m') + rowsum(P)
        O  = O * exp(m - m') + P V
    O /= l;  LSE = m + log(l)

Exponentials are in base 2 (one instruction on a GPU), with log2(e) folded into the scale. With a causal mask the loop
goes first over the tiles that every query sees entirely, without masking, then over those on the diagonal, with masking.
"""
# ruff: noqa: E741, SIM102 (O is the paper's letter; a branch on a constant stands alone)

import torch
import triton
import triton.language as tl

from .tiles import all_finite, dot, key_range, load_row, load_tile, my_tile, store_tile, visible
from .tuning import FORWARD, LOG2_E, OPTIONS, autotuned, block_d, even, length_class

# Argument lists are in groups: tensors, strides, sizes, constants.
# fmt: off

LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def attend(acc, row_max, row_sum, Q_tile, K, V, start, stop, first_q, k_stride, v_stride, seq_q, seq_kv, scale_log2,
           BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
           CAUSAL: tl.constexpr, MASKED: tl.constexpr):
    for first_kv in tl.range(start, stop, BLOCK_KV):
        K_tile = load_tile(K, first_kv, k_stride, seq_kv, BLOCK_KV, HEAD_DIM, BLOCK_D, CHECK_ROWS=MASKED)
        S = dot(Q_tile, K_tile.T, None)
        if MASKED:
            q_idx = first_q + tl.arange(0, BLOCK_Q)
            kv_idx = first_kv + tl.arange(0, BLOCK_KV)
            S = tl.where(visible(q_idx[:, None], kv_idx[None, :], seq_q, seq_kv, CAUSAL), S, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(S, 1) * scale_log2)
        shift = new_max
        if MASKED:  # in a row that has seen no key yet, -inf - -inf would be NaN
            shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        P = tl.exp2(S * scale_log2 - shift[:, None])
        rescale = tl.exp2(row_max - shift)
        row_sum = row_sum * rescale + tl.sum(P, 1)
        acc = acc * rescale[:, None]
        V_tile = load_tile(V, first_kv, v_stride, seq_kv, BLOCK_KV, HEAD_DIM, BLOCK_D, CHECK_ROWS=MASKED)
        acc = dot(P.to(V_tile.dtype), V_tile, acc)
        row_max = new_max
    return acc, row_max, row_sum


@triton.jit
def attend_nonfinite_safe(Q_tile, row_max, K, V, end, first_q, k_stride, v_stride, seq_q, seq_kv, scale_log2,
                          BLOCK_Q: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """The sum of P V key by key, which skips hidden keys instead of multiplying them by 0."""
    Q_tile = Q_tile.to(tl.float32)
    q_idx = first_q + tl.arange(0, BLOCK_Q)
    acc = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    for kv_idx in tl.range(0, end):
        S = tl.sum(Q_tile * load_row(K, kv_idx, k_stride, HEAD_DIM, BLOCK_D)[None, :], 1)
        weighted = tl.exp2(S * scale_log2 - row_max)[:, None] * load_row(V, kv_idx, v_stride, HEAD_DIM, BLOCK_D)[None, :]
        acc += tl.where(visible(q_idx, kv_idx, seq_q, seq_kv, CAUSAL=True)[:, None], weighted, 0.0)
    return acc


@autotuned(FORWARD)
@triton.jit(do_not_specialize=["heads_q", "length_class"])
def forward_kernel(Q, K, V, O, LSE, scale_log2,
                   q_strides, k_strides, v_strides, o_strides,
                   heads_q, group, seq_q, seq_kv, length_class,
                   HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, CAUSAL: tl.constexpr, EVEN_KV: tl.constexpr,
                   BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr):
    tile, batch_head = my_tile(seq_q, BLOCK_Q)
    first_q = (tl.cdiv(seq_q, BLOCK_Q) - 1 - tile) * BLOCK_Q  # causal: the last tiles take longest and start first
    batch = batch_head // heads_q
    head = batch_head % heads_q
    Q += batch * q_strides[0] + head * q_strides[2]
    K += batch * k_strides[0] + head // group * k_strides[2]
    V += batch * v_strides[0] + head // group * v_strides[2]
    O += batch * o_strides[0] + head * o_strides[2]
    LSE += batch_head * seq_q

    Q_tile = load_tile(Q, first_q, q_strides[1], seq_q, BLOCK_Q, HEAD_DIM, BLOCK_D, CHECK_ROWS=True)
    acc = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    row_max = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_Q], tl.float32)

    full, end = key_range(first_q, seq_q, seq_kv, BLOCK_Q, BLOCK_KV, CAUSAL, EVEN_KV)
    if CAUSAL or EVEN_KV:
        acc, row_max, row_sum = attend(
            acc, row_max, row_sum, Q_tile, K, V, 0, full, first_q, k_strides[1], v_strides[1], seq_q, seq_kv, scale_log2,
            BLOCK_Q, BLOCK_KV, HEAD_DIM, BLOCK_D, CAUSAL, MASKED=False)
    if CAUSAL or not EVEN_KV:
        acc, row_max, row_sum = attend(
            acc, row_max, row_sum, Q_tile, K, V, full, end, first_q, k_strides[1], v_strides[1], seq_q, seq_kv, scale_log2,
            BLOCK_Q, BLOCK_KV, HEAD_DIM, BLOCK_D, CAUSAL, MASKED=True)

    if CAUSAL:  # if some queries of the tile see a key with NaN, 0 * NaN has brought it to the others, too
        if not all_finite(acc):
            acc = attend_nonfinite_safe(Q_tile, row_max, K, V, end, first_q, k_strides[1], v_strides[1], seq_q, seq_kv,
                                        scale_log2, BLOCK_Q, HEAD_DIM, BLOCK_D)

    empty = row_sum == 0.0  # no visible key: output 0, LSE -inf
    row_sum = tl.where(empty, 1.0, row_sum)
    lse = tl.where(empty, float("-inf"), (row_max + tl.log2(row_sum)) * LN_2)
    rows = first_q + tl.arange(0, BLOCK_Q)
    tl.store(LSE + rows, lse, mask=rows < seq_q)
    store_tile(O, first_q, o_strides[1], seq_q, acc / row_sum[:, None], BLOCK_Q, HEAD_DIM, BLOCK_D)


def forward(q, k, v, causal, scale):
    """(out, lse) of tensors [batch, seq, heads, head_dim]; lse is fp32 [batch, heads, seq_q], natural logarithm."""
    batch, seq_q, heads_q, head_dim = q.shape
    seq_kv, heads_kv = k.shape[1:3]
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = torch.empty(batch, heads_q, seq_q, dtype=torch.float32, device=q.device)
    if out.numel() == 0:
        return out, lse
    grid = lambda config: (triton.cdiv(seq_q, config["BLOCK_Q"]) * batch * heads_q,)  # noqa: E731
    forward_kernel[grid](
        q, k, v, out, lse, scale * LOG2_E.value,
        q.stride()[:3], k.stride()[:3], v.stride()[:3], out.stride()[:3],
        heads_q, heads_q // heads_kv, seq_q, seq_kv, length_class(seq_q, seq_kv),
        HEAD_DIM=head_dim, BLOCK_D=block_d(head_dim), CAUSAL=causal, EVEN_KV=even(seq_kv),
        **OPTIONS)
    return out, lse
