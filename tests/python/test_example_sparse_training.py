"""examples/sparse_training.py: with selected keys a model learns as with all of them, and so does the indexer."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
try:
    import sparse_training
finally:
    sys.path.pop(0)


def loss_of_indexers(model, text):
    with torch.no_grad():
        model(text)
    return torch.stack([block.index_loss for block in model.blocks]).mean()


def test_both_learn_and_so_does_the_indexer(device):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        torch.manual_seed(3)
        sizes = {"width": 32, "heads": 2, "layers": 2, "context": 24}
        dense = sparse_training.GPT(12, **sizes).to(device)
        selecting = sparse_training.sparse_gpt(12, topk=6, **sizes).to(device)
        tokens = torch.randint(12, (40, 5), device=device).repeat(1, 12).flatten()  # a letter is that of five places before
        losses = torch.tensor(sparse_training.train(dense, selecting, tokens, steps=120, batch=8))
        learned = loss_of_indexers(selecting, tokens[:24][None])
        for block in selecting.blocks:
            for layer in (block.index_q, block.index_k, block.index_weights):
                layer.reset_parameters()
        fresh = loss_of_indexers(selecting, tokens[:24][None])
    finally:
        torch.set_num_threads(threads)
    first, last = losses[:5].mean(0), losses[-10:].mean(0)
    print(first, last, learned, fresh)
    assert last[0] < first[0] - 0.5  # dense
    assert last[1] < first[1] - 0.5  # sparse: 6 of 24 keys
    assert learned < 0.7 * fresh
