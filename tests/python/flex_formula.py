"""flex_attention against the dense formula in float64: output, lse and all gradients."""

import math

import torch
from flash_attention import create_block_mask, flex_attention
from torch.overrides import TorchFunctionMode

BATCH, HEADS, ROWS, KEYS, DIM = 2, 4, 90, 134, 32


class IndexByTensors(TorchFunctionMode):
    """table[h, :2] as a call of aten.index: vmap of torch 2.9 takes the numbers out of tensors without axes."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.__getitem__:
            table, parts = args[0], args[1] if isinstance(args[1], tuple) else (args[1],)
            parts = parts[:-1] if parts[-1] is ... else parts
            kinds = {type(part) for part in parts}
            if any(issubclass(kind, torch.Tensor) for kind in kinds) and kinds <= {torch.Tensor, int, slice}:
                table = table[tuple(slice(None) if isinstance(part, torch.Tensor) else part for part in parts)]
                tensors = [None if isinstance(part, slice) else part for part in parts if not isinstance(part, int)]
                return torch.ops.aten.index(table, tensors)
        return function(*args, **(kwargs or {}))


def over_all(function, *scores):
    """function(score, b, h, i, j) for every score and its indices, each without axes as FlexAttention has them."""
    for axis in (3, 2, 1, 0):
        function = torch.vmap(function, (0,) * len(scores) + tuple(0 if n == axis else None for n in range(4)))

    def call(shape):
        with IndexByTensors():
            return function(*scores, *(torch.arange(size) for size in shape))

    return call


def dense(q, k, v, score_mod, mask_mod, scale=None):
    """The formula, with whole matrices, in float64."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = (q @ k.transpose(-1, -2)) * (scale or 1 / math.sqrt(q.shape[-1]))
    if score_mod is not None:
        scores = over_all(score_mod, scores)(scores.shape)
    if mask_mod is not None:
        scores = torch.where(over_all(mask_mod)(scores.shape), scores, -math.inf)
    seen = (scores > -math.inf).any(-1)
    scores = torch.where(seen[..., None], scores, 0.0)  # rows without keys: any numbers, of no weight
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - lse[..., None]) * seen[..., None]
    return weights @ v, torch.where(seen, lse, -math.inf)


def tensors(heads_kv=HEADS, dim_v=DIM, rows=ROWS, keys=KEYS, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = (BATCH, HEADS, rows, DIM), (BATCH, heads_kv, keys, DIM), (BATCH, heads_kv, keys, dim_v)
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def compare(score_mod, mask_mod, parameters=(), tolerance=3e-5, scale=None, **sizes):
    q, k, v = tensors(**sizes)
    block_mask = None if mask_mod is None else create_block_mask(mask_mod, BATCH, HEADS, q.shape[2], k.shape[2])
    out, lse = flex_attention(q, k, v, score_mod, block_mask, scale, True, True)
    exact = [tensor.detach().double().requires_grad_() for tensor in (q, k, v)]
    expected, expected_lse = dense(*exact, score_mod, mask_mod, scale)
    generator = torch.Generator().manual_seed(1)
    dout, dlse = torch.randn(out.shape, generator=generator), torch.randn(lse.shape, generator=generator)
    seen = expected_lse > -math.inf
    assert torch.equal(lse > -math.inf, seen)
    got = torch.autograd.grad((out * dout).sum() + (lse * dlse)[seen].sum(), [q, k, v, *parameters])
    wanted = torch.autograd.grad((expected * dout).sum() + (expected_lse * dlse)[seen].sum(), [*exact, *parameters])
    for name, one, other in zip(
        ("out", "lse", "dq", "dk", "dv", *["parameter"] * len(parameters)),
        (out, lse[seen], *got),
        (expected, expected_lse[seen], *wanted),
        strict=True,
    ):
        if other.numel() > 0:
            size = max(1.0, other.abs().max().item())
            assert (one.double() - other).abs().max().item() <= tolerance * size, name
