"""A small GPT learns synthetic text: with this library its loss follows the curve of PyTorch's math backend."""

import random

import pytest
import torch
from flash_attention import FlashAttention
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

STEPS = 200


def synthetic_text(length, seed=0):
    """Sentences of a toy grammar, whose verbs agree with their subjects: something to learn near and far."""
    choose = random.Random(seed).choice
    text = ""
    while len(text) < length:
        many = choose((False, True))
        subject = choose(("cat", "dog", "bird", "fish")) + ("s" if many else "")
        place = choose(("on the old bridge", "in the garden", "near a river", "behind the house"))
        verb = choose(("sleep", "sing", "run")) + ("" if many else "s")
        text += f"{'two' if many else 'one'} {subject} {place} {verb} {choose(('today', 'often', 'again'))}. "
    return text[:length]


class Block(nn.Module):
    def __init__(self, width, heads, attend):
        super().__init__()
        self.heads, self.attend = heads, attend
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.project, self.join = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        qkv = self.project(self.before_attention(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = (tensor.transpose(1, 2) for tensor in qkv.unbind(2))
        x = x + self.join(self.attend(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.before_mlp(x))


class TinyGpt(nn.Module):
    def __init__(self, vocabulary, width, heads, layers, length, attend):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.Sequential(*(Block(width, heads, attend) for _ in range(layers)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, vocabulary))

    def forward(self, x):
        return self.head(self.blocks(self.tokens(x) + self.places[: x.shape[1]]))


def by_torch(backend):
    def attend(q, k, v):
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, is_causal=True)

    return attend


def losses(attend, device, dtype, width, heads, layers, length, batch, rate):
    """The loss of every step, from the same start and on the same batches each time."""
    text = synthetic_text(20_000)
    letters = sorted(set(text))
    data = torch.tensor([letters.index(letter) for letter in text])
    torch.manual_seed(0)
    model = TinyGpt(len(letters), width, heads, layers, length, attend).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    places = torch.randint(len(data) - length - 1, (STEPS, batch), generator=torch.Generator().manual_seed(1))
    curve = []
    for starts in places:
        rows = torch.stack([data[start : start + length + 1] for start in starts]).to(device)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            loss = cross_entropy(model(rows[:, :-1]).flatten(0, 1).float(), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        curve.append(loss.detach())
    return torch.stack(curve).cpu()


def by_tens(curve):
    return curve.unflatten(0, (-1, 10)).mean(1)


def check(device, dtype, tolerance, **sizes):
    """Step by step at first; later rounding has been amplified, and the curves are compared ten steps at a time. How far a
    GPU's is amplified is seen where torch's own two ways to compute it part."""
    flash = FlashAttention()
    ours = losses(lambda q, k, v: flash(q, k, v, causal=True), device, dtype, **sizes)
    theirs = losses(by_torch(SDPBackend.MATH), device, dtype, **sizes)
    assert theirs[-20:].mean() < 0.6 * theirs[0], f"nothing was learned: {theirs[0]:.3f} to {theirs[-20:].mean():.3f}"
    parted = 0.0
    if device == "cuda":
        backend = SDPBackend.FLASH_ATTENTION if dtype == torch.bfloat16 else SDPBackend.EFFICIENT_ATTENTION
        other = losses(by_torch(backend), device, dtype, **sizes)
        parted = 2 * float((by_tens(other) / by_tens(theirs) - 1).abs().max())
    torch.testing.assert_close(ours[:40], theirs[:40], atol=0.0, rtol=tolerance)
    torch.testing.assert_close(by_tens(ours), by_tens(theirs), atol=0.0, rtol=max(4 * tolerance, parted))


def test_float32_on_the_cpu():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the steps are too small to share
    try:
        check("cpu", torch.float32, 1e-4, width=32, heads=2, layers=2, length=32, batch=4, rate=1e-3)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_on_the_gpu(dtype):
    check("cuda", dtype, 0.02, width=256, heads=4, layers=4, length=256, batch=16, rate=3e-4)
