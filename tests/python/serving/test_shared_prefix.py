"""Shared prefixes: attention over prefix and own keys, as if they lay in one sequence; values and gradients in float64."""

import pytest
import reference
import torch
from flash_attention import attention_over_cache, masks, shared_pages, shared_prefix_attention
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


def int32(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


def over_parts(q, parts, **options):
    """(out, lse) of each sequence over its parts of keys, end to end, in float64. The last part may be causal."""
    results = []
    for b, of_b in enumerate(parts):
        keys = [torch.cat([part[n] for part in of_b])[None].double() for n in range(2)]
        results.append(reference.attention(q[b : b + 1].double(), *keys, **options))
    return [torch.cat(part) for part in zip(*results, strict=True)]


@pytest.mark.parametrize("in_pages", [False, True], ids=["dense", "pages"])
@pytest.mark.parametrize("seq_q", [1, 3])
def test_groups_in_any_order(in_pages, seq_q, device):
    """Groups of any size in any order, one that nobody names, and sequences without a prefix."""
    groups, prefix_lengths, lengths = [2, -1, 0, 2, 7, 0, 2], [30, 11, 17], [9, 5, 6, 8, 3, 9, 4]
    k, v, table, prefix = cache_in_pages(prefix_lengths, 8, 2, 32, device, seed=3)
    if not in_pages:
        k, v = (torch.full((3, 32, 2, 32), float("nan"), device=device) for _ in range(2))
        for group, (keys, values) in enumerate(prefix):
            k[group, : len(keys)], v[group, : len(keys)] = keys, values
    own = [torch.randn(7, 9, 2, 32, device=device) for _ in range(2)]
    q = torch.randn(7, seq_q, 4, 32, device=device)
    out, lse = shared_prefix_attention(
        q, k, v, *own, prefix_lengths=int32(prefix_lengths, device), prefix_groups=int32(groups, device),
        prefix_table=table if in_pages else None, seqused_kv=int32(lengths, device), return_lse=True,
    )  # fmt: skip
    parts = []
    for b, group in enumerate(groups):
        mine = [of[b][: lengths[b]] for of in own]
        parts.append([prefix[group], mine] if 0 <= group < 3 else [mine])
    want, want_lse = over_parts(q, parts, causal=True)
    torch.testing.assert_close(out.double(), want, **CLOSE)
    torch.testing.assert_close(lse.double(), want_lse, **CLOSE)


def test_levels(device):
    """A system prompt of all, prompts that begin with it, answers: two levels, one by groups, and a tree of drafts."""
    system, prompts, lengths = [21], [13, 1, 8], [10, 12, 9, 11]
    pools = [cache_in_pages(of, 4, 2, 32, device, seed=seed) for seed, of in enumerate((system, prompts, lengths))]
    (k0, v0, table0, rows0), (k1, v1, table1, rows1), (k, v, table, rows) = pools
    groups, sink = [1, 0, 1, 2], torch.randn(4, device=device)
    q = torch.randn(4, 3, 4, 32, device=device)
    parents = torch.tensor([[-1, 0, 0], [-1, 0, 1], [-1, -1, -1], [-1, 0, 0]], device=device)
    out = shared_prefix_attention(
        q, [k0, k1], [v0, v1], k, v, prefix_table=[table0, table1], prefix_groups=[None, int32(groups, device)],
        prefix_lengths=[int32(system, device), int32(prompts, device)], page_table=table,
        seqused_kv=int32(lengths, device), sink=sink, bit_mask=masks.draft_tree(parents),
    )  # fmt: skip
    for b, group in enumerate(groups):
        keys = [torch.cat([rows0[0][n], rows1[group][n], rows[b][n]])[None].double() for n in range(2)]
        visible = torch.ones(3, keys[0].shape[1]).bool()
        visible[:, -3:] = torch.eye(3).bool()
        for draft, parent in enumerate(parents[b].tolist()):
            if parent >= 0:
                visible[draft, -3:] |= visible[parent, -3:]
        want, _ = reference.attention(q[b : b + 1].double(), *keys, mask=visible.to(device), sink=sink.double())
        torch.testing.assert_close(out[b : b + 1].double(), want, **CLOSE)


def beams(steps, width, page, device, seed=0):
    """A beam search over pages: (pages k, v, table, lengths, rows of each beam). Beams fork, so that tables share pages."""
    generator = torch.Generator().manual_seed(seed)
    pages = [torch.full((200, page, 2, 32), float("nan")) for _ in range(2)]
    free = torch.randperm(200, generator=generator).tolist()
    tables, lengths = [[] for _ in range(width)], [0] * width
    prompt = 2 * page + 3

    def write(beam):
        if lengths[beam] % page == 0:
            tables[beam].append(free.pop())
        for store in pages:
            store[tables[beam][-1], lengths[beam] % page] = torch.randn(2, 32, generator=generator)
        lengths[beam] += 1

    def fork(source, beam):  # the last page, if it is not full, is copied
        tables[beam], lengths[beam] = list(tables[source]), lengths[source]
        if lengths[beam] % page:
            tables[beam][-1] = free.pop()
            for store in pages:
                store[tables[beam][-1]] = store[tables[source][-1]]

    for _ in range(prompt):
        write(0)
    for beam in range(1, width):
        fork(0, beam)
    for _ in range(steps):
        for beam in range(width):
            write(beam)
        source, beam = torch.randint(width, (2,), generator=generator).tolist()
        if source != beam:
            fork(source, beam)
    width_of_table = max(map(len, tables)) + 2
    table = torch.tensor([of + [-7] * (width_of_table - len(of)) for of in tables], dtype=torch.int32)
    rows = [
        [torch.cat([store[entry] for entry in of])[:length] for store in pages]
        for of, length in zip(tables, lengths, strict=True)
    ]
    return *(store.to(device) for store in pages), table.to(device), int32(lengths, device), rows


@pytest.mark.parametrize("steps", [0, 1, 11])
def test_beams_that_share_pages(steps, device):
    """Two searches in one batch, their beams interleaved, and a sequence alone."""
    page = 8
    k, v, table, lengths, rows = beams(steps, 4, page, device)
    groups = int32([0, 0, 0, 0], device)
    shared = shared_pages(table, lengths, groups, num_groups=2, page_size=page)
    assert int(shared.prefix_lengths[0]) >= 2 * page and int(shared.prefix_lengths[1]) == 0
    assert (shared.seqused_kv > 0).all()
    q = torch.randn(4, 1, 4, 32, device=device)
    out = shared_prefix_attention(q, k, v, k, v, prefix_groups=groups, **shared._asdict())
    want, _ = over_parts(q, [[[part.to(device) for part in of]] for of in rows])
    torch.testing.assert_close(out.double(), want, **CLOSE)
    torch.testing.assert_close(out, attention_over_cache(q, k, v, page_table=table, seqused_kv=lengths), **CLOSE)
    alone = shared_pages(table, lengths, int32([0, 1, -1, 5], device), num_groups=2, page_size=page)
    assert (alone.prefix_lengths == 0).all() and (alone.seqused_kv == lengths).all()
    assert (alone.page_table == table).all()


@pytest.mark.gpu
def test_a_graph_stays_right_with_other_groups():
    """Groups, lengths and tables change between replays."""
    device, page = "cuda", 8
    k, v, table, lengths, _ = beams(5, 4, page, device)
    groups, q = int32([0, 0, 0, 0], device), torch.randn(4, 1, 4, 32, device=device)

    def step():
        shared = shared_pages(table, lengths, groups, num_groups=4, page_size=page)
        return shared_prefix_attention(q, k, v, k, v, prefix_groups=groups, **shared._asdict())

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for other, cut in (([1, 0, 1, 0], 0), ([3, -1, 3, 3], 2), ([0, 1, 2, 3], 1)):
        groups.copy_(torch.tensor(other))
        lengths.sub_(cut)
        graph.replay()
        torch.testing.assert_close(out, attention_over_cache(q, k, v, page_table=table, seqused_kv=lengths), **CLOSE)


def test_refusals():
    q, keys = torch.randn(4, 1, 2, 16), torch.randn(3, 5, 2, 16)
    with pytest.raises(ValueError, match="prefix_k: has 3 groups; allowed are those that divide the batch, 4"):
        shared_prefix_attention(q, keys, keys, q, q)
    with pytest.raises(ValueError, match=r"prefix_v: got shape \[5, 2, 16\]"):
        shared_prefix_attention(q, keys[:1], keys[0], q, q)
    with pytest.raises(ValueError, match="prefix_v: got 1 of them; expected a list of 2, one for each level of prefix_k"):
        shared_prefix_attention(q, [keys, keys], [keys], q, q)
    with pytest.raises(ValueError, match=r"prefix_groups: got shape \[3\]; expected \[4\]"):
        shared_prefix_attention(q, keys, keys, q, q, prefix_groups=torch.zeros(3, dtype=torch.int32))
    with pytest.raises(ValueError, match="prefix_lengths: got Tensor; expected a list of 1"):
        shared_prefix_attention(q, [keys], [keys], q, q, prefix_lengths=torch.zeros(3, dtype=torch.int32))
