"""FlashInfer's wrappers over blocks, against dense attention under the same mask in float64."""

import math

import numpy
import pytest
import torch
from flash_attention import flashinfer
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


def test_blocks_in_the_old_order(device):
    """forward() replaces soft cap and scale of the plan; positions of other kinds are refused."""
    torch.manual_seed(4)
    seen = torch.tensor([[True, False, True], [False, True, True]])
    indptr, indices = torch.tensor([0, 2, 4]).int(), torch.tensor([0, 2, 1, 2]).int()
    q, k, v = torch.randn(32, 4, 16), torch.randn(48, 2, 16), torch.randn(48, 2, 16)
    mask = seen.repeat_interleave(16, 0).repeat_interleave(16, 1).expand(4, -1, -1)
    scores = torch.einsum("qhd,khd->hqk", q.double(), k.double().repeat_interleave(2, 1)) * 0.7
    p = (3 * torch.tanh(scores / 3)).masked_fill(~mask, -torch.inf).softmax(-1)
    want = torch.einsum("hqk,khd->qhd", p, v.double().repeat_interleave(2, 1))
    fixed = BlockSparseAttentionWrapper(torch.empty(1, device=device))
    fixed.plan(indptr.to(device), indices.to(device), 32, 48, 16, 16, 4, 2, 16)
    sizes = [torch.full((2, n), 16, dtype=torch.int32, device=device) for n in (2, 3)]
    of_any_size = VariableBlockSparseAttentionWrapper(torch.empty(1, device=device))
    of_any_size.plan(seen.expand(2, -1, -1).to(device), *sizes, 4, 2, 16)
    given = [x.to(device) for x in (q, k, v)]
    found = fixed.forward(*given, logits_soft_cap=3.0, sm_scale=0.7)
    torch.testing.assert_close(found.cpu().double(), want, atol=2e-5, rtol=2e-5)
    found = of_any_size.forward(*(x.transpose(0, 1) for x in given), logits_soft_cap=3.0, sm_scale=0.7)
    torch.testing.assert_close(found.transpose(0, 1).cpu().double(), want, atol=2e-5, rtol=2e-5)
    for wrapper in (fixed, of_any_size):
        with pytest.raises(NotImplementedError, match="pos_encoding_mode: got 'ALIBI'"):
            wrapper.forward(*given, pos_encoding_mode="ALIBI")


