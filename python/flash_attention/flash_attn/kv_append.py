"""New keys and values into a cache, and the rotary embedding of queries and keys."""

import torch

from flash_attention.flash_attn.layers.rotary import apply_rotary_emb


def append_and_turn(call, one_place):
    """(q, lengths) of a CacheCall after its new rows are in the caches. one_place: all queries of a sequence have the angle
    of the first."""
    q, new = call.q, call.new
    if call.rotary is not None:
        q, new = _turned(call, one_place)
    if new is None:
        return q, call.lengths
    write_rows(call.caches, new, call.lengths, call.cu_seqlens_new, call.table, call.capacity)
    return q, call.new_lengths()


def write_rows(caches, new, lengths, starts, table, capacity):
    """Writes new rows [batch, seq_new, heads, dim], or end to end as starts say, behind `lengths`.

    Nothing waits for a GPU. Rows without room, which on a GPU nobody has looked for, are not written: in their place the
    last that has room is written again, or what the last place holds.
    """
    batch, device = len(lengths), lengths.device
    count = new[0].shape[:-2].numel()
    if not batch or not count:
        return
    if starts is None:
        starts = torch.arange(batch + 1, device=device) * new[0].shape[1]
    starts, token = starts.long(), torch.arange(count, device=device)
    entry = torch.searchsorted(starts[1:].contiguous(), token, right=True).clamp(max=batch - 1)
    room = torch.minimum(capacity - lengths.long(), starts.diff())[entry]
    within = torch.minimum(token - starts[entry], room - 1).clamp(min=0)
    place = (lengths.long()[entry] + within).clamp(0, capacity - 1)
    row, slot = entry, place
    if table is not None:
        pages, size = caches[0].shape[:2]
        row, slot = table.long()[entry, place // size].clamp(0, pages - 1), place % size
    has_room, source = (room > 0)[:, None, None], (starts[entry] + within).clamp(max=count - 1)
    for cache, rows in zip(caches, new, strict=True):
        values = rows.reshape(count, *rows.shape[-2:])[source].to(cache.dtype)
        cache[row, slot] = torch.where(has_room, values, cache[row, slot])


def _turned(call, one_place):
    cos, sin, interleaved, offsets = call.rotary
    turn = {"interleaved": interleaved, "seqlen_offsets": offsets}
    q, new = call.q, call.new
    packed = call.cu_seqlens_q is not None
    if one_place and packed:
        token, starts = torch.arange(len(q), device=q.device), call.cu_seqlens_q.long()
        owner = torch.searchsorted(starts[1:].contiguous(), token, right=True).clamp(max=call.batch - 1)
        angles = offsets.long()[owner]
        q = apply_rotary_emb(q[:, None], cos, sin, interleaved=interleaved, seqlen_offsets=angles)[:, 0]
    elif one_place:
        q = apply_rotary_emb(q.flatten(1, 2)[:, None], cos, sin, **turn)[:, 0].unflatten(1, (q.shape[1], -1))
    else:
        q = apply_rotary_emb(q, cos, sin, cu_seqlens=call.cu_seqlens_q, **turn)
    if new is not None:
        new = (apply_rotary_emb(new[0], cos, sin, cu_seqlens=call.cu_seqlens_new, **turn), new[1])
    return q, new
