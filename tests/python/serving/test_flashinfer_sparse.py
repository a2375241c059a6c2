"""FlashInfer's wrappers over blocks, against dense attention under the same mask in float64."""

import math

import pytest
import torch
from flash_attention.flashinfer import BlockSparseAttentionWrapper, VariableBlockSparseAttentionWrapper


def want_of(q, k, v, mask, causal=False):
    """out [queries, heads, dim] and the lse of base 2; mask bool [heads, queries, keys]."""
    queries, heads, dim = q.shape
    keys = k.shape[0]
    group = heads // k.shape[1]
    if causal:
        mask = mask & torch.ones(queries, keys).tril(keys - queries).bool()
    q, k, v = q.double().cpu(), k.double().cpu().repeat_interleave(group, 1), v.double().cpu().repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k).masked_fill(~mask, -torch.inf) / math.sqrt(dim)
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - lse.clamp(min=-1e30)[..., None])
    return torch.einsum("hqk,khd->qhd", weights, v), lse.T / math.log(2)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sizes", [(8, 16), (1, 4), (64, 64)])
def test_blocks_in_compressed_rows(sizes, causal, device):
    rows, columns = (192 // sizes[0], 256 // sizes[1])
    torch.manual_seed(rows)
    seen = torch.rand(rows, columns) < 0.4
    seen[0] = False
    seen[1] = True
    indptr = torch.cat((torch.zeros(1), seen.sum(1).cumsum(0))).int()
    indices = seen.nonzero()[:, 1].int()
    q, k, v = torch.randn(192, 4, 32), torch.randn(256, 2, 32), torch.randn(256, 2, 32)
    wrapper = BlockSparseAttentionWrapper(torch.empty(1, device=device))
    wrapper.plan(indptr.to(device), indices.to(device), 192, 256, *sizes, 4, 2, 32, causal=causal)
    out, lse = wrapper.run(q.to(device), k.to(device), v.to(device), return_lse=True)
    mask = seen.repeat_interleave(sizes[0], 0).repeat_interleave(sizes[1], 1).expand(4, -1, -1)
    want, want_lse = want_of(q, k, v, mask, causal)
    torch.testing.assert_close(out.cpu().double(), want, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(lse.cpu().double(), want_lse, atol=2e-5, rtol=2e-5)
    assert torch.equal(wrapper.run(q.to(device), k.to(device), v.to(device)), out)


def test_blocks_of_different_sizes(device):
    torch.manual_seed(3)
    seen = torch.rand(2, 5, 4) < 0.5
    seen[0, 2] = False
    of_rows = torch.tensor([[7, 0, 9, 3, 11], [6, 6, 6, 6, 6]]).int()
    of_columns = torch.tensor([[10, 20, 0, 15], [9, 9, 9, 18]]).int()
    q, k, v = torch.randn(4, 30, 16), torch.randn(2, 45, 16), torch.randn(2, 45, 16)
    wrapper = VariableBlockSparseAttentionWrapper(torch.empty(1, device=device))
    wrapper.plan(seen.to(device), of_rows.to(device), of_columns.to(device), 4, 2, 16)
    out, lse = wrapper.run(q.to(device), k.to(device), v.to(device), return_lse=True)
    masks = [seen[g].repeat_interleave(of_rows[g], 0).repeat_interleave(of_columns[g], 1) for g in range(2)]
    mask = torch.stack(masks).repeat_interleave(2, 0)
    want, want_lse = want_of(*(x.transpose(0, 1) for x in (q, k, v)), mask)
    torch.testing.assert_close(out.cpu().double(), want.transpose(0, 1), atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(lse.cpu().double(), want_lse.T, atol=2e-5, rtol=2e-5)


def test_refusals():
    wrapper = BlockSparseAttentionWrapper(torch.empty(1))
    starts, blocks = torch.tensor([0, 1, 2]).int(), torch.tensor([0, 0]).int()
    with pytest.raises(RuntimeError, match="run: expected a call of plan"):
        wrapper.run(torch.zeros(8, 1, 8), torch.zeros(4, 1, 8), torch.zeros(4, 1, 8))
    for name, call in {
        "R": (starts, blocks, 8, 4, 3, 4),
        "C": (starts, blocks, 8, 4, 4, 3),
        "indptr": (starts[:2], blocks, 8, 4, 4, 4),
    }.items():
        with pytest.raises(ValueError, match=f"^{name}: "):
            wrapper.plan(*call, 1, 1, 8)
    with pytest.raises(NotImplementedError, match=r"^mask: "):
        wrapper.plan(starts, blocks, 8, 4, 4, 4, 1, 1, 8, mask=torch.ones(2, 4, 4))
    with pytest.raises(NotImplementedError, match=r"^pos_encoding_mode: "):
        wrapper.plan(starts, blocks, 8, 4, 4, 4, 1, 1, 8, pos_encoding_mode="ALIBI")
    wrapper.plan(starts, blocks, 8, 4, 4, 4, 1, 1, 8)
    with pytest.raises(ValueError, match=r"^k: got shape \[5, 1, 8\]"):
        wrapper.run(torch.zeros(8, 1, 8), torch.zeros(5, 1, 8), torch.zeros(5, 1, 8))
