"""flash_attn.modules.mha against formulas in float64; what of flash_attn is refused; register_flash_attn() and metadata."""

import importlib
import importlib.metadata
import sys
from types import SimpleNamespace

import flash_attention
import pytest
import torch
from flash_attention.flash_attn.modules.mha import MHA, CrossAttention, FlashSelfAttention, SelfAttention, get_alibi_slopes


def formula(layer, x, x_kv=None, *, causal=False, window=None, slopes=None, rotary=0, rows=slice(None)):
    """The layer's result in float64, of x [batch, seq, embed_dim]."""
    weights = {name: tensor.detach().double() for name, tensor in layer.state_dict().items()}
    heads, heads_kv, dim = layer.num_heads, layer.num_heads_kv, layer.head_dim
    linear = lambda name, x: x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0)  # noqa: E731
    x = x.double()
    if layer.cross_attn:
        q = linear("Wq", x[:, rows])
        k, v = linear("Wkv", x if x_kv is None else x_kv.double()).chunk(2, -1)
    else:
        q, k, v = linear("Wqkv", x).split([heads * dim, heads_kv * dim, heads_kv * dim], -1)
    q = q.unflatten(-1, (heads, dim))
    k, v = (t.unflatten(-1, (heads_kv, dim)) for t in (k, v))
    if rotary:
        angle = torch.arange(x.shape[1]).double()[:, None] * 10000.0 ** (-torch.arange(0, rotary, 2).double() / rotary)
        turn = torch.polar(torch.ones_like(angle), angle)[:, None]

        def turned(t):
            a, b = t[..., : rotary // 2], t[..., rotary // 2 : rotary]
            pairs = torch.complex(a, b) * turn
            return torch.cat([pairs.real, pairs.imag, t[..., rotary:]], -1)

        q, k = turned(q), turned(k)
    if not layer.cross_attn:
        q = q[:, rows]
    k, v = (t.repeat_interleave(heads // heads_kv, 2) for t in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * dim**-0.5
    distance = torch.arange(k.shape[1]) - torch.arange(q.shape[1])[:, None] - (k.shape[1] - q.shape[1])
    if slopes is not None:
        scores = scores - torch.tensor(slopes).double()[:, None, None] * distance.abs()
    seen = torch.ones_like(distance, dtype=torch.bool)
    if causal:
        seen &= distance <= 0
    if window is not None:
        seen &= (distance >= -window[0]) & (distance <= window[1])
    p = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return linear("out_proj", torch.einsum("bhqk,bkhd->bqhd", p, v).flatten(-2))


LAYERS = {
    "plain": ({}, {}),
    "grouped, no biases": ({"num_heads_kv": 2, "qkv_proj_bias": False, "out_proj_bias": False}, {}),
    "causal": ({"causal": True}, {"causal": True}),
    "window": ({"window_size": (3, 1)}, {"window": (3, 1)}),
    "alibi": ({"use_alibi": True, "causal": True}, {"causal": True, "slopes": [0.25, 0.0625, 0.015625, 0.00390625]}),
    "rotary": ({"rotary_emb_dim": 8, "causal": True}, {"rotary": 8, "causal": True}),
}


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer(name, checkpointing):
    given, wanted = LAYERS[name]
    layer = MHA(64, 4, checkpointing=checkpointing, **given)
    x = torch.randn(2, 11, 64, requires_grad=True)
    torch.testing.assert_close(layer(x).double(), formula(layer, x.detach(), **wanted), atol=2e-6, rtol=1e-5)
    layer(x).square().sum().backward()
    wide = x.detach().double().requires_grad_()
    formula(layer, wide, **wanted).square().sum().backward()
    torch.testing.assert_close(x.grad.double(), wide.grad, atol=2e-5, rtol=1e-4)


def test_cross_attention_rows_and_residual():
    layer = MHA(32, 4, num_heads_kv=2, cross_attn=True, return_residual=True)
    assert sorted(layer.state_dict()) == [
        "Wkv.bias",
        "Wkv.weight",
        "Wq.bias",
        "Wq.weight",
        "out_proj.bias",
        "out_proj.weight",
    ]
    x, x_kv = torch.randn(2, 5, 32), torch.randn(2, 9, 32)
    out, residual = layer(x, x_kv)
    assert residual is x
    torch.testing.assert_close(out.double(), formula(layer, x, x_kv), atol=2e-6, rtol=1e-5)
    layer = MHA(32, 4)
    assert sorted(layer.state_dict()) == ["Wqkv.bias", "Wqkv.weight", "out_proj.bias", "out_proj.weight"]
    rows = slice(0, 1)
    torch.testing.assert_close(layer(x, mixer_subset=rows).double(), formula(layer, x, rows=rows), atol=2e-6, rtol=1e-5)


def test_packed_sequences_and_the_inner_classes():
    layer = MHA(32, 4, causal=True)
    x = torch.randn(12, 32)
    starts = torch.tensor([0, 5, 12], dtype=torch.int32)
    out = layer(x, cu_seqlens=starts, max_seqlen=7)
    for begin, end in ((0, 5), (5, 12)):
        torch.testing.assert_close(
            out[begin:end].double(), formula(layer, x[None, begin:end], causal=True)[0], atol=2e-6, rtol=1e-5
        )
    qkv = torch.randn(2, 6, 3, 2, 16)
    want = flash_attention.attention(*qkv.unbind(2), causal=True)
    for inner in (FlashSelfAttention, SelfAttention):
        torch.testing.assert_close(inner(causal=True)(qkv), want)
        torch.testing.assert_close(inner()(qkv, causal=True), want)
    torch.testing.assert_close(CrossAttention()(qkv[:, :, 0], qkv[:, :, 1:], causal=True), want)
    dropped = FlashSelfAttention(attention_dropout=0.5)
    assert not torch.equal(dropped(qkv), dropped.eval()(qkv))


@pytest.mark.parametrize("lengths", [False, True])
def test_a_step_at_a_time(lengths):
    """Rows that come through a cache have the results of all rows at once."""
    layer = MHA(64, 4, num_heads_kv=2, causal=True, rotary_emb_dim=16, layer_idx=3)
    x = torch.randn(2, 9, 64)
    want = formula(layer, x, causal=True, rotary=16)
    params = SimpleNamespace(
        max_batch_size=2,
        max_seqlen=16,
        seqlen_offset=0,
        batch_size_offset=0,
        lengths_per_sample=None,
        key_value_memory_dict={},
    )
    with torch.no_grad():
        found = [layer(x[:, :5], inference_params=params)]
        for n in range(5, 9):
            params.seqlen_offset = n
            params.lengths_per_sample = torch.full((2,), n, dtype=torch.int32) if lengths else None
            found.append(layer(x[:, n : n + 1], inference_params=params))
    assert list(params.key_value_memory_dict) == [3]
    torch.testing.assert_close(torch.cat(found, 1).double(), want, atol=3e-6, rtol=1e-5)


def test_slopes():
    assert get_alibi_slopes(2) == [2.0**-4, 2.0**-8]
    assert get_alibi_slopes(3) == [2.0**-4, 2.0**-8, 2.0**-2]


def test_the_inner_layer_of_sequences_end_to_end(device):
    lengths = [5, 1, 11]
    qkv = torch.randn(17, 3, 2, 16, device=device)
    starts = torch.tensor([0, *lengths]).cumsum(0).int().to(device)
    out = FlashSelfAttention(causal=True, softmax_scale=0.3)(qkv, cu_seqlens=starts, max_seqlen=11)
    for part, of in zip(out.split(lengths), qkv.double().split(lengths), strict=True):
        q, k, v = of.unbind(1)
        seen = torch.ones(len(q), len(q), device=device).tril().bool()
        p = (torch.einsum("qhd,khd->hqk", q, k) * 0.3).masked_fill(~seen, -torch.inf).softmax(-1)
        torch.testing.assert_close(part.double(), torch.einsum("hqk,khd->qhd", p, v), atol=1e-5, rtol=1e-4)


def test_refusals():
    with pytest.raises(NotImplementedError, match="dwconv"):
        MHA(32, 4, dwconv=True)
    with pytest.raises(ValueError, match="embed_dim 30, num_heads 4"):
        MHA(30, 4)
    with pytest.raises(ValueError, match="rotary_emb_dim: got 8"):
        MHA(32, 4, cross_attn=True, rotary_emb_dim=8)
    with pytest.raises(NotImplementedError, match=r"key_padding_mask: .*unpad_input"):
        MHA(32, 4)(torch.randn(1, 2, 32), key_padding_mask=torch.ones(1, 2, dtype=torch.bool))
    cache = SimpleNamespace(lengths_per_sample=None)
    with pytest.raises(NotImplementedError, match="inference_params: takes no cu_seqlens, mixer_subset or cross_attn"):
        MHA(32, 4, layer_idx=0)(torch.randn(1, 2, 32), mixer_subset=slice(1), inference_params=cache)
    with pytest.raises(NotImplementedError, match="rotary_emb_dim: rotary embedding of packed sequences"):
        MHA(32, 4, rotary_emb_dim=8)(torch.randn(2, 32), cu_seqlens=torch.tensor([0, 2], dtype=torch.int32), max_seqlen=2)
    with pytest.raises(ValueError, match="layer_idx: got None"):
        MHA(32, 4)(torch.randn(1, 2, 32), inference_params=SimpleNamespace(lengths_per_sample=None))


@pytest.fixture
def registered():
    flash_attention.register_flash_attn()
    yield
    flash_attention.unregister_flash_attn()


def test_what_is_no_attention(registered):
    assert importlib.import_module("flash_attn.modules.mha").MHA is MHA
    for name, instead in (
        ("flash_attn.losses.cross_entropy", "torch.nn.functional.cross_entropy"),
        ("flash_attn.ops.triton.layer_norm", "torch.nn.RMSNorm"),
        ("flash_attention.flash_attn.ops", "torch.nn.RMSNorm"),
    ):
        with pytest.raises(ImportError, match=f"computes attention alone; .*{instead}"):
            importlib.import_module(name)


def test_the_distribution(registered):
    assert importlib.metadata.version("flash_attn") == importlib.metadata.version("flash-attn") == "2.8.3"
    assert importlib.metadata.packages_distributions()["flash_attn"] == ["flash-attn"]
    assert importlib.metadata.version("pytest")
    flash_attention.unregister_flash_attn()
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("flash_attn")


def test_transformers_finds_it(monkeypatch):
    utils = pytest.importorskip("transformers.utils.import_utils")
    monkeypatch.setattr(utils, "is_torch_cuda_available", lambda: True)
    utils.is_flash_attn_2_available.cache_clear()
    assert not utils.is_flash_attn_2_available()
    flash_attention.register_flash_attn()
    try:
        assert utils.is_flash_attn_2_available()
    finally:
        flash_attention.unregister_flash_attn()
    assert not utils.is_flash_attn_2_available()
    assert "flash_attn" not in sys.modules
