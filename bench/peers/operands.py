"""What a case needs besides q, k and v: masks, slopes, biases, bounds of packed sequences. The last of each kind is kept: a
bias of 8192 x 8192 for 32 heads has gigabytes."""

from functools import cache, lru_cache

import torch

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def window_of(case):
    """(left, right), -1 for no limit."""
    return (case.window, 0 if case.causal else case.window) if case.window else (-1, -1)


@cache
def bounds(case, device):
    """cu_seqlens of a packed case."""
    return torch.tensor((0, *case.lengths)).cumsum(0).to(torch.int32).to(device)


def positions(case, device):
    """(queries down, keys across), the last query at the last key."""
    queries = case.queries or case.seq
    return torch.arange(queries, device=device)[:, None] + case.seq - queries, torch.arange(case.seq, device=device)[None]


@lru_cache(maxsize=1)
def boolean_mask(case, device):
    """The mask of a masked, windowed or causal case: [1, 1, queries, keys], true if the key is visible."""
    i, j = positions(case, device)
    if case.masked == "random":
        generator = torch.Generator(device).manual_seed(1)
        mask = torch.rand(len(i), case.seq, generator=generator, device=device) < 0.5
    elif case.masked:
        edges = torch.tensor((1, 3, 6), device=device) * case.seq // 10
        mask = torch.bucketize(i, edges, right=True) == torch.bucketize(j, edges, right=True)
    elif case.window:
        mask = (j >= i - case.window) & (j <= (i if case.causal else i + case.window))
    else:
        mask = j <= i
    return mask[None, None]


@lru_cache(maxsize=1)
def slopes(case, device):
    """ALiBi's, float32 [heads]."""
    return torch.exp2(-8.0 * torch.arange(1, case.heads + 1, device=device) / case.heads)


@lru_cache(maxsize=1)
def bias(case, device):
    """[1, heads, queries, keys] in the type of the case."""
    shape = 1, case.heads, case.queries or case.seq, case.seq
    generator = torch.Generator(device).manual_seed(2)
    made = torch.randn(shape, generator=generator, device=device, dtype=DTYPES[case.dtype])
    return made.requires_grad_(case.bias == "learned")


@lru_cache(maxsize=1)
def alibi_bias(case, device):
    """ALiBi as a bias, [1, heads, queries, keys]."""
    i, j = positions(case, device)
    distance = (i - j).abs()
    made = torch.stack([(-slope * distance).to(DTYPES[case.dtype]) for slope in slopes(case, device)])
    return (made.masked_fill(j > i, float("-inf")) if case.causal else made)[None]


def attn_mask(case, device):
    """The mask or bias that tells SDPA about a case; None where is_causal, which counts from the first key, says it all."""
    if case.alibi:
        return alibi_bias(case, device)
    if case.bias:
        dense = bias(case, device)
        if not case.causal:
            return dense
        i, j = positions(case, device)
        return dense.masked_fill(j > i, float("-inf"))
    return boolean_mask(case, device) if case.window or case.masked or (case.causal and case.queries) else None


def forget():
    """Gives their memory back."""
    for kept in (boolean_mask, slopes, bias, alibi_bias):
        kept.cache_clear()
