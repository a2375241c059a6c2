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


def gradients(function, inputs, dout, dlse=None):
    """[out, lse, d(input) ...] for function(*inputs) -> (out, lse) and the loss <out, dout> + <lse where finite, dlse>."""
    inputs = [tensor.detach().requires_grad_() for tensor in inputs]
    out, lse = function(*inputs)
    loss = (out * dout.to(out.dtype)).sum()
    if dlse is not None:
        loss = loss + (lse.masked_fill(lse == -torch.inf, 0.0) * dlse.to(lse.dtype)).sum()
    found = torch.autograd.grad(loss, inputs, allow_unused=True)
    return [out, lse, *(torch.zeros_like(x) if g is None else g for x, g in zip(inputs, found, strict=True))]


def exact_and_plain(formula, inputs, dout, dlse=None):
    """gradients() of a formula in float64 and in the dtype of the inputs: what assert_close() wants, one by one.

    Autograd through the formula never meets delta = <dO, O>: where a row sees one key, dP - delta is 0 in it to the last
    bit. A backward pass in tiles computes delta from the stored, rounded output, so the plain gradients are shifted by the
    effect of that rounding. dS is P (dP - delta), and the gradient of lse is P: an error of delta changes the gradients as
    a dlse of that size would.
    """
    wide = [tensor.double() for tensor in inputs]
    exact, plain = gradients(formula, wide, dout, dlse), gradients(formula, inputs, dout, dlse)
    error = _error_of_delta(exact[0].detach(), dout.double(), plain[0].dtype)
    moved = gradients(formula, wide, torch.zeros_like(exact[0]), -error.transpose(-1, -2))
    return exact, plain[:2] + [p + m.to(p.dtype) for p, m in zip(plain[2:], moved[2:], strict=True)]


def _error_of_delta(out, dout, dtype):
    """For every row, from rounding `out`. An output with another last bit has other errors, so their size is added."""
    error = (dout * (out.to(dtype) - out)).sum(-1)
    size = torch.finfo(dtype).eps / 2 * (dout * out).norm(dim=-1)
    return error + torch.copysign(size, error)
