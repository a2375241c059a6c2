"""Times masks as data against torch's FlexAttention, compiled, and against our own other ways to say the same.

    python bench/benchmark_masks.py --lengths 8192 16384
    python bench/benchmark_masks.py --lengths 16384 --ways intervals bool
    python bench/benchmark_masks.py --device cpu --lengths 2048 --heads 4 --only documents --json masks.json

Masks: those of flash_attention.masks. Ways: "intervals" (hidden_rows), "bool" (the same as mask=), "packed" (documents as
attention_packed), "flex" (FlexAttention's block mask). Masks are made before the clock starts, ours as FlexAttention's
(masks.prepare), and serve all calls. TFLOP/s are over visible pairs: 4 * pairs * head_dim forward, 2.5 times that backward.
Results are compared first. On a GPU what prepares a mask before the forward kernel is kept, too (prepare_us, microseconds).
"""

import argparse
import sys
from itertools import pairwise

import command
import flash_attention
import timing
import torch
from flash_attention import masks
from peers import flex_attention
from torch.nn.attention import flex_attention as torch_flex


def edges(length, parts):
    """Uneven documents: the longest is a few times the shortest."""
    weights = torch.linspace(1, 4, parts)
    cuts = torch.cat([torch.zeros(1), weights.cumsum(0) / weights.sum() * length]).round().int()
    return cuts.tolist()


