"""flash_attn_with_kvcache: append to a cache of keys and values, and attend to it."""

from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from flash_attention.append import append_kv
from flash_attention.arguments.names import Renamed
from flash_attention.arguments.tables import as_int32, check_range
from flash_attention.compat.flash_attn.kv_append import append_and_turn
from flash_attention.compat.flash_attn.kv_arguments import CacheCall, check_room
from flash_attention.compat.flash_attn.options_of_3 import options_of_3
from flash_attention.pytorch.gradients import refusing_gradients
from flash_attention.routes import Caller, route
from flash_attention.tracing import is_tracing


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    s_aux: Tensor | None = None,
    invariant: bool | None = None,
    qv: Tensor | None = None,
    k_descale: Tensor | float | None = None,
    v_descale: Tensor | float | None = None,
    **fa3: Any,
) -> Any:
    """Attention of q [batch, seq_q, heads, head_dim] over a cache, after writing new keys and values into it.

        k_cache, v_cache = torch.zeros(2, 2, 32, 4, 64)
        lengths = torch.tensor([3, 7], dtype=torch.int32)
        out = flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths, causal=True)

    Args:
        k_cache, v_cache: [batch_cache, seq_cache, heads_k, head_dim]; with block_table
            [num_pages, page_size, heads_k, head_dim]. Changed in place if k and v are given.
        k, v: [batch, seq_new, heads_k, head_dim], written after the cache_seqlens keys of the cache.
        rotary_cos, rotary_sin: [positions, rotary_dim / 2]; k is rotated at its place in the cache. q is rotated at the
            same places if causal or windowed, otherwise at the first new place.
        cache_seqlens: int or int32 [batch]; how many keys the cache holds. The whole cache if None.
        cache_batch_idx: int [batch]; the row of the cache that belongs to each entry of q.
        cache_leftpad: int [batch]; the first key of each entry.
        block_table: int32 [batch, pages]; the pages of each entry, read on the device. Entries after an entry's keys may be
            anything. If the lengths are on a GPU, the first call with a table reads them once and refuses those that the
            table has no room for, as in FlashAttention-2. Later calls cut them off at the table's end.
        num_splits: accepted; the planner decides.

    FlashAttention-3's keywords:
        page_table: another name of block_table.
        cu_seqlens_q, max_seqlen_q: q is [total_q, heads, head_dim].
        cu_seqlens_k_new: k and v are [total_new, heads_k, head_dim].
        rotary_seqlens: int [batch]; the position of each entry's first token, instead of cache_seqlens.
        learnable_sink, s_aux: float32 [heads], two names of the sink.
        qv: [batch, seq_q, heads, head_dim_v] or [total_q, ...]; latent attention, scores are q k^T + qv v^T. The default
            scale is that of both dimensions together.
        k_descale, v_descale: scales of a cache in 8 bits, a number, float32 [1] or [batch, heads_k]. New keys and values in
            float8 are codes with these scales.

    This library's own keyword: with invariant a row's bits do not depend on anything else in the call (docs/numerics.md).

    Forward only. Returns out as q, or (out, softmax_lse [batch, heads, seq_q], or [heads, total_q]).
    """
    if block_table is not None and type(cache_seqlens) is Tensor and cache_seqlens.is_cuda:
        _check_room_once(block_table, cache_seqlens, k_cache, k)
    if block_table is not None and page_table is not None:
        raise ValueError("page_table: is given besides block_table; allowed is one of the two")
    table = page_table if block_table is None else block_table
    if (
        k is None and v is None and rotary_cos is None and rotary_sin is None
        and cache_batch_idx is None and cache_leftpad is None and cu_seqlens_q is None and cu_seqlens_k_new is None
        and qv is None and k_descale is None and v_descale is None and not fa3 and type(cache_seqlens) is Tensor
    ):  # fmt: skip
        try:  # a step of decoding, as servers call it
            return route()(
                q, k_cache, v_cache, caller=_CALLER, seqused_kv=cache_seqlens, page_table=table, causal=causal,
                window=window_size, softcap=softcap, scale=softmax_scale, alibi_slopes=alibi_slopes,
                sink=s_aux if learnable_sink is None else learnable_sink, invariant=invariant,
                return_lse=return_softmax_lse,
            )  # fmt: skip
        except (TypeError, ValueError, RuntimeError):
            rotary = (None, None, rotary_interleaved, None)
            CacheCall(q, (k_cache, v_cache), (k, v), rotary, cache_seqlens, None, None, table)  # refuses most of it itself
            raise
    if page_table is not None and cache_batch_idx is not None:  # FlashAttention-3 has rows of its table, too
        rows = as_int32("cache_batch_idx", cache_batch_idx, ("batch",), page_table.device)
        check_range("cache_batch_idx", rows, 0, len(page_table) - 1)
        table = page_table.index_select(0, rows.clamp(0, max(len(page_table) - 1, 0)))  # no index trips a device assert
        cache_batch_idx = None
    options = {
        "return_lse": return_softmax_lse,
        "scale": softmax_scale,
        "causal": causal,
        "window": window_size,
        "softcap": softcap,
        "alibi_slopes": alibi_slopes,
        "sink": s_aux if learnable_sink is None else learnable_sink,
        "invariant": invariant,
        "k_scale": k_descale,
        "v_scale": v_descale,
        **options_of_3(flash_attn_with_kvcache, fa3),
    }
    if qv is not None:
        check_qv(q, qv, v_cache)
        options["qv"] = qv
    if (k_descale is None) != (v_descale is None):
        given = "k_descale" if v_descale is None else "v_descale"
        raise ValueError(f"{given}: is given alone; k_descale and v_descale go together")
    rotary = (rotary_cos, rotary_sin, rotary_interleaved, rotary_seqlens)
    starts = (cu_seqlens_q, cu_seqlens_k_new, max_seqlen_q)
    call = (q, (k_cache, v_cache), (k, v), rotary, cache_seqlens, cache_batch_idx, cache_leftpad, table, *starts)
    unusual = (rotary_cos, rotary_sin, cache_batch_idx, cache_leftpad, cu_seqlens_q, cu_seqlens_k_new)
    plain = _is_plain(q, (k_cache, v_cache), (k, v), cache_seqlens, table) and all(value is None for value in unusual)

    if plain:
        try:
            found = _plain_step(q, k_cache, v_cache, k, v, cache_seqlens, table, options)
        except (TypeError, ValueError, RuntimeError):
            CacheCall(*call)  # which refuses most of it in the words of the caller
            raise
    else:
        found = attend(CacheCall(*call), **options)
    return refusing_gradients("flash_attn_with_kvcache", found, q, k_cache, v_cache, k, v, qv)


