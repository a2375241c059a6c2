"""A Llama-like model, of the sizes that a config.json of Hugging Face's has, with random weights; a token is a byte."""

import json
from typing import NamedTuple

import torch
from torch import nn

END = 256  # the token behind the bytes


class Config(NamedTuple):
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rope_theta: float
    rms_norm_eps: float
    vocab_size: int

    @classmethod
    def read(cls, path):
        with open(path) as file:
            given = json.load(file)
        return cls(**{name: given[name] for name in cls._fields})


class Layer(nn.Module):
    def __init__(self, config):
        super().__init__()
        width, wide = config.hidden_size, config.intermediate_size
        self.sizes = [config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads]
        self.norms = nn.ModuleList(nn.RMSNorm(width, config.rms_norm_eps) for _ in range(2))
        self.qkv = nn.Linear(width, sum(self.sizes) * config.head_dim, bias=False)
        self.out = nn.Linear(config.num_attention_heads * config.head_dim, width, bias=False)
        self.gate, self.up = (nn.Linear(width, wide, bias=False) for _ in range(2))
        self.down = nn.Linear(wide, width, bias=False)

    def heads(self, x):
        """Those of queries, keys and values, one after the other."""
        return self.qkv(self.norms[0](x)).unflatten(-1, (sum(self.sizes), -1))

    def rest(self, x, attended):
        """What follows attention."""
        x = x + self.out(attended.flatten(-2))
        y = self.norms[1](x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


def run(function, *tensors):
    return function(*tensors)


class Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.run_rows = run  # calls a function whose results have a row for each row of its arguments

    def forward(self, tokens, attend, last=slice(None)):
        """Logits of those of tokens [total] that `last` picks; attend(layer, q, k, v) knows the keys of before."""
        x = self.embedding(tokens)
        for index, layer in enumerate(self.layers):
            q, k, v = self.run_rows(layer.heads, x).split(layer.sizes, dim=-2)
            x = self.run_rows(layer.rest, x, attend(index, q, k, v))
        return self.run_rows(lambda rows: self.head(self.norm(rows)), x[last])

    def angles(self):
        """Of the rotary embedding, float64 [positions, pairs]."""
        pairs = torch.arange(0, self.config.head_dim, 2, dtype=torch.float64) / self.config.head_dim
        return torch.outer(torch.arange(self.config.max_position_embeddings).double(), self.config.rope_theta**-pairs)


@torch.no_grad()
def dense_logits(model, tokens):
    """Of all tokens at once in float64, without a cache: plain attention with the whole matrix of scores."""
    exact = Model(model.config).double()
    exact.load_state_dict(model.state_dict())
    angles, groups = exact.angles()[: len(tokens), None], exact.layers[0].sizes[0] // exact.layers[0].sizes[1]

    def rotated(x):
        pairs = torch.complex(*x.unflatten(-1, (2, -1)).unbind(-2)) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat([pairs.real, pairs.imag], dim=-1)

    def attend(_, q, k, v):
        k, v = (x.repeat_interleave(groups, dim=1) for x in (rotated(k), v))
        scores = torch.einsum("qhd,khd->hqk", rotated(q), k) / q.shape[-1] ** 0.5
        hidden = torch.ones_like(scores[0], dtype=torch.bool).triu(1)
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)

    return exact(torch.tensor(tokens), attend)
