"""PyTorch's FlexAttention, compiled, on the options of a case."""

from functools import cache, lru_cache

import torch

from peers import operands


@cache
def compiled():
    import torch._dynamo.config as dynamo
    import torch._functorch.config as functorch
    import torch._inductor.config as inductor
    from torch.nn.attention.flex_attention import flex_attention

    functorch.donated_buffer = False  # the backward pass is timed many times from one forward pass
    dynamo.recompile_limit = 1000  # one compilation per shape; past the limit it would not be compiled at all
    inductor.compile_threads = 1  # record.py has a process for every core; a pool of more would run beside what is timed
    return torch.compile(flex_attention, dynamic=False)


@lru_cache(maxsize=1)
def block_mask(case, device):
    from torch.nn.attention.flex_attention import create_block_mask

    seen = operands.boolean_mask(case, device)[0, 0] if case.masked else None
    causal, window, ahead = case.causal, case.window, case.seq - (case.queries or case.seq)

    def sees(b, h, i, j):
        i = i + ahead
        inside = (j <= i) if causal else (j <= i + window)
        return inside & (j >= i - window) if window else inside

    def masked(b, h, i, j):
        return seen[i, j]

    return create_block_mask(masked if case.masked else sees, None, None, case.queries or case.seq, case.seq, device)


@lru_cache(maxsize=1)
def score_mod(case, device):
    """None for plain scores."""
    if cap := case.softcap:
        return lambda score, b, h, i, j: cap * torch.tanh(score / cap)
    if case.alibi:
        slopes, ahead = operands.slopes(case, device), case.seq - (case.queries or case.seq)
        return lambda score, b, h, i, j: score - slopes[h] * (i + ahead - j).abs()
    if case.bias:
        added = operands.bias(case, device)
        return lambda score, b, h, i, j: score + added[0, h, i, j]
    return None


def attention(q, k, v, case):
    device = q.device.type
    mask = block_mask(case, device) if case.causal or case.window or case.masked else None
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    grouped = case.kv != case.heads
    return compiled()(q, k, v, score_mod(case, device), block_mask=mask, enable_gqa=grouped).transpose(1, 2)
