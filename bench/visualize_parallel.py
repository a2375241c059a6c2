"""python bench/visualize_parallel.py docs/images: what context parallelism should reach on 8 to 1024 GPUs, as SVG and PNG.

Figures of flash_attention.parallel.plan(), a model: docs/parallel.md says what is in it. Nothing here is measured.
"""

import argparse
import sys
from pathlib import Path

import package  # noqa: F401 (makes flash_attention importable)
from flash_attention.parallel import plan
from flash_attention.parallel.planner import H100_NODES, HDR_NODES
from report import write_charts
from report.charts import Chart

WORLDS = (8, 16, 32, 64, 128, 256, 512, 1024)
MODEL = {"heads": 64, "heads_kv": 8, "head_dim": 128, "show": False}


def efficiency(seq, world, links, **options):
    """Forward and backward together, in percent; None where a method has no heads left to share out."""
    if options.get("method") == "ulysses" and world > MODEL["heads"]:
        return None
    passes = [plan(seq, world=world, bandwidth=links, backward=backward, **MODEL, **options) for backward in (False, True)]
    return 100 * sum(each.ideal for each in passes) / sum(each.seconds for each in passes)


def chart(name, title, series):
    """One line for each of {name: options}."""
    values = {
        label: [efficiency(world=world, **{"seq": 1 << 20, **options}) for world in WORLDS]
        for label, options in series.items()
    }
    return Chart(name, title, "lines", "GPUs", "% of the work's ideal time", list(WORLDS), values, log_x=True)


def charts():
    methods = {
        "ring, zigzag": {"links": H100_NODES},
        "ring, contiguous": {"links": H100_NODES, "layout": "contiguous"},
        "all_gather": {"links": H100_NODES, "method": "all_gather"},
        "ulysses": {"links": H100_NODES, "method": "ulysses"},
    }
    lengths = {
        f"{seq >> 10}k, {name}": {"links": links, "seq": seq}
        for seq in (1 << 17, 1 << 19, 1 << 22)
        for name, links in (("NVLink 4 + NDR", H100_NODES), ("NVLink 3 + HDR", HDR_NODES))
    }
    shape = "64/8 heads of 128, causal, bf16, 600 TFLOP/s a GPU, forward and backward"
    return [
        chart("parallel_methods", f"Efficiency by method, 1M tokens, {shape} (model)", methods),
        chart("parallel_lengths", f"Efficiency of the ring by length and links, {shape} (model)", lengths),
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="where the images go")
    directory = parser.parse_args().directory
    if not directory.is_dir():
        print(f"visualize_parallel: {directory}: no such folder", file=sys.stderr)
        return 2
    for each in charts():
        print(*write_charts([each], directory))
        header, rows = each.table()
        for row in [header, *rows]:
            print("| " + " | ".join(row) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
