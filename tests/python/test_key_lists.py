"""key_indices and key_blocks against a dense formula in float64, with gradients, and what is refused."""

import math

import pytest

torch = pytest.importorskip("torch")

import flash_attention  # noqa: E402
from flash_attention import attention, attention_over_cache, attention_packed  # noqa: E402


def times_of(entries, count, keys, block):
    """How often a list names each key."""
    named = [int(entry) for entry in entries[:count] if 0 <= int(entry) * block < keys]
    times = torch.zeros(keys, dtype=torch.float64)
    for entry in named if block == 1 else set(named):
        times[entry * block : (entry + 1) * block] += 1
    return times


def formula(q, k, v, lists, counts, queries=1, block=1, causal=False, softcap=0.0, sink=None):
    """One sequence: out and lse."""
    seq_q, heads, dim = q.shape
    keys, heads_kv = k.shape[:2]
    out, lse = [], []
    for i in range(seq_q):
        for h in range(heads):
            g = {1: 0, heads_kv: h // (heads // heads_kv), heads: h}[lists.shape[1]]
            row = i // queries
            count = lists.shape[2] if counts is None else max(0, min(int(counts[row, g]), lists.shape[2]))
            times = times_of(lists[row, g], count, keys, block)
            if causal:
                times[i + keys - seq_q + 1 :] = 0
            score = k[:, h // (heads // heads_kv)].double() @ q[i, h].double() / math.sqrt(dim)
            score = softcap * torch.tanh(score / softcap) if softcap else score
            seen = times > 0
            terms = [score[seen] + times[seen].log()] + ([] if sink is None else [sink[h].double()[None]])
            total = (
                torch.logsumexp(torch.cat(terms), 0) if seen.any() or sink is not None else torch.tensor(-math.inf).double()
            )
            weight = times[seen] * torch.exp(score[seen] - total) if seen.any() else times[seen]
            out.append(weight @ v[:, h // (heads // heads_kv)].double()[seen])
            lse.append(total)
    return torch.stack(out).view(seq_q, heads, -1), torch.stack(lse).view(seq_q, heads).T


def draw(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32, requires_grad=True)


def draw_lists(seed, units, *shape):
    generator = torch.Generator().manual_seed(seed)
    lists = torch.randint(-2, units + 2, shape, generator=generator).int()
    lists[..., 0] = torch.iinfo(torch.int32).max
    lists[..., -1] = torch.iinfo(torch.int32).min
    lists[..., 1] = lists[..., 2]
    lists[0, 0] = -1
    return lists, torch.randint(-1, shape[-1] + 3, shape[:-1], generator=generator).int()


CASES = {
    "keys": {"heads": 1},
    "keys_by_key_head": {"heads": 2, "causal": True, "counts": True},
    "keys_softcap_sink": {"heads": 1, "softcap": 3.0, "sink": True},
    "blocks": {"heads": 4, "size": (8, 5), "counts": True},
    "blocks_causal": {"heads": 2, "size": (1, 16), "causal": True, "sink": True},
    "blocks_wide": {"heads": 1, "size": (64, 1000)},
}


@pytest.mark.parametrize("name", CASES)
def test_is_the_formula_with_gradients(name):
    case = {"size": None, "causal": False, "counts": False, "softcap": 0.0, "sink": False, **CASES[name]}
    q, k, v = draw(1, 2, 29, 4, 24), draw(2, 2, 53, 2, 24), draw(3, 2, 53, 2, 16)
    queries, block = case["size"] or (1, 1)
    rows = -(-29 // queries)
    lists, counts = draw_lists(5, -(-53 // block), 2, rows, case["heads"], 9)
    counts = counts if case["counts"] else None
    sink = draw(7, 4) if case["sink"] else None
    chosen = {"key_blocks": lists, "key_block_size": case["size"]} if case["size"] else {"key_indices": lists}
    rest = {"causal": case["causal"], "softcap": case["softcap"], "sink": sink}
    out, lse = attention(q, k, v, **chosen, key_counts=counts, **rest, return_lse=True)
    expected = [
        formula(q[b], k[b], v[b], lists[b], None if counts is None else counts[b], queries, block, **rest) for b in range(2)
    ]
    wanted, wanted_lse = (torch.stack(parts) for parts in zip(*expected, strict=True))
    torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=1e-5, atol=2e-6)
    inputs = [q, k, v] + ([] if sink is None else [sink])
    weight, of_lse = draw(8, 2, 29, 4, 16).detach(), draw(9, 2, 4, 29).detach()

    def total(out, lse):
        return (out * weight).sum() + (torch.where(lse.isinf(), 0, lse) * of_lse).sum()

    for got, want in zip(
        torch.autograd.grad(total(out, lse), inputs), torch.autograd.grad(total(wanted, wanted_lse), inputs), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_packed_and_pages():
    q, k, v = draw(1, 20, 4, 16).detach(), draw(2, 40, 2, 16).detach(), draw(3, 40, 2, 16).detach()
    starts, starts_kv = torch.tensor([0, 7, 7, 20]).int(), torch.tensor([0, 15, 15, 40]).int()
    lists, _ = draw_lists(4, 25, 20, 2, 8)
    out = attention_packed(q, k, v, starts, starts_kv, key_indices=lists)
    for b in range(3):
        rows, keys = slice(starts[b], starts[b + 1]), slice(starts_kv[b], starts_kv[b + 1])
        if starts[b] < starts[b + 1]:
            want, _ = formula(q[rows], k[keys], v[keys], lists[rows], None)
            torch.testing.assert_close(out[rows].double(), want, rtol=1e-5, atol=2e-6)
    table = torch.randperm(10).int().view(1, 10)
    pages_k, pages_v = (x.view(10, 4, 2, 16)[table[0].argsort()].contiguous() for x in (k, v))
    lists, _ = draw_lists(6, 40, 1, 20, 1, 12)
    used = torch.tensor([33]).int()
    got = attention_over_cache(q[None], pages_k, pages_v, page_table=table, seqused_kv=used, key_indices=lists)
    want, _ = formula(q, k[:33], v[:33], lists[0], None)
    torch.testing.assert_close(got[0].double(), want, rtol=1e-5, atol=2e-6)


def test_memory_and_nan_of_unlisted_keys():
    q, k, v = draw(1, 1, 9, 2, 16), draw(2, 1, 50, 2, 16), draw(3, 1, 50, 2, 16)
    lists = torch.randint(0, 20, (1, 9, 1, 12)).int()
    out = attention(q, k, v, key_indices=lists)
    with torch.no_grad():
        k[:, 20:], v[:, 20:] = math.nan, math.inf
    assert torch.equal(attention(q, k, v, key_indices=lists), out)
    dq, dk, dv = torch.autograd.grad(attention(q, k, v, key_indices=lists).sum(), (q, k, v))
    assert dq.isfinite().all() and (dk[:, 20:] == 0).all() and (dv[:, 20:] == 0).all()


REFUSALS = {
    "both": (lambda a: {"key_indices": a, "key_blocks": a, "key_block_size": (1, 4)}, "key_blocks"),
    "dtype": (lambda a: {"key_indices": a.long()}, "key_indices"),
    "rank": (lambda a: {"key_indices": a[..., 0]}, "key_indices"),
    "rows": (lambda a: {"key_indices": a[:, 1:].contiguous()}, "key_indices"),
    "heads": (lambda a: {"key_indices": a.expand(-1, -1, 3, -1).contiguous()}, "key_indices"),
    "strides": (lambda a: {"key_indices": a.transpose(1, 3).contiguous().transpose(1, 3)}, "key_indices"),
    "counts_alone": (lambda a: {"key_counts": a[..., 0].contiguous()}, "key_counts"),
    "counts": (lambda a: {"key_indices": a, "key_counts": a[:, 1:, :, 0].contiguous()}, "key_counts"),
    "no_size": (lambda a: {"key_blocks": a}, "key_block_size"),
    "size_of_keys": (lambda a: {"key_indices": a, "key_block_size": (1, 4)}, "key_block_size"),
    "size_of_0": (lambda a: {"key_blocks": a, "key_block_size": (1, 0)}, "key_block_size"),
    "size": (lambda a: {"key_blocks": a, "key_block_size": 4}, "key_block_size"),
    "standard": (lambda a: {"key_indices": a, "kernel": "standard"}, "key_indices"),
    "invariant": (lambda a: {"key_indices": a, "invariant": True}, "key_indices"),
    "program": (lambda a: {"key_indices": a, "mask_mod": lambda b, h, i, j: i >= j}, "key_indices"),
    "hidden_rows": (lambda a: {"key_indices": a, "hidden_rows": torch.zeros(1, 1, 30, 1).int()}, "key_indices"),
    "bias": (lambda a: {"key_indices": a, "bias": torch.zeros(1, 1, 9, 30, requires_grad=True)}, "bias"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refuses_by_name(name):
    given, argument = REFUSALS[name]
    q, k = draw(1, 1, 9, 8, 16), draw(2, 1, 30, 2, 16)
    with pytest.raises((TypeError, ValueError, NotImplementedError), match=f"^{argument}: "):
        attention(q, k, k, **given(torch.zeros(1, 9, 1, 5).int()))


def test_the_planner_names_its_kernel():
    assert {"cpu/listed", "forward/listed", "backward/listed"} <= {kernel["name"] for kernel in flash_attention.kernels()}