@pytest.mark.parametrize("packed", [False, True])
def test_a_mask_within_blocks(packed, device):
    """Of a row that sees no block, of a block of which nothing is seen, of blocks in no order and one past the end."""
    torch.manual_seed(4)
    starts, blocks = torch.tensor([0, 3, 3, 5]).int(), torch.tensor([4, 0, 2, 1, 9]).int()
    parts = torch.rand(5, 6, 8) < 0.4
    parts[2] = False
    q, k, v = torch.randn(18, 4, 16), torch.randn(40, 2, 16), torch.randn(40, 2, 16)
    k[24:32] = v[24:32] = torch.nan  # in no list
    bits = torch.from_numpy(numpy.packbits(parts.flatten().numpy(), bitorder="little")).to(device)
    given = {"packed_mask": bits, "mask": torch.ones(1)} if packed else {"mask": parts.to(device)}
    wrapper = BlockSparseAttentionWrapper(torch.empty(1, device=device))
    wrapper.plan(starts.to(device), blocks.to(device), 18, 40, 6, 8, 4, 2, 16, **given)
    out, lse = wrapper.run(q.to(device), k.to(device), v.to(device), return_lse=True)
    mask = torch.zeros(18, 40, dtype=torch.bool)
    for part, row, block in zip(parts, (0, 0, 0, 2, 2), (4, 0, 2, 1, 9), strict=True):
        if block < 5:
            mask[row * 6 : row * 6 + 6, block * 8 : block * 8 + 8] = part
    want, want_lse = want_of(q, k.nan_to_num(), v.nan_to_num(), mask[None].expand(4, -1, -1))
    torch.testing.assert_close(out.cpu().double(), want, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(lse.cpu().double(), want_lse, atol=2e-5, rtol=2e-5)


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
    with pytest.raises(ValueError, match=r"^mask: got shape \[2, 4, 3\]; expected \[2, 4, 4\]"):
        wrapper.plan(starts, blocks, 8, 4, 4, 4, 1, 1, 8, mask=torch.ones(2, 4, 3))
    with pytest.raises(ValueError, match=r"^packed_mask: has 24 bits; expected at least 32"):
        wrapper.plan(starts, blocks, 8, 4, 4, 4, 1, 1, 8, packed_mask=torch.ones(3, dtype=torch.uint8))
    with pytest.raises(NotImplementedError, match=r"^pos_encoding_mode: "):
        wrapper.plan(starts, blocks, 8, 4, 4, 4, 1, 1, 8, pos_encoding_mode="ALIBI")
    wrapper.plan(starts, blocks, 8, 4, 4, 4, 1, 1, 8)
    with pytest.raises(ValueError, match=r"^k: got shape \[5, 1, 8\]"):
        wrapper.run(torch.zeros(8, 1, 8), torch.zeros(5, 1, 8), torch.zeros(5, 1, 8))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("paged", [False, True])
def test_msa(causal, paged, device):
    """Blocks by key head and query, some of them twice, none, or out of range; lengths that are no multiples of a block."""
    torch.manual_seed(causal + 2 * paged)
    of_q, of_k, heads, heads_kv, dim = [5, 0, 40], [300, 17, 513], 4, 2, 24
    starts_q, starts_k = (torch.tensor([0, *lengths]).cumsum(0).int() for lengths in (of_q, of_k))
    q, k, v = torch.randn(45, heads, dim), torch.randn(830, heads_kv, dim), torch.randn(830, heads_kv, dim)
    chosen = torch.randint(-2, 6, (heads_kv, 45, 3), dtype=torch.int32)
    chosen[:, 3], chosen[:, 4, 1] = -1, chosen[:, 4, 0]
    chosen[0, 7, 2], chosen[1, 7, 2] = torch.iinfo(torch.int32).max, torch.iinfo(torch.int32).min
    named = [x.to(device) for x in (chosen, starts_q)]
    if paged:
        packed = torch.full((10, heads_kv, 128, 2 * dim), math.nan)  # both in a row, as servers keep them
        table, unused = torch.full((3, 5), 10**6, dtype=torch.int32), iter(torch.randperm(10).tolist())
        for b, length in enumerate(of_k):
            for page in range(-(-length // 128)):
                table[b, page] = next(unused)
                rows = slice(starts_k[b] + 128 * page, starts_k[b] + min(128 * page + 128, length))
                both = torch.cat((k[rows], v[rows]), 2).transpose(0, 1)
                packed[table[b, page], :, : both.shape[1]] = both
        keys = [x.to(device) for x in packed.split(dim, 3)]
        more = {"page_table": table.clamp(max=9).to(device), "seqused_k": torch.tensor(of_k).int().to(device)}
    else:
        keys, more = [k.to(device), v.to(device)], {"cu_seqlens_k": starts_k.to(device)}
    out, lse = flashinfer.msa_ops.msa_sparse_attention(
        q.to(device), *keys, *named, causal=causal, return_softmax_lse=True, v_global_scale=0.5, **more
    )
    for b, length in enumerate(of_k):
        rows, columns = slice(starts_q[b], starts_q[b + 1]), slice(starts_k[b], starts_k[b + 1])
        if of_q[b] == 0:
            continue
        block = torch.arange(length) // 128
        mask = (chosen[:, rows, :, None] == block).any(2).repeat_interleave(heads // heads_kv, 0)
        want, want_lse = want_of(q[rows], k[columns], v[columns], mask, causal)
        torch.testing.assert_close(out[rows].cpu().double(), 0.5 * want, atol=2e-5, rtol=2e-5)
        torch.testing.assert_close(lse[rows].cpu().double(), want_lse * math.log(2), atol=2e-5, rtol=2e-5)
    one = flashinfer.msa_sparse_decode_attention(
        q[40:43].to(device), *keys, chosen[:, 40:43].contiguous().to(device), causal=causal, **more
    )
    last = flashinfer.msa_sparse_attention(
        q[40:43].to(device), *keys, chosen[:, 40:43].contiguous().to(device),
        torch.arange(4, dtype=torch.int32, device=device), causal=causal, **more,
    )  # fmt: skip
    assert torch.equal(one, last)


def test_msa_decoding_into_a_tensor(device):
    torch.manual_seed(7)
    q, cache = torch.randn(2, 4, 32, device=device), torch.randn(5, 2, 128, 32, device=device)
    table, lengths = torch.tensor([[3, 0], [4, 1]]).int().to(device), torch.tensor([200, 9]).int().to(device)
    blocks = torch.tensor([[[1, 0], [0, -1]]] * 2).int().to(device)
    run = flashinfer.msa_ops.msa_sparse_decode_attention
    out, lse = run(q, cache, cache, blocks, page_table=table, seqused_k=lengths, return_softmax_lse=True)
    into = torch.full_like(out, math.nan)
    assert run(q, cache, cache, blocks, page_table=table, seqused_k=lengths, out=into) is into and torch.equal(into, out)
    pair = run(q, cache, cache, blocks, page_table=table, seqused_k=lengths, out=into.zero_(), return_softmax_lse=True)
    assert pair[0] is into and torch.equal(into, out) and torch.equal(pair[1], lse)
    for b in range(2):
        keys = cache[table[b].long()].transpose(0, 1).flatten(1, 2)[:, : lengths[b]].cpu()
        want, _ = want_of(q[b : b + 1], *[keys.transpose(0, 1)] * 2, torch.ones(4, 1, keys.shape[1]).bool())
        torch.testing.assert_close(out[b : b + 1].cpu().double(), want, atol=2e-5, rtol=2e-5)
    with pytest.raises(ValueError, match=r"out: got \[2, 4, 16\] on .*; expected \[2, 4, 32\]"):
        run(q, cache, cache, blocks, page_table=table, seqused_k=lengths, out=into[..., :16])


def test_msa_refuses_by_name():
    q, k, chosen = torch.randn(3, 4, 16), torch.randn(200, 2, 16), torch.zeros(2, 3, 1, dtype=torch.int32)
    starts = torch.tensor([0, 3], dtype=torch.int32)
    call = {
        "q": q,
        "k": k,
        "v": k,
        "q2k_indices": chosen,
        "cu_seqlens_q": starts,
        "cu_seqlens_k": torch.tensor([0, 200]).int(),
    }
    for name, changed in {
        "k": {"k": k.to(torch.float8_e4m3fn)},
        "q2k_indices": {"q2k_indices": chosen.transpose(0, 1)},
        "cu_seqlens_k": {"cu_seqlens_k": None},
        "seqused_k": {"page_table": torch.zeros(1, 2, dtype=torch.int32)},
        "q_offset": {"q_offset": 3},
        "k_global_scale": {"k_global_scale": 0.5},
        "return_temperature_lse": {"return_temperature_lse": True},
    }.items():
        with pytest.raises((ValueError, NotImplementedError), match=f"^{name}: "):
            flashinfer.msa_sparse_attention(**{**call, **changed})
    with pytest.raises(ValueError, match=r"^seqlen_q: "):
        flashinfer.msa_sparse_decode_attention(q, k, k, chosen, cu_seqlens_k=call["cu_seqlens_k"], seqlen_q=2)
