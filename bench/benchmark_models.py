"""Times whole models with our attention and with torch's: a GPT-2-like and a Llama-like one, forward and a training step.

    python bench/benchmark_models.py                              # 128 to 2048 tokens, float32
    python bench/benchmark_models.py --models llama --seq 1024 --dtype bfloat16 --seconds 5
    python bench/benchmark_models.py --models gpt2 --layers 8 --batch 16 --seq 1024 --dtype bfloat16 --autocast \\
        --attention ours sdpa_cudnn sdpa_flash sdpa_efficient

They alternate, step by step and without pauses, so each finds the threads, caches and clocks as the others leave them.
Their losses are compared before anything is timed. A training step is forward, loss, backward and a step of SGD.
"""

import argparse
import statistics
import time
from pathlib import Path

import command
import machine
import timing
import torch
from peers import models
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

LOSS_TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 1e-2}


def ours(q, k, v):
    from flash_attention import scaled_dot_product_attention

    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def sdpa(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


ATTENTION = {"ours": ours, "sdpa": sdpa, "sdpa_cudnn": sdpa, "sdpa_flash": sdpa, "sdpa_efficient": sdpa}
BACKENDS = {  # torch chooses among these if none is named
    "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa_flash": SDPBackend.FLASH_ATTENTION,
    "sdpa_efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def loss_of(model, tokens):
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())


def step_of(model, tokens, which, autocast):
    """What is timed. autocast() is entered for the forward pass and the loss."""
    if which == "forward":

        def forward():
            with torch.no_grad(), autocast():
                return model(tokens[:, :-1])

        return forward
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def step():
        optimizer.zero_grad()
        with autocast():
            loss = loss_of(model, tokens)
        loss.backward()
        optimizer.step()

    return step


def by_backend(name, call):
    """The same call, in which torch's function takes the backend of that name."""

    def chosen():
        with sdpa_kernel(BACKENDS[name]):
            return call()

    return chosen if name in BACKENDS else call


def in_turn(steps, device, seconds):
    """{name: summary} of steps that alternate, each first as often as second. `against_sdpa` is the median of what each
    pair of neighbours says: where the machine is slower for a while, both are."""
    samples = {name: [] for name in steps}
    for step in steps.values():
        step()
    end = time.perf_counter() + seconds
    while len(samples["sdpa"]) < 3 or time.perf_counter() < end:
        order = list(steps.items())
        for name, step in order if len(samples["sdpa"]) % 2 == 0 else reversed(order):
            begin = time.perf_counter()
            step()
            if device == "cuda":
                torch.cuda.synchronize()
            samples[name].append((time.perf_counter() - begin) * 1e3)
    return {
        name: timing.summary(mine)
        | {"against_sdpa": statistics.median(peer / own for own, peer in zip(mine, samples["sdpa"], strict=True))}
        for name, mine in samples.items()
    }


class Versions:
    """One model with each attention, measured when the first of its rows is needed."""

    def __init__(self, case, which, names, device, seconds):
        self.case, self.which, self.names, self.device, self.seconds, self.found = case, which, names, device, seconds, {}

    def row(self, name):
        if not self.found:
            self.measure()
        return self.found[name]

    def measure(self):
        dtype, by_autocast = getattr(torch, self.case["dtype"]), self.case.get("autocast", False)
        of_weights = torch.float32 if by_autocast else dtype

        def autocast():
            return torch.autocast(self.device, dtype, enabled=by_autocast)

        def loss(model):
            with torch.no_grad(), autocast():
                return loss_of(model, tokens).item()

        built = {
            name: models.build(self.case["model"], ATTENTION[name], of_weights, self.device, self.case.get("layers"))
            for name in self.names
        }
        tokens = torch.randint(models.VOCABULARY, (self.case["batch"], self.case["seq"] + 1), device=self.device)
        losses = {name: by_backend(name, lambda m=model: loss(m))() for name, model in built.items()}
        if any(abs(x - losses["sdpa"]) > LOSS_TOLERANCE[self.case["dtype"]] * abs(losses["sdpa"]) for x in losses.values()):
            raise ValueError(f"the losses differ: {losses}")
        steps = {name: by_backend(name, step_of(model, tokens, self.which, autocast)) for name, model in built.items()}
        self.found = in_turn(steps, self.device, self.seconds)


def print_table(results):
    times = {(str(row["case"]), row["pass"], row["baseline"]): row["ms"] for row in results.measured()}
    print(f"\nmilliseconds a step on {results.head['machine']['device']}")
    for row in results.measured():
        if row["baseline"] != "ours":
            continue
        case = row["case"]
        peers = {name: ms for (at, which, name), ms in times.items() if (at, which) == (str(case), row["pass"])}
        others = "".join(f"  {name} {peers[name]:9.2f}" for name in ATTENTION if name in peers)
        print(f"  {case['model']:6} {case['dtype']:9} L {case['seq']:5} {row['pass']:9}{others}"
              f"  {row['against_sdpa']:.3f} times as fast as sdpa")  # fmt: skip


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--models", nargs="+", choices=models.MODELS, default=list(models.MODELS))
    p.add_argument("--seq", type=int, nargs="+", default=[128, 512, 1024, 2048], help="tokens of a sequence")
    p.add_argument("--batch", type=int, default=1)
    p.add_argument("--layers", type=int, help="instead of four")
    p.add_argument("--dtype", nargs="+", choices=LOSS_TOLERANCE, default=["float32"])
    p.add_argument("--autocast", action="store_true", help="weights in float32, products in the type by torch.autocast")
    p.add_argument("--attention", nargs="+", choices=ATTENTION, default=["ours"], help="beside sdpa")
    p.add_argument("--pass", dest="passes", nargs="+", choices=("forward", "training"), default=["forward", "training"])
    p.add_argument("--seconds", type=float, default=4.0, help="of samples for all versions of a model")
    command.add_device(p)
    p.add_argument("--output", type=Path, default=Path("build/bench/models.json"), help="result file")
    p.add_argument("--resume", action="store_true", help="keep the rows that are in the output and add the others")
    p.add_argument("--force", action="store_true", help="overwrite the output")
    p.add_argument("--quiet", action="store_true", help="no progress")
    arguments = p.parse_args()
    results = command.opened(arguments.output, "models", machine.facts(arguments.device), arguments.resume, arguments.force)
    work = []
    for name in arguments.models:
        for dtype in arguments.dtype:
            for seq in arguments.seq:
                case = {"model": name, "batch": arguments.batch, "seq": seq, "dtype": dtype}
                if arguments.layers:
                    case["layers"] = arguments.layers
                if arguments.autocast:
                    case["autocast"] = True
                names = [entry for entry in ATTENTION if entry in ("sdpa", *arguments.attention)]
                for which in arguments.passes:
                    versions = Versions(case, which, names, arguments.device, arguments.seconds)
                    work += [
                        ({"case": case, "baseline": entry, "pass": which}, lambda v=versions, e=entry: v.row(e))
                        for entry in names
                    ]
    command.measure_all(results, arguments.output, work, arguments.quiet)
    print_table(results)
    print(f"\n{arguments.output}")
    return 0


if __name__ == "__main__":
    command.exit_on_bad_input(main)
