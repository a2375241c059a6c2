"""What the engines share: writing new rows to a cache in slots, and attending over its pages."""

import torch

from flash_attention.arguments.head_dim import padded_cache


def write_slots(cache, rows, slots):
    """Writes rows [tokens, heads, dim] to the slots of a cache in pages [pages, page_size, heads, dim].

    A slot below 0 belongs to a token that fills up a batch. Such rows leave slot 0 as it is, which engines keep for that:
    there is no look at the slots on the host, so a CUDA graph can be captured.
    """
    flat = cache.view(-1, *cache.shape[2:]) if cache.is_contiguous() else None
    slots = slots.long()
    used = slots.clamp(min=0)
    kept = (slots >= 0)[:, None, None]
    if flat is not None:
        flat[used] = torch.where(kept, rows.to(cache.dtype), flat[used])
        return
    place = used // cache.shape[1], used % cache.shape[1]
    cache[place] = torch.where(kept, rows.to(cache.dtype), cache[place])


@torch.no_grad()
def attend(
    q, k_pages, v_pages, table, starts, lengths, longest, *, causal, window, softcap, scale, alibi_slopes, sink, out=None
):
    """out as q [tokens, heads, dim]; sequence b has queries starts[b] : starts[b + 1], pages table[b], lengths[b] keys."""
    return padded_cache(
        q,
        k_pages,
        v_pages,
        page_table=table,
        cu_seqlens_q=starts,
        max_seqlen_q=longest,
        seqused_kv=lengths,
        causal=causal,
        window=window,
        softcap=softcap,
        scale=scale,
        alibi_slopes=alibi_slopes,
        sink=sink,
        out=out,
    )