def gallery(length):
    cuts = edges(length, 8)
    parts = [b - a for a, b in pairwise(cuts)]
    eighth = length // 8
    return {
        "documents": masks.documents(cuts),
        "documents_both": masks.documents(cuts, causal=False),
        "tree": masks.tree([-1, 0, 1, 1, 0, 4, 4], [eighth, eighth, eighth, eighth, eighth, eighth, length - 6 * eighth]),
        "shared_prefix": masks.shared_prefix(parts[-1], parts[:-1]),
        "prefix_lm": masks.prefix_lm(length // 3, length),
        "spans": masks.spans(cuts[1:6:2], cuts[2:7:2], length),
        "sink_window": masks.sink_window(64, length // 16, length),
        "block_diffusion": masks.block_diffusion(length // 2, 64),
    }


def ways_of(name, mask, length, q, device, wanted):
    """{way: call(q, k, v)}"""
    hidden = masks.prepare(mask.to(device))
    ways = {"intervals": lambda q, k, v: flash_attention.attention(q, k, v, hidden_rows=hidden)}
    visible = None
    if length <= 32768:
        visible = mask.to(device).visible()
        prepared = masks.prepare(visible)
        ways["bool"] = lambda q, k, v: flash_attention.attention(q, k, v, mask=prepared)
    if name.startswith("documents") and q.shape[0] == 1:
        starts = torch.tensor(edges(length, 8), dtype=torch.int32, device=device)
        longest = int((starts[1:] - starts[:-1]).max())

        def packed(q, k, v):
            bounds = {"max_seqlen_q": longest, "max_seqlen_kv": longest}
            one = (tensor.squeeze(0) for tensor in (q, k, v))  # tensor[0] would copy the gradients
            return flash_attention.attention_packed(*one, starts, causal=mask.causal, **bounds).unsqueeze(0)

        ways["packed"] = packed
    if visible is not None and "flex" in wanted:

        def sees(b, h, i, j):
            return visible[0, 0, i, j]

        block_mask = torch_flex.create_block_mask(sees, None, None, length, length, device)

        def flex(q, k, v):
            heads_first = (tensor.transpose(1, 2) for tensor in (q, k, v))
            return flex_attention.compiled()(*heads_first, block_mask=block_mask).transpose(1, 2)

        ways["flex"] = flex
    return {way: call for way, call in ways.items() if way in wanted}


def prepare_us(mask, tensors, timer, ways):
    """{way: microseconds before the forward kernel in calls that find out about the mask themselves}"""
    q, k, v = (tensor.detach() for tensor in tensors[:3])
    mask = mask.to(q.device)
    calls = {"intervals": lambda: flash_attention.attention(q, k, v, hidden_rows=mask)}
    if "bool" in ways:
        visible = mask.visible()
        calls["bool"] = lambda: flash_attention.attention(q, k, v, mask=visible)
    calls = {way: call for way, call in calls.items() if way in ways}
    for call in calls.values():
        call()  # what is compiled is compiled
    return dict(zip(calls, timer.prepare_us(list(calls.values())), strict=True)) if calls else {}


def passes_of(way, call, q, k, v, grad, device):
    plain = [tensor.detach() for tensor in (q, k, v)]

    def forward():
        return call(*plain)

    if way == "flex" and device == "cpu":  # it has no backward pass there
        return forward, None
    out = call(q, k, v)
    return forward, lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)


def passes_that_run(name, mask, tensors, arguments):
    """{way: (forward, backward)}, compared with the first; what FlexAttention cannot compile is left out."""
    q, k, v, grad = tensors
    made, first = {}, None
    for way, call in ways_of(name, mask, q.shape[1], q, arguments.device, arguments.ways).items():
        try:
            made[way] = passes_of(way, call, q, k, v, grad, arguments.device)
            out = made[way][0]().float()
        except Exception as error:
            if way != "flex":
                raise
            made.pop(way, None)
            print(f"{name}: {way}: {command.reason_of(error)}", flush=True)
            continue
        first = out if first is None else first
        worst = (out - first).abs().max().item()
        assert worst < 0.05, f"{name}: {way} differs from {next(iter(made))} by {worst}"
    return made


def report(name, mask, tensors, arguments, timer, kept):
    """Measures a mask, keeps it and prints a line for each pass."""
    length = tensors[0].shape[1]
    pairs = int(mask.to(arguments.device).visible().sum()) * arguments.batch * arguments.heads
    made = passes_that_run(name, mask, tensors, arguments)
    prepared = prepare_us(mask, tensors, timer, made) if arguments.device == "cuda" else {}
    for which, factor in ((0, 4), (1, 10)):
        there = [way for way in made if made[way][which] is not None]
        calls = [timer.warmed(made[way][which]) for way in there]
        found, title = dict(zip(there, timer.in_turn(calls), strict=True)), ("forward", "backward")[which]
        for row in found.values():
            row["tflops"] = round(factor * pairs * arguments.head_dim / row["ms"] / 1e9, 4)
        more = {"prepare_us": prepared} if prepared and which == 0 else {}
        kept.add(f"{name}, L{length}", title, found, ("flex",), **more)
        text = ", ".join(f"{way} {row['tflops']:.3g}" for way, row in found.items())
        text += "".join(f"; {way} prepared in {us} us" for way, us in more.get("prepare_us", {}).items())
        print(f"{name:16} {length:6} {title:8} {text}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add_device(parser)
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--ways", nargs="+", default=["intervals", "bool", "packed", "flex"])
    parser.add_argument("--seconds", type=float, default=0.15, help="of samples for each entry")
    command.add_share(parser, "masks")
    command.add_json(parser)
    arguments = parser.parse_args()
    device, dtype = arguments.device, torch.bfloat16 if arguments.device == "cuda" else torch.float32
    timer, kept = timing.Timer(device, arguments.seconds), command.Times(arguments.json, device)
    print(f"{'mask':16} {'length':>6} {'pass':8} {'TFLOP/s: way, ...'}")
    for length in arguments.lengths:
        shape = (arguments.batch, length, arguments.heads, arguments.head_dim)
        q, k, v = (torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
        grad = torch.randn(shape, device=device, dtype=dtype)
        chosen = {name: mask for name, mask in gallery(length).items() if not arguments.only or name in arguments.only}
        for name, mask in command.share_of(arguments, list(chosen.items())):
            with kept.problem(f"{name}, L{length}"):
                report(name, mask, (q, k, v, grad), arguments, timer, kept)
    return kept.status()


if __name__ == "__main__":
    sys.exit(main())
