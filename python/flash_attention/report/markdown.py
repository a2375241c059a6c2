"""The speed tables as Markdown, and their place in a README."""

from pathlib import Path

BEGIN, END = "<!-- benchmark:begin -->", "<!-- benchmark:end -->"


def table(header, rows):
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in (header, ["---"] * len(header), *rows)]
    return "\n".join(lines)


def render(files, sections):
    """Speed panels, memory and what fits, with one line that says where they come from."""
    parts = []
    for heading, charts in sections:
        if heading in ("Speed", "Memory", "What fits"):
            for chart in charts:
                unit = f" ({chart.y_label})" if hasattr(chart, "y_label") else ""
                parts.append(f"**{chart.title}{unit}**\n\n{table(*chart.table())}")
    sources = dict.fromkeys(
        f"{r.head['machine']['device']}, commit {r.head['commit']}, `{r.head['command']}`" for r in files
    )
    return "\n\n".join([*parts, "Measured on " + "; ".join(sources) + "."])


def update(path, text):
    """Replaces what is between the markers of a file; ValueError where it has none."""
    path = Path(path)
    old = path.read_text()
    if old.count(BEGIN) != 1 or old.count(END) != 1 or old.index(BEGIN) > old.index(END):
        raise ValueError(f"{path}: allowed: a file with one line '{BEGIN}' and, below it, one '{END}'")
    before, rest = old.split(BEGIN)
    path.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.split(END)[1]}")
