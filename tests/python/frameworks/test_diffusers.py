"""Attention layers of diffusers with our processor, against its own textbook processor in float64."""

import copy

import pytest
import torch

processors = pytest.importorskip("diffusers.models.attention_processor", reason="diffusers is not installed")
from flash_attention.diffusers import AttnProcessor  # noqa: E402

LAYERS = {
    "picture": (
        {"query_dim": 32, "norm_num_groups": 4, "residual_connection": True, "rescale_output_factor": 1.5},
        (2, 32, 5, 7),
    ),
    "tokens": ({"query_dim": 32, "bias": True}, (2, 19, 32)),
    "grouped": ({"query_dim": 32, "kv_heads": 2}, (2, 19, 32)),
    "cross": ({"query_dim": 32, "cross_attention_dim": 24, "cross_attention_norm": "layer_norm"}, (2, 19, 32)),
    "another scale": ({"query_dim": 32, "scale_qk": False}, (2, 6, 32)),
}


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer(name, masked, device):
    given, shape = LAYERS[name]
    layer = processors.Attention(heads=4, dim_head=8, **given).to(device)
    textbook = copy.deepcopy(layer).double()
    layer.set_processor(AttnProcessor())
    if name == "grouped":
        textbook = expanded(textbook, 2)
    textbook.set_processor(processors.AttnProcessor())
    x = torch.randn(shape, device=device, requires_grad=True)
    context = torch.randn(2, 11, 24, device=device) if name == "cross" else None
    keys = 11 if name == "cross" else x[0, 0].numel() if len(shape) == 4 else shape[1]
    mask = (
        torch.zeros(2, keys, device=device).masked_fill(torch.arange(keys, device=device) > keys // 2, -10000.0)
        if masked
        else None
    )
    if masked:
        mask = mask[:, None]
    found = layer(x, encoder_hidden_states=context, attention_mask=mask)
    wide = x.detach().double().requires_grad_()
    double = lambda tensor: None if tensor is None else tensor.double()  # noqa: E731
    wanted = textbook(wide, encoder_hidden_states=double(context), attention_mask=double(mask))
    torch.testing.assert_close(found.double(), wanted, atol=3e-6, rtol=1e-5)
    found.square().sum().backward()
    wanted.square().sum().backward()
    torch.testing.assert_close(x.grad.double(), wide.grad, atol=3e-5, rtol=1e-4)


def expanded(layer, times):
    """Keys and values of a layer with fewer key heads, for a processor that knows none."""
    for part in (layer.to_k, layer.to_v):
        weight = part.weight.detach().unflatten(0, (-1, 8)).repeat_interleave(times, 0).flatten(0, 1)
        part.weight = torch.nn.Parameter(weight)
        part.out_features = len(weight)
    return layer
