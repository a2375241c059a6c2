"""examples/train_characters.py: a model of its own learns, and a cache writes what the whole sequence would."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
try:
    import train_characters
finally:
    sys.path.pop(0)


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_it_learns(device):
    model = train_characters.GPT(12, width=32, heads=2, layers=2, context=24).to(device)
    tokens = torch.arange(600, device=device) * 5 % 12  # the next is always known
    losses = train_characters.train(model, tokens, steps=60)
    assert losses[0] > 2.2
    assert losses[-1] < 0.4
    written = model.write(tokens[None, :5], 15)
    assert written.shape == (1, 20)
    assert (written[0] == tokens[:20]).float().mean() > 0.8


def test_a_cache_gives_what_the_whole_sequence_does(device):
    model = train_characters.GPT(9, width=32, heads=2, layers=2, context=16).to(device)
    tokens = torch.randint(9, (2, 16), device=device)
    caches = torch.zeros(2, 2, 2, 16, 2, 16, device=device)
    with torch.no_grad():
        whole = model(tokens)
        steps = [model(tokens[:, :7], caches)] + [model(tokens[:, n : n + 1], caches, n) for n in range(7, 16)]
    torch.testing.assert_close(torch.cat(steps, 1), whole, atol=2e-5, rtol=1e-4)
