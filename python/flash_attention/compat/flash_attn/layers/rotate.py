"""The functions of rotary position embedding: tensors are rotated by given cos and sin. Products are taken in float32."""

import torch
from torch import Tensor

from flash_attention.pytorch.ops import is_watched


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """Rotates pairs of the first 2 * cos.shape[-1] dimensions of x by the angle of their position.

    Args:
        x: [batch, seq, heads, head_dim], or [total, heads, head_dim] with cu_seqlens.
        cos, sin: [positions, rotary_dim / 2].
        interleaved: pairs are (0, 1), (2, 3), ... instead of (0, rotary_dim / 2), (1, rotary_dim / 2 + 1), ...
        inplace: write the result into x.
        seqlen_offsets: int or int [batch]; the position of the first token of each sequence.
        cu_seqlens: int32 [batch + 1], where the sequences of a packed x begin.
    """
    positions = _inside(_positions(x, seqlen_offsets, cu_seqlens), len(cos), x, seqlen_offsets, cu_seqlens)
    return _turn(x, cos[positions], sin[positions], interleaved, inplace)


def apply_rotary_emb_torch(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """The same for x [batch, seq, heads, head_dim] and the cos and sin of its tokens, [seq, ...] or [batch, seq, ...]."""
    return _turn(x, cos, sin, interleaved, False)


def apply_rotary_emb_qkv_(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cos_k: Tensor | None = None,
    sin_k: Tensor | None = None,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
    num_heads_q: int | None = None,
) -> Tensor:
    """Rotates q and k of qkv in place.

    qkv: [batch, seq, 3, heads, head_dim] or [batch, seq, num_heads_q + 2 * heads_k, head_dim].
    cos_k, sin_k: for k, if they differ from those of q.
    """
    q, k = _queries_and_keys(qkv, num_heads_q)
    apply_rotary_emb(q, cos, sin, interleaved, True, seqlen_offsets)
    apply_rotary_emb(k, cos if cos_k is None else cos_k, sin if sin_k is None else sin_k, interleaved, True, seqlen_offsets)
    return qkv


def apply_rotary_emb_kv_(
    kv: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, seqlen_offsets: int | Tensor = 0
) -> Tensor:
    """Rotates k of kv [batch, seq, 2, heads_k, head_dim] in place."""
    if kv.dim() != 5 or kv.shape[2] != 2:
        raise ValueError(f"kv: got shape {list(kv.shape)}; expected [batch, seq, 2, heads_k, head_dim]")
    apply_rotary_emb(kv[:, :, 0], cos, sin, interleaved, True, seqlen_offsets)
    return kv


def _queries_and_keys(qkv, num_heads_q):
    if qkv.dim() == 5 and qkv.shape[2] == 3:
        return qkv[:, :, 0], qkv[:, :, 1]
    if qkv.dim() != 4 or num_heads_q is None or qkv.shape[2] < num_heads_q or (qkv.shape[2] - num_heads_q) % 2:
        raise ValueError(
            f"qkv: got shape {list(qkv.shape)} and num_heads_q {num_heads_q}; expected [batch, seq, 3, heads, head_dim] "
            "or [batch, seq, num_heads_q + 2 * heads_k, head_dim] with num_heads_q"
        )
    heads_k = (qkv.shape[2] - num_heads_q) // 2
    return qkv[:, :, :num_heads_q], qkv[:, :, num_heads_q : num_heads_q + heads_k]


def _turn(x, cos, sin, interleaved, inplace):
    """cos and sin: [..., seq, rotary_dim / 2] of the tokens of x."""
    half = cos.shape[-1]
    if 2 * half > x.shape[-1] or cos.shape != sin.shape:
        raise ValueError(
            f"cos: has {half} columns and sin {list(sin.shape)}; both have at most half of head_dim, {x.shape[-1]}"
        )
    wide = torch.promote_types(x.dtype, torch.float32)
    cos, sin = cos.to(wide).unsqueeze(-2), sin.to(wide).unsqueeze(-2)
    rotated, rest = x[..., : 2 * half].to(wide), x[..., 2 * half :]
    if interleaved:
        first, second = rotated[..., ::2], rotated[..., 1::2]
    else:
        first, second = rotated[..., :half], rotated[..., half:]
    pair = (first * cos - second * sin, first * sin + second * cos)
    rotated = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    if inplace:
        x[..., : 2 * half].copy_(rotated)
        return x
    return torch.cat([rotated.to(x.dtype), rest], dim=-1)


def _inside(positions, count, x, offsets, cu_seqlens):
    """Positions that cos and sin have. Others are refused if the host knows them, else they count as the nearest ones."""
    low, high = 0, -1
    if cu_seqlens is None and isinstance(offsets, int):
        low, high = offsets, offsets + x.shape[1] - 1
    elif not (positions.is_cuda or is_watched(positions)) and positions.numel():
        low, high = int(positions.min()), int(positions.max())
    if low < 0 or high >= count:
        raise ValueError(f"seqlen_offsets: tokens have the positions {low} to {high}; cos and sin have 0 to {count - 1}")
    return positions.clamp(0, max(count - 1, 0))


def _positions(x, offsets, cu_seqlens):
    """int64 [batch, seq] or [seq] or [total]: the row of cos and sin for each token."""
    if cu_seqlens is None:
        within = torch.arange(x.shape[1], device=x.device)
        return within + offsets if isinstance(offsets, int) else within + offsets.long()[:, None]
    starts, token = cu_seqlens.long(), torch.arange(x.shape[0], device=x.device)
    sequence = torch.searchsorted(starts[1:].contiguous(), token, right=True).clamp(max=len(starts) - 2)
    within = torch.where(token < starts[-1], token - starts[sequence], 0)  # rows after the last sequence belong to none
    return within + (offsets if isinstance(offsets, int) else offsets.long()[sequence])
