"""Keys and values in pages, read by the kernels: against float64, with garbage wherever nobody may look."""

import functools

import pytest
import reference
import torch
from flash_attention import flash_attn
from flash_attention.arguments.head_dim import padded_cache
from flash_attention.options import Options
from flash_attention.torch_cache import attention_over_cache
from torch.autograd import forward_ad

CLOSE = {"atol": 1e-5, "rtol": 1e-4}


def cache_in_pages(lengths, page, heads, dim, device, dtype=torch.float32, heads_first=False, seed=0):
    """(k pages, v pages, table, keys and values of each sequence); NaN in every row that is not in use."""
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-length // page) for length in lengths]
    order = torch.randperm(sum(counts) + 3, generator=generator).tolist()
    table = torch.tensor([-1, 2**31 - 1, -(2**31), 10**6] * 20, dtype=torch.int32)[: max(counts) + 2].repeat(
        len(lengths), 1
    )
    shape = (len(order), heads, page, dim) if heads_first else (len(order), page, heads, dim)
    pages = [torch.full(shape, float("nan"), dtype=dtype) for _ in range(2)]
    rows = []
    for b, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        mine = [order.pop() for _ in range(count)]
        table[b, :count] = torch.tensor(mine, dtype=torch.int32)
        values = [torch.randn(length, heads, dim, generator=generator).to(dtype) for _ in range(2)]
        for store, value in zip(pages, values, strict=True):
            view = store.transpose(1, 2) if heads_first else store
            for j in range(length):
                view[mine[j // page], j % page] = value[j]
        rows.append([value.to(device) for value in values])
    k, v = (store.transpose(1, 2).to(device) if heads_first else store.to(device) for store in pages)
    return k, v, table.to(device), rows


def exact(q, rows, **options):
    """(out, lse) of each entry of q over its keys, in float64."""
    results = [
        reference.attention(q[b : b + 1].double(), k[None].double(), v[None].double(), **options)
        for b, (k, v) in enumerate(rows)
    ]
    return torch.cat([out for out, _ in results]), torch.cat([lse for _, lse in results])


@pytest.mark.parametrize("page", [1, 7, 16, 64])
@pytest.mark.parametrize("seq_q, causal", [(1, False), (3, True)])
@pytest.mark.parametrize("heads_first", [False, True], ids=["nhd", "hnd"])
def test_pages_against_float64(page, seq_q, causal, heads_first, device):
    lengths = [33, 4, 70]
    k, v, table, rows = cache_in_pages(lengths, page, 2, 40, device, heads_first=heads_first, seed=page)
    q = torch.randn(3, seq_q, 8, 40, device=device)
    out, lse = flash_attn.flash_attn_with_kvcache(
        q, k, v, cache_seqlens=torch.tensor(lengths, dtype=torch.int32, device=device), block_table=table, causal=causal,
        return_softmax_lse=True,
    )  # fmt: skip
    want, want_lse = exact(q, rows, causal=causal)
    torch.testing.assert_close(out.double(), want, **CLOSE)
    torch.testing.assert_close(lse.double(), want_lse, **CLOSE)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_and_options(dtype, device):
    lengths = [90, 17]
    k, v, table, rows = cache_in_pages(lengths, 16, 2, 64, device, dtype=dtype)
    q = torch.randn(2, 2, 12, 64, device=device, dtype=dtype)
    slopes = torch.rand(12, device=device) * 0.1
    options = {"softcap": 5.0, "alibi_slopes": slopes}
    out = flash_attn.flash_attn_with_kvcache(
        q, k, v, cache_seqlens=torch.tensor(lengths, dtype=torch.int32, device=device), block_table=table,
        causal=True, window_size=(30, 0), **options,
    )  # fmt: skip
    want, _ = exact(q, rows, window=(30, 0), **options)
    torch.testing.assert_close(out.double(), want, atol=2e-2 if dtype == torch.bfloat16 else 3e-3, rtol=0)


def test_left_padding_hides_keys_in_pages(device):
    k, v, table, rows = cache_in_pages([40, 21], 16, 2, 32, device)
    k[table[0, 0].long(), :9] = float("nan")
    pad = torch.tensor([9, 0], dtype=torch.int32, device=device)
    q = torch.randn(2, 1, 4, 32, device=device)
    out = flash_attn.flash_attn_with_kvcache(
        q,
        k,
        v,
        cache_seqlens=torch.tensor([40, 21], dtype=torch.int32, device=device),
        block_table=table,
        cache_leftpad=pad,
    )
    want, _ = exact(q, [[x[int(pad[b]) :] for x in pair] for b, pair in enumerate(rows)])
    torch.testing.assert_close(out.double(), want, **CLOSE)


def test_a_row_of_the_cache_for_each_entry(device):
    cache = torch.randn(5, 48, 2, 32, device=device)
    q = torch.randn(2, 1, 4, 32, device=device)
    rows, lengths = torch.tensor([4, 2], device=device), torch.tensor([48, 11], dtype=torch.int32, device=device)
    cache[2, 11:] = float("nan")
    out = flash_attn.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=lengths, cache_batch_idx=rows)
    keys = [[cache[4], cache[4]], [cache[2, :11], cache[2, :11]]]
    torch.testing.assert_close(out.double(), exact(q, keys)[0], **CLOSE)


def test_packed_queries_over_pages(device):
    """The kernel reads pages; where gradients are asked for, the pages are gathered: the same results."""
    lengths = [33, 70, 5]
    k, v, table, rows = cache_in_pages(lengths, 16, 2, 32, device)
    starts = torch.tensor([0, 20, 21, 26], dtype=torch.int32, device=device)
    ends = torch.tensor([0, 33, 103, 108], dtype=torch.int32, device=device)
    q = torch.randn(26, 4, 32, device=device)
    call = {"causal": True, "block_table": table}
    out, lse, _ = flash_attn.flash_attn_varlen_func(q, k, v, starts, ends, 20, 70, return_attn_probs=True, **call)
    for b, (keys, values) in enumerate(rows):
        part = slice(int(starts[b]), int(starts[b + 1]))
        want, want_lse = reference.attention(
            q[None, part].double(), keys[None].double(), values[None].double(), causal=True
        )
        torch.testing.assert_close(out[part].double(), want[0], **CLOSE)
        torch.testing.assert_close(lse[:, part].double(), want_lse[0], **CLOSE)
    below = flash_attn.flash_attn_interface._flash_attn_varlen_forward(
        q, k, v, starts, ends, 20, 70, 0.0, None, True, block_table=table
    )
    assert torch.equal(below[0], out) and torch.equal(below[1], lse)
    leaf = q.clone().requires_grad_()
    gathered = flash_attn.flash_attn_varlen_func(leaf, k.nan_to_num(), v.nan_to_num(), starts, ends, 20, 70, **call)
    torch.testing.assert_close(gathered.detach(), out, **CLOSE)
    gathered.sum().backward()
    assert leaf.grad.isfinite().all()


CACHE_CALLS = {
    "flash_attn_with_kvcache": lambda q, k, v, n: flash_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=n),
    "flash_attn_with_kvcache of a number": lambda q, k, v, n: flash_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=4),
    "flash_attn_with_kvcache with a sink": lambda q, k, v, n: flash_attn.flash_attn_with_kvcache(
        q, k, v, cache_seqlens=n, learnable_sink=torch.zeros(4, device=q.device)
    ),
    "attention_over_cache": lambda q, k, v, n: attention_over_cache(q, k, v, seqused_kv=n),
    "attention_over_cache with lse": lambda q, k, v, n: attention_over_cache(q, k, v, seqused_kv=n, return_lse=True)[1],
}


