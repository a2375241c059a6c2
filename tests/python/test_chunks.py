"""attention_chunk: a query sees the keys of its own chunk, against the dense formula in float64."""

import pytest
import torch
from flash_attention import attention, attention_over_cache, attention_packed, flash_attn_3


def visible(seq_q, seq_kv, chunk, causal, device="cpu"):
    i = torch.arange(seq_q, device=device)[:, None] + seq_kv - seq_q
    j = torch.arange(seq_kv, device=device)
    seen = i.div(chunk, rounding_mode="floor") == j // chunk
    return seen & (j <= i) if causal else seen


def dense(q, k, v, mask):
    """[batch, seq, heads, dim] in float64; a row that sees nothing is 0."""
    q, k, v = (tensor.double().transpose(1, 2) for tensor in (q, k, v))
    k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for tensor in (k, v))
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~mask, -torch.inf)
    return (scores.softmax(-1).nan_to_num(0) @ v).transpose(1, 2)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("seq_q, seq_kv, chunk", [(67, 67, 16), (131, 131, 64), (67, 131, 29), (131, 67, 29), (1, 131, 50)])
def test_dense_and_gradients(device, seq_q, seq_kv, chunk, causal):
    torch.manual_seed(1)
    q, k, v = (torch.randn(2, seq, heads, 32, device=device, requires_grad=True)
               for seq, heads in ((seq_q, 4), (seq_kv, 2), (seq_kv, 2)))  # fmt: skip
    mask = visible(seq_q, seq_kv, chunk, causal, device)
    out = attention(q, k, v, causal=causal, attention_chunk=chunk)
    want = dense(q, k, v, mask)
    torch.testing.assert_close(out.double(), want, atol=2e-5, rtol=0)
    grad = torch.randn_like(out)
    wanted = torch.autograd.grad(want, (q, k, v), grad.double())
    for got, one in zip(torch.autograd.grad(out, (q, k, v), grad), wanted, strict=True):
        torch.testing.assert_close(got, one, atol=1e-4, rtol=0)


def test_packed_counts_inside_of_each_sequence(device):
    torch.manual_seed(2)
    q, k, v = (torch.randn(140, 2, 16, device=device) for _ in range(3))
    starts = torch.tensor([0, 37, 37, 140], dtype=torch.int32, device=device)
    out = attention_packed(q, k, v, starts, causal=True, attention_chunk=24)
    for begin, end in ((0, 37), (37, 140)):
        part = [tensor[None, begin:end] for tensor in (q, k, v)]
        want = dense(*part, visible(end - begin, end - begin, 24, True, device))
        torch.testing.assert_close(out[None, begin:end].double(), want, atol=2e-5, rtol=0)


@pytest.mark.parametrize("pages", [False, True], ids=["dense", "pages"])
def test_over_a_cache(device, pages):
    """One and three new queries; each sequence has its own length, and so its own chunk."""
    torch.manual_seed(3)
    k, v = (torch.randn(2, 96, 2, 32, device=device) for _ in range(2))
    lengths = torch.tensor([65, 96], dtype=torch.int32, device=device)
    caches, table = (k, v), None
    if pages:
        caches = [tensor.reshape(12, 16, 2, 32) for tensor in (k, v)]
        table = torch.arange(12, dtype=torch.int32, device=device).reshape(2, 6)
    for seq_q in (1, 3):
        q = torch.randn(2, seq_q, 4, 32, device=device)
        out = flash_attn_3.flash_attn_with_kvcache(
            q, *caches, cache_seqlens=lengths, page_table=table, causal=True, attention_chunk=32
        )
        for b, length in enumerate(lengths.tolist()):
            mask = visible(seq_q, length, 32, True, device)
            want = dense(q[b : b + 1], k[b : b + 1, :length], v[b : b + 1, :length], mask)
            torch.testing.assert_close(out[b : b + 1].double(), want, atol=2e-5, rtol=0)


@pytest.mark.parametrize("chunk", [4, 12, 50])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_chunks_begin_behind_left_padding(causal, chunk, device):
    """A query before the first key is in a chunk without keys, also where one chunk could hold all keys."""
    torch.manual_seed(5)
    q, k, v = (torch.randn(2, 12, heads, 16, device=device) for heads in (4, 2, 2))
    padding = torch.tensor([7, 0], dtype=torch.int32, device=device)
    out = attention_over_cache(q, k, v, left_padding=padding, causal=causal, attention_chunk=chunk)
    i, j = torch.arange(12, device=device)[:, None], torch.arange(12, device=device)
    for b, pad in enumerate(padding.tolist()):
        mask = ((i - pad).div(chunk, rounding_mode="floor") == (j - pad) // chunk) & (j >= pad)
        want = dense(q[b : b + 1], k[b : b + 1], v[b : b + 1], mask & (j <= i) if causal else mask)
        torch.testing.assert_close(out[b : b + 1].double(), want, atol=2e-5, rtol=0)


def test_other_ways_in():
    torch.manual_seed(4)
    q = torch.randn(1, 50, 2, 16)
    want = dense(q, q, q, visible(50, 50, 16, True))
    assert torch.equal(attention(q, q, q, attention_chunk=50), attention(q, q, q))  # nothing is hidden
    compiled = torch.compile(lambda x: attention(x, x, x, causal=True, attention_chunk=16), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(q).double(), want, atol=2e-5, rtol=0)
    arrays = attention(*[q.numpy()] * 3, causal=True, attention_chunk=16)
    torch.testing.assert_close(torch.from_numpy(arrays).double(), want, atol=2e-5, rtol=0)
    with pytest.raises(ValueError, match="attention_chunk: got -1"):
        attention(q, q, q, attention_chunk=-1)
    with pytest.raises(TypeError, match="attention_chunk"):
        attention(q, q, q, attention_chunk="much")
