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