@pytest.mark.parametrize("name", CACHE_CALLS)
@pytest.mark.parametrize("place", [0, 1, 2], ids="qkv")
def test_derivatives_through_a_cache_are_refused(name, place, device):
    """In every form that torch has: none of them is 0 by mistake."""
    tensors = [torch.randn(2, 5, 4, 16, device=device) for _ in range(3)]
    lengths = torch.tensor([4, 5], dtype=torch.int32, device=device)

    def call(x):
        return CACHE_CALLS[name](*tensors[:place], x, *tensors[place + 1 :], lengths)

    x = tensors[place]
    word = name.split()[0]
    with pytest.raises(NotImplementedError, match="cache: forward-mode derivatives"):
        torch.func.jvp(call, (x,), (torch.ones_like(x),))
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="cache: forward-mode derivatives"):
        call(forward_ad.make_dual(x, torch.ones_like(x)))
    with pytest.raises(RuntimeError, match=f"{word}: has no gradients"):
        torch.func.grad(lambda x: call(x).sum())(x)
    with pytest.raises(RuntimeError, match=f"{word}: has no gradients"):
        call(x.clone().requires_grad_()).sum().backward()
    expected = call(x)
    with torch.no_grad():
        assert torch.equal(call(x.clone().requires_grad_()), expected)
    # Of something else, with the call inside of it: nothing is refused.
    assert torch.func.grad(lambda y: (y * call(x)).sum())(torch.ones_like(expected)).allclose(expected)
    tangent = torch.func.jvp(lambda y: y * call(x), (torch.ones_like(expected),), (torch.ones_like(expected),))[1]
    assert tangent.allclose(expected)


