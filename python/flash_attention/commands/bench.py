"""python -m flash_attention bench: one shape, measured against torch's attention and the textbook algorithm, in one run."""

import json
import statistics
import time

import flash_attention
from flash_attention.commands import _problem

help = "time one shape against torch's attention and the textbook algorithm"


def add_arguments(parser):
    _problem.add_arguments(parser)
    parser.add_argument("--seconds", type=float, default=1.0, help="how long each is measured; default 1")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(arguments):
    import torch

    inputs = _problem.tensors(arguments)
    for tensor in inputs:
        tensor.requires_grad_(arguments.backward)
    causal, grouped = arguments.causal, inputs[0].shape[1] != inputs[1].shape[1]
    top_left = {"causal": causal, "alignment": "top_left", "layout": "bhsd"}
    contestants = {
        "flash_attention": lambda *t: flash_attention.attention(*t, **top_left),
        "torch": lambda *t: torch.nn.functional.scaled_dot_product_attention(*t, is_causal=causal, enable_gqa=grouped),
        "standard": lambda *t: flash_attention.attention(*t, kernel="standard", **top_left),
    }
    rows = {name: _measure(call, inputs, arguments) for name, call in contestants.items()}
    if arguments.json:
        print(json.dumps({"shape": [list(tensor.shape) for tensor in inputs], "causal": causal, "times": rows}, indent=2))
        return 0
    print(f"q {list(inputs[0].shape)}, k {list(inputs[1].shape)}, {inputs[0].dtype}, {inputs[0].device}, causal {causal}")
    print(f"{'':16} {'median ms':>10} {'p10':>10} {'p90':>10} {'of torch':>9}")
    for name, row in rows.items():
        share = row["median_ms"] / rows["torch"]["median_ms"]
        print(f"{name:16} {row['median_ms']:10.4f} {row['p10_ms']:10.4f} {row['p90_ms']:10.4f} {share:9.2f}")
    return 0


def _measure(call, inputs, arguments):
    """Median and tenth and ninetieth percentile of single calls, after a warm-up of a tenth of the time."""
    import torch

    def wait():
        if inputs[0].is_cuda:
            torch.cuda.synchronize()

    def once():
        out = call(*inputs)
        if arguments.backward:
            torch.autograd.grad(out, inputs, gradient)

    gradient = torch.randn_like(call(*inputs)).detach()
    samples = []
    begin = time.perf_counter()
    while len(samples) < 10 or time.perf_counter() - begin < 1.1 * arguments.seconds:
        wait()
        start = time.perf_counter()
        once()
        wait()
        samples.append(1e3 * (time.perf_counter() - start))
    samples = samples[len(samples) // 11 :]
    deciles = statistics.quantiles(samples, n=10)
    return {"median_ms": statistics.median(samples), "p10_ms": deciles[0], "p90_ms": deciles[-1], "samples": len(samples)}
