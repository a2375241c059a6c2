"""The fused merge of partial results against the same in plain torch: on a GPU, else in Triton's interpreter."""

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

# Other tests may have imported Triton before it was to interpret (tests/conftest.py): a separate process.
PROGRAM = """
import torch
from flash_attention import merge_states
from flash_attention.parallel import fused, partial

device = "cuda" if torch.cuda.is_available() else "cpu"
ranges = [(0, 10), (5, 10), (0, 5), (3, 7)]
single, half = torch.float32, torch.bfloat16  # Triton interprets for seconds: each count, each size
for dtype, count, dim in ((single, 1, 40), (single, 2, 8), (single, 3, 40), (single, 4, 40), (half, 2, 8), (half, 3, 40)):
    torch.manual_seed(count)
    parts = []
    for begin, end in ranges[:count]:
        out = torch.randn(2, end - begin, 3, dim, device=device).to(dtype)
        lse = torch.randn(2, 3, end - begin, device=device) * 3
        lse[0, 1, :1] = -torch.inf
        parts.append(((begin, end), out.masked_fill((lse == -torch.inf).transpose(1, 2)[..., None], 0), lse))
    outs, lses, total = [], [], torch.zeros(2, 10, 3, dim, device=device, dtype=torch.float64)
    for (begin, end), out, lse in parts:
        wide, weight = torch.zeros_like(total), torch.full((2, 3, 10), -torch.inf, device=device, dtype=torch.float64)
        wide[:, begin:end], weight[..., begin:end] = out, lse
        outs.append(wide), lses.append(weight)
        total += wide
    expected, expected_lse = merge_states(outs, lses)
    for kind in (torch.float32, dtype):
        found, lse = fused.merge(parts, 10, kind, True)
        added, _ = fused.merge([(rows, out, None) for rows, out, _ in parts], 10, kind, False)
        error = 1e-5 if kind == torch.float32 else 2e-2
        assert (found - expected).abs().max() < error, (dtype, count, dim)
        assert (added - total).abs().max() < 3 * error, (dtype, count, dim)
        assert torch.equal(lse == -torch.inf, expected_lse == -torch.inf)
        assert (lse - expected_lse).nan_to_num(0, 0, 0).abs().max() < 1e-5

# Nine parts, folded four at a time, as a ring of nine has them.
partial._kernels = lambda tensor: fused
q = torch.randn(1, 10, 3, 8, device=device)
states, total = partial.States(q, 8), partial.Sum(q)
outs, lses = torch.randn(9, 1, 10, 3, 8, device=device), torch.randn(9, 1, 3, 10, device=device)
for out, lse in zip(outs, lses):
    states.add((0, 10), out, lse)
    total.add((0, 10), out)
expected, expected_lse = merge_states(outs.double(), lses.double())
out, lse = states.result()
assert (out - expected).abs().max() < 1e-5 and (lse - expected_lse).abs().max() < 1e-5
assert (total.result() - outs.double().sum(0)).abs().max() < 1e-5
print("all close")
"""


def test_fused_merge(warm_python):
    done = warm_python("-c", PROGRAM)
    assert done.returncode == 0 and "all close" in done.stdout, done.stderr
