"""Close enough: at most twice the error of plain attention in the same dtype, and a floor."""

import torch

FLOOR = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def assert_close(actual, exact, plain, what=""):
    """`exact` is the reference in float64, `plain` the same formula in the dtype of the inputs."""
    assert actual.shape == exact.shape, f"{what}: shape {tuple(actual.shape)}, expected {tuple(exact.shape)}"
    floor = FLOOR[plain.dtype]
    actual, exact, plain = actual.detach().double(), exact.detach(), plain.detach().double()
    finite = exact.isfinite()
    assert torch.equal(actual.isfinite(), finite), f"{what}: inf or nan in other places"
    assert torch.equal(actual[~finite], exact[~finite]), f"{what}: another infinity"
    if finite.any():
        error = (actual - exact)[finite].abs().max()
        allowed = 2 * (plain - exact)[finite].abs().max() + floor * max(1.0, exact[finite].abs().max())
        assert error <= allowed, f"{what}: error {error:.3g}, allowed {allowed:.3g}"
