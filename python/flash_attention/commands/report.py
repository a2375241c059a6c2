"""python -m flash_attention report results.json...: one self-contained HTML file from the results of bench/.

bench/report of the repository draws it. Wheels do not contain it.
"""

import importlib
import sys
from pathlib import Path

help = "turn result files of bench/ into one HTML page, images and Markdown tables"


def add_arguments(parser):
    parser.add_argument("results", nargs="+", type=Path, help="JSON files written by bench/")
    parser.add_argument("--output", type=Path, default=Path("report.html"), help="the page (default report.html)")
    parser.add_argument("--images", type=Path, metavar="DIR", help="also every chart as SVG and, with matplotlib, PNG")
    parser.add_argument("--headline", type=Path, metavar="FILE", help="also the picture of README.md, as SVG and PNG")
    parser.add_argument(
        "--readme",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="also update the tables between the markers of Markdown files",
    )
    parser.add_argument("--force", action="store_true", help="overwrite the page and images that are there")


def drawing():
    """bench/report of the checkout that this is called in."""
    for folder in (Path.cwd(), *Path.cwd().parents):
        if (folder / "bench" / "report" / "__init__.py").is_file():
            sys.path.insert(0, str(folder / "bench"))
            break
    try:
        return importlib.import_module("report")
    except ModuleNotFoundError:
        raise RuntimeError("bench/report is not here; call this in a checkout of the repository") from None


def run(arguments):
    report = drawing()
    taken = [path for path in (arguments.output, arguments.images) if path is not None and path.exists()]
    try:
        if taken and not arguments.force:
            raise ValueError(f"{taken[0]}: exists; allowed: --force to overwrite it, or another path")
        files = [report.load(path) for path in arguments.results]
        for document in arguments.readme or ():
            report.write_markdown(files, document)
        if arguments.images:
            report.write_images(files, arguments.images)
        if arguments.headline:
            report.write_headline(files, arguments.headline)
        report.write_html(files, arguments.output)
    except (OSError, ValueError) as error:
        print(f"report: {error}", file=sys.stderr)
        return 2
    print(arguments.output)
    return 0
