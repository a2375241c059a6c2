"""FlashAttention-3's functions over this library, in its positional order: `from flash_attention import flash_attn_3`.

q, k and v may be float8 with q_descale, k_descale and v_descale, float32 [batch, heads_k]; out is then bfloat16; forward
only. Over a cache of 8 bits queries in float8 are converted to bfloat16, which holds their codes exactly. qv is refused
with float8; flash_attn_with_kvcache reads the cache once for it, the other functions copy columns together. num_splits,
pack_gqa, sm_margin and scheduler_metadata have no effect: the schedule is computed on the device, from the lengths there.
return_attn_probs and return_softmax_lse give (out, softmax_lse).
"""

from typing import Any, NoReturn

import torch
from torch import Tensor

from flash_attention import functional
from flash_attention.arguments.keywords import refuse_keywords
from flash_attention.arguments.shapes import parts_of
from flash_attention.arguments.tables import as_int32
from flash_attention.compat.flash_attn import flash_attn_interface as fa2
from flash_attention.compat.flash_attn.kv_cache import check_qv
from flash_attention.compat.flash_attn.options_of_3 import options_of_3
from flash_attention.merge import merge_states

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    **wrong: NoReturn,
) -> Any:
    """FlashAttention-2's function of this name, in FlashAttention-3's order.

    For example:

        out = flash_attn_func(q, k, v, causal=True)
    """
    if wrong:
        refuse_keywords(flash_attn_func, wrong)
    rest = {"qv": qv, "q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    if _is_float8(q):
        options = _narrow(softmax_scale, causal, window_size, softcap, attention_chunk, rest)
        return functional.attention(q, k, v, return_lse=return_attn_probs, **options)
    q, k, softmax_scale = with_qv(q, k, v, rest.pop("qv"), softmax_scale)
    options = _common(softmax_scale, causal, window_size, softcap, attention_chunk, rest)
    out = fa2.flash_attn_func(q, k, v, deterministic=deterministic, return_attn_probs=return_attn_probs, **options)
    return out[:2] if return_attn_probs else out


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    **wrong: NoReturn,
) -> Any:
    """flash_attn_func for qkv [batch, seq, 3, heads, head_dim], or [batch, seq, num_heads_q + 2 * heads_k, head_dim].

    For example:

        out = flash_attn_qkvpacked_func(torch.stack((q, k, v), dim=2), causal=True)
    """
    if wrong:
        refuse_keywords(flash_attn_qkvpacked_func, wrong)
    if qkv.dim() == 5:
        q, k, v = parts_of("qkv", qkv, 3)
    elif qkv.dim() == 4 and num_heads_q is not None and 0 < num_heads_q < qkv.shape[2]:
        heads_k = (qkv.shape[2] - num_heads_q) // 2
        q, k, v = qkv.split([num_heads_q, heads_k, qkv.shape[2] - num_heads_q - heads_k], dim=2)
    else:
        raise ValueError(
            f"qkv: got shape {list(qkv.shape)} and num_heads_q {num_heads_q}; expected [batch, seq, 3, heads, head_dim] or "
            "[batch, seq, num_heads_q + 2 * heads_k, head_dim] with num_heads_q"
        )
    return flash_attn_func(
        q, k, v, softmax_scale, causal, None, q_descale, k_descale, v_descale, window_size, attention_chunk, softcap,
        deterministic=deterministic, return_attn_probs=return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    **wrong: NoReturn,
) -> Any:
    """FlashAttention-2's function of this name, in FlashAttention-3's order.

    For example:

        starts = torch.tensor([0, 5, 16], dtype=torch.int32)  # sequences of 5 and 11 tokens
        out = flash_attn_varlen_func(q[0], k[0], v[0], starts, starts, 11, 11, causal=True)
    """
    if wrong:
        refuse_keywords(flash_attn_varlen_func, wrong)
    rest = {"qv": qv, "q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    if _is_float8(q):
        options = _narrow(softmax_scale, causal, window_size, softcap, attention_chunk, rest)
        return functional.attention_packed(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_kv=max_seqlen_k,
            seqused_q=seqused_q, seqused_kv=seqused_k, return_lse=return_attn_probs, **options,
        )  # fmt: skip
    q, k, softmax_scale = with_qv(q, k, v, rest.pop("qv"), softmax_scale)
    options = _common(softmax_scale, causal, window_size, softcap, attention_chunk, rest)
    lengths = {"seqused_q": seqused_q, "seqused_k": seqused_k, "deterministic": deterministic}
    starts = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    out = fa2.flash_attn_varlen_func(q, k, v, *starts, return_attn_probs=return_attn_probs, **lengths, **options)
    return out[:2] if return_attn_probs else out


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    **wrong: NoReturn,
) -> Any:
    """FlashAttention-2's function of this name, in FlashAttention-3's order.

    For example:

        out = flash_attn_with_kvcache(q[:, :1], k, v, cache_seqlens=torch.tensor([9, 16], dtype=torch.int32))
    """
    if wrong:
        refuse_keywords(flash_attn_with_kvcache, wrong)
    if _is_float8(q):
        q, rotary_cos, rotary_sin = (x if x is None else x.to(torch.bfloat16) for x in (q, rotary_cos, rotary_sin))
        if q_descale is not None:  # scores are linear in both
            k_descale, q_descale = q_descale if k_descale is None else q_descale * k_descale, None
    rest = {"qv": qv, "q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    return fa2.flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        k,
        v,
        rotary_cos,
        rotary_sin,
        cache_seqlens,
        cache_batch_idx,
        cache_leftpad,
        page_table=page_table,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k_new=cu_seqlens_k_new,
        max_seqlen_q=max_seqlen_q,
        rotary_seqlens=rotary_seqlens,
        rotary_interleaved=rotary_interleaved,
        return_softmax_lse=return_softmax_lse,
        **_common(softmax_scale, causal, window_size, softcap, attention_chunk, rest),
    )


