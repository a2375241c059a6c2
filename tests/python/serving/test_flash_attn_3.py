"""FlashAttention-3's names and order over this library, against float64."""

import inspect

import numpy
import pytest
import reference
import torch
from flash_attention import flash_attn, flash_attn_3
from test_flash_attn import rotate
from test_kv_cache import cache_in_pages

CLOSE = {"atol": 1e-5, "rtol": 1e-4}
ORDER = {
    "flash_attn_func": """q k v softmax_scale causal qv q_descale k_descale v_descale window_size attention_chunk softcap
        num_splits pack_gqa deterministic sm_margin return_attn_probs""",
    "flash_attn_qkvpacked_func": """qkv softmax_scale causal q_descale k_descale v_descale window_size attention_chunk
        softcap deterministic num_heads_q sm_margin return_attn_probs""",
    "flash_attn_varlen_func": """q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k seqused_q seqused_k softmax_scale
        causal qv q_descale k_descale v_descale window_size attention_chunk softcap num_splits pack_gqa deterministic
        sm_margin return_attn_probs""",
    "flash_attn_with_kvcache": """q k_cache v_cache k v qv rotary_cos rotary_sin cache_seqlens cache_batch_idx cache_leftpad
        page_table cu_seqlens_q cu_seqlens_k_new max_seqlen_q rotary_seqlens q_descale k_descale v_descale softmax_scale
        causal window_size attention_chunk softcap rotary_interleaved scheduler_metadata num_splits pack_gqa sm_margin
        return_softmax_lse""",
    "flash_attn_combine": "out_partial lse_partial out out_dtype",
    "get_scheduler_metadata": """batch_size max_seqlen_q max_seqlen_k num_heads_q num_heads_kv headdim cache_seqlens
        qkv_dtype headdim_v cu_seqlens_q cu_seqlens_k_new cache_leftpad page_size max_seqlen_k_new causal window_size
        attention_chunk has_softcap num_splits pack_gqa sm_margin""",
}


@pytest.mark.parametrize("name", ORDER)
def test_signatures(name):
    function = inspect.unwrap(getattr(flash_attn_3, name))
    assert list(inspect.signature(function).parameters) == [*ORDER[name].split(), "wrong"]


def test_plain_calls(device):
    q, k, v = (torch.randn(2, 9, 4, 16, device=device) for _ in range(3))
    want, want_lse = reference.attention(q.double(), k.double(), v.double(), causal=True, scale=0.3)
    out, lse = flash_attn_3.flash_attn_func(q, k, v, 0.3, True, return_attn_probs=True)
    torch.testing.assert_close(out.double(), want, **CLOSE)
    torch.testing.assert_close(lse.double(), want_lse, **CLOSE)
    joined = torch.cat([q, k, v], dim=2)
    packed = flash_attn_3.flash_attn_qkvpacked_func(joined, 0.3, True, num_heads_q=4)
    torch.testing.assert_close(packed.double(), want, **CLOSE)
    stacked = flash_attn_3.flash_attn_qkvpacked_func(torch.stack([q, k, v], dim=2), 0.3, True)
    torch.testing.assert_close(stacked.double(), want, **CLOSE)
    starts = torch.tensor([0, 9, 18], dtype=torch.int32, device=device)
    rows = (tensor.flatten(0, 1) for tensor in (q, k, v))
    ends = flash_attn_3.flash_attn_varlen_func(*rows, starts, starts, 9, 9, None, None, 0.3, True)
    torch.testing.assert_close(ends.double(), want.flatten(0, 1), **CLOSE)


