"""Times score and mask programs against torch's FlexAttention, compiled: the gallery of examples/masks.py.

    python bench/benchmark_programs.py --lengths 8192 16384
    python bench/benchmark_programs.py --device cpu --lengths 2048 --only documents

TFLOP/s are over visible pairs: 4 * pairs * head_dim forward, 2.5 times that backward. The first call of each is timed, too:
it compiles. Results are compared before anything is timed.
"""

import argparse
import sys
import time
from pathlib import Path

import flash_attention
import timing
import torch
from torch.nn.attention import flex_attention as torch_flex

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import masks


def visible_pairs(mask_mod, length, device):
    """Of one head, counted a few rows at a time."""
    if mask_mod is None:
        return length * length
    zero, keys = torch.zeros((), dtype=torch.int32, device=device), torch.arange(length, device=device)
    rows = torch.arange(length, device=device).split(256)
    return sum(int(mask_mod(zero, zero, part[:, None], keys).sum()) for part in rows)


def seconds(call, device):
    begin = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def calls_of(name, score_mod, mask_mod, length, arguments):
    """{who: (forward, backward, seconds of the first calls)}"""
    shape = (arguments.batch, arguments.heads, length, arguments.head_dim)
    dtype = torch.bfloat16 if arguments.device == "cuda" else torch.float32
    q, k, v = (torch.randn(shape, device=arguments.device, dtype=dtype, requires_grad=True) for _ in range(3))
    grad = torch.randn(shape, device=arguments.device, dtype=dtype)
    torch._dynamo.reset()  # it compiles no more than eight programs
    theirs = torch.compile(torch_flex.flex_attention, dynamic=False)
    plain = [tensor.detach() for tensor in (q, k, v)]
    made = {}
    for who in ("ours", "flex"):
        if who == "ours":
            block_mask = mask_mod and flash_attention.create_block_mask(mask_mod, None, None, length, length)
            attend = flash_attention.flex_attention
        else:
            block_mask = mask_mod and torch_flex.create_block_mask(mask_mod, None, None, length, length, arguments.device)
            attend = theirs

        def forward(attend=attend, block_mask=block_mask):
            with torch.no_grad():
                return attend(*plain, score_mod=score_mod, block_mask=block_mask)

        first = seconds(forward, arguments.device)
        backward = None
        if who == "ours" or arguments.device == "cuda":  # FlexAttention has no backward pass on CPUs
            out = attend(q, k, v, score_mod=score_mod, block_mask=block_mask)

            def backward(out=out):
                return torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)

            first += seconds(backward, arguments.device)
        made[who] = (forward, backward, first)
    ours, flex = (made[who][0]().float() for who in ("ours", "flex"))
    worst = (ours - flex).abs().max().item()
    assert worst < 0.05, f"{name}: the outputs differ by {worst}"
    return made


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192])
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--heads", type=int, default=masks.HEADS)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--only", nargs="*", default=[])
    arguments = parser.parse_args()
    masks.HEADS = arguments.heads
    timer = timing.Timer(arguments.device)
    print(f"{'program':16} {'length':>6} {'pass':8} {'ours':>8} {'flex':>8} {'ratio':>6}   first calls, s: ours, flex")
    for length in arguments.lengths:
        for name, (score_mod, mask_mod) in masks.gallery(length, arguments.device).items():
            if arguments.only and name not in arguments.only:
                continue
            made = calls_of(name, score_mod, mask_mod, length, arguments)
            pairs = visible_pairs(mask_mod, length, arguments.device) * arguments.batch * arguments.heads
            for which, factor in ((0, 4), (1, 10)):
                calls = [timer.warmed(made[who][which]) for who in ("ours", "flex") if made[who][which] is not None]
                rates = [factor * pairs * arguments.head_dim / found["ms"] / 1e9 for found in timer.in_turn(calls)]
                flex = f"{rates[1]:8.4g} {rates[0] / rates[1]:6.2f}" if len(rates) == 2 else f"{'-':>8} {'-':>6}"
                print(
                    f"{name:16} {length:6} {('forward', 'backward')[which]:8} {rates[0]:8.4g} {flex}   "
                    f"{made['ours'][2]:.1f}, {made['flex'][2]:.1f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
