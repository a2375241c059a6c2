"""Error of attention against fp64, by length and dtype: output and the three gradients.

    python bench/benchmark_accuracy.py --seq 512 2048 8192 --head-dim 64 --dtype float16 bfloat16

Each number is the root-mean-square error divided by the root-mean-square of the exact value; `worst` is the largest error
of a single entry divided by the largest exact entry.
"""

import command
import machine
import torch
from peers import baselines

NAMES = ("out", "dq", "dk", "dv")


def exact(q, k, v, grad, causal):
    """(out, dq, dk, dv) in fp64 by the textbook formulas, one head at a time; [batch, seq, heads, dim]."""
    heads, kv_heads, scale = q.shape[2], k.shape[2], q.shape[3] ** -0.5
    results = [torch.zeros(t.shape, dtype=torch.float64, device=t.device) for t in (q, q, k, v)]
    out, dq, dk, dv = results
    hidden = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device).triu(1) if causal else None
    for b in range(q.shape[0]):
        for h in range(heads):
            g = h // (heads // kv_heads)
            qh, kh, vh, gh = (t.detach()[b, :, i].double() for t, i in ((q, h), (k, g), (v, g), (grad, h)))
            scores = qh @ kh.T * scale
            if causal:
                scores.masked_fill_(hidden, float("-inf"))
            weights = torch.softmax(scores, -1)
            out[b, :, h] = weights @ vh
            dv[b, :, g] += weights.T @ gh
            grad_weights = gh @ vh.T
            grad_scores = weights * (grad_weights - (gh * out[b, :, h]).sum(-1, keepdim=True)) * scale
            dq[b, :, h] = grad_scores @ kh
            dk[b, :, g] += grad_scores.T @ qh
    return results


def error(got, want):
    difference = got.double() - want
    return {
        "rms": float(f"{(difference.norm() / want.norm()).item():.4g}"),
        "worst": float(f"{(difference.abs().max() / want.abs().max()).item():.4g}"),
    }


def accuracy(case, entry, device, truth):
    reason = entry.reject(case, device)
    if reason:
        return {"reason": reason}
    q, k, v, grad = baselines.inputs(case, entry, device, needs_grad=True)
    with torch.set_grad_enabled("backward" in entry.passes):
        found = [entry.run(q, k, v, case)]
    if "backward" in entry.passes:
        found += torch.autograd.grad(found[0], (q, k, v), grad)
    if case not in truth:
        truth.clear()
        truth[case] = exact(q, k, v, grad, case.causal)
    return {name: error(a.detach(), b) for name, a, b in zip(NAMES, found, truth[case], strict=False)}


def main():
    p = command.parser(__doc__, "build/bench/accuracy.json")
    arguments = p.parse_args()
    if arguments.list:
        return command.print_list(arguments.device)
    if not arguments.preset and not arguments.seq:
        arguments.seq, arguments.heads, arguments.head_dim = ([512, 2048, 8192], [2], [128])
        arguments.dtype = arguments.dtype or ["float32", "float16", "bfloat16"]
        arguments.seq = arguments.seq if arguments.device == "cuda" else [256, 1024]
    chosen = command.chosen_cases(arguments, "quick")
    if not all(case.plain for case in chosen):
        raise ValueError("case: got an option, as dropout, a window or packed lengths; allowed: full or causal")
    entries = baselines.select(arguments.baselines)
    results = command.opened(
        arguments.output, "accuracy", machine.facts(arguments.device), arguments.resume, arguments.force
    )
    truth = {}
    work = [
        ({"case": case.as_json(), "baseline": entry.name},
         lambda c=case, e=entry: accuracy(c, e, arguments.device, truth))
        for case in chosen for entry in entries
    ]  # fmt: skip
    command.measure_all(results, arguments.output, work, arguments.quiet)
    print(f"\nroot-mean-square error against fp64 on {results.head['machine']['device']}")
    for row in results.measured():
        case = row["case"]
        errors = "  ".join(f"{name} {row[name]['rms']:.2e}" for name in NAMES if name in row)
        print(f"  {row['baseline']:16} L {case['seq']:6} D {case['head_dim']:3} {case['dtype']:9} {errors}")
    print(f"\n{arguments.output}")
    return 0


if __name__ == "__main__":
    command.exit_on_bad_input(main)