def test_head_dim_of_no_multiple_of_eight(device):
    k, v, table, rows = cache_in_pages([20, 33], 16, 2, 36, device)
    q = torch.randn(2, 1, 4, 36, device=device)
    lengths = torch.tensor([20, 33], dtype=torch.int32, device=device)
    out = flash_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, block_table=table)
    torch.testing.assert_close(out.double(), exact(q, rows)[0], **CLOSE)


@pytest.mark.parametrize("dim", [32, 36])
@pytest.mark.parametrize("packed", [False, True])
def test_the_result_goes_where_it_is_wanted(dim, packed, device):
    """Into a part of a larger tensor, whose other elements stay."""
    k, v, table, rows = cache_in_pages([20, 33], 16, 2, dim, device)
    q = torch.randn(2, 1, 4, dim, device=device)
    lengths = torch.tensor([20, 33], dtype=torch.int32, device=device)
    starts = {"cu_seqlens_q": torch.tensor([0, 1, 2], dtype=torch.int32, device=device), "max_seqlen_q": 1}
    whole = torch.full((3, 6, dim + 8), 7.0, device=device)
    place = whole[1:, 1:5, :dim]
    given = {"out": place} if packed else {"out": place[:, None]}
    call = functools.partial(padded_cache, q[:, 0] if packed else q, k, v, page_table=table, seqused_kv=lengths, **given)
    out, lse = call(return_lse=True, **(starts if packed else {}))
    want, want_lse = exact(q, rows)
    assert out is given["out"]
    torch.testing.assert_close(place.double(), want[:, 0], **CLOSE)
    torch.testing.assert_close((lse.T if packed else lse[..., 0]).double(), want_lse[..., 0], **CLOSE)
    place.fill_(7.0)
    assert torch.equal(whole, torch.full_like(whole, 7.0))


@pytest.mark.parametrize("dim", [32, 36])
def test_places_for_a_result_that_are_refused(dim):
    q, cache, lengths = torch.randn(2, 1, 4, dim), torch.randn(2, 16, 2, dim), torch.tensor([3, 9], dtype=torch.int32)
    call = functools.partial(padded_cache, q, cache, cache, seqused_kv=lengths)
    for wrong in (torch.empty(2, 4, dim), torch.empty(2, 1, 4, dim + 8), torch.empty_like(q, dtype=torch.float64)):
        with pytest.raises(ValueError, match=rf"out: got .*; expected torch.float32 \[2, 1, 4, {dim}\] on cpu"):
            call(out=wrong)
    with pytest.raises(TypeError, match="out: expected a tensor, got list"):
        call(out=[])
    if dim % 8 == 0:
        with pytest.raises(ValueError, match=r"^out\b"):
            call(out=torch.empty(2, 1, 4, 2 * dim)[..., ::2])
        with pytest.raises(ValueError, match="out"):
            call(out=q)


def test_compiled_and_traced(device):
    k, v, table, rows = cache_in_pages([20, 33], 16, 2, 32, device)
    q = torch.randn(2, 1, 4, 32, device=device)
    lengths = torch.tensor([20, 33], dtype=torch.int32, device=device)

    def call(q, lengths, out=None):
        return attention_over_cache(q, k, v, seqused_kv=lengths, page_table=table, out=out)

    compiled = torch.compile(call, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(q, lengths).double(), exact(q, rows)[0], **CLOSE)
    place = torch.empty_like(q)
    into = torch.compile(functools.partial(call, out=place), fullgraph=True, backend="eager")
    torch.testing.assert_close(into(q, lengths).double(), exact(q, rows)[0], **CLOSE)
    torch.testing.assert_close(place.double(), exact(q, rows)[0], **CLOSE)
    tensors = (q, k, v, *[None] * 7, lengths, *[None] * 6, table, None)
    arguments = (*tensors, *Options())
    torch.library.opcheck(torch.ops.flash_attention.forward_cache, arguments, test_utils="test_faketensor")


