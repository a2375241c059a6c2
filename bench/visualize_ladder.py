"""python bench/visualize_ladder.py results.json directory: a bar a rung, and every rung by length.

`flash-attention ladder --update` calls this. It writes SVG and PNG. PNG needs matplotlib; SVG needs nothing.
"""

import argparse
import dataclasses
import sys
from pathlib import Path

import report
from report import panels

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("results", type=Path, help="JSON of `flash-attention ladder --sweep --save`")
parser.add_argument("directory", type=Path, help="where the images go")


def main():
    arguments = parser.parse_args()
    try:
        results = report.load(arguments.results)
        machine, rows = results.head["machine"]["device"], results.measured()
        charts = [*panels.ladder_staircase(rows), *panels.ladder_scaling_charts(rows)]
        charts = [
            dataclasses.replace(chart, title=f"{machine}: {chart.title}") for chart in charts
        ]  # a picture travels alone
        for path in report.write_charts(charts, arguments.directory):
            print(path)
    except (OSError, ValueError) as error:
        print(f"visualize_ladder: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
