"""Slopes that a score_mod works out for each head: the tensor that the library takes for ALiBi."""

import weakref

import torch
from flash_attention.flex import program, slopes
from flex_formula import HEADS


def test_slopes_of_a_function_become_a_tensor():
    def alibi(s, b, h, i, j):
        return s + (j - i) * torch.exp2(-((h + 1) * 8.0 / HEADS))

    recorded = program.record(alibi)
    text = slopes.with_slopes(recorded, HEADS, torch.device("cpu")).text
    assert "= load t0 h\n" in text
    found = slopes.with_slopes(recorded, HEADS, torch.device("cpu")).tensors[-1]
    torch.testing.assert_close(found, torch.exp2(-8.0 * torch.arange(1, HEADS + 1) / HEADS))
    for other in (
        lambda s, b, h, i, j: s + (j - i) * 0.5,
        lambda s, b, h, i, j: s * h,
        lambda s, b, h, i, j: s + (b + h) * j,
    ):
        recorded = program.record(other)
        assert slopes.with_slopes(recorded, HEADS, torch.device("cpu")) is recorded


def test_slopes_that_a_graph_may_read_are_never_dropped(monkeypatch):
    monkeypatch.setattr(slopes, "_known", {})
    monkeypatch.setattr(slopes, "_CAPACITY", 3)

    def tensors_of(score_mod):
        return slopes.with_slopes(program.record(score_mod), HEADS, torch.device("cpu")).tensors

    def alibi(factor):
        return tensors_of(lambda s, b, h, i, j: s + (j - i) * torch.exp2(-h * factor))

    first = weakref.ref(alibi(1.5)[0])
    for factor in range(5):
        assert tensors_of(lambda s, b, h, i, j, factor=factor: s * (factor + 0.5)) == []
    assert alibi(1.5)[0] is first()
    assert len(alibi(2.5)) == len(alibi(3.5)) == 1
    assert alibi(4.5) == []  # there is no room, and the program works its slopes out by itself
    assert alibi(1.5)[0] is first()
