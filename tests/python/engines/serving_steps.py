"""Steps of serving that every engine goes through, and what comes out of them: attention over all tokens in fp64."""

import torch

HEADS, KV_HEADS, DIM, PAGE = 4, 2, 32, 4


def exact(q, k, v, window=None, softcap=0.0, slopes=None, sink=None, scale=None):
    """The last len(q) positions over all of k, v: [queries, heads, dim] in fp64, causal."""
    heads, dim = q.shape[1:]
    k, v = (x.double().repeat_interleave(heads // k.shape[1], 1) for x in (k, v))
    s = torch.einsum("qhd,khd->hqk", q.double(), k) * (dim**-0.5 if scale is None else scale)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    distance = torch.arange(len(q))[:, None] + len(k) - len(q) - torch.arange(len(k))[None]
    if slopes is not None:
        s = s - slopes.double()[:, None, None] * distance.abs()
    hidden = distance < 0
    if window is not None:
        hidden = hidden | (distance >= window)
    s = s.masked_fill(hidden, -torch.inf)
    if sink is not None:
        s = torch.cat([s, sink.double()[:, None, None].expand(-1, len(q), 1)], -1)
    p = s.softmax(-1)[..., : len(k)]
    return torch.einsum("hqk,khd->qhd", p, v)


class Sequence:
    """Tokens of one request, and the pages that they were given."""

    def __init__(self, pages, count, kv_heads=KV_HEADS, dim=DIM, dim_v=DIM):
        self.pages = pages
        self.q = torch.randn(count, HEADS, dim)
        self.k, self.v = torch.randn(count, kv_heads, dim), torch.randn(count, kv_heads, dim_v)

    def slots(self, begin, end):
        return [self.pages[i // PAGE] * PAGE + i % PAGE for i in range(begin, end)]


def sequences(**sizes):
    return [Sequence(*pages, **sizes) for pages in (([5, 2, 9], 11), ([1], 4), ([7, 3], 8))]


# Of each sequence in each step: tokens that are in the cache, and tokens after the step.
PREFILL = [(0, 6), (0, 2), (0, 1)]
MIXED = [(6, 8), (2, 3), (1, 5)]
DECODE = [(8, 9), (3, 4), (5, 6)]
VERIFY = [(9, 11), (2, 4), (6, 8)]  # two drafted tokens a sequence; one sequence has dropped a token and drafts again
STEPS = {"prefill": PREFILL, "mixed": MIXED, "decode": DECODE, "verify": VERIFY}


def batch_of(everything, step):
    """(starts, (q, k, v) of the new tokens, their slots, lengths after the step)."""
    starts = torch.tensor([0, *torch.tensor([end - begin for begin, end in step]).cumsum(0)], dtype=torch.int32)
    rows = [torch.cat([getattr(s, name)[b:e] for s, (b, e) in zip(everything, step, strict=True)]) for name in "qkv"]
    slots = [slot for s, (b, e) in zip(everything, step, strict=True) for slot in s.slots(b, e)]
    return starts, rows, torch.tensor(slots), torch.tensor([end for _, end in step], dtype=torch.int32)


def expected_of(everything, step, **options):
    return torch.cat([exact(s.q[b:e], s.k[:e], s.v[:e], **options) for s, (b, e) in zip(everything, step, strict=True)])


OPTIONS = [
    {},
    {"window": 3},
    {"softcap": 5.0},
    {"slopes": torch.tensor([0.5, 0.25, 0.125, 0.1])},
    {"sink": torch.tensor([0.5, -1.0, 2.0, 0.0])},
]


def name_of(options):
    return next(iter(options), "plain")
