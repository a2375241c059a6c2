"""FlashAttention-2's other names: rotary embedding, padding, function classes, the alias; against formulas in float64."""

import flash_attention
import pytest
import reference
import torch
from flash_attention import flash_attn
from flash_attention.flash_attn import bert_padding, flash_attn_interface
from flash_attention.flash_attn.layers import rotary

DTYPES = {torch.float32: 2e-6, torch.bfloat16: 8e-3}


def rotated(x, position, dim, interleaved, base=10000.0, scale=None):
    """x [seq, heads, head_dim] in float64: pairs as complex numbers, times exp(i angle) and a scale [seq, dim / 2]."""
    x = x.double()
    angle = position.double()[:, None] * base ** (-torch.arange(0, dim, 2, device=x.device).double() / dim)
    factor = torch.polar(torch.ones_like(angle) if scale is None else scale, angle)[:, None]
    head = x[..., :dim]
    pairs = head.unflatten(-1, (-1, 2)) if interleaved else head.unflatten(-1, (2, -1)).transpose(-1, -2)
    result = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * factor)
    result = result if interleaved else result.transpose(-1, -2)
    return torch.cat([result.flatten(-2), x[..., dim:]], dim=-1)


def close(actual, exact, dtype):
    torch.testing.assert_close(actual.double(), exact, atol=DTYPES[dtype] * exact.abs().max().item(), rtol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("shape", ["qkv", "heads", "q_and_kv"])
def test_rotary_embedding(shape, interleaved, dtype, device):
    batch, seq, heads, heads_k, dim, head_dim = 2, 7, 4, 2, 16, 24
    module = rotary.RotaryEmbedding(dim, base=500.0, interleaved=interleaved, device=device)
    position = torch.arange(3, 3 + seq, device=device)

    def expected(x, rotate=True):
        rows = [rotated(x[b], position, dim, interleaved, 500.0) if rotate else x[b].double() for b in range(batch)]
        return torch.stack(rows)

    if shape == "q_and_kv":
        q = torch.randn(batch, seq, heads, head_dim, device=device).to(dtype)
        kv = torch.randn(batch, seq, 2, heads_k, head_dim, device=device).to(dtype)
        exact = expected(q), torch.stack([expected(kv[:, :, 0]), kv[:, :, 1].double()], dim=2)
        found = module(q, kv, seqlen_offset=3)
        assert found[0].data_ptr() == q.data_ptr() and found[1].data_ptr() == kv.data_ptr()
        for a, b in zip(found, exact, strict=True):
            close(a, b, dtype)
        return
    if shape == "qkv":
        qkv = torch.randn(batch, seq, 3, heads, head_dim, device=device).to(dtype)
        exact = torch.stack([expected(qkv[:, :, 0]), expected(qkv[:, :, 1]), qkv[:, :, 2].double()], dim=2)
        found = module(qkv, seqlen_offset=3)
    else:
        qkv = torch.randn(batch, seq, heads + 2 * heads_k, head_dim, device=device).to(dtype)
        parts = qkv.split([heads, heads_k, heads_k], dim=2)
        exact = torch.cat([expected(parts[0]), expected(parts[1]), parts[2].double()], dim=2)
        found = module(qkv, seqlen_offset=torch.full((batch,), 3, device=device), max_seqlen=seq + 3, num_heads_q=heads)
    assert found.data_ptr() == qkv.data_ptr()
    close(found, exact, dtype)


def test_rotary_embedding_with_a_scale(device):
    seq, dim = 9, 16
    module = rotary.RotaryEmbedding(dim, scale_base=4.0, device=device)
    position = torch.arange(seq, device=device)
    ratio = (torch.arange(0, dim, 2, device=device).double() + 0.4 * dim) / (1.4 * dim)
    scale = ratio ** ((position.double() - seq // 2) / 4.0)[:, None]
    qkv = torch.randn(1, seq, 3, 2, dim, device=device)
    q, k, v = (tensor[0].clone() for tensor in qkv.unbind(2))
    found = module(qkv)[0]
    close(found[:, 0], rotated(q, position, dim, False, scale=scale), torch.float32)
    close(found[:, 1], rotated(k, position, dim, False, scale=1 / scale), torch.float32)
    assert torch.equal(found[:, 2], v)


def test_positions_outside_of_the_tables(device):
    """Refused where the host knows them, the nearest inside where it does not: no index trips a device assert."""
    x, cos, sin = (torch.randn(shape, device=device) for shape in ((2, 5, 3, 8), (7, 4), (7, 4)))
    for offsets, span in ((3, "3 to 7"), (-1, "-1 to 3")):
        with pytest.raises(ValueError, match=f"seqlen_offsets: tokens have the positions {span}; cos and sin have 0 to 6"):
            rotary.apply_rotary_emb(x, cos, sin, seqlen_offsets=offsets)
    offsets = torch.tensor([1, 9], device=device)
    if device == "cpu":
        with pytest.raises(ValueError, match="positions 1 to 13"):
            rotary.apply_rotary_emb(x, cos, sin, seqlen_offsets=offsets)
        packed = torch.tensor([0, 9, 10], dtype=torch.int32)
        with pytest.raises(ValueError, match="positions 0 to 8"):
            rotary.apply_rotary_emb(x.flatten(0, 1), cos, sin, cu_seqlens=packed)
    else:
        rotated = rotary.apply_rotary_emb(x, cos, sin, seqlen_offsets=offsets)
        assert torch.equal(rotated[1], rotary.apply_rotary_emb(x, cos[6:].expand(5, 4), sin[6:].expand(5, 4))[1])


def test_rotary_functions(device):
    x = torch.randn(2, 5, 3, 16, device=device, requires_grad=True)
    angles = torch.rand(5, 4, device=device) * 6
    cos, sin = angles.cos(), angles.sin()
    for interleaved in (False, True):
        ours = rotary.apply_rotary_emb_torch(x, cos, sin, interleaved)
        assert torch.equal(ours, rotary.apply_rotary_emb(x, cos, sin, interleaved))
        assert torch.equal(ours, rotary.apply_rotary_emb_torch(x, cos.expand(2, 5, 4), sin.expand(2, 5, 4), interleaved))
        (gradient,) = torch.autograd.grad(ours, x, ours.detach())  # an orthogonal map, undone by its transpose
        torch.testing.assert_close(gradient, x.detach(), atol=1e-5, rtol=1e-5)
    leaf = torch.randn(2, 5, 2, 3, 16, device=device, requires_grad=True)
    rotary.apply_rotary_emb_kv_(leaf * 1, cos, sin).square().sum().backward()
    torch.testing.assert_close(leaf.grad, 2 * leaf.detach(), atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="qkv"):
        rotary.apply_rotary_emb_qkv_(x.detach(), cos, sin)
    with pytest.raises(ValueError, match="cos"):
        rotary.apply_rotary_emb(x, torch.ones(5, 9, device=device), torch.ones(5, 9, device=device))


def test_rows_of_several_sequences(device):
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [3, 2, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]], device=device)
    x = torch.arange(18, device=device).reshape(3, 6, 1).float()
    rows, indices, cu_seqlens, longest = bert_padding.unpad_input_for_concatenated_sequences(x, lengths)
    kept = [0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 12, 13, 14, 15, 16, 17]
    assert rows.flatten().tolist() == indices.tolist() == kept
    assert cu_seqlens.tolist() == [0, 2, 5, 8, 10, 16] and cu_seqlens.dtype == torch.int32 and longest == 6
    assert torch.equal(bert_padding.pad_input(rows, indices, 3, 6)[0, 5], torch.zeros(1, device=device))


def test_rows_and_what_bypasses_them(device):
    x = torch.randn(6, 4, device=device, requires_grad=True)
    indices = torch.tensor([4, 1], device=device)
    rows, residual = bert_padding.index_first_axis_residual(x, indices)
    assert torch.equal(rows, x[indices]) and torch.equal(residual, x)
    (rows.sum() * 3 + residual.sum()).backward()
    assert x.grad[:, 0].tolist() == [1, 4, 1, 1, 4, 1]


def test_function_classes(device):
    q = torch.randn(2, 8, 2, 16, device=device, requires_grad=True)
    exact, _ = reference.attention(*(q.double(),) * 3, causal=True)
    starts = torch.tensor([0, 8, 16], dtype=torch.int32, device=device)
    rest = (0.0, None, True, (-1, -1), 0.0, None, False, False)
    flat = q.flatten(0, 1)
    calls = {
        "FlashAttnFunc": (q, q, q, *rest),
        "FlashAttnQKVPackedFunc": (torch.stack([q, q, q], 2), *rest),
        "FlashAttnKVPackedFunc": (q, torch.stack([q, q], 2), *rest),
        "FlashAttnVarlenFunc": (flat, flat, flat, starts, starts, 8, 8, *rest, None),
        "FlashAttnVarlenQKVPackedFunc": (torch.stack([flat, flat, flat], 1), starts, 8, *rest),
        "FlashAttnVarlenKVPackedFunc": (flat, torch.stack([flat, flat], 1), starts, starts, 8, 8, *rest),
    }
    for name, arguments in calls.items():
        function = getattr(flash_attn_interface, name)
        for grad in (True, False):
            out = function.apply(*arguments, grad)
            assert out.requires_grad == grad, name
            torch.testing.assert_close(out.reshape(q.shape).double(), exact, atol=1e-5, rtol=1e-4)
        assert function.apply(*arguments).requires_grad
        with pytest.raises(TypeError, match=name):
            function.apply(*arguments, True, 1)
    with pytest.raises(AttributeError, match="FlashAttnNothing"):
        _ = flash_attn_interface.FlashAttnNothing


def test_version():
    assert torch.torch_version.TorchVersion(flash_attn.__version__) >= (2, 8)


def test_alias(warm_python):
    program = """
import sys, flash_attention
flash_attention.register_flash_attn()
import flash_attn, torch
from flash_attn import flash_attn_func, __version__
from flash_attn.bert_padding import unpad_input, index_first_axis_residual
from flash_attn.flash_attn_interface import FlashAttnFunc, _flash_attn_forward
from flash_attn.layers.rotary import RotaryEmbedding, apply_rotary_emb_qkv_
assert flash_attn is flash_attention.flash_attn
q = torch.randn(1, 8, 2, 16)
assert torch.equal(flash_attn_func(q, q, q), flash_attention.attention(q, q, q))
flash_attention.unregister_flash_attn()
assert not any(name.split(".")[0] == "flash_attn" for name in sys.modules)
sys.modules["flash_attn"] = type(sys)("flash_attn")
try:
    flash_attention.register_flash_attn()
except RuntimeError as error:
    assert "flash_attn: is already imported" in str(error)
else:
    raise AssertionError
"""
    done = warm_python("-c", program)
    assert done.returncode == 0, done.stderr[-2000:]
    assert {"register_flash_attn", "unregister_flash_attn"} <= set(flash_attention.__all__)


def test_tokens_that_are_kept_but_do_not_count(device):
    """The lengths of sequences have them, seqused has not."""
    x = torch.arange(8.0, device=device).view(2, 4, 1)
    counted = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0]], device=device)
    unused = torch.tensor([[0, 0, 1, 0], [0, 1, 1, 0]], device=device)
    rows, indices, starts, longest, used = bert_padding.unpad_input(x, counted, unused)
    assert rows.flatten().tolist() == [0, 1, 2, 4, 5, 6] and indices.tolist() == [0, 1, 2, 4, 5, 6]
    assert starts.tolist() == [0, 3, 6] and longest == 3 and used.tolist() == [2, 1]
