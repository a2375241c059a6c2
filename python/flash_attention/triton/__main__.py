"""python -m flash_attention.triton: the kernels against PyTorch on this machine's GPU, or in the interpreter.

On a GPU, --tune searches for the best tile sizes, which takes minutes; the default does not.
"""

import sys

import torch

from . import attention, tuning

# batch, seq_q, seq_kv, heads_q, heads_kv, head_dim, causal
GPU_CASES = [
    (2, 1024, 1024, 8, 8, 64, False),
    (2, 1024, 1024, 8, 8, 64, True),
    (2, 1000, 1000, 8, 2, 128, True),
    (1, 4096, 4096, 4, 4, 128, True),
    (2, 257, 1023, 6, 2, 96, True),
    (1, 300, 77, 4, 1, 256, True),
    (3, 1, 2048, 8, 1, 128, False),
]
INTERPRETER_CASES = [
    (1, 64, 64, 2, 2, 64, False),
    (1, 70, 70, 2, 1, 32, True),
    (1, 33, 50, 2, 2, 40, True),
    (1, 40, 9, 2, 1, 16, True),
]


def reference(q, k, v, causal):
    """Textbook attention in fp64; a query that sees no key gives 0."""
    q, k, v = (t.double().transpose(1, 2) for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril(k.shape[2] - q.shape[2])
        scores = scores.masked_fill(~seen, float("-inf"))
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - lse.masked_fill(lse == float("-inf"), 0.0)[..., None])
    return (weights @ v).transpose(1, 2), lse


def worst_error(case, dtype, device):
    """Largest error over out, lse, dq, dk, dv, relative to the largest entry of each."""
    batch, seq_q, seq_kv, heads_q, heads_kv, head_dim, causal = case
    torch.manual_seed(0)
    make = lambda seq, heads: torch.randn(batch, seq, heads, head_dim, dtype=dtype, device=device)  # noqa: E731
    q, k, v = (make(*s).requires_grad_() for s in ((seq_q, heads_q), (seq_kv, heads_kv), (seq_kv, heads_kv)))
    grad = make(seq_q, heads_q)
    out, lse = attention(q, k, v, causal=causal, return_lse=True)
    got = [out, lse, *torch.autograd.grad(out, (q, k, v), grad)]
    exact_out, exact_lse = reference(q, k, v, causal)
    want = [exact_out, exact_lse, *torch.autograd.grad(exact_out, (q, k, v), grad.double())]
    worst = 0.0
    for a, b in zip(got, want, strict=True):
        finite = torch.isfinite(b)
        if not torch.equal(finite, torch.isfinite(a)):
            return float("inf")
        difference = (a.double() - b.double())[finite].abs()
        if difference.numel():
            worst = max(worst, (difference.max() / b[finite].abs().max().clamp(min=1e-3)).item())
    return worst


def main():
    tuning.search = "--tune" in sys.argv[1:]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(f"Triton kernels on {torch.cuda.get_device_name() if device == 'cuda' else 'the CPU, interpreted'}")
    failures = 0
    for dtype, tolerance in ((torch.float16, 4e-3), (torch.bfloat16, 2e-2)):
        for case in GPU_CASES if device == "cuda" else INTERPRETER_CASES:
            error = worst_error(case, dtype, device)
            failures += not error <= tolerance
            names = "batch {} seq {}x{} heads {}/{} head_dim {} causal {}".format(*case)
            print(f"  {str(dtype)[6:]:9} {names:62} error {error:.1e} {'ok' if error <= tolerance else 'WRONG'}")
    print("FAILED" if failures else "PASSED")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
