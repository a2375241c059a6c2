"""FlashAttention-2's single passes, and a ring of two that is made of them, against the reference."""

import pytest
import reference
import torch
from flash_attention.flash_attn import flash_attn_interface as interface

OPTIONS = {"causal": (True, -1, -1, 0.0), "window": (False, 6, 2, 0.0), "softcap": (False, -1, -1, 4.0)}


def tensors(device, seq_q=13, seq_kv=20):
    shapes = ((2, seq_q, 4, 16), (2, seq_kv, 2, 16), (2, seq_kv, 2, 16), (2, seq_q, 4, 16))
    return [torch.randn(shape, device=device) for shape in shapes]


def exact(q, k, v, dout, **options):
    """[out, lse, dq, dk, dv]"""
    leaves = [tensor.double().requires_grad_() for tensor in (q, k, v)]
    out, lse = reference.attention(*leaves, **options)
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, dout.double())]


def assert_close(actual, expected):
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("dropout_p", [0.0, 0.3], ids=["all", "dropout"])
@pytest.mark.parametrize("name", OPTIONS)
def test_forward_and_backward(name, dropout_p, packed, device):
    q, k, v, dout = tensors(device)
    causal, left, right, softcap = OPTIONS[name]
    lengths, shared = (), (dropout_p, 0.3, causal, left, right, softcap, None)
    flat = (lambda tensor: tensor.flatten(0, 1)) if packed else (lambda tensor: tensor)
    forward, backward = interface._flash_attn_forward, interface._flash_attn_backward
    if packed:
        forward, backward = interface._flash_attn_varlen_forward, interface._flash_attn_varlen_backward
        starts = [torch.arange(3, dtype=torch.int32, device=device) * tensor.shape[1] for tensor in (q, k)]
        lengths = (*starts, q.shape[1], k.shape[1])
    inputs = [flat(tensor) for tensor in (q, k, v)]
    out, lse, weights, rng_state = forward(*inputs, *lengths, *shared, True)
    gradients = [torch.empty_like(tensor) for tensor in inputs]
    backward(flat(dout), *inputs, out, lse, *gradients, *lengths, *shared, False, rng_state)
    assert weights.numel() == (2 * 4 * 13 * 20 if dropout_p else 0)
    if packed:
        lse = lse.unflatten(1, (2, -1)).transpose(0, 1)
        out, *gradients = (tensor.unflatten(0, (2, -1)) for tensor in (out, *gradients))
    seed = int(rng_state[0]) if dropout_p else 0
    options = {"causal": causal, "window": (left, right), "softcap": softcap, "scale": 0.3}
    assert_close((out, lse, *gradients), exact(q, k, v, dout, dropout_p=dropout_p, seed=seed, **options))


def test_a_ring_of_two(device):
    """Keys in two parts: results are joined by lse, and both backward passes are given the joined ones."""
    q, k, v, dout = tensors(device)
    shared = (0.0, None, False, -1, -1, 0.0, None)
    parts = [slice(0, 8), slice(8, 20)]
    results = [interface._flash_attn_forward(q, k[:, part], v[:, part], *shared, False)[:2] for part in parts]
    lse = torch.stack([lse for _, lse in results]).logsumexp(0)
    out = sum(out * (part_lse - lse).exp().transpose(1, 2)[..., None] for out, part_lse in results)
    dq, dk, dv = torch.zeros_like(q), torch.empty_like(k), torch.empty_like(v)
    for part in parts:
        one = torch.empty_like(q)
        places = (one, dk[:, part], dv[:, part])
        interface._flash_attn_backward(dout, q, k[:, part], v[:, part], out, lse, *places, *shared, False)
        dq += one
    assert_close((out, lse, dq, dk, dv), exact(q, k, v, dout))


def test_pages_and_what_is_refused(device):
    pages = torch.randn(6, 8, 2, 16, device=device)
    table = torch.tensor([[4, 0, 3], [1, 5, 2]], dtype=torch.int32, device=device)
    starts = [torch.tensor(ends, dtype=torch.int32, device=device) for ends in ((0, 1, 2), (0, 24, 41))]
    q = torch.randn(2, 4, 16, device=device)
    arguments = (q, pages, pages, *starts, 1, 24, 0.0, None, False)
    out = interface._flash_attn_varlen_forward(*arguments, block_table=table, num_splits=0)[0]
    for b, length in enumerate((24, 17)):
        keys = pages[table[b].long()].flatten(0, 1)[None, :length].double()
        expected, _ = reference.attention(q[b][None, None].double(), keys, keys)
        torch.testing.assert_close(out[b].double(), expected[0, 0], atol=1e-5, rtol=1e-4)
    seeded = (q, pages, pages, *starts, 1, 24, 0.4, None, False)  # with dropout the pages are gathered
    torch.manual_seed(3)
    dropped, _, _, state = interface._flash_attn_varlen_forward(*seeded, block_table=table)
    rows = torch.cat([pages[table[b].long()].flatten(0, 1)[:length] for b, length in enumerate((24, 17))])
    torch.manual_seed(3)
    same, _, _, same_state = interface._flash_attn_varlen_forward(q, rows, rows, *seeded[3:])
    assert torch.equal(state, same_state) and torch.equal(dropped, same) and not torch.equal(dropped, out)
    with pytest.raises(RuntimeError, match="num_splits > 1 is not supported"):
        interface._flash_attn_varlen_forward(*arguments, block_table=table, num_splits=2)
    with pytest.raises(NotImplementedError, match="leftpad_k"):
        interface._flash_attn_varlen_forward(*arguments, leftpad_k=starts[0])


def test_what_backward_is_given():
    q = torch.randn(1, 8, 2, 16)
    out, lse, _, _ = interface._flash_attn_forward(q, q, q, 0.5, 0.25, False, -1, -1, 0.0, None, False)
    given = (q, q, q, q, out, lse)
    with pytest.raises(ValueError, match="rng_state: got None"):
        interface._flash_attn_backward(
            *given, *(torch.empty_like(q) for _ in range(3)), 0.5, 0.25, False, -1, -1, 0.0, None, False
        )
    wrong = torch.empty(1, 8, 1, 16)
    with pytest.raises(ValueError, match=r"dk: got shape \[1, 8, 1, 16\]; expected \[1, 8, 2, 16\]"):
        interface._flash_attn_backward(*given, q.clone(), wrong, q.clone(), 0.0, 0.25, False, -1, -1, 0.0, None, False)