@pytest.mark.parametrize("kind", ["pages", "rows", "rows by index"])
@pytest.mark.parametrize("causal, interleaved", [(True, True), (True, False), (False, True)])
def test_queries_and_new_keys_end_to_end(kind, causal, interleaved, device):
    """cu_seqlens_q, cu_seqlens_k_new and rotary_seqlens: each sequence has its own numbers of queries and new keys."""
    held, fresh, queries = [33, 5, 20], [4, 0, 7], [4, 2, 0]
    page, dim = 16, 32
    k, v, table, rows = cache_in_pages([a + b for a, b in zip(held, fresh, strict=True)], page, 2, dim, device)
    k, v = k.nan_to_num(), v.nan_to_num()
    where = {"page_table": table}
    if kind != "pages":
        order = [0, 1, 2] if kind == "rows" else [3, 0, 2]
        k, v = (torch.zeros(4, 48, 2, dim, device=device) for _ in range(2))
        for b, row in enumerate(order):
            for cache, values in zip((k, v), rows[b], strict=True):
                cache[row, : held[b]] = values[: held[b]]
        where = {} if kind == "rows" else {"cache_batch_idx": torch.tensor(order, dtype=torch.int32, device=device)}
    q = torch.randn(sum(queries), 4, dim, device=device)
    new = [torch.randn(sum(fresh) + 2, 2, dim, device=device) for _ in range(2)]  # two rows behind the last sequence
    first = torch.tensor([3, 0, 50], dtype=torch.int32, device=device)
    angles = torch.outer(torch.arange(64.0), 10.0 ** -torch.arange(8.0)).to(device)
    starts = [torch.tensor([0, *sizes]).cumsum(0).int().to(device) for sizes in (queries, fresh)]
    out, lse = flash_attn_3.flash_attn_with_kvcache(
        q, k, v, *new, None, angles.cos(), angles.sin(), torch.tensor(held, dtype=torch.int32, device=device),
        cu_seqlens_q=starts[0], cu_seqlens_k_new=starts[1], max_seqlen_q=4, rotary_seqlens=first, causal=causal,
        rotary_interleaved=interleaved, return_softmax_lse=True, **where,
    )  # fmt: skip
    exact_angles = angles.double()
    for b in range(3):
        mine, added = (slice(int(start[b]), int(start[b + 1])) for start in starts)
        at = int(first[b]) + torch.arange(fresh[b], device=device)
        keys = torch.cat([rows[b][0][: held[b]].double(), rotate(new[0][added].double(), exact_angles[at], interleaved)])
        values = torch.cat([rows[b][1][: held[b]].double(), new[1][added].double()])
        at = int(first[b]) + torch.arange(queries[b], device=device) * int(causal)
        rotated = rotate(q[mine].double(), exact_angles[at], interleaved)
        want, want_lse = reference.attention(rotated[None], keys[None], values[None], causal=causal)
        torch.testing.assert_close(out[mine].double(), want[0], **CLOSE)
        torch.testing.assert_close(lse[:, mine].double(), want_lse[0], **CLOSE)


@pytest.mark.parametrize("packed", [False, True])
def test_combine(packed, device):
    q = torch.randn(2, 5, 4, 16, device=device)
    k, v = (torch.randn(2, 30, 4, 16, device=device) for _ in range(2))
    parts = [
        flash_attn_3.flash_attn_func(q, k[:, a:b], v[:, a:b], return_attn_probs=True)
        for a, b in ((0, 9), (9, 10), (10, 30))
    ]
    outs, lses = torch.stack([out for out, _ in parts]), torch.stack([lse.transpose(1, 2) for _, lse in parts])
    want, want_lse = reference.attention(q.double(), k.double(), v.double())
    want_lse = want_lse.transpose(1, 2)
    if packed:
        outs, lses, want, want_lse = outs.flatten(1, 2), lses.flatten(1, 2), want.flatten(0, 1), want_lse.flatten(0, 1)
    out, lse = flash_attn_3.flash_attn_combine(outs, lses)
    torch.testing.assert_close(out.double(), want, **CLOSE)
    torch.testing.assert_close(lse.double(), want_lse, **CLOSE)
    into = torch.empty_like(out)
    assert flash_attn_3.flash_attn_combine(outs, lses, into)[0] is into and torch.equal(into, out)
    assert flash_attn_3.flash_attn_combine(outs, lses, out_dtype=torch.float16)[0].dtype == torch.float16