@pytest.mark.parametrize(
    "change, message",
    [
        ({"page_table": torch.zeros(2, 3)}, "page_table"),
        ({"page_table": torch.zeros(3, 3, dtype=torch.int32)}, "page_table"),
        ({"page_table": torch.zeros(2, 3, 1, dtype=torch.int32)}, "page_table"),
        ({"left_padding": torch.zeros(3, dtype=torch.int32)}, "left_padding"),
        ({"left_padding": torch.tensor([0, 99], dtype=torch.int32)}, "left_padding"),
        ({"seqused_kv": torch.tensor([99, 1], dtype=torch.int32)}, "seqused_kv"),
        ({"v": torch.zeros(4, 8, 2, 32)}, "v"),
        ({"k": torch.zeros(16, 2, 32)}, "k"),
    ],
)
def test_refusals_name_the_argument(change, message):
    arguments = {
        "q": torch.randn(2, 1, 4, 32),
        "k": torch.randn(4, 16, 2, 32),
        "v": torch.randn(4, 16, 2, 32),
        "page_table": torch.zeros(2, 3, dtype=torch.int32),
        "seqused_kv": torch.tensor([20, 33], dtype=torch.int32),
    } | change
    with pytest.raises((TypeError, ValueError), match=rf"{message}\b"):
        attention_over_cache(**arguments)


@pytest.mark.parametrize("window", [3, None, (1,), (1, 2, 3)])
@pytest.mark.parametrize("lengths", [7, torch.tensor([7, 9], dtype=torch.int32)])
def test_a_window_that_is_no_pair_is_refused(window, lengths):
    q, cache = torch.randn(2, 1, 4, 32), torch.randn(2, 16, 2, 32)
    with pytest.raises(ValueError, match="window_size: got"):
        flash_attn.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=lengths, window_size=window)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")
@pytest.mark.parametrize("seq_q", [1, 4])
def test_a_graph_is_replayed_with_other_lengths_and_tables(seq_q):
    batch, page, most = 5, 16, 40
    k, v = (torch.randn(batch * most + 7, page, 8, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    table = torch.zeros(batch, most, dtype=torch.int32, device="cuda")
    lengths = torch.zeros(batch, dtype=torch.int32, device="cuda")
    q = torch.randn(batch, seq_q, 32, 128, device="cuda", dtype=torch.bfloat16)

    def step():
        return flash_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, block_table=table, causal=True)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for seed, given in enumerate([[4, 17, 640, 333, 64], [640] * 5, [600, 4, 5, 4, 5], [16, 639, 128, 129, 127]]):
        generator = torch.Generator().manual_seed(seed)
        pages = torch.randperm(len(k), generator=generator)[: batch * most].view(batch, most)
        lengths.copy_(torch.tensor(given, dtype=torch.int32))
        table.copy_(pages.int())
        graph.replay()
        for b, length in enumerate(given):
            keys, values = (cache[pages[b].cuda()].flatten(0, 1)[None, :length].double() for cache in (k, v))
            want, _ = reference.attention(q[b : b + 1].double(), keys, values, causal=True)
            torch.testing.assert_close(out[b : b + 1].double(), want, atol=2e-2, rtol=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")
def test_a_graph_that_appends_is_replayed_behind_other_lengths():
    batch, page, most, dim = 3, 16, 20, 64
    k, v = (torch.randn(batch * most, page, 2, dim, device="cuda", dtype=torch.float16) for _ in range(2))
    table = torch.zeros(batch, most, dtype=torch.int32, device="cuda")
    lengths = torch.zeros(batch, dtype=torch.int32, device="cuda")
    q, *new = (torch.randn(batch, 1, heads, dim, device="cuda", dtype=torch.float16) for heads in (8, 2, 2))
    angles = torch.outer(torch.arange(most * page + 1.0), 10.0 ** -torch.arange(8.0)).cuda()

    def step():
        return flash_attn.flash_attn_with_kvcache(
            q, k, v, *new, angles.cos(), angles.sin(), lengths, block_table=table, causal=True, rotary_interleaved=False
        )

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for seed, given in enumerate([[3, 160, 17], [319, 0, 16], [5, 6, 7]]):
        pages = torch.randperm(len(k), generator=torch.Generator().manual_seed(seed)).view(batch, most)
        lengths.copy_(torch.tensor(given, dtype=torch.int32))
        table.copy_(pages.int())
        before = k.clone()
        graph.replay()
        for b, length in enumerate(given):
            keys, values = (cache[pages[b].cuda()].flatten(0, 1)[: length + 1].double() for cache in (k, v))
            keys[:length] = before[pages[b].cuda()].flatten(0, 1)[:length].double()
            keys[length] = rotated(new[0][b], angles[length])[0]
            values[length] = new[1][b, 0].double()
            want, _ = reference.attention(rotated(q[b], angles[length])[None], keys[None], values[None])
            torch.testing.assert_close(out[b : b + 1].double(), want, atol=5e-3, rtol=0)


def rotated(x, angles):
    """The first dimensions of x [1, heads, dim], half-split pairs, by the angles of one position; in float64."""
    half, x = len(angles), x.double().clone()
    first, second = x[..., :half].clone(), x[..., half : 2 * half].clone()
    cos, sin = angles.double().cos(), angles.double().sin()
    x[..., :half], x[..., half : 2 * half] = first * cos - second * sin, first * sin + second * cos
    return x


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")
def test_nothing_waits_for_the_gpu():
    k, v, table, _ = cache_in_pages([33, 70], 16, 2, 64, "cuda", dtype=torch.float16)
    lengths = torch.tensor([33, 70], dtype=torch.int32, device="cuda")
    q = torch.randn(2, 1, 4, 64, device="cuda", dtype=torch.float16)
    flash_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, block_table=table)
    new = torch.randn(2, 1, 2, 64, device="cuda", dtype=torch.float16)
    flash_attn.flash_attn_with_kvcache(q, k, v, new, new, cache_seqlens=lengths, block_table=table)
    torch.cuda.set_sync_debug_mode("error")
    try:
        flash_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, block_table=table)
        flash_attn.flash_attn_with_kvcache(q, k, v, new, new, cache_seqlens=lengths, block_table=table)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")
