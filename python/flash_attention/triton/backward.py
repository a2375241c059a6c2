"""Backward in three kernels without atomics, so the gradients are bitwise reproducible.

With P = exp(S - LSE) rebuilt tile by tile, dP = dO V^T and dS = P * (dP - D):

    preprocess   D = rowsum(dO * O) - dLSE          one number per query
    grad_q       dQ = scale * sum over keys    of dS K             one program per tile of queries
    grad_kv      dV =         sum over queries of P^T dO           one program per tile of keys,
                 dK = scale * sum over queries of dS^T Q           all query heads of its group
"""
# ruff: noqa: E741, SIM102 (O is the paper's letter; a branch on a constant stands alone)

import torch
import triton
import triton.language as tl

from .tiles import all_finite, dot, key_range, load_row, load_tile, my_tile, store_tile, visible
from .tuning import GRAD_KV, GRAD_Q, LOG2_E, OPTIONS, autotuned, block_d, even, length_class

# Argument lists are in groups: tensors, strides, sizes, constants.
# fmt: off


@triton.jit
def preprocess_kernel(O, dO, dLSE, D, o_strides, do_strides, heads_q, seq_q,
                      HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr, HAS_DLSE: tl.constexpr):
    tile, batch_head = my_tile(seq_q, BLOCK_Q)
    first_q = tile * BLOCK_Q
    batch = batch_head // heads_q
    head = batch_head % heads_q
    O += batch * o_strides[0] + head * o_strides[2]
    dO += batch * do_strides[0] + head * do_strides[2]

    O_tile = load_tile(O, first_q, o_strides[1], seq_q, BLOCK_Q, HEAD_DIM, BLOCK_D, CHECK_ROWS=True)
    dO_tile = load_tile(dO, first_q, do_strides[1], seq_q, BLOCK_Q, HEAD_DIM, BLOCK_D, CHECK_ROWS=True)
    delta = tl.sum(O_tile.to(tl.float32) * dO_tile.to(tl.float32), 1)
    rows = first_q + tl.arange(0, BLOCK_Q)
    if HAS_DLSE:
        delta -= tl.load(dLSE + batch_head * seq_q + rows, mask=rows < seq_q, other=0.0)
    tl.store(D + batch_head * seq_q + rows, delta, mask=rows < seq_q)


@triton.jit
def add_grad_q(dQ_tile, Q_tile, dO_tile, lse_log2, delta, K, V, start, stop, first_q, k_stride, v_stride, seq_q, seq_kv,
               scale_log2, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
               CAUSAL: tl.constexpr, MASKED: tl.constexpr):
    for first_kv in tl.range(start, stop, BLOCK_KV):
        K_tile = load_tile(K, first_kv, k_stride, seq_kv, BLOCK_KV, HEAD_DIM, BLOCK_D, CHECK_ROWS=MASKED)
        V_tile = load_tile(V, first_kv, v_stride, seq_kv, BLOCK_KV, HEAD_DIM, BLOCK_D, CHECK_ROWS=MASKED)
        S = dot(Q_tile, K_tile.T, None)
        dP = dot(dO_tile, V_tile.T, None)
        dS = tl.exp2(S * scale_log2 - lse_log2[:, None]) * (dP - delta[:, None])
        if MASKED:
            q_idx = first_q + tl.arange(0, BLOCK_Q)
            kv_idx = first_kv + tl.arange(0, BLOCK_KV)
            dS = tl.where(visible(q_idx[:, None], kv_idx[None, :], seq_q, seq_kv, CAUSAL), dS, 0.0)
        dQ_tile = dot(dS.to(K_tile.dtype), K_tile, dQ_tile)
    return dQ_tile


