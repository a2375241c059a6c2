"""python bench/visualize_ladder.py results.json directory: every rung of the ladder by length, as SVG and PNG.

`flash-attention ladder --update` calls this. PNG needs matplotlib; SVG needs nothing.
"""

import argparse
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
        charts = panels.ladder_scaling_charts(report.load(arguments.results).measured())
        for path in report.write_charts(charts, arguments.directory):
            print(path)
    except (OSError, ValueError) as error:
        print(f"visualize_ladder: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
