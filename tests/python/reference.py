"""docs/numerics.md in plain torch, in any precision: what the tests compare with. Shares no code with the package."""

import numpy
import torch


def attention(q, k, v, **options):
    """(out, lse) for q, k, v [batch, seq, heads, dim]; differentiable. lse is -inf where no key is visible."""
    results = [_sequence(q[b], k[b], v[b], b, **options) for b in range(q.shape[0])]
    return torch.stack([out for out, _ in results]), torch.stack([lse for _, lse in results])


def attention_packed(q, k, v, cu_seqlens_q, cu_seqlens_kv, **options):
    """(out, lse [heads, total]) for sequences end to end."""
    results = []
    for b in range(len(cu_seqlens_q) - 1):
        rows, keys = slice(cu_seqlens_q[b], cu_seqlens_q[b + 1]), slice(cu_seqlens_kv[b], cu_seqlens_kv[b + 1])
        results.append(_sequence(q[rows], k[keys], v[keys], b, **options))
    return torch.cat([out for out, _ in results]), torch.cat([lse for _, lse in results], dim=-1)


def _sequence(
    q,
    k,
    v,
    b,
    *,
    causal=False,
    window=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    bias=None,
    mask=None,
    key_lengths=None,
    seqused_q=None,
    seqused_kv=None,
    sink=None,
    dropout_p=0.0,
    seed=0,
    offset=0,
    scale=None,
    alignment="bottom_right",
):
    """One batch entry: q [seq_q, heads, dim] -> out [seq_q, heads, dim_v], lse [heads, seq_q]."""
    seq_q, heads, dim = q.shape
    seq_kv = k.shape[0]
    k, v = (tensor.repeat_interleave(heads // k.shape[1], dim=1) for tensor in (k, v))
    used_q = seq_q if seqused_q is None else int(seqused_q[b])
    used_kv = seq_kv if seqused_kv is None else int(seqused_kv[b])
    i = torch.arange(seq_q, device=q.device)[:, None]
    j = torch.arange(seq_kv, device=q.device)[None, :]
    scores = torch.einsum("ihd,jhd->hij", q, k) * (dim**-0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + _entry(bias, b)[..., :seq_q, :seq_kv].to(scores.dtype)
    if alibi_slopes is not None:
        slopes = alibi_slopes[b] if alibi_slopes.dim() == 2 else alibi_slopes
        scores = scores - slopes.to(scores.dtype)[:, None, None] * (i + used_kv - used_q - j).abs()
    diagonal = i + (used_kv - used_q if alignment == "bottom_right" else 0)
    left, right = window
    right = 0 if causal else right
    visible = (j < used_kv) & (i < used_q)
    if left >= 0:
        visible = visible & (j >= diagonal - left)
    if right >= 0:
        visible = visible & (j <= diagonal + right)
    if key_lengths is not None:
        visible = visible & (j < int(key_lengths[b]))
    visible = visible.expand(heads, seq_q, seq_kv)
    if mask is not None:
        visible = visible & _entry(mask, b)[..., :seq_q, :seq_kv]
    scores = scores.masked_fill(~visible, -torch.inf)
    if sink is not None:
        column = sink.to(scores.dtype)[:, None, None].expand(heads, seq_q, 1)
        column = column.masked_fill(i >= used_q, -torch.inf)
        scores = torch.cat([scores, column], dim=-1)
    empty = (scores == -torch.inf).all(-1)
    lse = torch.logsumexp(scores.masked_fill(empty[..., None], 0.0), dim=-1)
    probs = torch.exp(scores - lse[..., None]).masked_fill(empty[..., None], 0.0)[..., :seq_kv]
    if dropout_p:
        keep = torch.from_numpy(keeps(seed, offset, dropout_p, b, heads, seq_q, seq_kv)).to(q.device)
        probs = probs * keep / (1 - dropout_p)
    return torch.einsum("hij,jhd->ihd", probs, v), lse.masked_fill(empty, -torch.inf)


def _entry(scores, b):
    """[heads | 1, seq_q | 1, seq_kv | 1] of batch entry b, from any shape that broadcasts."""
    scores = scores.reshape((1,) * (4 - scores.dim()) + scores.shape)
    return scores[b if scores.shape[0] > 1 else 0]


def keeps(seed, offset, dropout_p, batch_idx, heads, seq_q, seq_kv):
    """bool [heads, seq_q, seq_kv]: Philox4x32-7 as docs/numerics.md folds it."""
    h = numpy.arange(heads, dtype=numpy.uint64)[:, None, None]
    i = numpy.arange(seq_q, dtype=numpy.uint64)[None, :, None]
    j = numpy.arange(seq_kv, dtype=numpy.uint64)[None, None, :]
    low, high = numpy.uint64(0xFFFFFFFF), numpy.uint64(32)
    counter = numpy.broadcast_arrays(
        8 * (i // 16) + i % 8,
        4 * (j // 16) + (j % 8) // 2,
        (batch_idx * heads + h) & low,
        numpy.uint64(offset & 0xFFFFFFFF),
    )
    key = [seed & 0xFFFFFFFF, (seed >> 32) ^ (offset >> 32)]
    for _ in range(7):
        first, second = counter[0] * numpy.uint64(0xD2511F53), counter[2] * numpy.uint64(0xCD9E8D57)
        counter = [
            (second >> high) ^ counter[1] ^ numpy.uint64(key[0]),
            second & low,
            (first >> high) ^ counter[3] ^ numpy.uint64(key[1]),
            first & low,
        ]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    words = numpy.stack(counter)
    which = numpy.broadcast_to(2 * ((i // 8) % 2) + (j // 8) % 2, words.shape[1:]).astype(numpy.int64)
    word = numpy.take_along_axis(words, which[None], axis=0)[0]
    half = numpy.uint64(16)
    word = numpy.where(j % 2 == 1, ((word << half) & low) | (word >> half), word)
    return word >= numpy.uint64(int(float(numpy.float32(dropout_p)) * 2**32))
