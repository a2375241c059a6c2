"""FlashAttention-2's extension module, for code that calls it directly: its functions in their positional order.

The generator, the last argument before rng_state or num_splits, must be None, as there.
"""

import torch

from flash_attention.compat.flash_attn import passes

__all__ = ["bwd", "fwd", "varlen_bwd", "varlen_fwd"]


def fwd(q, k, v, out, alibi_slopes, p_dropout, softmax_scale, is_causal, window_size_left, window_size_right, softcap,
        return_softmax, generator):  # fmt: skip
    """[out, softmax_lse, S_dmask, rng_state]"""
    _check(generator)
    found = passes._flash_attn_forward(
        q, k, v, p_dropout, softmax_scale, is_causal, window_size_left, window_size_right, softcap, alibi_slopes,
        return_softmax,
    )  # fmt: skip
    return _given(out, found)


def varlen_fwd(q, k, v, out, cu_seqlens_q, cu_seqlens_k, seqused_k, leftpad_k, block_table, alibi_slopes, max_seqlen_q,
               max_seqlen_k, p_dropout, softmax_scale, zero_tensors, is_causal, window_size_left, window_size_right,
               softcap, return_softmax, generator, num_splits=0):  # fmt: skip
    """[out, softmax_lse, S_dmask, rng_state]"""
    _check(generator)
    found = passes._flash_attn_varlen_forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, p_dropout, softmax_scale, is_causal,
        window_size_left, window_size_right, softcap, alibi_slopes, return_softmax, block_table, leftpad_k, seqused_k,
        zero_tensors, num_splits,
    )  # fmt: skip
    return _given(out, found)


def bwd(dout, q, k, v, out, softmax_lse, dq, dk, dv, alibi_slopes, p_dropout, softmax_scale, is_causal, window_size_left,
        window_size_right, softcap, deterministic, generator, rng_state):  # fmt: skip
    """[dq, dk, dv]"""
    _check(generator)
    gradients = _places((dq, dk, dv), (q, k, v))
    passes._flash_attn_backward(
        dout, q, k, v, out, softmax_lse, *gradients, p_dropout, softmax_scale, is_causal, window_size_left,
        window_size_right, softcap, alibi_slopes, deterministic, rng_state,
    )  # fmt: skip
    return gradients


def varlen_bwd(dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, alibi_slopes, max_seqlen_q,
               max_seqlen_k, p_dropout, softmax_scale, zero_tensors, is_causal, window_size_left, window_size_right,
               softcap, deterministic, generator, rng_state):  # fmt: skip
    """[dq, dk, dv]"""
    _check(generator)
    gradients = _places((dq, dk, dv), (q, k, v))
    passes._flash_attn_varlen_backward(
        dout, q, k, v, out, softmax_lse, *gradients, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, p_dropout,
        softmax_scale, is_causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic, rng_state,
        zero_tensors,
    )  # fmt: skip
    return gradients


def _check(generator):
    if generator is not None:
        raise RuntimeError("the `generator` argument is no longer supported: got a value, allowed is None")


def _given(out, found):
    if out is None:
        return list(found)
    return [out.copy_(found[0]), *found[1:]]


def _places(gradients, tensors):
    return [torch.empty_like(of) if place is None else place for place, of in zip(gradients, tensors, strict=True)]
