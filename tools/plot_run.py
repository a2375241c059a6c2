"""`make run`: flash against standard attention on the best device here, as a table and as a plot (PNG and SVG)."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

SECONDS = "0.2"  # for a case: this is a demonstration, `make bench` takes its time
COLOURS = {"flash": "#1b6ca8", "standard": "#c8553d"}


def series(results: list[dict], standard: bool, value) -> tuple[list[int], list[float]]:
    chosen = [r for r in results if r["pass"].startswith("standard") == standard]
    return [r["problem"]["seq_kv"] for r in chosen], [value(r) for r in chosen]


def extra_bytes(result: dict) -> int:
    return result.get("peak_extra_bytes", result["workspace_bytes"])


def plot(report: dict, folder: Path) -> list[Path]:
    results = report["results"]
    problem = results[0]["problem"]
    lengths = sorted({r["problem"]["seq_kv"] for r in results})
    figure, axes = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    panels = [
        ("time of a call, ms", lambda r: r["time"]["median_s"] * 1e3, "log"),
        ("GFLOP/s", lambda r: r["flops_per_second"] / 1e9, "linear"),
        ("extra memory, MiB (at least 1)", lambda r: max(extra_bytes(r), 2**20) / 2**20, "log"),
    ]
    for axis, (title, value, scale) in zip(axes, panels, strict=True):
        for name, standard in (("standard", True), ("flash", False)):
            axis.plot(*series(results, standard, value), marker="o", color=COLOURS[name], label=name)
        axis.set(title=title, xlabel="sequence length", yscale=scale)
        axis.set_xscale("log", base=2)
        axis.set_xticks(lengths, [str(n) for n in lengths])
        axis.grid(True, alpha=0.3)
        axis.legend()
    device = report["device"]
    mask = "causal" if problem["causal"] else "full"
    figure.suptitle(
        f"{device['name']}: {problem['heads_q']} heads, head_dim {problem['head_dim']}, {problem['dtype']}, {mask}, forward"
    )
    paths = [folder / f"flash_against_standard.{ending}" for ending in ("png", "svg")]
    for path in paths:
        figure.savefig(path, dpi=130)
    plt.close(figure)
    return paths


def print_gain(results: list[dict]) -> None:
    """One sentence about the longest length that both were measured at."""
    flash = {r["problem"]["seq_kv"]: r for r in results if not r["pass"].startswith("standard")}
    both = [r for r in results if r["pass"].startswith("standard") and r["problem"]["seq_kv"] in flash]
    if not both:
        return
    standard = both[-1]
    length = standard["problem"]["seq_kv"]
    faster = standard["time"]["median_s"] / flash[length]["time"]["median_s"]
    memory = {True: extra_bytes(standard), False: extra_bytes(flash[length])}
    words = {key: f"{value / 2**20:.0f} MiB" if value >= 2**20 else "less than 1 MiB" for key, value in memory.items()}
    print(
        f"At length {length} flash attention is {faster:.2f}x as fast as standard attention and needs {words[False]} "
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
    code = subprocess.run(command).returncode
    report = json.loads(raw.read_text()) if raw.exists() else {"results": []}
    if not report["results"]:
        return code or 1
    print()
    print_gain(report["results"])
    for path in plot(report, arguments.output):
        print(f"plot: {path}")
    print(f"numbers: {raw}")
    return code


if __name__ == "__main__":
    sys.exit(main())
