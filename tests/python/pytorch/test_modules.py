"""FlashAttention, StandardAttention and MultiheadAttention."""

import pytest
import torch
from flash_attention import FlashAttention, MultiheadAttention, StandardAttention


@pytest.mark.parametrize("causal", [False, True])
def test_flash_agrees_with_standard(causal, device):
    inputs = [torch.randn(2, 4, 70, 32, device=device, requires_grad=True) for _ in range(3)]
    results = []
    for module in (FlashAttention(), StandardAttention()):
        out = module(*inputs, causal=causal)
        results.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    for flash, standard in zip(*results, strict=True):
        torch.testing.assert_close(flash, standard, atol=1e-3, rtol=1e-3)


def test_flash_agrees_with_torch(device):
    q, k, v = (torch.randn(2, 4, 70, 32, device=device) for _ in range(3))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(FlashAttention()(q, k, v, causal=True), expected, atol=1e-5, rtol=1e-4)


def test_dropout_only_in_training(device):
    q = torch.randn(1, 2, 32, 16, device=device)
    module = FlashAttention(dropout_p=0.5)
    assert not torch.equal(module(q, q, q), FlashAttention()(q, q, q))
    assert torch.equal(module.eval()(q, q, q), FlashAttention()(q, q, q))


@pytest.mark.parametrize("kind", [FlashAttention, StandardAttention])
def test_options_of_the_module_hold_for_every_call(kind, device):
    q, k, v = (torch.randn(2, 4, 20, 16, device=device) for _ in range(3))
    causal, full = kind()(q, k, v, causal=True), kind()(q, k, v)
    assert torch.equal(kind(causal=True)(q, k, v), causal)
    assert torch.equal(kind(causal=True)(q, k, v, scale=0.25), causal)  # head_dim 16: the default
    assert torch.equal(kind(causal=True)(q, k, v, causal=False), full)  # a call has the last word
    assert torch.equal(kind(causal=True, window=(3, -1))(q, k, v), kind()(q, k, v, window=(3, 0)))
    tokens_first = kind(layout="bshd")(*(tensor.transpose(1, 2) for tensor in (q, k, v)))
    torch.testing.assert_close(tokens_first.transpose(1, 2), full)


SETTINGS = [
    {},
    {"batch_first": True},
    {"batch_first": True, "bias": False},
    {"batch_first": True, "kdim": 24, "vdim": 40},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("masks", ["none", "padding", "bool", "float", "per_head", "both", "causal"])
def test_multihead_matches_torch(settings, masks, device):
    batch, seq_q, seq_kv, width = 3, 10, 10 if masks == "causal" else 14, 36
    theirs = torch.nn.MultiheadAttention(width, 3, **settings).to(device)
    ours = MultiheadAttention(width, 3, **settings).to(device)
    ours.load_state_dict(theirs.state_dict())

    def sequence(length, size):
        shape = (batch, length, size) if settings.get("batch_first") else (length, batch, size)
        return torch.randn(shape, device=device)

    query = sequence(seq_q, width)
    key, value = sequence(seq_kv, settings.get("kdim", width)), sequence(seq_kv, settings.get("vdim", width))
    options = {}
    if masks in ("padding", "both"):
        options["key_padding_mask"] = torch.arange(seq_kv, device=device) >= torch.tensor([[14], [9], [3]], device=device)
    if masks in ("bool", "both"):
        options["attn_mask"] = torch.rand(seq_q, seq_kv, device=device) > 0.7
        options["attn_mask"][:, 0] = False
    if masks == "float":
        options["attn_mask"] = torch.randn(seq_q, seq_kv, device=device)
    if masks == "per_head":
        options["attn_mask"] = torch.randn(batch * 3, seq_q, seq_kv, device=device)
    if masks == "causal":
        hidden = torch.ones(seq_q, seq_kv, device=device, dtype=torch.bool).triu(1)
        options |= {"attn_mask": hidden, "is_causal": True}
    expected, _ = theirs(query, key, value, need_weights=False, **options)
    actual, weights = ours(query, key, value, need_weights=False, **options)
    assert weights is None
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)


def test_multihead_self_attention_trains_like_torch(device):
    theirs = torch.nn.MultiheadAttention(32, 4, batch_first=True).to(device)
    ours = MultiheadAttention(32, 4, batch_first=True).to(device)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 9, 32, device=device)
    for module in (theirs, ours):
        module(x, x, x, need_weights=False)[0].square().sum().backward()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-4, rtol=1e-3)


def test_multihead_gives_weights_when_asked(device):
    module = MultiheadAttention(32, 4, batch_first=True).to(device)
    x = torch.randn(2, 9, 32, device=device)
    out, weights = module(x, x, x)
    assert weights.shape == (2, 9, 9)
    torch.testing.assert_close(out, module(x, x, x, need_weights=False)[0], atol=1e-5, rtol=1e-4)
    unbatched, _ = module(x[0], x[0], x[0], need_weights=False)
    torch.testing.assert_close(unbatched, out[0], atol=1e-5, rtol=1e-4)


def test_encoder_layer_swaps_one_line(device):
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True).to(device).train()
    x = torch.randn(2, 9, 32, device=device)
    expected = layer(x)
    swapped = MultiheadAttention(32, 4, batch_first=True).to(device)
    swapped.load_state_dict(layer.self_attn.state_dict())
    layer.self_attn = swapped
    torch.testing.assert_close(layer(x), expected, atol=1e-5, rtol=1e-4)
