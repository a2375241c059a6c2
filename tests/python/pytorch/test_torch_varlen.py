"""torch's varlen_attn and nested tensors on this library, against attention of each sequence in float64."""

import inspect

import flash_attention
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

varlen = pytest.importorskip("torch.nn.attention.varlen", reason="this torch has no varlen_attn")
registry = pytest.importorskip("flash_attention.torch_registry")
newer = pytest.mark.skipif(
    "enable_gqa" not in inspect.signature(varlen.varlen_attn).parameters,
    reason="varlen_attn of this torch has no enable_gqa, seqused_k, block_table or num_splits",
)

LENGTHS = (5, 0, 33, 1, 20)
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.fixture(autouse=True)
def registered():
    flash_attention.register()
    yield
    flash_attention.unregister()


def starts_of(lengths, device):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32, device=device)


def exact(q, k, v, q_lengths, k_lengths, window=(-1, -1), scale=None):
    """Each sequence alone, in float64: [total, heads, dim] and lse [heads, total]. The diagonal is bottom-right."""
    outs, lses = [], []
    group = q.shape[1] // k.shape[1]
    parts = (x.double().split(list(n)) for x, n in ((q, q_lengths), (k, k_lengths), (v, k_lengths)))
    for a, b, c in zip(*parts, strict=True):
        b, c = b.repeat_interleave(group, 1), c.repeat_interleave(group, 1)
        s = torch.einsum("qhd,khd->hqk", a, b) * (a.shape[-1] ** -0.5 if scale is None else scale)
        distance = torch.arange(b.shape[0])[None] - torch.arange(a.shape[0])[:, None] - (b.shape[0] - a.shape[0])
        distance = distance.to(s.device)
        hidden = torch.zeros_like(distance, dtype=torch.bool)
        if window[0] >= 0:
            hidden |= distance < -window[0]
        if window[1] >= 0:
            hidden |= distance > window[1]
        s = s.masked_fill(hidden, -torch.inf)
        lses.append(s.logsumexp(-1))
        outs.append(torch.einsum("hqk,khd->qhd", torch.exp(s - lses[-1][..., None]).nan_to_num(0.0), c))
    return torch.cat(outs), torch.cat(lses, 1)


def close(ours, theirs, dtype):
    torch.testing.assert_close(ours.double(), theirs.double(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@newer
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (7, 0), (3, 2)], ids=str)
def test_varlen_attn_and_its_gradients(device, dtype, window):
    if device == "cuda" and dtype == torch.float32:
        pytest.skip("torch's varlen_attn checks for 16-bit types on CUDA")
    total, k_lengths = sum(LENGTHS), (9, 4, 33, 6, 25)
    starts, k_starts = starts_of(LENGTHS, device), starts_of(k_lengths, device)
    q = torch.randn(total, 4, 32, dtype=dtype, device=device, requires_grad=True)
    k, v = (torch.randn(sum(k_lengths), 2, 32, dtype=dtype, device=device, requires_grad=True) for _ in range(2))
    options = {"window_size": window, "enable_gqa": True, "return_aux": varlen.AuxRequest(lse=True)}
    out, lse = varlen.varlen_attn(q, k, v, starts, k_starts, 33, 33, **options)
    expected, expected_lse = exact(q, k, v, LENGTHS, k_lengths, window)
    close(out, expected, dtype)
    close(lse, expected_lse, dtype)
    dout = torch.randn_like(out)
    gradients = torch.autograd.grad(out, (q, k, v), dout), torch.autograd.grad(expected, (q, k, v), dout.double())
    for ours, theirs in zip(*gradients, strict=True):
        close(ours, theirs, dtype)