@triton.jit
def grad_q_nonfinite_safe(Q_tile, dO_tile, lse_log2, delta, K, V, end, first_q, k_stride, v_stride, seq_q, seq_kv,
                          scale_log2, BLOCK_Q: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """The sum of dS K key by key, which skips hidden keys instead of multiplying them by 0."""
    Q_tile = Q_tile.to(tl.float32)
    dO_tile = dO_tile.to(tl.float32)
    q_idx = first_q + tl.arange(0, BLOCK_Q)
    dQ_tile = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    for kv_idx in tl.range(0, end):
        K_row = load_row(K, kv_idx, k_stride, HEAD_DIM, BLOCK_D)
        S = tl.sum(Q_tile * K_row[None, :], 1)
        dP = tl.sum(dO_tile * load_row(V, kv_idx, v_stride, HEAD_DIM, BLOCK_D)[None, :], 1)
        dS = tl.exp2(S * scale_log2 - lse_log2) * (dP - delta)
        seen = visible(q_idx, kv_idx, seq_q, seq_kv, CAUSAL=True)
        dQ_tile += tl.where(seen[:, None], dS[:, None] * K_row[None, :], 0.0)
    return dQ_tile


@autotuned(GRAD_Q)
@triton.jit(do_not_specialize=["heads_q", "length_class"])
def grad_q_kernel(Q, K, V, dO, LSE, D, dQ, scale, scale_log2,
                  q_strides, k_strides, v_strides,
                  do_strides, dq_strides,
                  heads_q, group, seq_q, seq_kv, length_class,
                  HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, CAUSAL: tl.constexpr, EVEN_KV: tl.constexpr,
                  BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr):
    tile, batch_head = my_tile(seq_q, BLOCK_Q)
    first_q = (tl.cdiv(seq_q, BLOCK_Q) - 1 - tile) * BLOCK_Q
    batch = batch_head // heads_q
    head = batch_head % heads_q
    Q += batch * q_strides[0] + head * q_strides[2]
    K += batch * k_strides[0] + head // group * k_strides[2]
    V += batch * v_strides[0] + head // group * v_strides[2]
    dO += batch * do_strides[0] + head * do_strides[2]
    dQ += batch * dq_strides[0] + head * dq_strides[2]

    rows = first_q + tl.arange(0, BLOCK_Q)
    lse_log2 = tl.load(LSE + batch_head * seq_q + rows, mask=rows < seq_q, other=0.0) * LOG2_E
    delta = tl.load(D + batch_head * seq_q + rows, mask=rows < seq_q, other=0.0)
    Q_tile = load_tile(Q, first_q, q_strides[1], seq_q, BLOCK_Q, HEAD_DIM, BLOCK_D, CHECK_ROWS=True)
    dO_tile = load_tile(dO, first_q, do_strides[1], seq_q, BLOCK_Q, HEAD_DIM, BLOCK_D, CHECK_ROWS=True)
    dQ_tile = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)

    full, end = key_range(first_q, seq_q, seq_kv, BLOCK_Q, BLOCK_KV, CAUSAL, EVEN_KV)
    if CAUSAL or EVEN_KV:
        dQ_tile = add_grad_q(
            dQ_tile, Q_tile, dO_tile, lse_log2, delta, K, V, 0, full, first_q, k_strides[1], v_strides[1], seq_q, seq_kv,
            scale_log2, BLOCK_Q, BLOCK_KV, HEAD_DIM, BLOCK_D, CAUSAL, MASKED=False)
    if CAUSAL or not EVEN_KV:
        dQ_tile = add_grad_q(
            dQ_tile, Q_tile, dO_tile, lse_log2, delta, K, V, full, end, first_q, k_strides[1], v_strides[1], seq_q, seq_kv,
            scale_log2, BLOCK_Q, BLOCK_KV, HEAD_DIM, BLOCK_D, CAUSAL, MASKED=True)
    if CAUSAL:  # if some queries of the tile see a key with NaN, 0 * NaN has brought it to the others, too
        if not all_finite(dQ_tile):
            dQ_tile = grad_q_nonfinite_safe(Q_tile, dO_tile, lse_log2, delta, K, V, end, first_q, k_strides[1],
                                            v_strides[1], seq_q, seq_kv, scale_log2, BLOCK_Q, HEAD_DIM, BLOCK_D)
    store_tile(dQ, first_q, dq_strides[1], seq_q, dQ_tile * scale, BLOCK_Q, HEAD_DIM, BLOCK_D)


@triton.jit
def add_grad_kv(dK_tile, dV_tile, K_tile, V_tile, Q, dO, LSE, D, start, stop, first_kv, q_stride, do_stride, seq_q,
                seq_kv, scale_log2, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, HEAD_DIM: tl.constexpr,
                BLOCK_D: tl.constexpr, MASKED: tl.constexpr):
    """Scores are held transposed, [keys, queries], so that P and dS are left operands and stay in registers.

    Queries past the end load as zeros, which add nothing, so only the diagonal needs a mask.
    """
    for first_q in tl.range(start, stop, BLOCK_Q):
        rows = first_q + tl.arange(0, BLOCK_Q)
        Q_tile = load_tile(Q, first_q, q_stride, seq_q, BLOCK_Q, HEAD_DIM, BLOCK_D, CHECK_ROWS=True)
        lse_log2 = tl.load(LSE + rows, mask=rows < seq_q, other=0.0) * LOG2_E
        S_t = dot(K_tile, Q_tile.T, None)
        P_t = tl.exp2(S_t * scale_log2 - lse_log2[None, :])
        if MASKED:
            kv_idx = first_kv + tl.arange(0, BLOCK_KV)
            P_t = tl.where(visible(rows[None, :], kv_idx[:, None], seq_q, seq_kv, CAUSAL=True), P_t, 0.0)
        dO_tile = load_tile(dO, first_q, do_stride, seq_q, BLOCK_Q, HEAD_DIM, BLOCK_D, CHECK_ROWS=True)
        dV_tile = dot(P_t.to(dO_tile.dtype), dO_tile, dV_tile)
        dP_t = dot(V_tile, dO_tile.T, None)
        delta = tl.load(D + rows, mask=rows < seq_q, other=0.0)
        dS_t = P_t * (dP_t - delta[None, :])
        dK_tile = dot(dS_t.to(Q_tile.dtype), Q_tile, dK_tile)
    return dK_tile, dV_tile


