"""Shared prefixes: attention over prefix and own keys, as if they lay in one sequence; values and gradients in float64."""

import pytest
import reference
import torch
from flash_attention import shared_prefix_attention
from test_kv_cache import cache_in_pages

CLOSE = {"atol": 1e-5, "rtol": 1e-4}


def whole(q, prefix, own, prefix_lengths, lengths, sink=None, **options):
    """(out, lse) of each sequence over both, end to end, in float64."""
    results = []
    for b in range(len(q)):
        group = b * len(prefix[0]) // len(q)
        keys = [
            torch.cat([p[group, : prefix_lengths[group]], o[b][: lengths[b]]])[None].double()
            for p, o in zip(prefix, own, strict=True)
        ]
        results.append(reference.attention(q[b : b + 1].double(), *keys, sink=sink, **options))
    return [torch.cat(parts) for parts in zip(*results, strict=True)]


@pytest.mark.parametrize("groups, seq_q", [(1, 1), (2, 1), (2, 3), (4, 5)])
def test_values_and_gradients(groups, seq_q, device):
    torch.manual_seed(groups)
    q = torch.randn(4, seq_q, 4, 16, device=device, requires_grad=True)
    prefix = [torch.randn(groups, 20, 2, 16, device=device, requires_grad=True) for _ in range(2)]
    own = [torch.randn(4, 9, 2, 16, device=device, requires_grad=True) for _ in range(2)]
    sink = torch.randn(4, device=device, requires_grad=True)
    prefix_lengths, lengths = ([20, 7, 1, 13] * 2)[:groups], [9, 5, 6, 8]
    ints = {"dtype": torch.int32, "device": device}
    out, lse = shared_prefix_attention(
        q, *prefix, *own, prefix_lengths=torch.tensor(prefix_lengths, **ints), seqused_kv=torch.tensor(lengths, **ints),
        sink=sink, softcap=7.0, scale=0.5, return_lse=True,
    )  # fmt: skip
    want, want_lse = whole(q, prefix, own, prefix_lengths, lengths, sink.double(), softcap=7.0, scale=0.5, causal=True)
    torch.testing.assert_close(out.double(), want, **CLOSE)
    torch.testing.assert_close(lse.double(), want_lse, **CLOSE)
    leaves = [q, *prefix, *own, sink]
    weight = torch.randn_like(out)
    found = torch.autograd.grad((out * weight).sum() + lse.sum(), leaves)
    expected = torch.autograd.grad((want * weight.double()).sum() + want_lse.sum(), leaves)
    for gradient, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient, exact, atol=1e-4, rtol=1e-3)


def test_own_keys_in_pages(device):
    lengths = [33, 4, 0, 17]
    k, v, table, rows = cache_in_pages(lengths, 16, 2, 32, device)
    prefix = [torch.randn(2, 50, 2, 32, device=device) for _ in range(2)]
    q = torch.randn(4, 1, 8, 32, device=device)
    used = torch.tensor(lengths, dtype=torch.int32, device=device)
    out = shared_prefix_attention(q, *prefix, k, v, seqused_kv=used, page_table=table)
    want, _ = whole(q, prefix, list(zip(*rows, strict=True)), [50, 50], lengths)
    torch.testing.assert_close(out.double(), want, **CLOSE)
    out = shared_prefix_attention(q.requires_grad_(), *prefix, k, v, seqused_kv=used, page_table=table)
    with pytest.raises(RuntimeError, match="has no gradients"):  # that of the prefix alone would be a part of it
        out.sum().backward()


def test_refusals():
    q, keys = torch.randn(4, 1, 2, 16), torch.randn(3, 5, 2, 16)
    with pytest.raises(ValueError, match="prefix_k: has 3 groups; allowed are those that divide the batch, 4"):
        shared_prefix_attention(q, keys, keys, q, q)
    with pytest.raises(ValueError, match=r"prefix_v: got shape \[5, 2, 16\]"):
        shared_prefix_attention(q, keys[:1], keys[0], q, q)