@newer
def test_varlen_attn_over_pages(device):
    dtype = torch.float16
    used, page = [13, 3, 20], 8
    pages = [torch.randn(9, page, 2, 32, dtype=dtype, device=device) for _ in range(2)]
    table = torch.tensor([[4, 2, -1], [7, -1, -1], [0, 8, 5]], dtype=torch.int32, device=device)
    q = torch.randn(3, 4, 32, dtype=dtype, device=device)
    starts = starts_of((1, 1, 1), device)
    lengths = torch.tensor(used, dtype=torch.int32, device=device)
    options = {"seqused_k": lengths, "block_table": table, "enable_gqa": True, "window_size": (-1, 0)}
    gathered = [torch.cat([x[table[i].clamp(min=0)].flatten(0, 1)[:n] for i, n in enumerate(used)]) for x in pages]
    expected, _ = exact(q, *gathered, (1, 1, 1), used)
    close(varlen.varlen_attn(q, *pages, starts, None, 1, 24, **options), expected, dtype)
    out = torch.full_like(q, torch.nan)
    varlen.varlen_attn_out(out, q, *pages, starts, None, 1, 24, **options)
    close(out, expected, dtype)


@newer
def test_varlen_attn_into_a_tensor(device):
    dtype = torch.float16
    q, k, v = (torch.randn(sum(LENGTHS), 2, 64, dtype=dtype, device=device) for _ in range(3))
    starts = starts_of(LENGTHS, device)
    out = torch.full_like(q, torch.nan)
    varlen.varlen_attn_out(out, q, k, v, starts, starts, 33, 33, window_size=(-1, 0))
    close(out, exact(q, k, v, LENGTHS, LENGTHS, (-1, 0))[0], dtype)


@newer
@pytest.mark.parametrize("paged", [False, True], ids=["packed", "pages"])
def test_one_split_means_the_same_bits_in_any_batch(device, paged):
    """What torch promises for num_splits=1: a sequence's result does not depend on the others of the batch."""
    used, page, dtype = (700, 3, 260), 20, torch.float16
    q = torch.randn(3, 4, 64, dtype=dtype, device=device)
    keys = [[torch.randn(n, 2, 64, dtype=dtype, device=device) for n in used] for _ in range(2)]

    def call(which):
        lengths = [used[i] for i in which]
        starts, options = (
            starts_of((1,) * len(which), device),
            {"enable_gqa": True, "num_splits": 1, "window_size": (-1, 0)},
        )
        if not paged:
            k, v = (torch.cat([x[i] for i in which]) for x in keys)
            return varlen.varlen_attn(q[which], k, v, starts, starts_of(lengths, device), 1, max(lengths), **options)
        pages = [torch.zeros(len(which) * 35, page, 2, 64, dtype=dtype, device=device) for _ in range(2)]
        for n, i in enumerate(which):
            for x, pool in zip(keys, pages, strict=True):
                pool[n * 35 : (n + 1) * 35].view(-1, 2, 64)[: used[i]] = x[i]
        table = torch.arange(len(which) * 35, dtype=torch.int32, device=device).view(-1, 35)
        options |= {"seqused_k": torch.tensor(lengths, dtype=torch.int32, device=device), "block_table": table}
        return varlen.varlen_attn(q[which], *pages, starts, None, 1, 700, **options)

    together = call([0, 1, 2])
    close(together, exact(q, *(torch.cat(x) for x in keys), (1, 1, 1), used)[0], dtype)
    for i in range(3):
        assert torch.equal(call([i])[0], together[i])


def test_varlen_attn_compiles(device):
    torch._dynamo.reset()
    q, k, v = (torch.randn(sum(LENGTHS), 2, 64, dtype=torch.float16, device=device, requires_grad=True) for _ in range(3))
    starts = starts_of(LENGTHS, device)
    step = torch.compile(lambda *x: varlen.varlen_attn(*x, starts, starts, 33, 33), fullgraph=True, backend="aot_eager")
    out = step(q, k, v)
    close(out, exact(q, k, v, LENGTHS, LENGTHS)[0], torch.float16)
    out.sum().backward()
    assert q.grad.isfinite().all()


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_nested_tensors(device, causal, monkeypatch):
    """torch chooses its flash path for nested tensors on CUDA alone; on a CPU the choice is made for it."""
    if device == "cpu":
        monkeypatch.setattr("torch.nested._internal.sdpa._select_sdp_backend", lambda *_: SDPBackend.FLASH_ATTENTION)
    lengths = (5, 33, 1, 20)
    leaves = [[torch.randn(n, 4, 32, dtype=torch.float16, device=device) for n in lengths] for _ in range(3)]
    tensors = [torch.nested.nested_tensor(x, layout=torch.jagged, requires_grad=True) for x in leaves]
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in tensors), is_causal=causal)
    packed = [torch.cat(x).requires_grad_() for x in leaves]
    expected, _ = exact(*packed, lengths, lengths, (-1, 0) if causal else (-1, -1))
    close(out.transpose(1, 2).values(), expected, torch.float16)
    out.values().sum().backward()
    theirs = torch.autograd.grad(expected.sum(), packed)
    for ours, b in zip(tensors, theirs, strict=True):
        close(ours.grad.values(), b, torch.float16)


