"""Times score and mask programs against torch's FlexAttention, compiled: the gallery of examples/masks.py.

    python bench/benchmark_programs.py --lengths 8192 16384
    python bench/benchmark_programs.py --device cpu --lengths 2048 --only documents --json programs.json

Where an option says the same as a program, its call is timed beside it ("built in"): ALiBi's slopes, softcap=, documents
as attention_packed. Masks, ours and FlexAttention's, are made before the timing starts and serve all calls. On a GPU our
first call also prepares the mask, which is a separate figure (prepare_us: microseconds before the forward kernel).
TFLOP/s are over visible pairs: 4 * pairs * head_dim forward, 2.5 times that backward. The first step
of each, forward and backward, is timed, too: it compiles, or finds in its cache what was compiled before. Results are
compared before anything else is timed.
"""

import argparse
import sys
import time
from pathlib import Path

import command
import flash_attention
import timing
import torch
from peers import flex_attention
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


def passes_of(attend, block_mask, score_mod, tensors, differentiable):
    """(forward, backward or None, seconds of the first calls)"""
    q, k, v, grad = tensors
    plain = [tensor.detach() for tensor in (q, k, v)]

    def forward():
        with torch.no_grad():
            return attend(*plain, score_mod=score_mod, block_mask=block_mask)

    if not differentiable:
        return forward, None, seconds(forward, q.device.type)
    kept = []  # the first step of training, as a user makes it: backward is compiled together with forward
    first = seconds(lambda: kept.append(attend(q, k, v, score_mod=score_mod, block_mask=block_mask)), q.device.type)

    def backward():
        return torch.autograd.grad(kept[0], (q, k, v), grad, retain_graph=True)

    return forward, backward, first + seconds(backward, q.device.type)


def built_in(name, length, arguments):
    """The program as an option: call(q, k, v), in layout "bhsd", or None."""
    causal = {"causal": True, "layout": "bhsd"}
    if name == "alibi":
        slopes = torch.exp2(-8.0 * torch.arange(1, arguments.heads + 1, device=arguments.device) / arguments.heads)
        return lambda q, k, v: flash_attention.attention(q, k, v, alibi_slopes=slopes, **causal)
    if name == "soft cap":
        return lambda q, k, v: flash_attention.attention(q, k, v, softcap=20.0, **causal)
    if name == "documents" and arguments.batch == 1:
        longest = length // 5 + 1  # as in the gallery
        starts = torch.tensor([*range(0, length, longest), length], dtype=torch.int32, device=arguments.device)
        lengths = {"max_seqlen_q": longest, "max_seqlen_kv": longest}

        def packed(*tensors):
            rows = (tensor.squeeze(0).transpose(0, 1) for tensor in tensors)  # views, as their gradients are
            return flash_attention.attention_packed(*rows, starts, causal=True, **lengths).transpose(0, 1).unsqueeze(0)

        return packed
    return None


def calls_of(name, score_mod, mask_mod, length, arguments):
    """{who: passes}, and a forward call that finds out about its mask itself; what FlexAttention cannot compile is left
    out."""
    shape, device = (arguments.batch, arguments.heads, length, arguments.head_dim), arguments.device
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    tensors = [torch.randn(shape, device=device, dtype=dtype, requires_grad=n < 3) for n in range(4)]
    block_mask = mask_mod and flash_attention.create_block_mask(mask_mod, None, None, length, length)
    made = {"ours": passes_of(flash_attention.flex_attention, block_mask, score_mod, tensors, True)}
    plain, as_torch = [tensor.detach() for tensor in tensors[:3]], {"layout": "bhsd", "alignment": "top_left"}

    def unprepared():  # a function by itself keeps nothing
        return flash_attention.attention(*plain, score_mod=score_mod, mask_mod=mask_mod, **as_torch)

    if option := built_in(name, length, arguments):
        made["built in"] = passes_of(lambda q, k, v, **mods: option(q, k, v), None, None, tensors, True)
    try:
        block_mask = mask_mod and torch_flex.create_block_mask(mask_mod, None, None, length, length, device)
        attend, on_gpu = flex_attention.compiled(), device == "cuda"  # it has no backward pass on CPUs
        made["flex"] = passes_of(attend, block_mask, score_mod, tensors, on_gpu)
    except Exception as error:
        print(f"{name}: flex: {command.reason_of(error)}", flush=True)
    return made, unprepared


def check(name, made):
    """All outputs are the same but for rounding."""
    ours = made["ours"][0]().float()
    for who in made:
        worst = (ours - made[who][0]().float()).abs().max().item()
        assert worst < 0.05, f"{name}: the outputs of ours and {who} differ by {worst}"


def report(name, score_mod, mask_mod, length, arguments, timer, kept):
    """Measures a program, keeps it and prints a line for each pass."""
    made, unprepared = calls_of(name, score_mod, mask_mod, length, arguments)
    check(name, made)
    pairs = visible_pairs(mask_mod, length, arguments.device) * arguments.batch * arguments.heads
    first = {who: round(made[who][2], 3) for who in made}
    hides = mask_mod is not None and arguments.device == "cuda"
    if hides:
        unprepared()  # what is compiled is compiled
    prepared = {"prepare_us": {"ours": timer.prepare_us([unprepared])[0]}} if hides else {}
    for which, factor in ((0, 4), (1, 10)):
        there = [who for who in made if made[who][which] is not None]
        found = dict(zip(there, timer.in_turn([timer.warmed(made[who][which]) for who in there]), strict=True))
        for row in found.values():
            row["tflops"] = round(factor * pairs * arguments.head_dim / row["ms"] / 1e9, 4)
        title, ours = ("forward", "backward")[which], found["ours"]
        more = prepared if which == 0 else {}
        kept.add(f"{name}, L{length}", title, found, ("flex",), first_seconds=first, **more)
        others = [
            f"{found[who]['tflops']:8.4g} {found[who]['ms'] / ours['ms']:6.2f}" if who in found else f"{'-':>8} {'-':>6}"
            for who in ("built in", "flex")
        ]
        took = ", ".join(f"{first[who]:.1f}" if who in first else "-" for who in ("ours", "built in", "flex"))
        print(
            f"{name:16} {length:6} {title:8} {ours['tflops']:8.4g} {' '.join(others)}   {took}"
            + "".join(f"; mask prepared in {us} us" for us in more.get("prepare_us", {}).values()),
            flush=True,
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add_device(parser)
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192])
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--heads", type=int, default=masks.HEADS)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--seconds", type=float, default=0.15, help="of samples for each entry")
    command.add_share(parser, "programs")
    command.add_json(parser)
    arguments = parser.parse_args()
    masks.HEADS = arguments.heads
    timer = timing.Timer(arguments.device, arguments.seconds)
    kept = command.Times(arguments.json, arguments.device)
    others = " ".join(f"{who:>8} {'ratio':>6}" for who in ("built in", "flex"))
    print(f"{'program':16} {'length':>6} {'pass':8} {'ours':>8} {others}   first step, s: ours, built in, flex")
    for length in arguments.lengths:
        gallery = masks.gallery(length, arguments.device)
        chosen = [(name, *mods) for name, mods in gallery.items() if not arguments.only or name in arguments.only]
        for name, score_mod, mask_mod in command.share_of(arguments, chosen):
            with kept.problem(f"{name}, L{length}"):
                report(name, score_mod, mask_mod, length, arguments, timer, kept)
    return kept.status()


if __name__ == "__main__":
    sys.exit(main())