def test_lengths_and_pages_out_of_range_stay_inside_the_cache():
    k, v = (torch.randn(6, 16, 2, 64, device="cuda", dtype=torch.float16) for _ in range(2))
    table = torch.tensor([[0, -5, 10**6], [2**31 - 1, 1, 2]], dtype=torch.int32, device="cuda")
    lengths = torch.tensor([10**9, -3], dtype=torch.int32, device="cuda")
    q = torch.randn(2, 1, 4, 64, device="cuda", dtype=torch.float16)
    out = flash_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, page_table=table)
    assert out[0].isfinite().all()
    assert (out[1] == 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_sinks_and_slopes_of_any_float(dtype, device):
    """Models keep them in their own type."""
    q, k, v = (torch.randn(2, n, 4, 16, device=device) for n in (1, 9, 9))
    lengths = torch.tensor([5, 9], dtype=torch.int32, device=device)
    sink, slopes = (torch.rand(4, device=device).to(dtype) for _ in range(2))
    call = functools.partial(flash_attn.flash_attn_with_kvcache, q, k, v, cache_seqlens=lengths, causal=True)
    expected = call(learnable_sink=sink.float(), alibi_slopes=slopes.float())
    torch.testing.assert_close(call(learnable_sink=sink, alibi_slopes=slopes), expected)


@pytest.mark.parametrize("of", ["causal", "window", "chunk", "neither"])
def test_the_angles_of_several_queries(of, device):
    """Each query has the angle of its own place where it sees part of the keys by place; otherwise all have the first's."""
    from flash_attention.flash_attn.layers.rotary import apply_rotary_emb

    q, new = torch.randn(2, 3, 4, 32, device=device), torch.randn(2, 3, 2, 32, device=device)
    cache = torch.randn(2, 24, 2, 32, device=device)
    lengths = torch.tensor([5, 17], dtype=torch.int32, device=device)
    angles = torch.rand(24, 8, device=device) * 6
    cos, sin = angles.cos(), angles.sin()
    given = {"causal": {"causal": True}, "window": {"window_size": (4, 1)}, "chunk": {"attention_chunk": 8}}.get(of, {})
    k, v = cache.clone(), cache.clone()
    out = flash_attn.flash_attn_with_kvcache(
        q, k, v, new, new, cos, sin, cache_seqlens=lengths, rotary_interleaved=False, **given
    )
    for b, length in enumerate(lengths.tolist()):
        places = range(length, length + 3)
        rotated = [
            apply_rotary_emb(x[b : b + 1], cos[rows], sin[rows]).double()
            for x, rows in ((q, [length] * 3 if of == "neither" else list(places)), (new, list(places)))
        ]
        keys = torch.cat((cache[b, :length].double(), rotated[1][0]))
        values = torch.cat((cache[b, :length], new[b])).double()
        options = {"causal": of == "causal", "window": given.get("window_size", (-1, -1))}
        if of == "chunk":
            i, j = torch.tensor(places, device=device)[:, None] // 8, torch.arange(length + 3, device=device)[None] // 8
            options["mask"] = (i == j)[None, None]
        want, _ = reference.attention(rotated[0], keys[None], values[None], **options)
        torch.testing.assert_close(out[b].double(), want[0], **CLOSE)
