"""Gradients against finite differences of our own forward: independent of every reference."""

import flash_attention
import pytest
import torch
from attention_cases import CASES, NAMES

FEW = ["plain", "causal_empty_rows", "window", "scale_softcap", "alibi", "bias_rows", "mask", "seqused", "sink", "dropout"]


@pytest.mark.parametrize("name", FEW)
def test_directional_derivative(name, device):
    case = CASES[NAMES.index(name)]
    q, k, v, options = case.make(torch.float32, device)
    learned = [key for key in ("bias", "sink") if key in options]
    inputs = [q, k, v, *(options.pop(key) for key in learned)]
    weights = None

    def loss(*tensors):
        nonlocal weights
        named = dict(zip(learned, tensors[3:], strict=True))
        out, lse = flash_attention.attention(*tensors[:3], return_lse=True, **options, **named)
        if weights is None:
            weights = torch.randn_like(out), torch.randn_like(lse)
        lse = lse.masked_fill(lse == -torch.inf, 0.0)
        return (out.double() * weights[0]).sum() + (lse.double() * weights[1]).sum()

    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    loss(*leaves).backward()
    for which, leaf in enumerate(leaves):
        direction = torch.randn_like(leaf)
        step = 1e-2
        ahead, behind = list(inputs), list(inputs)
        ahead[which] = inputs[which] + step * direction
        behind[which] = inputs[which] - step * direction
        measured = (loss(*ahead) - loss(*behind)) / (2 * step)
        claimed = (leaf.grad.double() * direction).sum()
        scale = (leaf.grad.double() * direction).norm() + 1e-3
        assert abs(measured - claimed) <= 2e-2 * scale + 2e-3 * abs(measured), (
            f"{name}, input {which}: finite difference {measured:.6g}, gradient {claimed:.6g}"
        )


def test_a_learned_number_over_a_cache_is_refused(device):
    """Where a backward pass would miss a part, the call says so; without gradients it is the plain call."""
    q, k, v = (torch.randn(2, 9, 4, 16, device=device) for _ in range(3))
    for learned in (
        {"scale": torch.tensor(0.5)},
        {"softcap": torch.tensor(2.0)},
        {"alibi_slopes": torch.rand(4, device=device)},
    ):
        (name,) = learned
        want = flash_attention.attention_over_cache(q, k, v, **learned)
        learned[name].requires_grad_()
        refusals = "requires a gradient, which is not computed|attention_over_cache: has no gradients"
        with pytest.raises((NotImplementedError, RuntimeError), match=refusals):
            flash_attention.attention_over_cache(q, k, v, **learned).sum().backward()
        with torch.no_grad():
            assert torch.equal(flash_attention.attention_over_cache(q, k, v, **learned), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("seq_kv", [1, 7])
def test_rows_of_one_key_have_rounding_alone(seq_kv, dtype, device):
    """dQ and dK are 0: what is left are rounding errors of dP and of delta, sums of the same terms (docs/numerics.md).

    With several keys each row sees one of them, and through lse the gradient is dlse's.
    """
    q, k, v = (torch.randn(2, n, 6, 128, device=device).to(dtype) for n in (239, seq_kv, seq_kv))
    dout = torch.randn_like(q)
    mask = torch.arange(seq_kv, device=device) == torch.arange(239, device=device)[:, None] % seq_kv
    leaves = [tensor.clone().requires_grad_() for tensor in (q, k)]
    out, lse = flash_attention.attention(*leaves, v, mask=mask, return_lse=True)
    found = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    seen = v[:, torch.arange(239) % seq_kv].float()
    terms = (dout.float() * seen).abs().sum(-1)  # [batch, rows, heads]
    unit = 4 * terms.max().item() * 2.0**-24 * 128**-0.5
    assert found[0].abs().max() <= unit * k.abs().max()
    assert found[1].abs().max() <= unit * q.abs().max() * (239 / seq_kv) ** 0.5 * 4
    (dq,) = torch.autograd.grad(lse.sum(), leaves[:1])
    exact = k[:, torch.arange(239) % seq_kv].double() * 128**-0.5
    torch.testing.assert_close(dq.double(), exact, atol=2 * torch.finfo(dtype).eps, rtol=2 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("which", ["q", "k", "v", "sink"])
def test_backward_over_a_cache_is_refused(which, device):
    tensors = {name: torch.randn(2, 9, 4, 16, device=device) for name in ("q", "k", "v")} | {
        "sink": torch.zeros(4, device=device)
    }
    tensors[which].requires_grad_()
    if which != "sink":
        del tensors["sink"]  # the fast path
    attend = flash_attention.attention_over_cache
    for results in ([attend(**tensors)], attend(**tensors, return_lse=True), [attend(**tensors, kernel="standard")]):
        assert all(result.requires_grad for result in results)
        with pytest.raises(RuntimeError, match="attention_over_cache: has no gradients"):
            results[-1].sum().backward()
    with torch.no_grad():
        assert not attend(**tensors).requires_grad
