"""Eleven masks and score programs of attention-gym's kind, each against the dense formula in float64.

python examples/masks.py [--device cuda] [--length 512]
"""

import argparse
import math

import torch
from flash_attention import and_masks, create_block_mask, flex_attention, or_masks

BATCH, HEADS, DIM = 1, 4, 64


def causal(b, h, i, j):
    return i >= j


def gallery(length, device):
    """Name -> (score_mod, mask_mod); None where there is none."""
    slopes = torch.exp2(-8.0 * torch.arange(1, HEADS + 1, device=device) / HEADS)
    documents = torch.arange(length, device=device) // (length // 5 + 1)  # of each position
    side = math.isqrt(length)  # of an image, row after row
    nodes = torch.arange(length, device=device) * 37 % 41  # of a graph: how deep each lies
    by_distance = torch.linspace(1, -1, 16 * HEADS, device=device).view(16, HEADS)  # Graphormer's bias
    half = length // 2  # block diffusion: noisy tokens, then clean ones

    def neighbourhood(b, h, i, j):
        x, y = (i % side).clamp(3, side - 4), (i // side).clamp(3, side - 4)
        return ((x - j % side).abs() <= 3) & ((y - j // side).abs() <= 3)

    def sliding_tile(b, h, i, j):
        return ((i % side // 8 - j % side // 8).abs() <= 1) & ((i // side // 8 - j // side // 8).abs() <= 1)

    def block_diffusion(b, h, i, j):
        block_i, block_j = i % half // 32, j % half // 32
        noisy_i, noisy_j = i < half, j < half
        own = (block_i == block_j) & (noisy_i == noisy_j)
        return own | (noisy_i & ~noisy_j & (block_i > block_j)) | (~noisy_i & ~noisy_j & (block_i >= block_j))

    return {
        "alibi": (lambda s, b, h, i, j: s - slopes[h] * (i - j).abs(), causal),
        "soft cap": (lambda s, b, h, i, j: 20 * torch.tanh(s / 20), causal),
        "tanh": (lambda s, b, h, i, j: torch.tanh(s), None),
        "graph distance": (lambda s, b, h, i, j: s + by_distance[(nodes[i] - nodes[j]).abs().clamp(max=15), h], None),
        "documents": (None, lambda b, h, i, j: (documents[i] == documents[j]) & (i >= j)),
        "prefix LM": (None, or_masks(causal, lambda b, h, i, j: j < length // 4)),
        "sliding tile": (None, sliding_tile),
        "neighbourhood": (None, neighbourhood),
        "dilated window": (None, lambda b, h, i, j: ((i - j).abs() <= 64) & ((i - j) % 2 == 0)),
        "block diffusion": (None, block_diffusion),
        "shared prefix": (None, and_masks(causal, lambda b, h, i, j: (j < 64) | (i // 128 == j // 128))),
    }


def dense(q, k, v, score_mod, mask_mod):
    """The formula with whole matrices."""
    sizes = (*q.shape[:3], k.shape[2])
    b, h, i, j = (
        torch.arange(size, device=q.device).view([-1 if n == axis else 1 for n in range(4)])
        for axis, size in enumerate(sizes)
    )
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if score_mod is not None:
        scores = score_mod(scores, b, h, i, j)
    if mask_mod is not None:
        scores = torch.where(mask_mod(b, h, i, j), scores, -math.inf)
    weights = torch.softmax(scores, -1)
    return torch.where(weights.isnan(), 0.0, weights) @ v  # a row without keys is 0


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--length", type=int, default=512)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    dtype = torch.bfloat16 if arguments.device == "cuda" else torch.float32
    for name, (score_mod, mask_mod) in gallery(arguments.length, arguments.device).items():
        q, k, v = (torch.randn(BATCH, HEADS, arguments.length, DIM, device=arguments.device, dtype=dtype) for _ in range(3))
        q, k, v = (tensor.requires_grad_() for tensor in (q, k, v))
        mask = mask_mod and create_block_mask(mask_mod, BATCH, HEADS, arguments.length, arguments.length)
        out = flex_attention(q, k, v, score_mod, mask)
        gradients = torch.autograd.grad(out.square().sum(), (q, k, v))
        exact = [tensor.detach().double().requires_grad_() for tensor in (q, k, v)]
        expected = dense(*exact, score_mod, mask_mod)
        wanted = torch.autograd.grad(expected.square().sum(), exact)
        worst = max(
            ((got.double() - other).abs().max() / other.abs().max()).item()
            for got, other in zip((out, *gradients), (expected, *wanted), strict=True)
        )
        print(f"{name:16} largest error of out, dq, dk, dv, relative to the largest value: {worst:.1e}")
        assert worst < (0.03 if dtype == torch.bfloat16 else 1e-4), name


if __name__ == "__main__":
    main()