def test_scheduler_metadata_is_taken(device):
    lengths = torch.tensor([20, 33], dtype=torch.int32, device=device)
    k, v, table, _ = cache_in_pages([20, 33], 16, 2, 32, device)
    q = torch.randn(2, 1, 4, 32, device=device)
    metadata = flash_attn_3.get_scheduler_metadata(2, 1, 48, 4, 2, 32, lengths, page_size=16)
    call = {"cache_seqlens": lengths, "page_table": table}
    out = flash_attn_3.flash_attn_with_kvcache(q, k, v, scheduler_metadata=metadata, num_splits=3, **call)
    assert torch.equal(out, flash_attn_3.flash_attn_with_kvcache(q, k, v, **call))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"q": torch.zeros(2, 4, 32)}, r"q: got \[2, 4, 32\]; expected \[batch"),
        ({"k_cache": torch.zeros(16, 2, 32)}, "k_cache: got"),
        ({"v_cache": torch.zeros(6, 8, 2, 32)}, "v_cache: got"),
        ({"block_table": torch.zeros(2, 3)}, "block_table: got float32"),
        ({"block_table": torch.zeros(3, 3, dtype=torch.int32)}, r"block_table: got shape \[3, 3\]"),
        ({"cache_seqlens": torch.tensor([20.0, 3.0])}, "cache_seqlens: got float32"),
        ({"cache_seqlens": torch.tensor([20, 3, 1], dtype=torch.int32)}, r"cache_seqlens: got shape \[3\]"),
        ({"cache_seqlens": torch.tensor([20, -3], dtype=torch.int32)}, r"cache_seqlens: entry \[1\] is -3"),
        ({"cache_seqlens": -1}, "cache_seqlens: got -1; allowed are 0 to 48"),
        ({"cache_seqlens": 2.5}, "cache_seqlens: expected an int"),
        ({"cache_seqlens": 49}, "cache_seqlens: 49 keys"),
        ({"k": torch.zeros(2, 1, 2, 32)}, "v: got None"),
        (
            {"k": torch.zeros(2, 1, 2, 32), "v": torch.zeros(2, 2, 2, 32)},
            r"v: got \[2, 2, 2, 32\]; expected \[2, 1, 2, 32\]",
        ),
        ({"k": torch.zeros(2, 1, 4, 32), "v": torch.zeros(2, 1, 4, 32)}, r"k: got \[2, 1, 4, 32\]"),
        ({"cache_leftpad": torch.tensor([0, 99], dtype=torch.int32)}, r"cache_leftpad: entry \[1\] is 99"),
        ({"cache_batch_idx": torch.zeros(2, dtype=torch.int32)}, "cache_batch_idx: is given besides a table"),
        (
            {"block_table": None, "cache_batch_idx": torch.tensor([0, 6])},
            r"cache_batch_idx: entry \[1\] is 6; allowed are 0 to",
        ),
        ({"page_table": torch.zeros(2, 3, dtype=torch.int32)}, "page_table: is given besides block_table"),
        (
            {
                "block_table": None,
                "page_table": torch.zeros(4, 3, dtype=torch.int32),
                "cache_batch_idx": torch.tensor([0, 4]),
            },
            r"cache_batch_idx: entry \[1\] is 4; allowed are 0 to 3",
        ),
        ({"rotary_cos": torch.zeros(64, 8)}, "rotary_sin: got None"),
        ({"rotary_cos": torch.zeros(64, 20), "rotary_sin": torch.zeros(64, 20)}, "rotary_dim of at most 32"),
        ({"cu_seqlens_q": torch.tensor([0, 1, 2], dtype=torch.int32)}, r"q: got \[2, 1, 4, 32\]; expected \[total_q"),
        ({"qv": torch.zeros(2, 1, 4, 16)}, r"qv: got shape \[2, 1, 4, 16\]; expected \[2, 1, 4, 32\]"),
        ({"q_descale": torch.zeros(1)}, "q_descale: got a value"),
        ({"attention_chunk": -4}, "attention_chunk: got -4"),
    ],
    ids=str,
)
def test_refusals_name_the_argument(changes, message):
    arguments = {
        "q": torch.zeros(2, 1, 4, 32),
        "k_cache": torch.zeros(6, 16, 2, 32),
        "v_cache": torch.zeros(6, 16, 2, 32),
        "block_table": torch.zeros(2, 3, dtype=torch.int32),
        "cache_seqlens": torch.tensor([20, 33], dtype=torch.int32),
    } | changes
    with pytest.raises((TypeError, ValueError, NotImplementedError), match=message):
        flash_attn.flash_attn_with_kvcache(**arguments)


