"""tile=(queries, keys) reaches the planner, and is refused by name."""

import flash_attention
import pytest
import torch
from flash_attention.arguments.options import with_tile

Q = torch.randn(1, 32, 2, 16)


def test_it_is_a_part_of_the_kernels_name():
    assert with_tile(None, (64, 32)) == "@64x32"
    assert with_tile("forward/sm80", [128, 64]) == "forward/sm80@128x64"


@pytest.mark.parametrize("tile", [64, (64,), (64, 32, 16), ("64", "32"), (64.0, 32)], ids=str)
def test_what_is_no_tile(tile):
    with pytest.raises(TypeError, match=r"tile: expected \(queries, keys\), got"):
        flash_attention.attention(Q, Q, Q, tile=tile)


def test_refusals_name_it():
    with pytest.raises(ValueError, match=r"tile: got \(0, 32\), allowed: queries and keys"):
        flash_attention.attention(Q, Q, Q, tile=(0, 32))
    with pytest.raises(ValueError, match='tile: the textbook algorithm, kernel="standard", has none'):
        flash_attention.attention(Q, Q, Q, tile=(64, 32), kernel="standard")
    for call in (flash_attention.attention, flash_attention.explain):
        with pytest.raises((ValueError, RuntimeError, NotImplementedError), match="its tile cannot be set"):
            call(Q, Q, Q, tile=(64, 32))


def test_backward_keeps_its_own(device):
    """A tile without a kernel's name is the forward kernel's: gradients come as ever."""
    if device == "cpu":
        pytest.skip("kernels of the CPU have no tile to set")
    q, k, v = (torch.randn(1, 200, 2, 64, device=device, dtype=torch.float16, requires_grad=True) for _ in range(3))
    usual, tiled = (flash_attention.attention(q, k, v, causal=True, tile=tile) for tile in (None, (64, 64)))
    torch.testing.assert_close(usual, tiled, atol=2e-3, rtol=2e-3)
    for a, b in zip(*(torch.autograd.grad(out.sum(), (q, k, v)) for out in (usual, tiled)), strict=True):
        torch.testing.assert_close(a, b, atol=5e-3, rtol=5e-3)
