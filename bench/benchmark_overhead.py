"""What a call costs on the host: microseconds until it returns, on a problem with hardly any work.

    python bench/benchmark_overhead.py
    python bench/benchmark_overhead.py --batch 2 --seq 256 --heads 16 --head-dim 128
    python bench/benchmark_overhead.py --programs

--programs: flex_attention() with mods and masks that are known already, beside torch's, compiled.
The calls alternate; each number is the median of their batches, with the fastest and the slowest. The queue of a GPU is
emptied between two batches, outside of the time.
"""

import argparse
import functools
import statistics
import time

import command
import package  # noqa: F401 (makes flash_attention importable)
import torch
from flash_attention import FlashAttention, attention, create_block_mask, flex_attention
from flash_attention.flash_attn import flash_attn_func, flash_attn_with_kvcache
from peers import flex_attention as peer
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.functional import scaled_dot_product_attention

CALLS, BATCHES = 100, 9


def contestants(shape, device):
    """{name: call} for q = k = v [batch, seq, heads, head_dim], causal."""
    q = torch.randn(*shape, device=device, dtype=torch.bfloat16)
    g = q.clone().requires_grad_()
    q_first, g_first = q.transpose(1, 2), q.clone().transpose(1, 2).requires_grad_()
    module = FlashAttention()
    leaves, leaves_first = trained(q), trained(q_first)
    kept, kept_first = ours_of(leaves), torch_of(leaves_first)  # a graph that is gone through again and again
    one, lengths = q[:, :1], torch.full((shape[0],), shape[1], dtype=torch.int32, device=device)
    table = torch.arange(shape[0], dtype=torch.int32, device=device)[:, None]  # a page a sequence
    return {
        "torch.empty_like(q)": lambda: torch.empty_like(q),
        "q.add(1)": lambda: q.add(1),
        "attention()": lambda: attention(q, q, q, causal=True),
        "attention(), one query": lambda: attention(one, q, q),
        "flash_attn_with_kvcache(), one query": lambda: flash_attn_with_kvcache(one, q, q, cache_seqlens=lengths),
        "the same in pages": lambda: flash_attn_with_kvcache(one, q, q, cache_seqlens=lengths, block_table=table),
        "flash_attn_func()": lambda: flash_attn_func(q, q, q, causal=True),
        "FlashAttention()": lambda: module(q_first, q_first, q_first, causal=True),
        "torch's": lambda: scaled_dot_product_attention(q_first, q_first, q_first, is_causal=True),
        "attention(), a gradient to come": lambda: attention(g, g, g, causal=True),
        "torch's, a gradient to come": lambda: scaled_dot_product_attention(g_first, g_first, g_first, is_causal=True),
        "backward of attention()": lambda: torch.autograd.grad(kept, leaves, q, retain_graph=True),
        "backward of torch's": lambda: torch.autograd.grad(kept_first, leaves_first, q_first, retain_graph=True),
        "attention() and its backward": lambda: torch.autograd.grad(ours_of(leaves), leaves, q),
        "torch's and its backward": lambda: torch.autograd.grad(torch_of(leaves_first), leaves_first, q_first),
    }


def programs(shape, device):
    """The same with a program. FlexAttention has no backward pass on CPUs."""
    q = torch.randn(*shape, device=device, dtype=torch.bfloat16).transpose(1, 2)
    rows, width, bias = shape[1], 8, torch.randn(2 * shape[1], device=device)
    documents = torch.arange(rows, device=device) // 50

    def same_document(b, h, i, j):
        return (documents[i] == documents[j]) & (i >= j)

    def neighbours(b, h, i, j):
        x, y = (i % width).clamp(2, width - 3), (i // width).clamp(2, width - 3)
        return ((x - j % width).abs() <= 2) & ((y - j // width).abs() <= 2)

    def relative(score, b, h, i, j):
        return score + bias[i - j + rows]

    compiled, gpu, calls = peer.compiled(), device == "cuda", {}
    mods = {"documents": (None, same_document), "neighbours": (None, neighbours), "relative bias": (relative, None)}
    for name, (score_mod, mask_mod) in mods.items():
        sizes = (mask_mod, None, None, rows, rows)
        ours = {"score_mod": score_mod, "block_mask": mask_mod and create_block_mask(*sizes)}
        torchs = {"score_mod": score_mod, "block_mask": mask_mod and torch_flex.create_block_mask(*sizes, device)}
        makers = [("flex_attention()", flex_attention, ours, True), ("torch's, compiled", compiled, torchs, gpu)]
        if mask_mod:
            makers.insert(1, ("flex_attention(), torch's mask", flex_attention, torchs, True))
        for who, attend, given, differentiable in makers:
            of = functools.partial(attend, **given)
            calls[f"{name}: {who}"] = functools.partial(of, q, q, q)
            if differentiable:
                calls[f"{name}: {who} and its backward"] = functools.partial(there_and_back, of, trained(q), q)
    return calls


def there_and_back(attend, leaves, gradient):
    return torch.autograd.grad(attend(*leaves), leaves, gradient)


def trained(x):
    """q, k and v that want gradients."""
    return [x.clone(memory_format=torch.preserve_format).requires_grad_() for _ in range(3)]


def ours_of(leaves):
    return attention(*leaves, causal=True)


def torch_of(leaves):
    return scaled_dot_product_attention(*leaves, is_causal=True)


def batch_of(call, device):
    """Microseconds per call."""
    begin = time.perf_counter()
    for _ in range(CALLS):
        call()
    seconds = time.perf_counter() - begin
    if device == "cuda":
        torch.cuda.synchronize()
    return 1e6 * seconds / CALLS


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("batch", 1), ("seq", 128), ("heads", 4), ("head-dim", 64)):
        parser.add_argument(f"--{name}", type=int, default=value, help=f"default {value}")
    parser.add_argument("--programs", action="store_true", help="calls with programs instead of plain ones")
    command.add_device(parser)
    arguments = parser.parse_args()
    shape = arguments.batch, arguments.seq, arguments.heads, arguments.head_dim
    calls = (programs if arguments.programs else contestants)(shape, arguments.device)
    times = {name: [] for name in calls}
    for turn in range(BATCHES + 1):  # the first warms up
        for name, call in calls.items():
            found = batch_of(call, arguments.device)
            if turn:
                times[name].append(found)
    for name, found in times.items():
        print(f"{name:60}{statistics.median(found):8.2f} us ({min(found):.2f} to {max(found):.2f})")


if __name__ == "__main__":
    main()
