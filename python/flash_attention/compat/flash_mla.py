"""FlashMLA's functions over this library: `from flash_attention import flash_mla`.

Multi-head latent attention, as DeepSeek's models decode: a key of 576 columns whose first 512 are its value, in one cache.
Any page size, head dimension and number of heads, float32 and CPU tensors too. With indices, or flash_mla_sparse_fwd,
each query attends to the keys that its list names: docs/sparse.md.
"""

import dataclasses
from typing import Any, NoReturn

import torch
from torch import Tensor

from flash_attention import _core, merge_states
from flash_attention.arguments.keywords import refuse_keywords
from flash_attention.arguments.options import make_options
from flash_attention.compat.flash_mla_rows import new_fp8_cache, read_fp8_cache, views_of, write_fp8_cache
from flash_attention.options import Tensors
from flash_attention.pytorch import ops as torch_ops
from flash_attention.torch_cache import attention_over_cache

__all__ = [
    "FlashMLASchedMeta",
    "flash_mla_sparse_fwd",
    "flash_mla_with_kvcache",
    "get_mla_metadata",
    "new_fp8_cache",
    "read_fp8_cache",
    "write_fp8_cache",
]

_EXPANDED_BYTES = 1 << 28  # of rows of 8 bits that are expanded at a time


@dataclasses.dataclass
class FlashMLASchedMeta:
    """Empty: the kernel computes its schedule from the lengths of the call."""


def get_mla_metadata(*args: Any, **kwargs: Any) -> tuple[FlashMLASchedMeta, None]:
    """(metadata, None), which flash_mla_with_kvcache accepts and does not need. The arguments are those of older versions.

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
        block_table: int32 [batch, pages]; entries after a sequence's keys may be anything.
        cache_seqlens: int32 [batch].
        softmax_scale: 1 / sqrt(head_dim) if None.
        causal: the last query sees all keys, each earlier query one key less.
        is_fp8_kvcache: k_cache is float8_e4m3fn, or its bytes, with the value code * k_scale.
        k_scale: an argument of this library: a number, float32 [1], [batch, heads_k], or [num_pages, page_size, heads_k].
        indices: int32 [batch, seq_q, topk]: the slots, page * page_size + row, of the keys that each query attends to.
            Negative slots, and those past the cache, are not keys. As in FlashMLA, block_table and cache_seqlens are then
            not read, and causal must be False. The cache has 16 or 32 bits, or with is_fp8_kvcache rows of 656 or 584
            bytes in the form of write_fp8_cache, which are first expanded to q's type.
        topk_length: int32 [batch]; later entries of indices are not read.
        attn_sink: float32 [heads_q]; out is multiplied by exp(lse) / (exp(lse) + exp(sink)), and lse is without it.
        extra_k_cache, extra_indices_in_kvcache, extra_topk_length: a second cache of the same kind with its own lists; the
            keys of both share one softmax.

    Returns out [batch, seq_q, heads_q, head_dim_v] and softmax_lse float32 [batch, heads_q, seq_q], natural logarithm, +inf
    for a query that sees no key.
    """
    if wrong:
        refuse_keywords(flash_mla_with_kvcache, wrong)
    if indices is not None:
        caches = _caches(q, k_cache, indices, topk_length, extra_k_cache, extra_indices_in_kvcache, extra_topk_length)
        if k_scale is not None:
            raise ValueError("k_scale: got a value; expected None, which goes with indices")
        if causal:
            raise ValueError("causal: got True; expected False, which goes with indices")
        return _over_slots(q, caches, head_dim_v, softmax_scale, is_fp8_kvcache, attn_sink)
    belongs = {
        "attn_sink": attn_sink,
        "extra_k_cache": extra_k_cache,
        "extra_indices_in_kvcache": extra_indices_in_kvcache,
        "topk_length": topk_length,
        "extra_topk_length": extra_topk_length,
    }
    for name, value in belongs.items():
        if value is not None:
            raise NotImplementedError(f"{name}: got a value; only None is supported without indices")
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


