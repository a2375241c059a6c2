"""flash_attention.sparse against formulas of torch in float64, with gradients, ties and memory."""

import math

import pytest

torch = pytest.importorskip("torch")

from flash_attention import attention, sparse  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402


def draw(seed, *shape, device="cpu", dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def dense_scores(q, k, weights):
    """[batch, seq_q, seq_kv] in float64."""
    dots = torch.einsum("bihd,bjd->bihj", q.double(), k.double()).relu()
    return torch.einsum("bihj,bih->bij", dots, weights.double())


def hide(scores, causal, used=None):
    seq_q, seq_kv = scores.shape[1:]
    used = torch.full((len(scores),), seq_kv) if used is None else used.cpu()
    used = used.clamp(0, seq_kv)[:, None, None]
    i, j = torch.arange(seq_q)[:, None], torch.arange(seq_kv)
    hidden = j >= used
    if causal:
        hidden = hidden | (j > i + used - seq_q)
    return scores.masked_fill(hidden.to(scores.device), -math.inf)


@pytest.fixture
def small_temporaries(monkeypatch):
    """Several chunks of queries and of keys where the sizes are small, too."""
    monkeypatch.setattr(sparse, "_TEMPORARY", {"cpu": 4096, "cuda": 4096})
    monkeypatch.setattr(sparse, "_KEYS_AT_A_TIME", 31)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("seq_q", "seq_kv"), [(67, 67), (5, 101), (37, 13)])
@pytest.mark.parametrize("causal", [True, False])
def test_select_keys_are_the_best_of_the_formula(small_temporaries, device, dtype, seq_q, seq_kv, causal):
    q, k = draw(1, 2, seq_q, 3, 16, device=device, dtype=dtype), draw(2, 2, seq_kv, 16, device=device, dtype=dtype)
    weights = draw(3, 2, seq_q, 3, device=device, dtype=dtype)
    lists = sparse.select_keys(q, k, weights, 19, causal=causal)
    assert lists.shape == (2, seq_q, 1, 19)
    assert lists.dtype == torch.int32
    scores = hide(dense_scores(q, k, weights), causal)
    for b in range(2):
        for i in range(seq_q):
            row, seen = scores[b, i], int(torch.isfinite(scores[b, i]).sum())
            got = lists[b, i, 0].long()
            count = min(seen, 19)
            assert (got[:count] >= 0).all()
            assert (got[count:] == -1).all()
            assert len(set(got[:count].tolist())) == count
            mine = row[got[:count]]
            best = row.sort(descending=True).values[:count]
            torch.testing.assert_close(mine, best, atol=1e-4, rtol=1e-5)  # float32 may swap what differs by rounding


def test_equal_scores_go_by_index_and_nan_comes_first(small_temporaries):
    # small whole numbers: every score is exact, and relu makes many of them 0
    q = torch.randint(-2, 3, (1, 40, 2, 8), generator=torch.Generator().manual_seed(4)).float()
    k = torch.randint(-2, 3, (1, 90, 8), generator=torch.Generator().manual_seed(5)).float()
    weights = torch.tensor([1.0, -1.0]).expand(1, 40, 2)
    scores = hide(dense_scores(q, k, weights), True)
    expected = torch.sort(scores, dim=-1, descending=True, stable=True).indices[..., :50].int()
    got = sparse.select_keys(q, k, weights, 50)[:, :, 0]
    seen = torch.arange(50) < torch.isfinite(scores).sum(-1, keepdim=True)
    assert torch.equal(got, torch.where(seen, expected, -1))
    k[0, 17] = torch.nan
    got = sparse.select_keys(q, k, weights, 3, causal=False)[0, :, 0]
    assert (got[:, 0] == 17).all()
    got = sparse.select_keys(q, k, weights, 3)[0, :, 0]  # the first queries see 51 keys
    assert (got[:, 0] == 17).all()


def test_used_lengths_move_the_diagonal(device):
    q, k, weights = draw(1, 3, 9, 2, 8, device=device), draw(2, 3, 30, 8, device=device), draw(3, 3, 9, 2, device=device)
    used = torch.tensor([30, 11, 0], dtype=torch.int32, device=device)
    got = sparse.select_keys(q, k, weights, 6, seqused_kv=used)[:, :, 0]
    scores = hide(dense_scores(q, k, weights), True, used)
    expected = torch.sort(scores, dim=-1, descending=True, stable=True).indices[..., :6].int()
    seen = torch.arange(6, device=device) < torch.isfinite(scores).sum(-1, keepdim=True)
    assert torch.equal(got, torch.where(seen, expected, -1))


