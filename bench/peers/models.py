"""Two small language models whose attention is an argument: what a change of attention is worth end to end."""

import torch
from torch import nn
from torch.nn import functional as F

VOCABULARY = 8192


class Block(nn.Module):
    """Attention and a feed-forward network, each after a norm and with a residual."""

    def __init__(self, width, heads, heads_kv, hidden, llama, attend):
        super().__init__()
        self.heads, self.heads_kv, self.dim, self.llama, self.attend = heads, heads_kv, width // heads, llama, attend
        self.norms = nn.ModuleList(nn.RMSNorm(width) if llama else nn.LayerNorm(width) for _ in range(2))
        self.to_qkv = nn.Linear(width, (heads + 2 * heads_kv) * self.dim, bias=not llama)
        self.to_out = nn.Linear(width, width, bias=not llama)
        self.up = nn.Linear(width, (2 if llama else 1) * hidden, bias=not llama)
        self.down = nn.Linear(hidden, width, bias=not llama)

    def forward(self, x, rotary):
        batch, seq, width = x.shape
        qkv = self.to_qkv(self.norms[0](x)).view(batch, seq, -1, self.dim).transpose(1, 2)
        q, k, v = qkv.split((self.heads, self.heads_kv, self.heads_kv), dim=1)
        if self.llama:
            q, k = rotated(q, rotary), rotated(k, rotary)
        x = x + self.to_out(self.attend(q, k, v).transpose(1, 2).reshape(batch, seq, width))
        y = self.up(self.norms[1](x))
        if self.llama:
            gate, y = y.chunk(2, dim=-1)
            return x + self.down(F.silu(gate) * y)
        return x + self.down(F.gelu(y, approximate="tanh"))


def rotated(x, rotary):
    cos, sin = rotary
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Model(nn.Module):
    def __init__(self, attend, layers, width, heads, heads_kv, hidden, llama):
        super().__init__()
        self.dim = width // heads
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, heads, heads_kv, hidden, llama, attend) for _ in range(layers))
        self.norm = nn.RMSNorm(width) if llama else nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        angles = torch.arange(tokens.shape[1], device=x.device)[:, None] * 1e4 ** (
            -torch.arange(0, self.dim, 2, device=x.device) / self.dim
        )
        angles = torch.cat((angles, angles), dim=-1)
        rotary = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for block in self.blocks:
            x = block(x, rotary)
        return self.head(self.norm(x))


MODELS = {
    "gpt2": {"layers": 4, "width": 768, "heads": 12, "heads_kv": 12, "hidden": 3072, "llama": False},
    "llama": {"layers": 4, "width": 1024, "heads": 16, "heads_kv": 4, "hidden": 2816, "llama": True},
}


def build(name, attend, dtype, device, layers=None):
    """The same weights for the same name; `layers` instead of its own number."""
    torch.manual_seed(0)
    shape = MODELS[name] | ({"layers": layers} if layers else {})
    return Model(attend, **shape).to(device, dtype)
