"""Draws the pictures of the primer and the ladder from what the kernels' own code says; `--check` only compares.

Layouts and orders are asked of kernels/ as it is, compiled for this machine's CPU (tools/lessons/). So a picture that no
longer fits its kernel is found: `make test` compares. It needs a C++ compiler and build/release/flash-attention."""

import argparse
import sys
from pathlib import Path

from lessons.pictures import PICTURES

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--command", default=str(ROOT / "build/release/flash-attention"), help="the command that plans")
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if a picture is stale")
    parser.add_argument("names", nargs="*", help="only pictures whose path contains one of these")
    arguments = parser.parse_args()
    stale = []
    for name, draw in PICTURES.items():
        if arguments.names and not any(word in name for word in arguments.names):
            continue
        path, text = ROOT / name, draw(arguments.command)
        if path.exists() and path.read_text() == text:
            continue
        stale.append(name)
        if not arguments.check:
            path.write_text(text)
            print(name)
    if arguments.check and stale:
        names = ", ".join(stale)
        print(f"not as the kernels are now: {names}; `python3 tools/draw_lessons.py` draws them", file=sys.stderr)
    return int(arguments.check and bool(stale))


if __name__ == "__main__":
    raise SystemExit(main())