@torch.no_grad()
def flash_mla_sparse_fwd(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None,
    **wrong: NoReturn,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention of each query over the keys that its list names: prefill.

        q, kv = torch.randn(4, 16, 576), torch.randn(64, 1, 576)
        indices = torch.randint(0, 64, (4, 1, 8), dtype=torch.int32)
        out, max_logits, lse = flash_mla_sparse_fwd(q, kv, indices, 576**-0.5)

    Args:
        q: [seq_q, heads_q, head_dim].
        kv: [seq_kv, heads_kv, head_dim]; the first d_v columns are the values.
        indices: int32 [seq_q, heads_kv, topk]; negative entries, and those past seq_kv, are not keys. A key that is in a
            list twice counts twice.
        attn_sink: float32 [heads_q]; out is multiplied by exp(lse) / (exp(lse) + exp(sink)), and lse is without it.
        topk_length: int32 [seq_q]; later entries are not read.

    Returns out [seq_q, heads_q, d_v], max_logits and lse, float32 [seq_q, heads_q], natural; of a query without keys 0,
    -inf and +inf.
    """
    if wrong:
        refuse_keywords(flash_mla_sparse_fwd, wrong)
    for name, tensor in (("q", q), ("kv", kv), ("indices", indices)):
        if not isinstance(tensor, Tensor) or tensor.dim() != 3:
            got = list(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ValueError(f"{name}: got {got}; expected 3 axes, [seq, heads, head_dim or topk]")
    _check_columns("kv", q, kv, "d_v", d_v)
    counts = None
    if topk_length is not None:
        counts = (
            _counts("topk_length", topk_length, q.shape[:1]).view(1, -1, 1).expand(-1, -1, indices.shape[1]).contiguous()
        )
    out, lse, row_max = _listed(q[None], kv[None], indices[None].contiguous(), counts, d_v, sm_scale)
    out = _with_sink(out, lse, attn_sink)
    return out[0], row_max[0].T.contiguous(), _infinite(lse)[0].T.contiguous()


def _over_slots(q, caches, head_dim_v, scale, is_fp8, attn_sink):
    """Attention over one cache or two, by slots."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if is_fp8:
        out, lse = _over_rows(q, caches, head_dim_v, scale)
    else:
        parts = []
        for name, cache, indices, length in caches:
            if cache.element_size() == 1:
                raise ValueError("is_fp8_kvcache: got False; expected True for a cache of 8 bits")
            _check_columns(name, q, cache, "head_dim_v", head_dim_v)
            kv, slots = _as_slots(cache, indices)
            counts = None if length is None else length.view(-1, 1, 1).expand(-1, q.shape[1], 1).contiguous()
            listed = slots.view(*slots.shape[:2], 1, -1).contiguous()
            parts.append(_listed(q, kv.expand(q.shape[0], -1, -1, -1), listed, counts, head_dim_v, scale)[:2])
        out, lse = parts[0] if len(parts) == 1 else merge_states(*map(list, zip(*parts, strict=True)))
    return _with_sink(out, lse, attn_sink), _infinite(lse)


def _listed(q, kv, lists, counts, head_dim_v, scale):
    """(out, lse, largest scores) of lists over latent keys."""
    k, v = kv[..., head_dim_v:], kv[..., :head_dim_v]
    latent = 8 <= head_dim_v <= 512 and head_dim_v % 8 == kv.shape[-1] % 8 == 0 and kv.shape[-1] <= 576
    out = q.new_empty((*q.shape[:-1], head_dim_v))
    lse, row_max = q.new_empty((2, q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32).unbind()
    if not latent:
        k = kv
    tensors = Tensors(q, k, v, key_indices=lists, key_counts=counts)
    stream = 0
    if not torch_ops.HAS_EXCHANGE:
        tensors, stream = torch_ops.detached(tensors)
    options = make_options(scale=float(scale))
    _core.forward(
        tensors,
        options,
        out,
        lse,
        0,
        0,
        stream,
        lambda size: torch_ops.workspace(out, size),
        latent=latent,
        row_max=row_max,
    )
    return out, lse, row_max


def _infinite(lse):
    """FlashMLA's form: +inf for a query that sees no key."""
    return lse.nan_to_num(nan=torch.nan, posinf=torch.inf, neginf=torch.inf)


def _with_sink(out, lse, sink):
    """out [batch, seq_q, heads, dim] times exp(lse) / (exp(lse) + exp(sink))."""
    if sink is None:
        return out
    heads = out.shape[2]
    if not isinstance(sink, Tensor) or list(sink.shape) != [heads]:
        got = list(sink.shape) if isinstance(sink, Tensor) else type(sink).__name__
        raise ValueError(f"attn_sink: got {got}; expected [{heads}]")
    sink = sink.float().view(1, heads, 1)
    factor = torch.where(sink == -torch.inf, 1.0, torch.sigmoid(lse - sink))
    factor = torch.where(lse == -torch.inf, 0.0, factor)
    return (out.float() * factor.transpose(1, 2).unsqueeze(-1)).to(out.dtype)


def _counts(name, lengths, shape):
    if not isinstance(lengths, Tensor) or lengths.dtype != torch.int32 or list(lengths.shape) != list(shape):
        got = f"{lengths.dtype} {list(lengths.shape)}" if isinstance(lengths, Tensor) else type(lengths).__name__
        raise ValueError(f"{name}: got {got}; expected int32 {list(shape)}")
    return lengths


def _caches(q, k_cache, indices, topk_length, extra_k_cache, extra_indices, extra_length):
    """(name, cache, indices, lengths) of each cache."""
    if not isinstance(q, Tensor) or q.dim() != 4:
        raise ValueError(f"q: got {list(getattr(q, 'shape', ()))}; expected [batch, seq_q, heads_q, head_dim]")
    if (extra_k_cache is None) != (extra_indices is None):
        name = "extra_k_cache" if extra_k_cache is None else "extra_indices_in_kvcache"
        raise ValueError(f"{name}: got None; a second cache needs both")
    if extra_k_cache is None and extra_length is not None:
        raise ValueError("extra_topk_length: got a value; expected None without a second cache")
    found = []
    for names, cache, lists, length in (
        (("k_cache", "indices", "topk_length"), k_cache, indices, topk_length),
        (("extra_k_cache", "extra_indices_in_kvcache", "extra_topk_length"), extra_k_cache, extra_indices, extra_length),
    ):
        if cache is None:
            continue
        if not isinstance(cache, Tensor) or cache.dim() != 4 or cache.shape[2] != 1:
            got = list(cache.shape) if isinstance(cache, Tensor) else type(cache).__name__
            raise ValueError(f"{names[0]}: got {got}; expected [num_pages, page_size, 1, head_dim or bytes of a row]")
        if not isinstance(lists, Tensor) or lists.dtype != torch.int32 or list(lists.shape[:-1]) != list(q.shape[:2]):
            got = f"{lists.dtype} {list(lists.shape)}" if isinstance(lists, Tensor) else type(lists).__name__
            raise ValueError(f"{names[1]}: got {got}; expected int32 [{q.shape[0]}, {q.shape[1]}, topk]")
        if length is not None:
            _counts(names[2], length, q.shape[:1])
        found.append((names[0], cache, lists, length))
    return found


def _as_slots(cache, indices):
    """The cache as rows [1, slots, 1, dim], and the lists in its rows: pages may be apart."""
    pages, size, heads, dim = cache.shape
    if pages <= 1 or cache.stride(0) == size * cache.stride(1):
        return cache.as_strided((1, pages * size, heads, dim), (0, *cache.stride()[1:]), cache.storage_offset()), indices
    if cache.stride(0) % cache.stride(1) == 0:  # rows between the pages, which are in no list
        apart = cache.stride(0) // cache.stride(1)
        slots = torch.where((indices >= 0) & (indices < pages * size), indices // size * apart + indices % size, -1)
        rows = (pages - 1) * apart + size
        return cache.as_strided((1, rows, heads, dim), (0, *cache.stride()[1:]), cache.storage_offset()), slots.int()
    return cache.reshape(1, pages * size, heads, dim), indices


def _over_rows(q, caches, head_dim_v, scale):
    """(out, lse) over caches of 8 bits, whose rows are expanded first: all rows, or only the listed ones if these are
    fewer. Listed rows are stored for each query in turn, so that each query has its own sequence.
    """
    sizes = []
    for name, cache, _, _ in caches:
        form = views_of(name, cache)[2]
        if form.columns != q.shape[-1]:
            raise ValueError(
                f"{name}: got rows of {form.bytes} bytes, for a head_dim of {form.columns}; q has {q.shape[-1]}"
            )
        sizes.append(cache.shape[0] * cache.shape[1])
    if not 0 < head_dim_v <= q.shape[-1]:
        raise ValueError(f"head_dim_v: got {head_dim_v}; allowed are 1 to {q.shape[-1]}, the head_dim of q")
    named = [_named_slots(*rest, size) for (_, *rest), size in zip(caches, sizes, strict=True)]
    entries = sum(lists.shape[2] for lists in named)
    batch, seq_q = q.shape[:2]
    if sum(sizes) <= batch * seq_q * entries:
        rows = [
            read_fp8_cache(cache, torch.arange(size, device=q.device), q.dtype)
            for (_, cache, _, _), size in zip(caches, sizes, strict=True)
        ]
        lists = [named[0], *(torch.where(more < 0, -1, more + sizes[0]) for more in named[1:])]
        kv = torch.cat(rows).view(1, -1, 1, q.shape[-1]).expand(batch, -1, -1, -1)
        return _listed(q, kv, torch.cat(lists, 2).view(batch, seq_q, 1, -1).contiguous(), None, head_dim_v, scale)[:2]
    queries, outs, sums = q.flatten(0, 1), [], []
    lists = [each.flatten(0, 1) for each in named]
    step = max(_EXPANDED_BYTES // (max(entries, 1) * q.shape[-1] * q.element_size()), 1)
    places = torch.arange(entries, device=q.device, dtype=torch.int32)
    for first in range(0, max(batch * seq_q, 1), step):
        part = slice(first, first + step)
        rows = [
            read_fp8_cache(cache, each[part].clamp(min=0), q.dtype)
            for (_, cache, _, _), each in zip(caches, lists, strict=True)
        ]
        kept = torch.where(torch.cat([each[part] for each in lists], 1) >= 0, places, -1).view(-1, 1, 1, entries)
        kv = torch.cat(rows, 1).unsqueeze(2)
        out, lse, _ = _listed(queries[part].unsqueeze(1), kv, kept, None, head_dim_v, scale)
        outs.append(out), sums.append(lse)
    out, lse = torch.cat(outs), torch.cat(sums)
    return out.view(batch, seq_q, *out.shape[2:]), lse.view(batch, seq_q, -1).transpose(1, 2).contiguous()


def _named_slots(cache, indices, length, size):
    """The lists, with -1 for entries that are not keys."""
    kept = (indices >= 0) & (indices < size)
    if length is not None:
        kept &= torch.arange(indices.shape[-1], device=indices.device) < length.view(-1, 1, 1)
    return torch.where(kept, indices, -1)


def _check_columns(name, q, kv, name_of_width, head_dim_v):
    if kv.shape[-1] != q.shape[-1]:
        raise ValueError(f"{name}: got a head_dim of {kv.shape[-1]}; expected {q.shape[-1]}, as q")
    if not 0 < head_dim_v <= q.shape[-1]:
        raise ValueError(f"{name_of_width}: got {head_dim_v}; allowed are 1 to {q.shape[-1]}, the head_dim of q")


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
