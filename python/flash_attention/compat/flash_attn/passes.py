"""Single passes outside of autograd, the functions below FlashAttention-2's interface that ring attention calls.

`out` and `softmax_lse` of a backward pass may belong to more keys than are given. A ring adds up gradients in this way.
"""

import torch
from torch import Tensor

from flash_attention.arguments.options import binding_arguments
from flash_attention.compat.flash_attn.paging import attention_in_pages, gather_pages
from flash_attention.compat.flash_attn.weights import signed_weights
from flash_attention.pytorch import ops as torch_ops


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    return_softmax: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """(out, softmax_lse [batch, heads, seq_q], S_dmask, rng_state); rng_state is None without dropout."""
    window = (window_size_left, window_size_right)
    options = plain_options(dropout_p, softmax_scale, causal, window, softcap, alibi_slopes)
    return _forward(q, k, v, options, None, return_softmax)


def _flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    block_table: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    zero_tensors: bool = False,
    num_splits: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The same for sequences end to end; softmax_lse is [heads, total_q]. zero_tensors has no effect."""
    if num_splits > 1:
        raise NotImplementedError(f"num_splits: got {num_splits}; num_splits > 1 is not supported here")
    if block_table is not None and not dropout_p:
        lengths = cu_seqlens_k if seqused_k is None else seqused_k
        options = {"scale": softmax_scale, "causal": causal, "softcap": softcap, "alibi_slopes": alibi_slopes}
        options |= {"window": (window_size_left, window_size_right), "left_padding": leftpad_k}
        out, lse = attention_in_pages(q, k, v, block_table, cu_seqlens_q, lengths, max_seqlen_q, **options)
        return out, lse, q.new_empty(0), None
    if leftpad_k is not None:
        raise NotImplementedError("leftpad_k: got a value; only None is supported without block_table, or with dropout")
    if block_table is not None:
        k, v = gather_pages(k, block_table, cu_seqlens_k), gather_pages(v, block_table, cu_seqlens_k)
    window = (window_size_left, window_size_right)
    options = plain_options(dropout_p, softmax_scale, causal, window, softcap, alibi_slopes)
    packed = packed_options(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k=seqused_k)
    return _forward(q, k, v, options, packed, return_softmax)


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
) -> None:
    """Writes dq, dk and dv."""
    window = (window_size_left, window_size_right)
    options = plain_options(dropout_p, softmax_scale, causal, window, softcap, alibi_slopes, deterministic)
    _backward(dout, q, k, v, out, softmax_lse, (dq, dk, dv), options, None, rng_state)


def _flash_attn_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
    zero_tensors: bool = False,
) -> None:
    """The same for sequences end to end. zero_tensors has no effect."""
    window = (window_size_left, window_size_right)
    options = plain_options(dropout_p, softmax_scale, causal, window, softcap, alibi_slopes, deterministic)
    packed = packed_options(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    _backward(dout, q, k, v, out, softmax_lse, (dq, dk, dv), options, packed, rng_state)


def plain_options(dropout_p, scale, causal, window, softcap, alibi_slopes, deterministic=False):
    """The common arguments of FlashAttention-2's functions, by the names of attention()."""
    return {
        "dropout_p": dropout_p,
        "scale": scale,
        "causal": causal,
        "window": window,
        "softcap": softcap,
        "alibi_slopes": alibi_slopes,
        "deterministic": deterministic,
    }


def packed_options(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None):
    """The additional arguments of the functions for sequences end to end."""
    return {
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_kv": cu_seqlens_k,
        "max_seqlen_q": max_seqlen_q,
        "max_seqlen_kv": max_seqlen_k,
        "seqused_q": seqused_q,
        "seqused_kv": seqused_k,
    }


def _bound(q, k, v, options, packed):
    """(Tensors, Options)"""
    fixed = {"alignment": "bottom_right", "kernel": None}
    return binding_arguments({"q": q, "k": k, "v": v, **options, **(packed or {}), **fixed})


@torch.no_grad()
def _forward(q, k, v, options, packed, return_softmax):
    out, lse, rng_state = torch_ops.forward(*_bound(q, k, v, options, packed), None, 0, True)
    weights = q.new_empty(0)
    if return_softmax and options["dropout_p"]:
        weights = signed_weights(q, k, int(rng_state[0]), packed=packed, sink=None, **options)
    return out, lse, weights, rng_state


@torch.no_grad()
def _backward(dout, q, k, v, out, lse, gradients, options, packed, rng_state):
    if options["dropout_p"] and rng_state is None:
        raise ValueError("rng_state: got None; with dropout_p expected what the forward pass returned")
    for name, place, source in zip(("dq", "dk", "dv"), gradients, (q, k, v), strict=True):
        if place.shape != source.shape:
            raise ValueError(f"{name}: got shape {list(place.shape)}; expected {list(source.shape)}")
    found = torch_ops.backward(*_bound(q, k, v, options, packed), out, lse, rng_state, dout, None, False, False)
    for place, gradient in zip(gradients, found, strict=False):
        place.copy_(gradient)
