"""FlashAttention-4's functions over this library: their keywords and functions, forward and backward, against float64."""

import types

import pytest
import reference
import torch
from flash_attention import flash_attn_4

CLOSE = {"atol": 2e-5, "rtol": 2e-4}


def rows(*shape, device, grad=False):
    return torch.randn(*shape, device=device, requires_grad=grad)


def formula(q, k, v, bias=None, **options):
    """reference.attention() in float64; bias [batch, heads, seq_q, seq_k] in double."""
    return reference.attention(*(x.double() for x in (q, k, v)), bias=bias, **options)


def close(found, want, **more):
    torch.testing.assert_close(found.double(), want, **{**CLOSE, **more})


@pytest.mark.parametrize(
    "given, same",
    [
        ({"causal": True, "softcap": 6.0, "softmax_scale": 0.3}, {"causal": True, "softcap": 6.0, "scale": 0.3}),
        ({"window_size": (5, None)}, {"window": (5, -1)}),
        ({"window_size": (None, 2), "num_splits": 3, "pack_gqa": True}, {"window": (-1, 2)}),
    ],
)
@pytest.mark.parametrize("dims", [(32, 32), (40, 24)])
def test_dense(given, same, dims, device):
    q, k = (rows(2, size, heads, dims[0], device=device, grad=True) for size, heads in ((13, 4), (29, 2)))
    v = rows(2, 29, 2, dims[1], device=device, grad=True)
    sink = rows(4, device=device, grad=True)
    out, lse = flash_attn_4.flash_attn_func(q, k, v, learnable_sink=sink, return_lse=True, **given)
    want, want_lse = formula(q, k, v, sink=sink.double(), **same)
    close(out, want)
    close(lse, want_lse)
    upstream = torch.randn_like(out)
    leaves = (q, k, v, sink)
    found = torch.autograd.grad((out * upstream).sum() + lse.sum(), leaves)
    exact = torch.autograd.grad((want * upstream.double()).sum() + want_lse.sum(), leaves)
    for one, other in zip(found, exact, strict=True):
        close(one, other.double(), atol=2e-4)
    assert flash_attn_4.flash_attn_func(q, k, v, **given)[1] is None


