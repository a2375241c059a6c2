"""The planner: its counts are those of the pairs themselves, its clock that of a pipeline worked out by hand."""

import itertools

import pytest
import torch
from flash_attention.parallel import Links, cut, plan
from flash_attention.parallel.planner import pairs
from test_parallel_cut import block_pairs


def test_pairs_are_counted():
    for left, right, rows, keys in itertools.product((-1, 0, 2, 9), (-1, 0, 3, 11), (1, 5, 8), (1, 6, 8)):
        block = cut.Block((0, rows), (0, keys), ((0, keys),), left, right)
        assert pairs(block) == int(block_pairs(block).sum()), block


def test_bytes_and_flops_of_every_turn():
    found = plan(64, 8, 4, 100.0, heads_kv=2, head_dim=16, show=False)
    whole = 4 * 8 * 16 * torch.ones(64, 64).tril().sum().item()
    assert found.flops == whole
    assert sum(turn.flops for turn in found.turns) == pytest.approx(whole / 4)
    row = 2 * 2 * 16 * 2
    last = plan(64, 8, 4, 100.0, heads_kv=2, head_dim=16, layout="contiguous", show=False)
    assert [turn.received for turn in last.turns] == [0, 16 * row, 16 * row, 16 * row]
    assert last.balance == pytest.approx(whole and (16 * 48 + 136) / (64 * 65 / 2 / 4))
    back = plan(64, 8, 4, 100.0, heads_kv=2, head_dim=16, backward=True, show=False)
    assert back.flops == 2.5 * whole and back.received == 2 * found.received


def test_the_clock_waits_for_what_ends_last():
    links = Links(1.0, 1.0, latency=0.0)
    slow = plan(4096, 1, 2, links, causal=False, tflops=1e6, memory=1e9, show=False)  # the exchange alone
    assert slow.seconds == pytest.approx(2048 * 2 * 128 * 2 / 1e9, rel=1e-3)
    fast = plan(4096, 1, 2, Links(1e6, 1e6, latency=0.0), head_dim=128, causal=False, tflops=1.0, show=False)
    assert fast.seconds == pytest.approx(4 * 4096 * 2048 * 128 / 1e12, rel=1e-3) and fast.efficiency > 0.999
    both = plan(4096, 1, 2, Links(1.0, 1.0, latency=0.0), causal=False, tflops=2.0, memory=100.0, show=False)
    exchange, block, merge = 2048 * 2 * 128 * 2 / 1e9, 4 * 2048 * 2048 * 128 / 2e12, 2048 * 128 * (2 + 8 / 3) / 100e9
    assert both.seconds == pytest.approx(max(exchange, block) + block + merge)


def test_a_window_receives_less_and_ulysses_has_uneven_heads():
    assert plan(65536, 8, 8, window=(100, 0), layout="contiguous", show=False).received == 100 * 2 * 8 * 128 * 2
    assert plan(4096, 6, 4, method="ulysses", show=False).balance == pytest.approx(4 / 3)
    assert plan(4096, 8, 4, method="all_gather", show=False).seconds > plan(4096, 8, 4, show=False).seconds


def test_it_prints_and_refuses(capsys):
    plan(1 << 20, 64, 64, heads_kv=8)
    text = capsys.readouterr().out
    assert "1048576 tokens" in text and "efficiency" in text and "..." in text and len(text.splitlines()) == 20
    with pytest.raises(ValueError, match="method: got 'tree'"):
        plan(64, 8, 4, method="tree")
    with pytest.raises(ValueError, match="a group of 4 does not divide it"):
        plan(66, 8, 4)