def test_why_torch(device):
    q = torch.randn(1, 2, 16, 32, device=device, dtype=torch.float16)
    assert flash_attention.why_torch(q, q, q, is_causal=True) is None
    assert "return_debug_mask" in registry.torch_varlen.why_not(q, q, return_debug_mask=True)
    assert "num_splits" in registry.torch_varlen.why_not(q, q, num_splits=4)
    wide = torch.randn(1, 2, 16, 584, device=device, dtype=torch.float16)
    assert flash_attention.why_torch(wide, wide, wide)
    with sdpa_kernel(SDPBackend.MATH):
        assert "MATH" in flash_attention.why_torch(q, q, q)
    flash_attention.unregister()
    assert "register()" in flash_attention.why_torch(q, q, q)


def test_what_is_said_is_what_happens(monkeypatch):
    """why_torch is None exactly where the library's forward runs."""
    calls = []
    original = registry.torch_ops._core.forward

    class Counting:
        @staticmethod
        def forward(*arguments, **keywords):
            calls.append(1)
            return original(*arguments, **keywords)

    monkeypatch.setattr(registry.torch_ops, "_core", Counting)
    for dtype, width, options in (
        (torch.float32, 32, {}),
        (torch.float32, 32, {"is_causal": True}),
        (torch.float32, 32, {"attn_mask": torch.zeros(16, 16)}),
        (torch.bfloat16, 64, {}),
        (torch.float64, 32, {}),
        (torch.float32, 30, {}),
        (torch.float32, 32, {"dropout_p": 0.5}),
    ):
        calls.clear()
        q = torch.randn(1, 2, 16, width, dtype=dtype)
        torch.nn.functional.scaled_dot_product_attention(q, q, q, **options)
        assert (flash_attention.why_torch(q, q, q, **options) is None) == bool(calls), (dtype, width, options)


def test_without_it_torch_has_no_varlen_attn_on_a_cpu():
    flash_attention.unregister()
    q = torch.randn(4, 1, 8, dtype=torch.float16)
    starts = starts_of((4,), "cpu")
    with pytest.raises(NotImplementedError):
        varlen.varlen_attn(q, q, q, starts, starts, 4, 4)


def test_what_neither_takes_says_so():
    q = torch.randn(4, 1, 12, dtype=torch.float16)
    starts = starts_of((4,), "cpu")
    with pytest.raises(NotImplementedError, match="does not take these tensors"):
        varlen.varlen_attn(q, q, q, starts, starts, 4, 4)


@pytest.mark.skipif(not hasattr(torch.nn.attention, "list_flash_attention_impls"), reason="torch has no such list")
def test_importing_registers_nothing_and_torchs_list_works(warm_python):
    program = """
import torch, flash_attention, flash_attention.torch_registry as r
a = torch.nn.attention
assert "flash_attention" not in a.list_flash_attention_impls() and a.current_flash_attention_impl() is None
assert r.offer() and "flash_attention" in a.list_flash_attention_impls() and not r.is_registered()
a.activate_flash_attention_impl("flash_attention")
assert r.is_registered()
a.restore_flash_attention_impl()
assert not r.is_registered()
"""
    done = warm_python("-c", program)
    assert done.returncode == 0, done.stderr