def relative(score, b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
    """By FlashAttention-4's names: a learned bias by distance, from the end of the keys."""
    distance = (kv_idx - q_idx) + (seqlen_info.seqlen_q - seqlen_info.seqlen_k)
    return score + aux_tensors[0][h, distance.clamp(-8, 0) + 8]


def relative_bias(table, seq_q, seq_k):
    distance = torch.arange(seq_k)[None] - torch.arange(seq_q)[:, None] + (seq_q - seq_k)
    return table[:, (distance.clamp(-8, 0) + 8).to(table.device)]


def test_a_function_of_scores_with_its_tensors(device):
    q, k, v = (rows(2, size, 4, 32, device=device, grad=True) for size in (13, 29, 29))
    table = rows(4, 9, device=device, grad=True)
    out, lse = flash_attn_4.flash_attn_func(
        q, k, v, causal=True, score_mod=relative, aux_tensors=[table], return_lse=True, softmax_scale=0.2
    )
    want, want_lse = formula(q, k, v, bias=relative_bias(table, 13, 29)[None].double(), causal=True, scale=0.2)
    close(out, want)
    close(lse, want_lse)
    upstream = torch.randn_like(out)
    leaves = (q, k, v, table)
    found = torch.autograd.grad((out * upstream).sum(), leaves)
    exact = torch.autograd.grad((want * upstream.double()).sum(), leaves)
    for one, other in zip(found, exact, strict=True):
        close(one, other.double(), atol=2e-4)


def test_numbers_and_flex_functions(device):
    """aux_scalars are the last keyword; functions with FlexAttention's parameters are taken as they are."""
    q, k, v = (rows(1, 17, 2, 32, device=device) for _ in range(3))

    def scaled(score, b, h, q_idx, kv_idx, seqlen_info, aux_tensors, aux_scalars):
        return score * aux_scalars[0]

    out, _ = flash_attn_4.flash_attn_func(q, k, v, score_mod=scaled, aux_scalars=(0.5,))
    want, _ = formula(q, k, v, scale=0.5 * 32**-0.5)
    close(out, want)
    out, _ = flash_attn_4.flash_attn_func(
        q, k, v, score_mod=lambda score, b, h, i, j: score * 0.5, mask_mod=lambda b, h, i, j: j <= i, window_size=(2, 0)
    )
    close(out, formula(q, k, v, scale=0.5 * 32**-0.5, causal=True)[0])


def documents(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
    return (aux_tensors[0][b, q_idx] == aux_tensors[0][b, kv_idx]) & (kv_idx < seqlen_info.seqlen_k - 1)


def test_a_function_of_pairs_stands_in_place_of_causal(device):
    q, k, v = (rows(2, 19, 2, 32, device=device) for _ in range(3))
    owner = torch.randint(0, 3, (2, 19), device=device, dtype=torch.int32)
    out, _ = flash_attn_4.flash_attn_func(q, k, v, causal=True, mask_mod=documents, aux_tensors=[owner])
    mask = (owner[:, :, None] == owner[:, None]) & (torch.arange(19, device=device) < 18)
    close(out, formula(q, k, v, mask=mask[:, None])[0])


class Blocks(types.SimpleNamespace):
    """The fields of FlashAttention-4's BlockSparseTensorsTorch."""


def test_lists_of_blocks(device):
    """Blocks of 16: the first list where the function decides, the second whole."""
    q, k, v = (rows(1, 48, 2, 32, device=device) for _ in range(3))
    some, whole = torch.zeros(3, 3, dtype=torch.bool), torch.zeros(3, 3, dtype=torch.bool)
    some[[0, 1, 2], [0, 1, 2]] = True
    whole[2, 0] = True

    def lists(blocks):
        order = blocks.int().argsort(dim=-1, descending=True, stable=True).int()
        return blocks.sum(-1).int()[None, None].to(device), order[None, None].to(device)

    count, index = lists(some)
    full_count, full_index = lists(whole)
    given = Blocks(
        mask_block_cnt=count,
        mask_block_idx=index,
        full_block_cnt=full_count,
        full_block_idx=full_index,
        block_size=(16, 16),
    )
    out, _ = flash_attn_4.flash_attn_func(q, k, v, mask_mod=lambda b, h, i, j: j <= i, block_sparse_tensors=given)
    ones = torch.ones(16, 16, dtype=torch.bool)
    mask = torch.kron(some, ones.tril()) | torch.kron(whole, ones)
    close(out, formula(q, k, v, mask=mask[None, None].to(device))[0])
    given.block_size = None
    with pytest.raises(NotImplementedError, match="block_size"):
        flash_attn_4.flash_attn_func(q, k, v, block_sparse_tensors=given)


def test_packed_sequences_with_a_function(device):
    """Lengths and tensors are those of the sequence; queries in a rectangle, keys packed, are taken too."""
    lengths_q, lengths_k = [13, 5], [29, 11]
    starts_q, starts_k = (torch.tensor([0, *sizes]).cumsum(0).int().to(device) for sizes in (lengths_q, lengths_k))
    q, k, v = rows(18, 4, 32, device=device), rows(40, 2, 32, device=device), rows(40, 2, 32, device=device)
    table = rows(4, 9, device=device)
    out, lse = flash_attn_4.flash_attn_varlen_func(
        q, k, v, cu_seqlens_q=starts_q, cu_seqlens_k=starts_k, max_seqlen_q=13, max_seqlen_k=29, causal=True,
        score_mod=relative, aux_tensors=[table], return_lse=True,
    )  # fmt: skip
    parts = zip(q.split(lengths_q), k.split(lengths_k), v.split(lengths_k), strict=True)
    done = 0
    for of_q, of_k, of_v in parts:
        bias = relative_bias(table, len(of_q), len(of_k))[None].double()
        want, want_lse = formula(of_q[None], of_k[None], of_v[None], bias=bias, causal=True)
        close(out[done : done + len(of_q)], want[0])
        close(lse[:, done : done + len(of_q)], want_lse[0])
        done += len(of_q)

    dense = rows(2, 6, 4, 32, device=device)
    out, lse = flash_attn_4.flash_attn_varlen_func(dense, k, v, cu_seqlens_k=starts_k, causal=True, return_lse=True)
    assert out.shape == dense.shape and lse.shape == (2, 4, 6)
    for b, (of_k, of_v) in enumerate(zip(k.split(lengths_k), v.split(lengths_k), strict=True)):
        want, want_lse = formula(dense[b : b + 1], of_k[None], of_v[None], causal=True)
        close(out[b], want[0])
        close(lse[b], want_lse[0])


def test_used_lengths_and_pages(device):
    """Pages in disorder with NaN behind the keys; the same keys in a rectangle of which a part counts."""
    used = torch.tensor([29, 11], dtype=torch.int32, device=device)
    k, v = (rows(2, 32, 2, 32, device=device) for _ in range(2))
    for b, length in enumerate(used.tolist()):
        k[b, length:], v[b, length:] = float("nan"), float("nan")
    table = torch.tensor([[5, 2, 0, 7], [1, 6, 3, 4]], dtype=torch.int32, device=device)
    pages = [torch.empty(8, 8, 2, 32, device=device) for _ in range(2)]
    for cache, values in zip(pages, (k, v), strict=True):
        cache[table.long()] = values.unflatten(1, (4, 8))
    q = rows(2, 3, 4, 32, device=device)
    sink = rows(4, device=device)
    given = {"causal": True, "learnable_sink": sink, "return_lse": True}
    found = flash_attn_4.flash_attn_varlen_func(q, k, v, seqused_k=used, **given)
    over_pages = flash_attn_4.flash_attn_varlen_func(q, *pages, seqused_k=used, page_table=table, **given)
    for b, length in enumerate(used.tolist()):
        keys = (x[b : b + 1, :length] for x in (k, v))
        want, want_lse = formula(q[b : b + 1], *keys, causal=True, sink=sink.double())
        for out, lse in (found, over_pages):
            close(out[b], want[0])
            close(lse[b], want_lse[0])


def test_latent_queries(device):
    """qv: scores of two parts, and lse with heads last."""
    q, qv = rows(1, 7, 4, 16, device=device), rows(1, 7, 4, 32, device=device)
    k, v = rows(1, 21, 1, 16, device=device), rows(1, 21, 1, 32, device=device)
    out, lse = flash_attn_4.flash_attn_func(q, k, v, qv, causal=True, return_lse=True)
    want, want_lse = formula(torch.cat((q, qv), -1), torch.cat((k, v), -1), v, causal=True)
    close(out, want)
    close(lse, want_lse.transpose(1, 2))


def test_latent_queries_end_to_end_and_over_pages(device):
    lengths, keys = [5, 1, 9], [12, 33, 9]
    starts_q, starts_k = (torch.tensor([0, *n]).cumsum(0).int().to(device) for n in (lengths, keys))
    q, qv = rows(15, 4, 16, device=device), rows(15, 4, 32, device=device)
    k, v = rows(54, 1, 16, device=device), rows(54, 1, 32, device=device)
    given = {"qv": qv, "cu_seqlens_q": starts_q, "causal": True, "return_lse": True}
    flat = flash_attn_4.flash_attn_varlen_func(q, k, v, cu_seqlens_k=starts_k, **given)
    table = torch.tensor([[4, 0, 1], [6, 2, 5], [3, 0, 0]], dtype=torch.int32, device=device)
    pages = [torch.full((7, 16, 1, x.shape[-1]), float("nan"), device=device) for x in (k, v)]
    for b, length in enumerate(keys):
        for page, x in zip(pages, (k, v), strict=True):
            for j in range(length):
                page[table[b, j // 16], j % 16] = x[int(starts_k[b]) + j]
    used = torch.tensor(keys, dtype=torch.int32, device=device)
    paged = flash_attn_4.flash_attn_varlen_func(q, *pages, seqused_k=used, page_table=table, **given)
    for b in range(3):
        mine, theirs = slice(starts_q[b], starts_q[b + 1]), slice(starts_k[b], starts_k[b + 1])
        joined = torch.cat((q, qv), -1)[None, mine], torch.cat((k, v), -1)[None, theirs], v[None, theirs]
        want, want_lse = formula(*joined, causal=True)
        for out, lse in (flat, paged):
            close(out[mine], want[0])
            close(lse[mine] if lse.shape[0] == 15 else lse[:, mine].T, want_lse[0].T)


def test_what_is_refused_by_name():
    q = torch.randn(1, 4, 2, 16)
    for name in ("gather_kv_indices", "score_mod_bwd"):
        with pytest.raises(NotImplementedError, match=name):
            flash_attn_4.flash_attn_func(q, q, q, **{name: q})
    # What CuTe's decorator returns: a wrapper with the name of the function, made in a module of CuTe.
    cute = types.ModuleType("cutlass.base_dsl.dsl")
    source = "import functools\ndef jit(function):\n    @functools.wraps(function)\n    def wrapper(*args, **kwargs):\n"
    exec(source + "        return function(*args, **kwargs)\n    return wrapper\n", vars(cute))
    with pytest.raises(NotImplementedError, match="score_mod: relative is compiled by CuTe"):
        flash_attn_4.flash_attn_func(q, q, q, score_mod=cute.jit(relative))
    with pytest.raises(NotImplementedError, match="mask_mod: documents is compiled by CuTe"):
        flash_attn_4.flash_attn_func(q, q, q, mask_mod=cute.jit(documents))
    with pytest.raises(TypeError, match="mask_mod: expected a function, got int"):
        flash_attn_4.flash_attn_func(q, q, q, mask_mod=3)
    table = torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="page_table"):
        flash_attn_4.flash_attn_varlen_func(q, q, q, page_table=table, mask_mod=documents)
    with pytest.raises(ValueError, match="k: got shape"):
        flash_attn_4.flash_attn_varlen_func(q, q[0], q[0])
