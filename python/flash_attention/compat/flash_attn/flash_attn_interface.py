"""The signatures and meanings of FlashAttention-2, with FlashAttention-3's keywords after them.

These functions accept more: float32, softcap together with dropout, another head_dim for v, inputs that are not
contiguous, and CPU tensors. The softmax_lse of a row that sees no key is -inf, as in FlashAttention-3; FlashAttention-2
gives +inf.
"""

from typing import Any, NoReturn

import torch
from torch import Tensor

from flash_attention.arguments.head_dim import padded
from flash_attention.arguments.keywords import refuse_keywords
from flash_attention.arguments.names import Renamed
from flash_attention.arguments.shapes import parts_of
from flash_attention.compat.flash_attn.kv_cache import flash_attn_with_kvcache
from flash_attention.compat.flash_attn.options_of_3 import options_of_3
from flash_attention.compat.flash_attn.paging import attention_in_pages, gather_pages
from flash_attention.compat.flash_attn.passes import (  # noqa: F401 (where FlashAttention-2 has them)
    _flash_attn_backward,
    _flash_attn_forward,
    _flash_attn_varlen_backward,
    _flash_attn_varlen_forward,
    packed_options,
    plain_options,
)
from flash_attention.compat.flash_attn.weights import signed_weights
from flash_attention.routes import Caller, route

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]


def __getattr__(name: str):
    """FlashAttnFunc and its kin, which are made of the functions below, and the names of FlashAttention-2's extension."""
    if name.startswith("FlashAttn"):
        from flash_attention.compat.flash_attn import function_classes

        return getattr(function_classes, name)
    if name == "flash_attn_gpu":
        from flash_attention.compat.flash_attn import flash_attn_gpu

        return flash_attn_gpu
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# The callers' names for our arguments, also those of FlashAttention-4.
NAMES = {
    "window": "window_size",
    "window_left": "window_size[0]",
    "window_right": "window_size[1]",
    "scale": "softmax_scale",
    "sink": "learnable_sink",
    "cu_seqlens_kv": "cu_seqlens_k",
    "seqused_kv": "seqused_k",
    "max_seqlen_kv": "max_seqlen_k",
}
_CALLER = Caller(names=NAMES, any_form=True, function="flash_attn_func")

USE_TRITON_ROCM = False  # asked by FlashAttention-2's tests, as is the next


