"""flash_attn_with_kvcache: append to a cache of keys and values, and attend to it."""

from typing import Any

import torch
from torch import Tensor

from flash_attention.flash_attn.layers.rotary import apply_rotary_emb
from flash_attention.flash_attn.paging import usable_pages
from flash_attention.head_dim import padded_cache


@torch.no_grad()
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
) -> Any:
    """Attention of q [batch, seq_q, heads, head_dim] over a cache, after writing new keys and values into it.

    Args:
        k_cache, v_cache: [batch_cache, seq_cache, heads_k, head_dim]; with block_table
            [num_pages, page_size, heads_k, head_dim]. Changed in place where k and v are given.
        k, v: [batch, seq_new, heads_k, head_dim], written behind the cache_seqlens keys that are there.
        rotary_cos, rotary_sin: [positions, rotary_dim / 2]; k is turned at its place in the cache, and q there too if
            causal or windowed, else at the first new place.
        cache_seqlens: int or int32 [batch]; how many keys the cache holds. The whole cache if None.
        cache_batch_idx: int [batch]; the row of the cache that belongs to each entry of q.
        cache_leftpad: int [batch]; where each entry's keys begin.
        block_table: int32 [batch, pages]; the pages of each entry, read where the kernel runs. Entries behind an entry's
            keys may be anything.
        num_splits: accepted; the planner decides.

    Forward only. Returns out as q, or (out, softmax_lse [batch, heads, seq_q]).
    """
    batch, seq_q = q.shape[:2]
    page_size = k_cache.shape[1]
    capacity = page_size if block_table is None else page_size * block_table.shape[1]
    lengths = _lengths(cache_seqlens, capacity, batch, q.device)
    _check_room(lengths, cache_seqlens, capacity, 0 if k is None else k.shape[1])
    if rotary_cos is not None:
        turn = {"interleaved": rotary_interleaved, "seqlen_offsets": lengths}
        if causal or window_size[0] >= 0 or window_size[1] >= 0:
            q = apply_rotary_emb(q, rotary_cos, rotary_sin, **turn)
        else:
            one_place = apply_rotary_emb(q.flatten(1, 2)[:, None], rotary_cos, rotary_sin, **turn)
            q = one_place[:, 0].unflatten(1, (seq_q, -1))
        k = None if k is None else apply_rotary_emb(k, rotary_cos, rotary_sin, **turn)
    if k is not None or not q.is_cuda:
        rows = torch.arange(batch, device=q.device) if cache_batch_idx is None else cache_batch_idx.long()
        pages = None
        if block_table is not None:
            pages = usable_pages(block_table, k_cache.shape[0], lengths + (0 if k is None else k.shape[1]), page_size)
        if k is not None:
            lengths = _append(((k_cache, k), (v_cache, v)), lengths, rows, pages, capacity)
    table = block_table
    if table is None and cache_batch_idx is not None:
        table = cache_batch_idx[:, None]  # a cache of rows has one page a row
    elif table is None:
        k_cache, v_cache = k_cache[:batch], v_cache[:batch]
    return padded_cache(
        q,
        k_cache,
        v_cache,
        page_table=None if table is None else table.to(torch.int32),
        seqused_kv=lengths,
        left_padding=None if cache_leftpad is None else cache_leftpad.to(torch.int32),
        scale=softmax_scale,
        causal=causal,
        window=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        return_lse=return_softmax_lse,
    )


def _lengths(cache_seqlens, capacity, batch, device):
    if isinstance(cache_seqlens, torch.Tensor):
        return cache_seqlens.to(torch.int32)
    return torch.full((batch,), capacity if cache_seqlens is None else cache_seqlens, dtype=torch.int32, device=device)


class CacheFull(ValueError, RuntimeError):
    """More keys than a cache holds: a wrong argument here, and a RuntimeError for whoever catches flash-attn's."""


def _check_room(lengths, given, capacity, seq_new):
    """Where the lengths are known on the host: a look at a GPU's tensor would wait for the GPU."""
    if isinstance(given, int):
        longest = given
    elif lengths.is_cuda or given is None or not lengths.numel():
        longest = capacity if given is None else 0
    else:
        longest = int(lengths.max())
    if longest + seq_new > capacity and lengths.numel():
        raise CacheFull(f"cache_seqlens: {longest + seq_new} keys; the cache or its block_table holds {capacity}")


def _append(pairs, lengths, rows, pages, capacity):
    """Writes the new tokens behind `lengths`; returns the new lengths.

    Tokens without room, which on a GPU nobody has looked for, are not written: in their place the last that has room is
    written again, or what the last place holds.
    """
    seq_new = pairs[0][1].shape[1]
    room = (capacity - lengths.long())[:, None]
    token = torch.minimum(torch.arange(seq_new, device=lengths.device), (room - 1).clamp(min=0))
    place = (lengths.long()[:, None] + token).clamp(0, capacity - 1)
    row, slot = rows[:, None], place
    if pages is not None:
        page_size = pairs[0][0].shape[1]
        row, slot = pages.gather(1, place // page_size), place % page_size
    entry = torch.arange(len(lengths), device=lengths.device)[:, None]
    for cache, new in pairs:
        cache[row, slot] = torch.where((room > 0)[..., None, None], new[entry, token].to(cache.dtype), cache[row, slot])
    return lengths + seq_new
