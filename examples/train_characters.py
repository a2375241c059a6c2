"""Trains a small GPT on characters, and lets it write: a minute on a CPU, seconds on a GPU.

python examples/train_characters.py                     # learns from the documents of this folder's project
python examples/train_characters.py --text book.txt --steps 2000
"""

import argparse
import time
from pathlib import Path

import torch
from flash_attention import attention, attention_over_cache
from torch import nn
from torch.nn import functional as F

ROOT = Path(__file__).resolve().parent.parent


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x, cache=None, place=0):
        """x [batch, seq, width]. cache: keys and values [2, batch, most, heads, head_dim], `place` rows of which count."""
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).unbind(2)  # [batch, seq, heads, head_dim]
        if cache is None:
            y = attention(q, k, v, causal=True)
        else:
            rows = slice(place, place + x.shape[1])
            cache[0, :, rows], cache[1, :, rows] = k, v
            held = torch.full((len(x),), rows.stop, dtype=torch.int32, device=x.device)
            y = attention_over_cache(q, *cache, seqused_kv=held, causal=True)
        x = x + self.out(y.flatten(2))
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    def __init__(self, letters, width=96, heads=4, layers=3, context=128):
        super().__init__()
        self.context, self.heads, self.head_dim = context, heads, width // heads
        self.letters, self.places = nn.Embedding(letters, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, letters, bias=False)
        for embedding in (self.letters, self.places):
            nn.init.normal_(embedding.weight, std=0.05)

    def forward(self, tokens, caches=None, place=0):
        x = self.letters(tokens) + self.places.weight[place : place + tokens.shape[1]]
        for n, block in enumerate(self.blocks):
            x = block(x, None if caches is None else caches[n], place)
        return self.head(self.norm(x))

    @torch.no_grad()
    def write(self, tokens, count):
        """`count` more tokens behind tokens [1, seq], one at a time over a cache, drawn from what the model expects."""
        device, most = tokens.device, min(self.context, tokens.shape[1] + count)
        caches = torch.zeros(len(self.blocks), 2, 1, most, self.heads, self.head_dim, device=device)
        place, fresh = 0, tokens
        while tokens.shape[1] < most:
            logits = self(fresh, caches, place)
            place += fresh.shape[1]
            fresh = torch.multinomial(logits[:, -1].softmax(-1), 1)
            tokens = torch.cat((tokens, fresh), 1)
        return tokens


def train(model, tokens, steps, batch=12, report=lambda step, loss: None):
    """The loss of each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    window = torch.arange(model.context + 1, device=tokens.device)
    losses = []
    for step in range(steps):
        starts = torch.randint(len(tokens) - model.context, (batch, 1), device=tokens.device)
        text = tokens[starts + window]
        loss = F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        report(step, losses[-1])
    return losses


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, nargs="*", default=sorted((ROOT / "docs").glob("*.md")))
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    text = "".join(path.read_text(encoding="utf-8") for path in arguments.text)
    letters = sorted(set(text))
    number = {letter: n for n, letter in enumerate(letters)}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokens = torch.tensor([number[letter] for letter in text], device=device)
    model = GPT(len(letters)).to(device)
    print(f"{len(text)} characters, {sum(p.numel() for p in model.parameters())} parameters, on {device}")
    start = time.monotonic()

    def report(step, loss):
        if step % 50 == 0 or step == arguments.steps - 1:
            print(f"step {step:5}   loss {loss:.3f}   {time.monotonic() - start:.0f} s", flush=True)

    train(model, tokens, arguments.steps, report=report)
    print("".join(letters[n] for n in model.write(tokens[None, :20], 120)[0].tolist()))


if __name__ == "__main__":
    main()