@autotuned(GRAD_KV)
@triton.jit(do_not_specialize=["heads_q", "length_class"])
def grad_kv_kernel(Q, K, V, dO, LSE, D, dK, dV, scale, scale_log2,
                   q_strides, k_strides, v_strides,
                   do_strides, dk_strides, dv_strides,
                   heads_q, group, seq_q, seq_kv, length_class,
                   HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, CAUSAL: tl.constexpr,
                   BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr):
    tile, batch_head = my_tile(seq_kv, BLOCK_KV)
    first_kv = tile * BLOCK_KV
    heads_kv = heads_q // group
    batch = batch_head // heads_kv
    head_kv = batch_head % heads_kv
    K += batch * k_strides[0] + head_kv * k_strides[2]
    V += batch * v_strides[0] + head_kv * v_strides[2]
    dK += batch * dk_strides[0] + head_kv * dk_strides[2]
    dV += batch * dv_strides[0] + head_kv * dv_strides[2]

    K_tile = load_tile(K, first_kv, k_strides[1], seq_kv, BLOCK_KV, HEAD_DIM, BLOCK_D, CHECK_ROWS=True)
    V_tile = load_tile(V, first_kv, v_strides[1], seq_kv, BLOCK_KV, HEAD_DIM, BLOCK_D, CHECK_ROWS=True)
    dK_tile = tl.zeros([BLOCK_KV, BLOCK_D], tl.float32)
    dV_tile = tl.zeros([BLOCK_KV, BLOCK_D], tl.float32)

    start = 0  # queries before it see no key of this tile
    full = 0   # queries from it on see every key of this tile
    if CAUSAL:
        shift = seq_kv - seq_q
        start = tl.maximum(first_kv - shift, 0) // BLOCK_Q * BLOCK_Q
        full = tl.maximum(tl.minimum(tl.cdiv(first_kv + BLOCK_KV - 1 - shift, BLOCK_Q) * BLOCK_Q, seq_q), start)

    for head in tl.range(head_kv * group, (head_kv + 1) * group):
        Q_head = Q + batch * q_strides[0] + head * q_strides[2]
        dO_head = dO + batch * do_strides[0] + head * do_strides[2]
        LSE_head = LSE + (batch * heads_q + head) * seq_q
        D_head = D + (batch * heads_q + head) * seq_q
        if CAUSAL:
            dK_tile, dV_tile = add_grad_kv(dK_tile, dV_tile, K_tile, V_tile, Q_head, dO_head, LSE_head, D_head,
                                           start, full, first_kv, q_strides[1], do_strides[1], seq_q, seq_kv, scale_log2,
                                           BLOCK_Q, BLOCK_KV, HEAD_DIM, BLOCK_D, MASKED=True)
        dK_tile, dV_tile = add_grad_kv(dK_tile, dV_tile, K_tile, V_tile, Q_head, dO_head, LSE_head, D_head,
                                       full, seq_q, first_kv, q_strides[1], do_strides[1], seq_q, seq_kv, scale_log2,
                                       BLOCK_Q, BLOCK_KV, HEAD_DIM, BLOCK_D, MASKED=False)
    store_tile(dK, first_kv, dk_strides[1], seq_kv, dK_tile * scale, BLOCK_KV, HEAD_DIM, BLOCK_D)
    store_tile(dV, first_kv, dv_strides[1], seq_kv, dV_tile, BLOCK_KV, HEAD_DIM, BLOCK_D)


def backward(q, k, v, out, lse, grad_out, grad_lse, causal, scale):
    """(dq, dk, dv); grad_lse may be None."""
    batch, seq_q, heads_q, head_dim = q.shape
    seq_kv, heads_kv = k.shape[1:3]
    dq, dk, dv = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v))
    if q.numel() == 0 or k.numel() == 0:
        return dq.zero_(), dk.zero_(), dv.zero_()
    delta = torch.empty_like(lse)
    sizes = {"HEAD_DIM": head_dim, "BLOCK_D": block_d(head_dim), **OPTIONS}
    preprocess_kernel[(triton.cdiv(seq_q, 64) * batch * heads_q,)](
        out, grad_out, grad_lse, delta, out.stride()[:3], grad_out.stride()[:3], heads_q, seq_q,
        **sizes, BLOCK_Q=64, HAS_DLSE=grad_lse is not None)

    inputs = (q, k, v, grad_out, lse, delta)
    strides = (q.stride()[:3], k.stride()[:3], v.stride()[:3], grad_out.stride()[:3])
    lengths = (heads_q, heads_q // heads_kv, seq_q, seq_kv, length_class(seq_q, seq_kv))
    grad_q_kernel[lambda config: (triton.cdiv(seq_q, config["BLOCK_Q"]) * batch * heads_q,)](
        *inputs, dq, scale, scale * LOG2_E.value, *strides, dq.stride()[:3], *lengths, **sizes, CAUSAL=causal,
        EVEN_KV=even(seq_kv))
    grad_kv_kernel[lambda config: (triton.cdiv(seq_kv, config["BLOCK_KV"]) * batch * heads_kv,)](
        *inputs, dk, dv, scale, scale * LOG2_E.value, *strides, dk.stride()[:3], dv.stride()[:3], *lengths,
        **sizes, CAUSAL=causal)
    return dq, dk, dv
