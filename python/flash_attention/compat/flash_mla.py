"""FlashMLA's functions over this library: `from flash_attention import flash_mla`.

Multi-head latent attention, as DeepSeek's models decode: a key of 576 columns whose first 512 are its value, in one cache.
Any page size, head dimension and number of heads, float32 and CPU tensors too. Attention over chosen keys (indices) is
refused.
"""

import dataclasses
from typing import Any, NoReturn

import torch
from torch import Tensor

from flash_attention.arguments.keywords import refuse_keywords
from flash_attention.torch_cache import attention_over_cache

__all__ = ["FlashMLASchedMeta", "flash_mla_with_kvcache", "get_mla_metadata"]


@dataclasses.dataclass
class FlashMLASchedMeta:
    """Empty: the schedule is made by the kernel, from the lengths of the call."""


def get_mla_metadata(*args: Any, **kwargs: Any) -> tuple[FlashMLASchedMeta, None]:
    """(metadata, None), which flash_mla_with_kvcache takes and does not need; arguments are those of older versions.

    For example:

        metadata, _ = get_mla_metadata()
    """
    return FlashMLASchedMeta(), None


@torch.no_grad()
def flash_mla_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor | None,
    cache_seqlens: Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: Any = None,
    num_splits: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: Tensor | None = None,
    attn_sink: Tensor | None = None,
    extra_k_cache: Tensor | None = None,
    extra_indices_in_kvcache: Tensor | None = None,
    topk_length: Tensor | None = None,
    extra_topk_length: Tensor | None = None,
    *,
    k_scale: Tensor | float | None = None,
    **wrong: NoReturn,
) -> tuple[Tensor, Tensor]:
    """Attention of q [batch, seq_q, heads_q, head_dim] over a cache of latent keys.

        pages, table = torch.randn(4, 64, 1, 576), torch.tensor([[2, 0], [1, 3]], dtype=torch.int32)
        lengths = torch.tensor([70, 128], dtype=torch.int32)
        metadata, _ = get_mla_metadata()
        out, lse = flash_mla_with_kvcache(torch.randn(2, 1, 16, 576), pages, table, lengths, 512, metadata)

    Args:
        k_cache: [num_pages, page_size, heads_k, head_dim]; the first head_dim_v columns are the values.
        block_table: int32 [batch, pages]; entries behind a sequence's keys may be anything.
        cache_seqlens: int32 [batch].
        softmax_scale: 1 / sqrt(head_dim) if None.
        causal: the last query sees the last key, the one before it one less.
        is_fp8_kvcache: k_cache is float8_e4m3fn, or the bytes of it, and worth code * k_scale.
        k_scale: this library's own: a number, float32 [1], [batch, heads_k], or [num_pages, page_size, heads_k].

    Returns out [batch, seq_q, heads_q, head_dim_v] and softmax_lse float32 [batch, heads_q, seq_q], natural logarithm, +inf
    for a query that sees no key.
    """
    if wrong:
        refuse_keywords(flash_mla_with_kvcache, wrong)
    refused = {
        "indices": indices,
        "attn_sink": attn_sink,
        "extra_k_cache": extra_k_cache,
        "extra_indices_in_kvcache": extra_indices_in_kvcache,
        "topk_length": topk_length,
        "extra_topk_length": extra_topk_length,
    }
    for name, value in refused.items():
        if value is not None:
            raise NotImplementedError(f"{name}: got a value; only None is supported, attention over all keys of the cache")
    _check(q, k_cache, block_table, cache_seqlens, head_dim_v, is_fp8_kvcache, k_scale)
    out, lse = attention_over_cache(
        q,
        k_cache[..., head_dim_v:],
        k_cache[..., :head_dim_v],
        page_table=block_table,
        seqused_kv=cache_seqlens,
        causal=causal,
        scale=softmax_scale,
        return_lse=True,
        latent=True,
        k_scale=k_scale,
        v_scale=k_scale,
        cache_dtype="e4m3" if is_fp8_kvcache else None,
    )
    return out, lse.nan_to_num_(nan=torch.nan, posinf=torch.inf, neginf=torch.inf)


def _check(q, k_cache, block_table, cache_seqlens, head_dim_v, is_fp8_kvcache, k_scale):
    for name, tensor, axes in (
        ("q", q, "[batch, seq_q, heads_q, head_dim]"),
        ("k_cache", k_cache, "[num_pages, page_size, heads_k, head_dim]"),
    ):
        if not isinstance(tensor, Tensor) or tensor.dim() != 4:
            got = list(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ValueError(f"{name}: got {got}; expected {axes}")
    for name, tensor in (("block_table", block_table), ("cache_seqlens", cache_seqlens)):
        if tensor is None:
            raise ValueError(f"{name}: got None; expected a tensor, for attention over all keys of the cache")
    if k_cache.shape[-1] != q.shape[-1]:
        raise ValueError(f"k_cache: got a head_dim of {k_cache.shape[-1]}; expected {q.shape[-1]}, as q")
    if not 0 < head_dim_v <= q.shape[-1]:
        raise ValueError(f"head_dim_v: got {head_dim_v}; allowed are 8 to {q.shape[-1]}, the head_dim of q")
    if is_fp8_kvcache and k_cache.dtype not in (torch.float8_e4m3fn, torch.uint8, torch.int8):
        raise ValueError(f"k_cache: got {k_cache.dtype}; expected float8_e4m3fn or its bytes, for is_fp8_kvcache")
    if not is_fp8_kvcache and (k_cache.element_size() == 1 or k_scale is not None):
        raise ValueError(f"is_fp8_kvcache: got False; expected True for a k_cache of {k_cache.dtype} or with a k_scale")
