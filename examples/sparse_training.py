"""Trains two small GPTs on characters: one with dense attention, one that attends to keys which an indexer selects.

python examples/sparse_training.py                      # learns from this project's documents; a minute on a CPU
python examples/sparse_training.py --topk 16 --steps 400

The sparse model is built as DeepSeek's sparse attention is. A small indexer scores the keys of each query. Attention sees
the `topk` best alone. The indexer learns to score as attention weighs, by a KL loss over the selected keys; no gradient of
that loss reaches the model.
"""

import argparse
import time
from pathlib import Path

import torch
from flash_attention import attention, sparse
from torch import nn
from torch.nn import functional as F
from train_characters import GPT, ROOT, Block


class SparseBlock(Block):
    """A block whose queries attend to the keys that its indexer selects."""

    def __init__(self, width, heads, topk, index_heads=4, index_dim=16):
        super().__init__(width, heads)
        self.topk, self.index_heads = topk, index_heads
        self.index_q = nn.Linear(width, index_heads * index_dim, bias=False)
        self.index_k, self.index_weights = (
            nn.Linear(width, index_dim, bias=False),
            nn.Linear(width, index_heads, bias=False),
        )
        self.index_loss = None

    def forward(self, x, cache=None, place=0):
        assert cache is None, "this example trains; examples/train_characters.py writes, too"
        normed = self.norms[0](x)
        q, k, v = self.qkv(normed).unflatten(-1, (3, self.heads, -1)).unbind(2)
        seen = normed.detach()
        index = self.index_q(seen).unflatten(-1, (self.index_heads, -1)), self.index_k(seen), self.index_weights(seen)
        keys = sparse.select_keys(*index, self.topk)
        y, lse = attention(q, k, v, causal=True, key_indices=keys, return_lse=True)
        self.index_loss = sparse.indexer_loss(sparse.indexer_scores(*index, keys), keys, q, k, lse=lse)
        x = x + self.out(y.flatten(2))
        return x + self.mlp(self.norms[1](x))


def sparse_gpt(letters, topk, width=96, heads=4, layers=3, context=128):
    model = GPT(letters, width, heads, layers, context)
    model.blocks = nn.ModuleList([SparseBlock(width, heads, topk) for _ in range(layers)])
    return model


def train(dense, selecting, tokens, steps, batch=6, report=lambda *losses: None):
    """Both models on the same text. Of each step: the dense loss, the sparse loss, the indexers' loss."""
    optimizers = [torch.optim.AdamW(m.parameters(), lr=3e-3, betas=(0.9, 0.95)) for m in (dense, selecting)]
    window = torch.arange(dense.context + 1, device=tokens.device)
    history = []
    for step in range(steps):
        starts = torch.randint(len(tokens) - dense.context, (batch, 1), device=tokens.device)
        text = tokens[starts + window]
        losses = []
        for model, optimizer in zip((dense, selecting), optimizers, strict=True):
            loss = F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
            losses.append(loss.item())
            if model is selecting:
                of_indexers = torch.stack([block.index_loss for block in model.blocks]).mean()
                losses.append(of_indexers.item())
                loss = loss + of_indexers
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        history.append(losses)
        report(step, *losses)
    return history


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, nargs="*", default=sorted((ROOT / "docs").glob("*.md")))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--topk", type=int, default=32, help="keys that a query sees, of 128")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    text = "".join(path.read_text(encoding="utf-8") for path in arguments.text)
    letters = sorted(set(text))
    number = {letter: n for n, letter in enumerate(letters)}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokens = torch.tensor([number[letter] for letter in text], device=device)
    torch.manual_seed(arguments.seed)
    dense = GPT(len(letters)).to(device)
    torch.manual_seed(arguments.seed)
    selecting = sparse_gpt(len(letters), arguments.topk).to(device)
    print(f"{len(text)} characters, contexts of {dense.context}, {arguments.topk} keys a query, on {device}")
    print("step   loss: dense  sparse   indexers")
    start = time.monotonic()

    def report(step, dense_loss, sparse_loss, index_loss):
        if step % 25 == 0 or step == arguments.steps - 1:
            print(
                f"{step:4}   {dense_loss:11.3f}  {sparse_loss:6.3f}   {index_loss:8.3f}   {time.monotonic() - start:.0f} s",
                flush=True,
            )

    train(dense, selecting, tokens, arguments.steps, report=report)


if __name__ == "__main__":
    main()