@pytest.mark.parametrize("pages", [None, 16], ids=["dense", "pages"])
@pytest.mark.parametrize("rotary", [False, True], ids=["plain", "rotary"])
def test_float8_queries_over_a_float8_cache(device, pages, rotary):
    """New keys in float8 are codes of the cache; against float64 of what the codes are worth."""
    torch.manual_seed(5)
    code = torch.float8_e4m3fn
    q = torch.randn(2, 3, 4, 32, device=device).to(code)
    k, v = (torch.randn(2, 48, 2, 32, device=device).to(code) for _ in range(2))
    new = [torch.randn(2, 3, 2, 32, device=device).to(code) for _ in range(2)]
    lengths = torch.tensor([20, 45], dtype=torch.int32, device=device)
    descales = [torch.rand(2, 2, device=device) + 0.5 for _ in range(3)]
    caches, table = [k.clone(), v.clone()], None
    if pages:
        caches, table = (
            [x.reshape(6, 16, 2, 32) for x in caches],
            torch.arange(6, device=device, dtype=torch.int32).view(2, 3),
        )
    angles = torch.rand(64, 8, device=device)
    rotate = {"rotary_cos": angles.cos(), "rotary_sin": angles.sin(), "rotary_interleaved": False} if rotary else {}
    out = flash_attn_3.flash_attn_with_kvcache(
        q, *caches, *new, cache_seqlens=lengths, page_table=table, causal=True, q_descale=descales[0],
        k_descale=descales[1], v_descale=descales[2], **rotate,
    )  # fmt: skip
    assert out.dtype == torch.bfloat16
    held = [x.reshape(2, 48, 2, 32) for x in caches]
    if not rotary:
        for b, length in enumerate(lengths.tolist()):
            for cache, rows in zip(held, new, strict=True):
                assert torch.equal(cache[b, length : length + 3].view(torch.uint8), rows[b].view(torch.uint8))
    q = q.double()
    if rotary:
        places = lengths[:, None].long() + torch.arange(3, device=device)
        cos, sin = (f(angles.double())[places][:, :, None] for f in (torch.cos, torch.sin))
        a, b = q[..., :8], q[..., 8:16]
        q = torch.cat((a * cos - b * sin, a * sin + b * cos, q[..., 16:]), -1)
    for b, length in enumerate((lengths + 3).tolist()):
        keys, values = (x[b, :length].double().repeat_interleave(2, 1) for x in held)
        factor = [d[b].double().repeat_interleave(2)[:, None, None] for d in descales]
        scores = torch.einsum("ihd,jhd->hij", q[b], keys) * factor[0] * factor[1] * 32**-0.5
        seen = torch.arange(length, device=device) <= torch.arange(3, device=device)[:, None] + length - 3
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1) * factor[2]
        want = torch.einsum("hij,jhd->ihd", weights, values)
        torch.testing.assert_close(out[b].double(), want, atol=2e-2, rtol=1e-2)


