"""Rotary position embedding, with the arguments of FlashAttention-2's apply_rotary_emb."""

import torch


def apply_rotary_emb(x, cos, sin, interleaved=False, inplace=False, seqlen_offsets=0, cu_seqlens=None, max_seqlen=None):
    """Turns pairs of the first 2 * cos.shape[1] dimensions of x by the angle of their position.

    Args:
        x: [batch, seq, heads, head_dim], or [total, heads, head_dim] with cu_seqlens.
        cos, sin: [positions, rotary_dim / 2].
        interleaved: pairs are (0, 1), (2, 3), ... instead of (0, rotary_dim / 2), (1, rotary_dim / 2 + 1), ...
        inplace: write the result into x.
        seqlen_offsets: int or int [batch]; the position of the first token of each sequence.
        cu_seqlens: int32 [batch + 1], where the sequences of a packed x begin.
    """
    positions = _positions(x, seqlen_offsets, cu_seqlens)
    cos, sin = cos[positions].unsqueeze(-2), sin[positions].unsqueeze(-2)
    half = cos.shape[-1]
    turned, rest = x[..., : 2 * half], x[..., 2 * half :]
    if interleaved:
        first, second = turned[..., ::2], turned[..., 1::2]
    else:
        first, second = turned[..., :half], turned[..., half:]
    pair = (first * cos - second * sin, first * sin + second * cos)
    turned = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    out = torch.cat([turned.to(x.dtype), rest], dim=-1)
    return x.copy_(out) if inplace else out


def _positions(x, offsets, cu_seqlens):
    """int64 [batch, seq] or [seq] or [total]: the row of cos and sin for each token."""
    if cu_seqlens is None:
        within = torch.arange(x.shape[1], device=x.device)
        return within + offsets if isinstance(offsets, int) else within + offsets.long()[:, None]
    starts = cu_seqlens.long()
    sequence = torch.repeat_interleave(torch.arange(len(starts) - 1, device=x.device), starts.diff())
    within = torch.arange(x.shape[0], device=x.device) - starts[sequence]
    return within + (offsets if isinstance(offsets, int) else offsets.long()[sequence])
