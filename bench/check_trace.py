"""Compares the times that `flash-attention trace` predicts with those that were measured on an H200.

bench/check_trace.py [--command build/release/flash-attention] [--lengths 4096 16384] [--output trace.json]

The cases are those of bench/results/h200/paper.json: forward and backward, 64, 128 and 256 columns, full and causal. One head
runs in the emulator on the SMs that it would have to itself (two of 132 if there are 64 heads). That takes minutes at 4k and
hours at 16k, and needs no GPU.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "bench/results/h200/paper.json"
WITHIN = 0.15


def cases(record: dict, lengths: list[int]) -> list[dict]:
    """Of our own kernels, each with the milliseconds that it took; backward alone, without its forward pass."""
    return [
        {"pass": row["pass"], "ms": row["ms"], **row["case"]}
        for row in record["rows"]
        if row["baseline"] == "ours" and row["case"]["seq"] in lengths and row["pass"] in ("forward", "backward")
    ]


def predict(command: str, case: dict, sms: int, samples: int) -> dict:
    own = max(1, round(sms / (case["batch"] * case["heads"])))
    words = [command, "trace", case["pass"], "--sms", own, "--samples", samples, "--json", "--dtype", "bf16"]
    words += ["--heads", 1, "--seq-q", case["seq"], "--head-dim", case["head_dim"]]
    words += ["--causal"] if case["causal"] else []
    return json.loads(subprocess.run([str(word) for word in words], check=True, capture_output=True, text=True).stdout)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--command", default=str(ROOT / "build/release/flash-attention"))
    parser.add_argument("--samples", type=int, default=4, help="blocks that are recorded (default 4)")
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096])
    parser.add_argument("--output", type=Path, help="write the table as JSON, too")
    given = parser.parse_args()
    record = json.loads(RECORD.read_text())
    rows, near = [], 0
    print(f"{'':34}{'measured':>10}{'model':>10}{'ratio':>8}  bound by")
    for case in cases(record, given.lengths):
        found = predict(given.command, case, record["machine"]["sms"], given.samples)
        ratio = found["predicted_s"] * 1e3 / case["ms"]
        near += abs(ratio - 1) <= WITHIN
        bound = max(found["launches"], key=lambda launch: launch["predicted_s"])["bound"]
        name = f"{case['pass']} {case['head_dim']} {case['seq'] // 1024}k {'causal' if case['causal'] else 'full'}"
        print(f"{name:34}{case['ms']:10.3f}{found['predicted_s'] * 1e3:10.3f}{ratio:8.2f}  {bound}", flush=True)
        rows.append({"case": name, "measured_ms": case["ms"], "model_ms": found["predicted_s"] * 1e3, "bound": bound})
    print(f"{near} of {len(rows)} within {WITHIN:.0%}")
    if given.output:
        head = {"kind": "trace", "measured_at": record["commit"], "machine": record["machine"]["device"]}
        given.output.write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