def hurtful_lists(seed, batch, seq_q, entries, keys):
    lists = torch.randint(-2, keys + 2, (batch, seq_q, 1, entries), generator=torch.Generator().manual_seed(seed)).int()
    lists[..., 0] = torch.iinfo(torch.int32).max
    lists[..., -1] = torch.iinfo(torch.int32).min
    lists[..., 1] = lists[..., 2]  # twice
    lists[0, 0] = -1  # a query without a key
    return lists


def test_indexer_scores_and_their_gradients(small_temporaries, device):
    q, k, weights = (
        draw(1, 2, 23, 3, 16, device=device),
        draw(2, 2, 41, 16, device=device),
        draw(3, 2, 23, 3, device=device),
    )
    lists = hurtful_lists(6, 2, 23, 13, 41).to(device)
    dscores = draw(7, *lists.shape, device=device)
    mine = [t.clone().requires_grad_() for t in (q, k, weights)]
    theirs = [t.double().requires_grad_() for t in (q, k, weights)]
    scores = sparse.indexer_scores(*mine, lists)
    is_key = (lists >= 0) & (lists < 41)
    expected = dense_scores(*theirs).gather(2, lists[:, :, 0].clamp(0, 40).long())[:, :, None]
    assert torch.equal(torch.isneginf(scores), ~is_key)
    torch.testing.assert_close(scores[is_key], expected[is_key].float(), atol=1e-4, rtol=1e-5)
    scores[is_key].backward(dscores[is_key])
    expected[is_key].backward(dscores[is_key].double())
    for got, want in zip(mine, theirs, strict=True):
        torch.testing.assert_close(got.grad, want.grad.float(), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("sink", [False, True])
def test_indexer_loss_and_its_gradient(small_temporaries, device, reduction, sink):
    q, k, v = (
        draw(1, 2, 23, 4, 16, device=device),
        draw(2, 2, 41, 2, 16, device=device),
        draw(3, 2, 41, 2, 16, device=device),
    )
    lists = hurtful_lists(8, 2, 23, 13, 41).to(device)
    index = [draw(4, 2, 23, 3, 8, device=device), draw(5, 2, 41, 8, device=device), draw(6, 2, 23, 3, device=device)]
    mine, theirs = [t.clone().requires_grad_() for t in index], [t.double().requires_grad_() for t in index]
    logits = draw(9, 4, device=device) if sink else None
    _, lse = attention(q, k, v, causal=True, key_indices=lists, sink=logits, return_lse=True)
    loss = sparse.indexer_loss(
        sparse.indexer_scores(*mine, lists), lists, q, k, lse=lse if sink else None, reduction=reduction
    )

    listed = lists[:, :, 0].clamp(0, 40).long()
    seen = ((lists >= 0) & (lists < 41))[:, :, 0] & (listed <= torch.arange(23, device=device)[:, None] + 18)
    attended = torch.einsum("bihd,bjhd->bhij", q.double(), k.double().repeat_interleave(2, 2)) / 4
    attended = attended.gather(3, listed[:, None].expand(-1, 4, -1, -1)).masked_fill(~seen[:, None], -math.inf)
    total = attended.logsumexp(-1, keepdim=True)
    if sink:
        total = torch.logaddexp(total, logits.double()[None, :, None, None])
    target = torch.where(seen[:, None], torch.exp(attended - total), 0).sum(1)
    some = seen.any(-1)
    target = target / target.sum(-1, keepdim=True).clamp(min=1e-300)
    scores = dense_scores(*theirs).gather(2, listed).masked_fill(~seen, -math.inf)
    predicted = torch.where(some[..., None], scores, 0).log_softmax(-1)
    rows = torch.where(seen, torch.special.xlogy(target, target) - target * torch.where(seen, predicted, 0), 0).sum(-1)
    expected = {"none": rows, "sum": rows.sum(), "mean": rows.sum() / some.sum()}[reduction]

    torch.testing.assert_close(loss, expected.float(), atol=1e-5, rtol=1e-4)
    loss.sum().backward()
    expected.sum().backward()
    for got, want in zip(mine, theirs, strict=True):
        torch.testing.assert_close(got.grad, want.grad.float(), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("size", [(1, 16), (8, 5), (64, 64)])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("causal", [True, False])
def test_block_scores_and_their_gradients(device, size, groups, causal):
    q, k = draw(1, 2, 45, 4, 16, device=device), draw(2, 2, 83, 2, 16, device=device)
    mine, theirs = [t.clone().requires_grad_() for t in (q, k)], [t.double().requires_grad_() for t in (q, k)]
    got = sparse.block_scores(*mine, size, groups=groups, causal=causal)
    wide_k = theirs[1].repeat_interleave(2, 2)
    expected = torch.empty(got.shape, dtype=torch.float64, device=device)
    for i, rows in enumerate(theirs[0].split(size[0], 1)):
        for j, columns in enumerate(wide_k.split(size[1], 1)):
            for g in range(groups):
                heads = slice(g * 4 // groups, (g + 1) * 4 // groups)
                query, key = rows[:, :, heads].mean((1, 2)), columns[:, :, heads].mean((1, 2))
                hidden = causal and j * size[1] > i * size[0] + rows.shape[1] - 1 + 38
                expected[:, i, g, j] = -math.inf if hidden else (query * key).sum(-1) / 4
    assert torch.equal(torch.isneginf(got), torch.isneginf(expected))
    seen = torch.isfinite(expected)
    torch.testing.assert_close(got[seen], expected[seen].float(), atol=1e-5, rtol=1e-4)
    got[seen].sum().backward()
    expected[seen].sum().backward()
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad.float(), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("first", "last"), [(0, 1), (1, 2), (0, 0)])
def test_select_blocks(small_temporaries, device, causal, first, last):
    q, k = draw(1, 2, 45, 4, 16, device=device), draw(2, 2, 83, 2, 16, device=device)
    size, topk = (4, 8), 7
    got = sparse.select_blocks(q, k, topk, size, causal=causal, first=first, last=last)
    scores = sparse.block_scores(q, k, size, causal=causal)  # held against its formula above
    assert got.shape == (2, 12, 2, topk)
    for place in [(b, i, g) for b in range(2) for i in range(12) for g in range(2)]:
        row = scores[place].clone()
        visible = int(torch.isfinite(row).sum())
        always = sorted({*range(min(first, visible)), *range(max(visible - last, 0), visible)})
        row[always] = -math.inf
        rest = torch.sort(row, descending=True, stable=True).indices.tolist()[: visible - len(always)]
        expected = (always + rest)[:topk]
        assert got[place].tolist() == expected + [-1] * (topk - len(expected))


class LargestTensor(TorchDispatchMode):
    elements = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() // tensor.element_size())
        return result


def test_no_tensor_is_as_large_as_queries_times_keys(monkeypatch):
    monkeypatch.setattr(sparse, "_TEMPORARY", {"cpu": 1 << 16, "cuda": 1 << 16})
    monkeypatch.setattr(sparse, "_KEYS_AT_A_TIME", 256)
    length = 2048
    q, k = draw(1, 1, length, 2, 8), draw(2, 1, length, 8)
    weights = draw(3, 1, length, 2).requires_grad_()
    wide, narrow = draw(4, 1, length, 4, 8), draw(5, 1, length, 2, 8)
    with LargestTensor() as largest:
        lists = sparse.select_keys(q, k, weights, 16)
        scores = sparse.indexer_scores(q, k, weights, lists)
        sparse.indexer_loss(scores, lists, wide, narrow).backward()
        sparse.select_blocks(wide, narrow, 4, (1, 64))
    assert weights.grad.isfinite().all()
    assert largest.elements <= length * length // 16


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (
            lambda q, k, w: sparse.select_keys(q[0], k, w, 4),
            r"q: got shape \[8, 2, 16\]; expected \[batch, seq_q, heads, dim\]",
        ),
        (lambda q, k, w: sparse.select_keys(q, k[..., :8], w, 4), r"k: got shape \[1, 8, 8\]; expected \[1, seq_kv, 16\]"),
        (lambda q, k, w: sparse.select_keys(q, k, w[:, :1], 4), r"weights: got shape \[1, 1, 2\]; expected \[1, 8, 2\]"),
        (lambda q, k, w: sparse.select_keys(q, k, w, 0), "topk: got 0"),
        (
            lambda q, k, w: sparse.select_keys(q, k, w, 4, seqused_kv=torch.ones(3)),
            r"seqused_kv: got shape \[3\]; expected \[1\]",
        ),
        (lambda q, k, w: sparse.indexer_scores(q, k, w, torch.zeros(1, 8, 1, 4)), r"key_indices: got torch.float32"),
        (lambda q, k, w: sparse.indexer_scores(q, k, w, torch.zeros(1, 8, 2, 4).int()), r"key_indices: got shape"),
        (lambda q, k, w: sparse.select_keys(q.numpy(), k, w, 4), "q: expected a tensor of torch, got ndarray"),
        (lambda q, k, w: sparse.select_blocks(q, q, 2, (1, 16), first=2), r"first \+ last: got 2 \+ 1; a list has 2"),
        (lambda q, k, w: sparse.select_blocks(q, q, 2, (1, 0)), r"key_block_size: got \(1, 0\)"),
        (lambda q, k, w: sparse.block_scores(q, q, (1, 4), groups=3), "groups: got 3; allowed are 1, heads_kv"),
        (lambda q, k, w: sparse.select_keys(q, k, w, 4, is_causal=True), "'is_causal'"),
    ],
)
def test_what_is_wrong_is_named(call, says):
    with pytest.raises((TypeError, ValueError), match=says):
        call(torch.zeros(1, 8, 2, 16), torch.zeros(1, 8, 16), torch.zeros(1, 8, 2))
