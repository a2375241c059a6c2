"""Attention over lists of keys as dense matrices in float64, with torch's own gradients: from docs/numerics.md alone."""

import math

import torch


def times_of(lists, counts, seq_q, keys, heads, heads_kv, size=None):
    """How often the lists [rows, G, entries] name each key: float64 [heads, seq_q, keys]. size: of blocks, or None."""
    times = torch.zeros(heads, seq_q, keys, dtype=torch.float64)
    queries, block = size or (1, 1)
    for h in range(heads):
        g = {1: 0, heads_kv: h * heads_kv // heads, heads: h}[lists.shape[1]]
        for i in range(seq_q):
            entries = lists[i // queries, g].tolist()
            if counts is not None:
                entries = entries[: max(int(counts[i // queries, g]), 0)]
            for entry in entries if size is None else set(entries):
                if 0 <= entry * block < keys:
                    times[h, i, entry * block : (entry + 1) * block] += 1
    return times


def attend(
    q, k, v, times, *, shown=None, scale=None, softcap=0.0, bias=None, alibi_slopes=None, sink=None, causal=False,
    window=(-1, -1), attention_chunk=0, alignment="bottom_right", kept=None, dropout_p=0.0,
):  # fmt: skip
    """out [seq_q, heads, dim], lse [heads, seq_q] of one sequence. shown, bias, kept: [heads, seq_q, keys]."""
    seq_q, heads, dim = q.shape
    keys, group = k.shape[0], heads // k.shape[1]
    place = torch.arange(seq_q)[:, None] + keys - seq_q
    diagonal = place if alignment == "bottom_right" else torch.arange(seq_q)[:, None]
    j = torch.arange(keys)[None]
    sees = times > 0
    left, right = (-1, 0) if causal else window
    if left >= 0:
        sees = sees & (j >= diagonal - left)
    if right >= 0:
        sees = sees & (j <= diagonal + right)
    if attention_chunk:
        sees = sees & (j // attention_chunk == diagonal.div(attention_chunk, rounding_mode="floor"))
    if shown is not None:
        sees = sees & shown
    anyone = sees.any(1).unflatten(0, (-1, group)).any(1).T[..., None]  # what nobody sees is not multiplied
    k, v = (torch.where(anyone, x.double(), 0.0).repeat_interleave(group, 1) for x in (k, v))
    score = torch.einsum("qhd,khd->hqk", q.double(), k) * (dim**-0.5 if scale is None else scale)
    if softcap:
        score = softcap * torch.tanh(score / softcap)
    if bias is not None:
        score = score + bias.double()
    if alibi_slopes is not None:
        score = score - alibi_slopes.double()[:, None, None] * (place - j).abs()
    terms = torch.where(sees, score + torch.where(sees, times, 1.0).log(), -math.inf)
    if sink is not None:
        terms = torch.cat((terms, sink.double()[:, None, None].expand(-1, seq_q, 1)), 2)
    terms = torch.cat((terms, torch.full((heads, seq_q, 1), -math.inf, dtype=torch.float64)), 2)
    empty = (terms == -math.inf).all(2)
    lse = torch.where(empty, -math.inf, torch.where(empty[..., None], 0.0, terms).logsumexp(2))
    weight = torch.where(sees, times * torch.exp(score - torch.where(empty, 0.0, lse)[..., None]), 0.0)
    if kept is not None:
        weight = weight * kept / (1 - dropout_p)
    return torch.einsum("hqk,khd->qhd", weight, v), lse