@torch.no_grad()
def flash_attn_combine(
    out_partial: Tensor,
    lse_partial: Tensor,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    **wrong: NoReturn,
) -> tuple[Tensor, Tensor]:
    """(out, softmax_lse) over all keys, from the results over parts of them.

        parts = torch.randn(3, 2, 16, 4, 64), torch.randn(3, 2, 16, 4)  # the last of lse is the head
        out, lse = flash_attn_combine(*parts)

    out_partial: [parts, batch, seq, heads, head_dim], or [parts, total, heads, head_dim]; lse_partial: the same without
    head_dim, natural logarithm. out: a tensor for the result; out_dtype: that of out_partial if None.
    """
    if wrong:
        refuse_keywords(flash_attn_combine, wrong)
    if out_partial.dim() not in (4, 5) or lse_partial.shape != out_partial.shape[:-1]:
        raise ValueError(
            f"out_partial, lse_partial: got shapes {list(out_partial.shape)} and {list(lse_partial.shape)}; expected "
            "[parts, batch, seq, heads, head_dim] or [parts, total, heads, head_dim], and the same without head_dim"
        )
    merged, lse = merge_states(out_partial, lse_partial.transpose(-1, -2), dtype=out_dtype)
    lse = lse.transpose(-1, -2)
    if out is None:
        return merged, lse
    if out.shape != merged.shape:
        raise ValueError(f"out: got shape {list(out.shape)}; expected {list(merged.shape)}")
    return out.copy_(merged), lse


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: Tensor,
    qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    **wrong: NoReturn,
) -> Tensor:
    """An empty int32 tensor, for scheduler_metadata: the kernel computes its schedule from the lengths of the call.

    For example:

        lengths = torch.tensor([9, 16], dtype=torch.int32)
        metadata = get_scheduler_metadata(2, 1, 16, 4, 4, 64, lengths)
    """
    if wrong:
        refuse_keywords(get_scheduler_metadata, wrong)
    as_int32("cache_seqlens", cache_seqlens, (batch_size,))
    return torch.empty(0, dtype=torch.int32, device=cache_seqlens.device)


def _common(scale, causal, window, softcap, attention_chunk, rest):
    options = {"softmax_scale": scale, "causal": causal, "window_size": window, "softcap": softcap}
    given = {name: value for name, value in rest.items() if value is not None}
    return {**options, **given, **({"attention_chunk": attention_chunk} if attention_chunk else {})}


def with_qv(q, k, v, qv, scale):
    """q, k and the scale for scores q k^T + qv v^T: the columns are concatenated."""
    if qv is None:
        return q, k, scale
    check_qv(q, qv, v)
    return torch.cat((q, qv), -1), torch.cat((k, v), -1), (q.shape[-1] + qv.shape[-1]) ** -0.5 if scale is None else scale


def _is_float8(q):
    return isinstance(q, Tensor) and q.dtype in (torch.float8_e4m3fn, torch.float8_e5m2)


def _narrow(scale, causal, window, softcap, attention_chunk, rest):
    """The same for attention() of float8 tensors."""
    more = options_of_3(flash_attn_func, {"qv": rest.pop("qv"), "attention_chunk": attention_chunk})
    return {"scale": scale, "causal": causal, "window": window, "softcap": softcap, **rest, **more}
