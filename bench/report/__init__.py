"""From result files (bench/*.py) to a report: one HTML file, SVG and PNG images, Markdown tables."""

import dataclasses
import re
from pathlib import Path

from . import markdown, page, panels, png, svg
from .charts import Chart
from .contents import sections
from .results import ResultError, Results, load

__all__ = [
    "ResultError",
    "Results",
    "load",
    "write_charts",
    "write_headline",
    "write_html",
    "write_images",
    "write_markdown",
]


def write_html(files, path):
    Path(path).write_text(page.render(files, sections(files)))


def write_markdown(files, path):
    """Into the marked places of an existing file."""
    found = sections(files)
    texts = {
        "benchmark": markdown.render(files, found),
        "summary": markdown.summary(files, dict(found).get("Speed", [])),
        "measured": markdown.measured(files),
    }
    markdown.update(path, texts)


def write_images(files, directory):
    """Every chart of the report, the machine in its title, since a picture travels alone; returns the paths."""
    machine = ", ".join(dict.fromkeys(f.head["machine"]["device"] for f in files))
    charts = [c for _, charts in sections(files) for c in charts if isinstance(c, Chart)]
    return write_charts([dataclasses.replace(c, title=f"{machine}: {c.title}") for c in charts], directory)


def write_headline(files, path):
    """The picture of README.md: ours beside what most people use, the machine in its title."""
    rows = [row for file in files if file.kind == "speed" and not file.head.get("listed") for row in file.measured()]
    (chart,) = panels.headline(rows)
    machine = ", ".join(dict.fromkeys(file.head["machine"]["device"] for file in files))
    chart = dataclasses.replace(chart, name=Path(path).stem, title=f"{machine}: {chart.title}")
    return write_charts([chart], Path(path).parent)


def write_charts(charts, directory):
    """One SVG and, where matplotlib is installed, one PNG per chart; returns the paths."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    written = []
    for chart in charts:
        stem = directory / re.sub(r"[^a-z0-9]+", "_", chart.name.lower()).strip("_")
        text = svg.draw(chart).replace(">", f"><style>{svg.STYLE}</style>", 1)
        stem.with_suffix(".svg").write_text(text)
        written.append(stem.with_suffix(".svg"))
        try:
            png.write(chart, stem.with_suffix(".png"))
            written.append(stem.with_suffix(".png"))
        except ImportError:
            continue
    return written
