"""`make run`: flash against standard attention on the best device here, as a table and as plots.

Any Python draws them as SVG; where matplotlib is installed there are PNG files, too."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "bench"))
from report import write_charts  # noqa: E402
from report.charts import Chart  # noqa: E402

NEXT = """
What to try next:
  {command} run --seq-q 4096 --causal --backward    one problem, and its error against fp64
  pip install .                          the Python package, in an environment of yours; the first lines are in README.md
  make test                              every check that can run here"""

SECONDS = "0.2"  # for a case: this is a demonstration, `make bench` takes its time


def is_standard(result: dict) -> bool:
    return result["pass"].startswith("standard")


def length(result: dict) -> int:
    return result["problem"]["seq_kv"]


def extra_bytes(result: dict) -> int:
    return result.get("peak_extra_bytes", result["workspace_bytes"])


def charts(report: dict) -> list[Chart]:
    """Time, speed and memory by length."""
    results, device = report["results"], report["device"]
    problem = results[0]["problem"]
    mask = "causal" if problem["causal"] else "full"
    title = (
        f"{device['name']}: {problem['heads_q']} heads, head_dim {problem['head_dim']}, {problem['dtype']}, {mask}, forward"
    )
    lengths = sorted({length(r) for r in results})
    panels = [
        ("time", "time of a call, ms", lambda r: r["time"]["median_s"] * 1e3),
        ("speed", "GFLOP/s", lambda r: r["flops_per_second"] / 1e9),
        ("memory", "extra memory, MiB (at least 1)", lambda r: max(extra_bytes(r), 2**20) / 2**20),
    ]
    drawn = []
    for name, label, value in panels:
        series = {}
        for entry, standard in (("standard attention", True), ("flash attention", False)):
            values = {length(r): value(r) for r in results if is_standard(r) == standard}
            if values:
                series[entry] = [values.get(n) for n in lengths]
        log_y = name != "speed"
        drawn.append(Chart(name, title, "lines", "sequence length", label, lengths, series, log_x=True, log_y=log_y))
    return drawn


def print_gain(results: list[dict]) -> None:
    """One sentence about the longest length that both were measured at."""
    flash = {length(r): r for r in results if not is_standard(r)}
    both = [r for r in results if is_standard(r) and length(r) in flash]
    if not both:
        return
    standard = both[-1]
    longest = length(standard)
    faster = standard["time"]["median_s"] / flash[longest]["time"]["median_s"]
    memory = {True: extra_bytes(standard), False: extra_bytes(flash[longest])}
    words = {key: f"{value / 2**20:.0f} MiB" if value >= 2**20 else "less than 1 MiB" for key, value in memory.items()}
    print(
        f"At length {longest} flash attention is {faster:.2f}x as fast as standard attention and needs {words[False]} "
        f"beyond inputs and results; standard attention needs {words[True]}."
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--command", default="build/release/flash-attention", help="the flash-attention program")
    parser.add_argument("--output", type=Path, default=Path("build/run"), help="folder of the plots and the JSON")
    parser.add_argument("rest", nargs="*", help="flags for `flash-attention bench`, after --")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    raw = arguments.output / "results.json"
    raw.unlink(missing_ok=True)
    command = [arguments.command, "bench", "lengths", "--save", raw, *arguments.rest]
    if not any(flag.startswith("--seconds") for flag in arguments.rest):
        command += ["--seconds", SECONDS]
    print("measuring flash and standard attention at growing lengths: about half a minute", flush=True)
    code = subprocess.run(command).returncode
    report = json.loads(raw.read_text()) if raw.exists() else {"results": []}
    if not report["results"]:
        return code or 1
    print()
    print_gain(report["results"])
    for path in write_charts(charts(report), arguments.output):
        print(f"plot: {path}")
    print(f"numbers: {raw}")
    print(NEXT.format(command=arguments.command))
    return code


if __name__ == "__main__":
    sys.exit(main())