def _get_block_size_n(device, head_dim, is_dropout, is_causal):
    """Keys over which S_dmask keeps one maximum: all of them."""
    return 2**31 - 1


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    learnable_sink: Tensor | None = None,
    s_aux: Tensor | None = None,
    **fa3: Any,
) -> Any:
    """Attention of q [batch, seq_q, heads, head_dim] over k, v [batch, seq_k, heads_k, head_dim].

        out = flash_attn_func(q, k, v, causal=True, window_size=(8, 0))

    causal and window_size are aligned bottom-right: query i sees keys in
    [i + seq_k - seq_q - window_size[0], i + seq_k - seq_q + window_size[1]], -1 = unlimited.
    alibi_slopes: float32 [heads] or [batch, heads]. softcap: 0 = off. learnable_sink (or s_aux): [heads].
    num_splits, pack_gqa and sm_margin of FlashAttention-3 are accepted, without effect.

    Returns out as q; with return_attn_probs (out, softmax_lse [batch, heads, seq_q], S_dmask): S_dmask is empty without
    dropout, otherwise exp(score - row maximum) [batch, heads, seq_q, seq_k], negative if dropped.
    """
    if not (return_attn_probs or fa3):
        return route()(
            q, k, v, caller=_CALLER, causal=causal, window=window_size, softcap=softcap, scale=softmax_scale,
            dropout_p=dropout_p, deterministic=deterministic, alibi_slopes=alibi_slopes,
            sink=s_aux if learnable_sink is None else learnable_sink,
        )  # fmt: skip
    options = _options(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, learnable_sink, s_aux
    )
    return _with_probs(q, k, v, options | options_of_3(flash_attn_func, fa3), return_attn_probs)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    **wrong: NoReturn,
) -> Any:
    """flash_attn_func for qkv [batch, seq, 3, heads, head_dim].

    For example:

        out = flash_attn_qkvpacked_func(torch.stack((q, k, v), dim=2), causal=True)
    """
    if wrong:
        refuse_keywords(flash_attn_qkvpacked_func, wrong)
    q, k, v = parts_of("qkv", qkv, 3)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    **wrong: NoReturn,
) -> Any:
    """flash_attn_func for q [batch, seq_q, heads, head_dim] and kv [batch, seq_k, 2, heads_k, head_dim].

    For example:

        out = flash_attn_kvpacked_func(q, torch.stack((k, v), dim=2), causal=True)
    """
    if wrong:
        refuse_keywords(flash_attn_kvpacked_func, wrong)
    k, v = parts_of("kv", kv, 2)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    page_table: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    s_aux: Tensor | None = None,
    **fa3: Any,
) -> Any:
    """flash_attn_func for sequences end to end: q [total_q, heads, head_dim], k and v [total_k, heads_k, head_dim].

        starts = torch.tensor([0, 5, 16], dtype=torch.int32)  # sequences of 5 and 11 tokens
        out = flash_attn_varlen_func(q[0], k[0], v[0], starts, starts, 11, 11, causal=True)

    cu_seqlens_q, cu_seqlens_k: int32 [batch + 1]. max_seqlen_q, max_seqlen_k: the longest lengths; None = unknown.
    seqused_q, seqused_k: int32 [batch], how many tokens of each sequence count.
    block_table (or page_table): int32 [batch, pages]; then k and v are [num_pages, page_size, heads_k, head_dim]. The pages
    are read in place; for gradients or dropout those in use are gathered before the call.
    softmax_lse is [heads, total_q].
    """
    more = options_of_3(flash_attn_varlen_func, fa3)
    table = page_table if block_table is None else block_table
    if table is not None:
        wants_gradients = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (q, k, v))
        if not dropout_p and not wants_gradients:
            out, lse = attention_in_pages(
                q,
                k,
                v,
                table,
                cu_seqlens_q,
                cu_seqlens_k if seqused_k is None else seqused_k,
                max_seqlen_q,
                seqused_q=seqused_q,
                scale=softmax_scale,
                causal=causal,
                window=window_size,
                softcap=softcap,
                alibi_slopes=alibi_slopes,
                sink=s_aux if learnable_sink is None else learnable_sink,
                **more,
            )
            return (out, lse, q.new_empty(0)) if return_attn_probs else out
        k, v = gather_pages(k, table, cu_seqlens_k), gather_pages(v, table, cu_seqlens_k)
    options = _options(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, learnable_sink, s_aux
    )
    options["packed"] = packed_options(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k)
    return _with_probs(q, k, v, options | more, return_attn_probs)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    **wrong: NoReturn,
) -> Any:
    """flash_attn_varlen_func for qkv [total, 3, heads, head_dim].

    For example:

        starts = torch.tensor([0, 5, 16], dtype=torch.int32)  # sequences of 5 and 11 tokens
        out = flash_attn_varlen_qkvpacked_func(torch.stack((q[0], k[0], v[0]), dim=1), starts, 11, causal=True)
    """
    if wrong:
        refuse_keywords(flash_attn_varlen_qkvpacked_func, wrong)
    q, k, v = parts_of("qkv", qkv, 3, "[total")
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens,
        cu_seqlens,
        max_seqlen,
        max_seqlen,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    **wrong: NoReturn,
) -> Any:
    """flash_attn_varlen_func for q [total_q, heads, head_dim] and kv [total_k, 2, heads_k, head_dim].

    For example:

        starts = torch.tensor([0, 5, 16], dtype=torch.int32)  # sequences of 5 and 11 tokens
        out = flash_attn_varlen_kvpacked_func(q[0], torch.stack((k[0], v[0]), dim=1), starts, starts, 11, 11)
    """
    if wrong:
        refuse_keywords(flash_attn_varlen_kvpacked_func, wrong)
    k, v = parts_of("kv", kv, 2, "[total")
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def _options(dropout_p, scale, causal, window, softcap, alibi_slopes, deterministic, learnable_sink, s_aux):
    plain = plain_options(dropout_p, scale, causal, window, softcap, alibi_slopes, deterministic)
    return plain | {"sink": s_aux if learnable_sink is None else learnable_sink}


def _with_probs(q, k, v, options, return_attn_probs):
    """FlashAttention-2's results: out, or (out, softmax_lse, S_dmask)."""
    with Renamed(NAMES):
        if not return_attn_probs:
            return padded(q, k, v, **options)
        if not options["dropout_p"]:
            return *padded(q, k, v, return_lse=True, **options), q.new_empty(0)
        seed = int(torch.randint(2**63 - 1, (), device="cpu"))
        out, lse = padded(q, k, v, return_lse=True, seed=seed, **options)
    return out, lse, signed_weights(q.detach(), k.detach(), seed, **options)
