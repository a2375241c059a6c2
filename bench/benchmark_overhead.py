"""What a call costs on the host: microseconds until it returns, on a problem with hardly any work.

    python bench/benchmark_overhead.py
    python bench/benchmark_overhead.py --batch 2 --seq 256 --heads 16 --head-dim 128
    python bench/benchmark_overhead.py --programs
    python bench/benchmark_overhead.py --compiled
    python bench/benchmark_overhead.py --seq 8 --heads 1 --head-dim 16 --other FOLDER

--programs: flex_attention() with mods and masks that are known already, beside torch's, compiled.
--compiled: calls inside of torch.compile, too.
--other: a second package, FOLDER/flash_attention, in a second process. The batches of the two processes alternate, so
that both meet the same machine; the last column is this package's median over the other's.

The calls alternate; each number is the median of their batches, with the fastest and the slowest. The queue of a GPU is
emptied between two batches, outside of the time. On a CPU the time is the thread's own, without what other programs take.
"""

import argparse
import functools
import os
import statistics
import subprocess
import sys
import time

import command
import package  # noqa: F401 (makes flash_attention importable)
import torch
from flash_attention import FlashAttention, attention, attention_over_cache, create_block_mask, flex_attention
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
        "attention_over_cache(), one query": lambda: attention_over_cache(one, q, q, seqused_kv=lengths),
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


def compiled(shape, device):
    """Calls inside of torch.compile, with no other work in the graph."""
    q = torch.randn(*shape, device=device, dtype=torch.bfloat16)
    one, lengths = q[:, :1], torch.full((shape[0],), shape[1], dtype=torch.int32, device=device)
    leaves = trained(q)
    add, attend = torch.compile(lambda x: x.add(1)), torch.compile(lambda q, k, v: attention(q, k, v, causal=True))
    step = torch.compile(lambda q, k, v, lengths: attention_over_cache(q, k, v, seqused_kv=lengths))
    return {
        "compiled: q.add(1)": lambda: add(q),
        "compiled: attention()": lambda: attend(q, q, q),
        "compiled: attention() and its backward": lambda: there_and_back(attend, leaves, q),
        "compiled: attention_over_cache(), one query": lambda: step(one, q, q, lengths),
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
    clock = time.perf_counter if device == "cuda" else time.thread_time
    begin = clock()
    for _ in range(CALLS):
        call()
    seconds = clock() - begin
    if device == "cuda":
        torch.cuda.synchronize()
    return 1e6 * seconds / CALLS


def calls_of(arguments):
    shape = arguments.batch, arguments.seq, arguments.heads, arguments.head_dim
    if arguments.programs:
        return programs(shape, arguments.device)
    return contestants(shape, arguments.device) | (compiled(shape, arguments.device) if arguments.compiled else {})


class Other:
    """This script in a second process, with another package."""

    def __init__(self, folder):
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])}
        command = [sys.executable, *sys.argv, "--answer"]
        self.process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def batch_of(self, name):
        print(name, file=self.process.stdin, flush=True)
        return float(self.process.stdout.readline())

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def answer(calls, device):
    """Microseconds of a batch of each call that is named on standard input."""
    for line in sys.stdin:
        print(batch_of(calls[line.rstrip("\n")], device), flush=True)


def show(name, times, others):
    found = times[name]
    line = f"{name:60}{statistics.median(found):8.2f} us ({min(found):.2f} to {max(found):.2f})"
    if others[name]:
        ratio = statistics.median(found) / statistics.median(others[name])
        line += f"   other{statistics.median(others[name]):8.2f} us ({min(others[name]):.2f}){ratio:8.3f}"
    print(line)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("batch", 1), ("seq", 128), ("heads", 4), ("head-dim", 64)):
        parser.add_argument(f"--{name}", type=int, default=value, help=f"default {value}")
    parser.add_argument("--batches", type=int, default=BATCHES, help=f"of {CALLS} calls each; default {BATCHES}")
    parser.add_argument("--programs", action="store_true", help="calls with programs instead of plain ones")
    parser.add_argument("--compiled", action="store_true", help="calls inside of torch.compile, too")
    parser.add_argument("--other", metavar="FOLDER", help="a folder with another flash_attention to compare with")
    parser.add_argument("--answer", action="store_true", help=argparse.SUPPRESS)
    command.add_device(parser)
    arguments = parser.parse_args()
    calls = calls_of(arguments)
    if arguments.answer:
        return answer(calls, arguments.device)
    other = Other(arguments.other) if arguments.other else None
    times, others = ({name: [] for name in calls} for _ in range(2))
    for turn in range(arguments.batches + 1):  # the first warms up
        for name, call in calls.items():
            found = batch_of(call, arguments.device)
            beside = other.batch_of(name) if other else None
            if turn:
                times[name].append(found)
                others[name] += [beside] if other else []
    if other:
        other.close()
    for name in calls:
        show(name, times, others)


if __name__ == "__main__":
    main()
