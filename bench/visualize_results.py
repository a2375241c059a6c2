"""python bench/visualize_results.py results.json... [--output report.html]: as `python -m flash_attention report`."""

import argparse
import sys

import package  # noqa: F401 (makes flash_attention importable)
from flash_attention.commands import report as verb

parser = argparse.ArgumentParser(description=__doc__)
verb.add_arguments(parser)
sys.exit(verb.run(parser.parse_args()))