def test_queries_of_the_values(device):
    """qv without a cache: scores are q k^T + qv v^T, with gradients of all four."""
    torch.manual_seed(7)
    q, qv = (torch.randn(2, 9, 4, dim, device=device, requires_grad=True) for dim in (16, 32))
    k, v = (torch.randn(2, 11, 2, dim, device=device, requires_grad=True) for dim in (16, 32))
    out = flash_attn_3.flash_attn_func(q, k, v, causal=True, qv=qv)
    exact = [tensor.detach().double().requires_grad_() for tensor in (q, qv, k, v)]
    keys, values = (tensor.repeat_interleave(2, 2) for tensor in exact[2:])
    scores = torch.einsum("bihd,bjhd->bhij", exact[0], keys) + torch.einsum("bihd,bjhd->bhij", exact[1], values)
    hidden = torch.ones(9, 11, dtype=torch.bool, device=device).triu(3)
    weights = (scores * 48**-0.5).masked_fill(hidden, -torch.inf).softmax(-1)
    want = torch.einsum("bhij,bjhd->bihd", weights, values)
    torch.testing.assert_close(out.double(), want, atol=1e-5, rtol=1e-4)
    grad = torch.randn_like(out)
    found = torch.autograd.grad(out, (q, qv, k, v), grad)
    for got, one in zip(found, torch.autograd.grad(want, exact, grad.double()), strict=True):
        torch.testing.assert_close(got.double(), one, atol=1e-4, rtol=1e-3)
    starts = [torch.tensor([0, n, 2 * n], dtype=torch.int32, device=device) for n in (9, 11)]
    flat = [tensor.detach().flatten(0, 1) for tensor in (q, k, v, qv)]
    packed = flash_attn_3.flash_attn_varlen_func(*flat[:3], *starts, 9, 11, causal=True, qv=flat[3])
    torch.testing.assert_close(packed.view_as(out), out, atol=1e-5, rtol=1e-4)
    lengths = torch.tensor([11, 11], dtype=torch.int32, device=device)
    cache = [tensor.detach() for tensor in (q, k, v, qv)]
    over_cache = flash_attn_3.flash_attn_with_kvcache(*cache[:3], qv=cache[3], cache_seqlens=lengths, causal=True)
    torch.testing.assert_close(over_cache.double(), want.detach(), atol=1e-5, rtol=1e-4)
    with pytest.raises(ValueError, match="qv: got shape"):
        flash_attn_3.flash_attn_func(q, k, v, qv=q)


def test_lengths_of_numpy():
    q, k = torch.randn(2, 1, 4, 32), torch.randn(2, 16, 2, 32)
    got = flash_attn_3.flash_attn_with_kvcache(q, k, k, cache_seqlens=numpy.int64(9))
    assert torch.equal(got, flash_attn_3.flash_attn_with_kvcache(q, k, k, cache_seqlens=9))
    with pytest.raises(TypeError, match="cache_seqlens: expected an int"):
        flash_attn_3.flash_attn_with_kvcache(q, k, k, cache_seqlens=numpy.float64(9))


def test_scales_are_refused_by_the_callers_name():
    q, cache = torch.randn(2, 1, 4, 32), torch.randn(2, 8, 2, 32).to(torch.float8_e4m3fn)
    lengths = torch.tensor([3, 8], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"k_descale: got float32\[3, 2\]; expected one number, \[2, 2\]"):
        flash_attn_3.flash_attn_with_kvcache(
            q, cache, cache, cache_seqlens=lengths, k_descale=torch.ones(3, 2), v_descale=torch.ones(2, 2)
        )
    with pytest.raises(ValueError, match=r"k_descale: .*k_descale and v_descale go together"):
        flash_attn_3.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=lengths, k_descale=torch.ones(1))


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize(
    "changes, message",
    [
        ({"k_cache": torch.zeros(2, 8, 2, 16)}, "k_cache: "),
        ({"v_cache": torch.zeros(2, 8, 2, 32, dtype=torch.float16)}, "v_cache: "),
        ({"softmax_scale": float("nan")}, "softmax_scale: "),
        ({"window_size": (-3, 0)}, r"window_size\[0\]: "),
        ({"cache_seqlens": torch.tensor([3], dtype=torch.int32)}, "cache_seqlens: "),
        ({"s_aux": torch.zeros(3)}, "learnable_sink: "),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_errors_of_the_kernels_have_the_callers_names(changes, message, plain):
    """On both ways to them: with lengths in a tensor and no more, and with left padding."""
    arguments = {
        "q": torch.zeros(2, 1, 4, 32), "k_cache": torch.zeros(2, 8, 2, 32), "v_cache": torch.zeros(2, 8, 2, 32),
        "cache_seqlens": torch.tensor([3, 8], dtype=torch.int32),
        "cache_leftpad": None if plain else torch.tensor([1, 0], dtype=torch.int32),
    }  # fmt: skip
    call = flash_attn.flash_attn_with_kvcache
    with pytest.raises((TypeError, ValueError, NotImplementedError), match=f"^{message}"):
        call(**{**arguments, **changes})