# The names of flash_attn_with_kvcache()'s arguments in append_kv() and attention_over_cache().
_OF_APPEND = {"lengths": "cache_seqlens", "page_table": "block_table", "k_scale": "k_descale", "v_scale": "v_descale"}
_OF_ATTENTION = {
    "k": "k_cache",
    "v": "v_cache",
    "seqused_kv": "cache_seqlens",
    "left_padding": "cache_leftpad",
    "page_table": "block_table",
    "scale": "softmax_scale",
    "window": "window_size",
    "window_left": "window_size[0]",
    "window_right": "window_size[1]",
    "sink": "learnable_sink",
    "k_scale": "k_descale",
    "v_scale": "v_descale",
}
_CALLER = Caller(over_cache=True, names=_OF_ATTENTION, any_form=True, function="flash_attn_with_kvcache")
_LATENT = _CALLER._replace(any_form=False)  # zeros would go between a key's two parts


def _is_plain(q, caches, new, lengths, table):
    """Whether the tensors have the kernels' form, as in calls of servers: then only the kernels' checks are needed."""
    tensors = [q, *caches, *(rows for rows in new if rows is not None), lengths]
    return (
        all(type(tensor) is Tensor for tensor in tensors)
        and (new[0] is None) == (new[1] is None)
        and all(cache.dim() == 4 and cache.element_size() > 1 for cache in caches)
        and all(rows.dim() == 4 and rows.stride(-1) == 1 for rows in new if rows is not None)
        and lengths.dtype == torch.int32
        and (len(caches[0]) == len(q) if table is None else type(table) is Tensor and table.dtype == torch.int32)
    )


@torch.no_grad()
def _plain_step(q, k_cache, v_cache, k, v, lengths, table, options):
    if k is not None:
        with Renamed(_OF_APPEND):
            append_kv(k_cache, v_cache, k, v, lengths=lengths, page_table=table)
        lengths = lengths + k.shape[1]
    return _over_cache(q, k_cache, v_cache, page_table=table, seqused_kv=lengths, **options)


def _check_room_once(table, lengths, k_cache, new):
    if is_tracing() or table in _with_room or torch.cuda.is_current_stream_capturing():
        return
    most = int(lengths.max()) if len(lengths) else 0
    most += new.shape[1] if new is not None and new.dim() == 4 else 0
    check_room(most, table.shape[-1] * k_cache.shape[1])
    _with_room[table] = True


_with_room = WeakIdKeyDictionary()  # tables whose first lengths they had room for


def check_qv(q, qv, v_cache):
    """Checks the queries of the values: the shape of q, with the width of a value."""
    expected = [*q.shape[:-1], v_cache.shape[-1]]
    if list(qv.shape) != expected:
        raise ValueError(f"qv: got shape {list(qv.shape)}; expected {expected}, as q and with the head_dim of v_cache")
    if qv.dtype != q.dtype or qv.device != q.device:
        raise ValueError(f"qv: got {qv.dtype} on {qv.device}; expected {q.dtype} on {q.device}, as q")


def _over_cache(q, k, v, *, qv=None, scale=None, **options):
    if qv is None:
        return route()(q, k, v, caller=_CALLER, scale=scale, **options)
    scale = (q.shape[-1] + qv.shape[-1]) ** -0.5 if scale is None else scale
    return route()(torch.cat((qv, q), dim=-1), k, v, caller=_LATENT, scale=scale, latent=True, **options)


@torch.no_grad()
def attend(call, *, return_lse, causal, window, **options):
    """Writes the new keys and values of a CacheCall, then attends."""
    try:
        left, right = window
    except (TypeError, ValueError):
        raise ValueError(f"window_size: got {window!r}; expected (left, right)") from None
    local = left not in (-1, None) or right not in (-1, None) or "attention_chunk" in options
    scales = {name: options[name] for name in ("k_scale", "v_scale")}
    with Renamed(_OF_APPEND):
        q, lengths = append_and_turn(call, one_place=not causal and not local, **scales)
    return _over_cache(
        q,
        *call.caches,
        page_table=call.table,
        seqused_kv=lengths,
        left_padding=call.left_padding,
        cu_seqlens_q=call.cu_seqlens_q,
        max_seqlen_q=call.max_seqlen_q,
        causal=causal,
        window=window,
        return_lse=return_lse,
        **options,
    )
