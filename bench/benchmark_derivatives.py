"""Forward mode and second derivatives beside forward and backward: medians of calls in turns, once compared with float64.

    python bench/benchmark_derivatives.py
    python bench/benchmark_derivatives.py --seq 4096 --head-dim 128 --causal --dtype bfloat16 --device cuda

jvp: torch.func.jvp by q, k and v, out and its tangent. second: the backward pass of a backward pass alone.
"""

import argparse
import statistics
import time

import package  # noqa: F401 (makes flash_attention importable)
import torch
from flash_attention import attention


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    dtype = getattr(torch, given.dtype)
    shape = 1, given.seq, given.heads, given.head_dim
    drawn = [torch.randn(shape, device=given.device, dtype=dtype) for _ in range(7)]
    check([x[:, :64].contiguous() for x in drawn], given.causal)
    calls = contestants(drawn, given.causal)
    times = {name: [] for name in calls}
    for _ in range(given.rounds + 1):
        for name, call in calls.items():
            times[name].append(timed(call, given.device))
    medians = {name: statistics.median(found[1:]) for name, found in times.items()}  # the first call of each warms up
    print(f"{given.device}, {given.dtype}, {shape}, causal {given.causal}, {torch.get_num_threads()} threads")
    for name, base in (("forward", "forward"), ("jvp", "forward"), ("backward", "backward"), ("second", "backward")):
        print(f"{name:10} {1e3 * medians[name]:9.3f} ms   {medians[name] / medians[base]:5.2f} x {base}")


def contestants(drawn, causal):
    """{name: call}"""
    (q, k, v), tangents, dout = drawn[:3], tuple(drawn[3:6]), drawn[6]
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = attention(*leaves, causal=causal)
    first = torch.autograd.grad(attention(*leaves, causal=causal), leaves, dout, create_graph=True)
    return {
        "forward": lambda: attention(q, k, v, causal=causal),
        "jvp": lambda: torch.func.jvp(lambda *x: attention(*x, causal=causal), (q, k, v), tangents),
        "backward": lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True),
        "second": lambda: torch.autograd.grad(first, leaves, tangents, retain_graph=True),
    }


def check(drawn, causal):
    """Both derivatives of a few rows against those of the formula in float64."""

    def formula(q, k, v):
        scores = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5
        if causal:
            scores = scores.masked_fill(torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1), -torch.inf)
        return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v)

    def derivatives(function, drawn):
        leaves = [x.detach().requires_grad_() for x in drawn[:3]]
        first = torch.autograd.grad(function(*leaves), leaves, drawn[6], create_graph=True)
        second = torch.autograd.grad(first, leaves, drawn[3:6])
        return [torch.func.jvp(function, tuple(drawn[:3]), tuple(drawn[3:6]))[1], *second]

    got = derivatives(lambda *x: attention(*x, causal=causal), drawn)
    want = derivatives(formula, [x.double() for x in drawn])
    allowed = {torch.float32: 1e-4, torch.float16: 0.02}.get(drawn[0].dtype, 0.1)
    for mine, theirs in zip(got, want, strict=True):
        error = (mine.double() - theirs).abs().max().item()
        assert error <= allowed * max(1.0, theirs.abs().max().item()), error


def timed(call, device):
    if device != "cpu":
        torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
